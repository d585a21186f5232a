"""The messages among sequencers (ARCHITECTURE 8.3, decisions 0006 and 0020); how to read them is
said in `indilog.wire.messages`.
"""

from __future__ import annotations

from typing import ClassVar, Final

from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.metalog import Base, Entry
from indilog.wire.wire_message import WireMessage

NO_INCARNATION: Final = Epoch(0)
"""Stands for no incarnation: epochs begin at 1."""


class MetalogAppend(WireMessage, frozen=True):
    """primary → backup: metalog entries from position `start` on, and how many are committed.

    It leaves before the primary has synced the entries, so a crash may take them from the primary
    and not from the backup; the entries of a newer incarnation then replace them. `epoch` is the
    primary's incarnation, `previous` the one that proposed the entry before `start` (0: there is
    none). `committed` may be ahead of the primary's disk as well; nothing is decided by it.
    `completes`: with these entries the backup whose incarnation that is has all that the primary
    had when it heard that this backup may lack some; 0: not said.
    `folded`: the primary keeps no entries below it, so the backup need not either. `base`, whose
    position is `start`, replaces all that the backup has, if that lacks an entry before; one that
    ends below the backup's own base does so if the backup is of incarnation `anew`.
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

    From `epoch` (0: there is none) the primary knows how many of them are its own. `incomplete` is
    the incarnation of the backup if it may lack entries that it had once, else 0. The entries below
    `base` are not here one by one.
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

    With an `anchor`, a position, it also asks for the entries from `start` up to and including that
    one; None: for none. The backup answers when it can never forget what it was told here.
    Lost: asked again after a pause.
    Repeated: answered again.
    """

    epoch: Epoch
    start: MetalogPosition
    anchor: MetalogPosition | None


class MetalogCopy(WireMessage, frozen=True):
    """backup → primary: `length` entries are durable here, the last proposed by `last`; has some of
    the entries that incarnation `asked` requested.

    `whole`: none is missing that this backup ever answered for. `previous` is the incarnation that
    proposed the entry before `start`, `anchor_epoch` the one that proposed that at `anchor` (0:
    there is none). Where the wanted start lies below the backup's base, that is sent along and
    `start` is its position. Two copies that have entries of one incarnation at one position are
    equal up to it.
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
