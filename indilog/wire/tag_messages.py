"""The messages about tags: floors (ARCHITECTURE 13), discarded records, and new tags (thesis 5.7).

`indilog.wire.messages` says how to read them.
"""

from __future__ import annotations

from typing import Final

from indilog.base.ids import Epoch, MetalogPosition, SeqNum, ShardId, ViewNumber
from indilog.kernel.lineage import TrimExtent
from indilog.kernel.metalog import NO_FLOORS, NO_INCARNATION, Floor, FloorCursor
from indilog.wire.wire_message import WireMessage


class TrimWanted(WireMessage, frozen=True):
    """engine → primary: asks to raise this floor, of a whole log or of a tag.

    Lost: resent until it is answered or the caller's deadline has passed.
    Repeated: answered with the entry of the trim if that is known; otherwise the primary proposes
        an entry that changes nothing.
    """

    request: int
    floor: Floor


class TrimIs(WireMessage, frozen=True):
    """primary → engine: a node that has applied `position` entries has applied the trim. `position`
    None: the trim is refused, because the floor is beyond `tail`.

    Lost: the engine resends `TrimWanted`.
    Repeated: the second one finds no request.
    """

    request: int
    position: MetalogPosition | None
    tail: SeqNum


class TagFloors(WireMessage, frozen=True):
    """storage → index, storage: the floors raised by the trims after the first `start`, up to the
    first `trims`.

    Two storage nodes send it unrequested for every trim. On request (`start` None) it is a page of
    all floors: those after the cursor `after`, in order; `last` marks the last page. A floor in a
    page may be newer than `trims` says. A node that has applied `position` metalog entries has
    applied all these trims. `epoch` is the incarnation of the primary that proposed the last of the
    trims. `previous` is the incarnation that proposed the last of the first `start` trims.
    `copy_of` is as in `IndexData`.
    Without floors and with `start` equal to `trims`, the message announces only which trims there
    are.
    Lost: a lookup names more trims than are applied, or the next `TagFloors` has a later `start`;
    the index node sends `TagFloorsWanted`.
    Repeated: floors only grow.
    """

    start: int | None
    trims: int
    floors: tuple[Floor, ...]
    after: FloorCursor = NO_FLOORS
    last: bool = True
    position: MetalogPosition = 0
    epoch: Epoch = NO_INCARNATION
    previous: Epoch = NO_INCARNATION
    copy_of: Epoch = NO_INCARNATION

    @property
    def extent(self) -> TrimExtent:
        """Which trims the sender knows."""
        return TrimExtent(self.copy_of, self.trims, self.epoch)


class TagFloorsWanted(WireMessage, frozen=True):
    """index, storage → storage: asks for all floors after the cursor `after`, unless the asking
    node has them all.

    The asking node has the floors of `trims` trims; incarnation `epoch` of the primary proposed the
    last of them.
    Lost: asked again after a while.
    Repeated: answered again.
    """

    after: FloorCursor = NO_FLOORS
    trims: int = 0
    epoch: Epoch = NO_INCARNATION


DISCARDED_RUNS_MAX: Final = 4096
"""Runs of records in a question or an answer about discarded ones."""


class DiscardedWanted(WireMessage, frozen=True):
    """index → storage: asks which of these records of a shard are discarded, because they are
    trimmed as a whole or in all their tags.

    `runs`: the first seqnum and the one after the last (u64 each) of each run, ascending; at most
    4,096 runs.
    Lost: another replica is asked; if none answers, the shard is asked again when the index has
        grown.
    Repeated: answered again; an unexpected answer is ignored.
    """

    shard: ShardId
    runs: bytes


class Discarded(WireMessage, frozen=True):
    """storage → index: these records of the shard are discarded; all records below seqnum `end`
    were checked.

    According to the first `trims` trims, no read may return them any more. Lost records are not
    among them. `runs` is as in the question, `copy_of` as in `IndexData`.
    Lost: the question is asked again.
    Repeated: ignored.
    """

    shard: ShardId
    runs: bytes
    end: SeqNum
    trims: int
    copy_of: Epoch


class SnapshotWanted(WireMessage, frozen=True):
    """engine → index: asks for a snapshot of all positions of the index shard below `position`.

    The index node writes it when it has applied them, also if few entries are new.
    Lost: the program that waits for the snapshot asks again.
    Repeated: a snapshot that reaches `position` is there, so none is written.
    """

    position: MetalogPosition


NO_RECORD: Final = 2**64 - 1
"""In `TagFirsts`: no record has the tag."""
NOT_KNOWN: Final = 2**64 - 2
"""In `TagFirsts`: the node does not know the first record."""


class TagFirstsWanted(WireMessage, frozen=True):
    """engine → index: asks for the first record with each of these tags (u64 each), below `limit`.

    Every index shard is asked, about tags that are appended and not known at the engine (thesis
    5.7). An index node answers as it answers a lookup: when all its positions below `position` are
    applied.
    Lost: the engine does not learn whether the tags are new.
    Repeated: answered again.
    """

    request: int
    tags: bytes
    limit: SeqNum
    position: MetalogPosition
    trims: int = 0
    """As in a lookup. For a tag with a floor the answer does not name the first record."""
    epoch: Epoch = NO_INCARNATION
    """As in a lookup."""
    view: ViewNumber = ViewNumber(1)
    """As in a lookup."""


class TagFirsts(WireMessage, frozen=True):
    """index → engine: the first seqnum in this index shard for each tag (u64), and its shard (u16).

    In place of a seqnum there may be `NO_RECORD` or `NOT_KNOWN`.
    Lost: as `TagFirstsWanted`.
    Repeated: the engine counts each index shard once.
    """

    request: int
    index_shard: int
    seqnums: bytes
    shards: bytes
