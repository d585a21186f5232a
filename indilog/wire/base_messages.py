"""The messages about the base and the history, which replace old metalog entries (decision 0030).

`indilog.wire.messages` says how to read them. Primaries, storage nodes and engines exchange them.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.metalog import Base, Entry
from indilog.wire.wire_message import WireMessage


class MetalogCovered(WireMessage, frozen=True):
    """storage → primary: both checkpoints of this node cover the metalog entries below `position`.

    `epoch` is the incarnation that proposed the entry before `position`; 0: there is none. From it
    the primary computes how many of these entries equal its own. `term` is the newest term that the
    sender knows. As with `ShardProgress`, a primary counts only messages of its own term.
    Lost: the primary keeps its entries until the next one.
    Repeated: absolute.
    """

    term: Epoch
    position: MetalogPosition
    epoch: Epoch


class MetalogBase(WireMessage, frozen=True):
    """primary → engine, storage: the requested entries are no longer kept; `base` replaces them.
    Answers the `MetalogWanted` of number `request`.

    Lost: asked again after a pause.
    Repeated: ignored by a node that has the entries that the base replaces.
    """

    base: Base
    request: int


class HistoryWanted(WireMessage, frozen=True):
    """storage → storage: asks what the metalog entries from `start` to below `end` ordered.

    `last` is the incarnation that proposed the last entry that the sender has. `end_epoch` is the
    incarnation that proposed the entry before `end`. A node whose entry before `end` has this epoch
    has the primary's entries below `end`.
    Lost: another storage node is asked after a pause.
    Repeated: answered again.
    """

    request: int
    start: MetalogPosition
    last: Epoch
    end: MetalogPosition
    end_epoch: Epoch


class History(WireMessage, frozen=True):
    """storage → storage: the entries from `start` on, without floors.

    `start` is the `start` of the `HistoryWanted`, or 0 if the asking node's copy differs from the
    committed entries. `previous` is the incarnation that proposed the entry before `start`.
    `lacking`: the sender itself does not have the entries below `end`.
    Lost: another storage node is asked after a pause.
    Repeated: the second one matches no question.
    """

    request: int
    start: MetalogPosition
    previous: Epoch
    entries: tuple[Entry, ...]
    lacking: bool = False
