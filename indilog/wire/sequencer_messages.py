"""The messages among sequencers (ARCHITECTURE 8.3, decisions 0006 and 0020).

`indilog.wire.messages` says how to read them.
"""

from __future__ import annotations

from typing import ClassVar, Final

from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.metalog import Base, Entry
from indilog.wire.wire_message import WireMessage

NO_INCARNATION: Final = Epoch(0)
"""An epoch that no incarnation has: epochs begin at 1."""


class MetalogAppend(WireMessage, frozen=True):
    """primary → backup: metalog entries from position `start` on, and how many are committed.

    The primary sends it before it has synced the entries. So after a crash the backup may have
    entries that the primary lost. The entries of a newer incarnation then replace them. `epoch` is
    the primary's incarnation. `previous` is the one that proposed the entry before `start` (0:
    there is none). `committed` may be ahead of the primary's disk, too; no decision depends on it.
    `completes` is the incarnation of a backup that may lack entries. It says that with these
    entries the backup has all that the primary had when it learned of the loss. 0: it says nothing.
    `folded`: the primary keeps no entries below this position, so the backup may drop them. `base`
    ends at `start`. It replaces the whole copy of the backup if the copy lacks an entry before
    `start`. It also replaces a longer base of the backup if the backup is of incarnation `anew`.
    Lost: the backup's `MetalogStored` lags, and the primary resends from there.
    Repeated: entries that the backup has are skipped; messages of an older incarnation are ignored.
    """

    promises: ClassVar[bool] = False

    epoch: Epoch
    start: MetalogPosition
    previous: Epoch
    entries: tuple[Entry, ...]
    committed: MetalogPosition
    completes: Epoch = NO_INCARNATION
    folded: MetalogPosition = 0
    base: Base | None = None
    anew: Epoch = NO_INCARNATION


class MetalogStored(WireMessage, frozen=True):
    """backup → primary: how many metalog entries are durable here, and the incarnation of the
    primary that proposed the last one.

    From `epoch` (0: there is no entry) the primary computes how many of them equal its own.
    `incomplete` is the backup's incarnation if it may lack entries that it had once, else 0. A base
    replaces the entries below position `base`.
    Lost: the primary resends after a pause, and the backup repeats it.
    Repeated: absolute.
    """

    epoch: Epoch
    length: MetalogPosition
    incomplete: Epoch = NO_INCARNATION
    base: MetalogPosition = 0


class MetalogCopyWanted(WireMessage, frozen=True):
    """primary → backup: the primary's incarnation `epoch` lacks entries; report your copy, and
    refuse older incarnations.

    `anchor` is a position: the message also asks for the entries from `start` up to and including
    it. None: it asks for no entries. The backup answers once its refusal is durable.
    Lost: asked again after a pause.
    Repeated: answered again.
    """

    epoch: Epoch
    start: MetalogPosition
    anchor: MetalogPosition | None


class MetalogCopy(WireMessage, frozen=True):
    """backup → primary: `length` entries are durable here, the last proposed by `last`; has some of
    the entries that incarnation `asked` requested.

    `whole`: no entry is missing that this backup ever acknowledged. `previous` is the incarnation
    that proposed the entry before `start`, `anchor_epoch` the one that proposed the entry at
    `anchor` (0: there is none).
    If the requested start lies below the backup's base, the message has the base, and `start` is
    its position. Two copies that have entries of one incarnation at one position are equal up to
    it.
    Lost: asked again.
    Repeated: entries no longer needed are ignored.
    """

    asked: Epoch
    whole: bool
    last: Epoch
    length: MetalogPosition
    start: MetalogPosition
    previous: Epoch
    anchor: MetalogPosition | None
    anchor_epoch: Epoch
    entries: tuple[Entry, ...]
    base: Base | None = None
