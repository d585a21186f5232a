"""The messages among sequencers: the consensus core's (ARCHITECTURE 8.3, decision 0042).

`indilog.wire.messages` says how to read them. `term` is the term of the primary: its incarnation,
numbered by the metadata store, so no two primaries have the same.
"""

from __future__ import annotations

from typing import ClassVar

from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import NO_INCARNATION, Base, Entry
from indilog.wire.wire_message import WireMessage


class Seal(WireMessage, frozen=True):
    """primary → sequencer: follow no primary of a term below `term`, and report your copy.

    `round` numbers the primary's rounds of this term; the answer repeats it. If `start` is given,
    the message also asks for the entries from `start` on; `previous` is then the epoch of the
    primary's entry before `start` (0: there is none).
    Lost: sent again after a pause.
    Repeated: answered again.
    """

    term: Epoch
    round: int
    start: MetalogPosition | None = None
    previous: Epoch = NO_INCARNATION


class Sealed(WireMessage, frozen=True):
    """sequencer → primary: this node durably refuses terms below `term`; its durable entries have
    this `extent`.

    `learner`: the node may have lost entries or promises; it does not count. If the question asked
    for entries, `start` is where the `entries` begin, and `previous` is the epoch of the entry
    before them. If the question asks for entries before `start`, `base` replaces these. `common`:
    the two copies differ before the requested start; they can be equal up to this extent at most.
    Lost: asked again after a pause.
    Repeated: entries that the receiver has already are compared.
    """

    term: Epoch
    round: int
    extent: Extent
    learner: bool = False
    start: MetalogPosition | None = None
    previous: Epoch = NO_INCARNATION
    entries: tuple[Entry, ...] = ()
    base: Base | None = None
    common: Extent | None = None


class MetalogAppend(WireMessage, frozen=True):
    """primary → sequencer: metalog entries from position `start` on, and how many are committed.

    The primary sends it before it has synced the entries. `previous` is the epoch of the entry
    before `start` (0: there is none). A sequencer that has another entry there reports the
    difference. An entry that differs from the one at its position replaces it and all after it.
    `committed` may be ahead of the primary's disk. `folded`: the primary keeps no entries below
    this position, so they may be dropped. `base` ends at `start`. It replaces the whole copy if the
    copy lacks an entry before `start`. `round` numbers the primary's rounds. `voter` is the
    incarnation of a learner that counts from now on (0: of none).
    Lost: the answer lags, and the primary resends from there.
    Repeated: entries that the receiver has are skipped; messages of an older term are ignored.
    """

    promises: ClassVar[bool] = False

    term: Epoch
    start: MetalogPosition
    previous: Epoch
    entries: tuple[Entry, ...]
    committed: MetalogPosition
    round: int = 0
    folded: MetalogPosition = 0
    base: Base | None = None
    voter: Epoch = NO_INCARNATION


class MetalogStored(WireMessage, frozen=True):
    """sequencer → primary: this many metalog entries are durable here and equal those of the
    primary of `term`.

    `round` is the newest round of that primary that arrived. `learner`: as in `Sealed`. `common`:
    the last message did not fit this copy; the copies can be equal up to this extent at most.
    After a start a node also sends it unrequested.
    Lost: the primary resends after a pause, and the answer is repeated.
    Repeated: absolute.
    """

    term: Epoch
    matched: MetalogPosition
    round: int = 0
    learner: bool = False
    common: Extent | None = None
