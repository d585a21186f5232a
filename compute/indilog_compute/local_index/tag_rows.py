"""The row of one tag in the Tag Cache (thesis 5.1.3, figure 5.2).

A row has the highest seqnums of the tag, ascending, with their shards, and the metalog position of
the tag's last event. The oldest seqnum of a row is its *head*; from the head on, the row has every
record of the tag. About the records below the head, a row may have one of two fields of the
extended Tag Cache:

- *complete*: the tag has no records below the head;
- *minimum*: the first record that ever had the tag. Records between the minimum and the head are
  unknown.

In some workloads most tags have one record and never get a second one. The row of such a tag is one
integer, `seqnum << 64 | complete << 63 | last access << 16 | shard`. The integer becomes a `TagRow`
when a second record or a minimum is added. `TagCache` keeps the rows.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias, cast

from indilog.base.ids import MetalogPosition, SeqNum, ShardId
from indilog_compute.local_index.answers import EMPTY, MISS, Answer, Found, Matches, RangeAnswer

SEQNUM_SHIFT: Final = 64
COMPLETE_BIT: Final = 1 << 63
ACCESSED_SHIFT: Final = 16
ACCESSED_MASK: Final = 2**47 - 1
SHARD_MASK: Final = 0xFFFF


class First(NamedTuple):
    """The first record that ever had a tag."""

    seqnum: SeqNum
    shard: ShardId


class TagRow:
    """A row with arrays: `seqnums`, which is never empty, and `shards`, the shard of each seqnum.

    Attributes:
        minimum: None: the minimum is not known, or the row is complete, so that the head is the
            minimum.
    """

    __slots__ = ("accessed", "complete", "minimum", "seqnums", "shards")

    def __init__(self, single: int) -> None:
        self.seqnums = array("Q", (single >> SEQNUM_SHIFT,))
        self.shards = array("H", (single & SHARD_MASK,))
        self.accessed: MetalogPosition = accessed_of(single)
        self.complete = bool(single & COMPLETE_BIT)
        self.minimum: First | None = None

    @property
    def head(self) -> SeqNum:
        """The oldest kept seqnum."""
        return self.seqnums[0]

    def cut(self, excess: int) -> None:
        """Evict the `excess` oldest seqnums, so the head moves up. A complete row keeps its old
        head as its minimum.
        """
        assert 0 < excess < len(self.seqnums), "a row keeps its newest seqnum"
        if self.complete:
            self.minimum = First(self.head, ShardId(self.shards[0]))
            self.complete = False
        del self.seqnums[:excess], self.shards[:excess]

    def put_before(self, seqnums: Sequence[SeqNum], shards: Sequence[ShardId], end: SeqNum) -> None:
        """Replace the seqnums below `end` by `seqnums`, which are ascending and below `end`."""
        assert len(seqnums) == len(shards), "each seqnum has a shard"
        assert not seqnums or seqnums[-1] < end, "only records below `end` are replaced"
        kept = bisect_left(self.seqnums, end)
        self.seqnums[:kept] = array("Q", seqnums)
        self.shards[:kept] = array("H", shards)

    def next(self, bound: SeqNum) -> Answer:
        """Return the first record from `bound` on (algorithm 4)."""
        if bound < self.head:
            if self.complete:
                return Found(self.head, ShardId(self.shards[0]))
            if self.minimum is not None and bound <= self.minimum.seqnum:
                return Found(*self.minimum)
            return MISS
        index = bisect_left(self.seqnums, bound)
        if index == len(self.seqnums):
            return EMPTY
        return Found(self.seqnums[index], ShardId(self.shards[index]))

    def prev(self, bound: SeqNum) -> Answer:
        """Return the last record up to `bound`.

        A bound at or above the head is always answered, at least with the head. A bound below the
        head is answered if the row is complete, or if the bound is not above the minimum. Otherwise
        the bound misses, because the record at the bound may have been evicted (PITFALLS 9).
        """
        if bound < self.head:
            if self.complete or (self.minimum is not None and bound < self.minimum.seqnum):
                return EMPTY
            if self.minimum is not None and bound == self.minimum.seqnum:
                return Found(*self.minimum)
            return MISS
        index = bisect_right(self.seqnums, bound) - 1
        return Found(self.seqnums[index], ShardId(self.shards[index]))

    def range(self, bound: SeqNum, limit: int) -> RangeAnswer:
        """Return the first `limit` records from `bound` on; fewer if there are no further ones."""
        if bound < self.head and not self.complete:
            if limit == 1 and isinstance(first := self.next(bound), Found):
                return Matches((first.seqnum,), (first.shard,))
            return MISS
        index = bisect_left(self.seqnums, bound)
        seqnums = self.seqnums[index : index + limit]
        shards = self.shards[index : index + limit]
        return Matches(seqnums.tolist(), cast("list[ShardId]", shards.tolist()))


Row: TypeAlias = int | TagRow
"""The row of a tag: a single record as one integer, or arrays."""


def single_of(
    seqnum: SeqNum, shard: ShardId, accessed: MetalogPosition, *, complete: bool = False
) -> int:
    """Return the row of a tag with one record."""
    flag = COMPLETE_BIT if complete else 0
    return seqnum << SEQNUM_SHIFT | flag | accessed << ACCESSED_SHIFT | shard


def head_of(row: Row) -> SeqNum:
    """Return the oldest kept seqnum."""
    return row >> SEQNUM_SHIFT if isinstance(row, int) else row.seqnums[0]


def accessed_of(row: Row) -> MetalogPosition:
    """Return the metalog position of the tag's last event."""
    if isinstance(row, int):
        return row >> ACCESSED_SHIFT & ACCESSED_MASK
    return row.accessed


def touched(row: Row, position: MetalogPosition) -> Row:
    """Return the row with its last event at `position`."""
    if isinstance(row, int):
        return row & ~(ACCESSED_MASK << ACCESSED_SHIFT) | position << ACCESSED_SHIFT
    row.accessed = position
    return row


def next_in(row: Row, bound: SeqNum) -> Answer:
    """Return the first record from `bound` on, as `TagRow.next`."""
    if not isinstance(row, int):
        return row.next(bound)
    seqnum = row >> SEQNUM_SHIFT
    if bound > seqnum:
        return EMPTY
    if bound == seqnum or row & COMPLETE_BIT:
        return Found(seqnum, ShardId(row & SHARD_MASK))
    return MISS


def prev_in(row: Row, bound: SeqNum) -> Answer:
    """Return the last record up to `bound`, as `TagRow.prev`."""
    if not isinstance(row, int):
        return row.prev(bound)
    seqnum = row >> SEQNUM_SHIFT
    if bound >= seqnum:
        return Found(seqnum, ShardId(row & SHARD_MASK))
    return EMPTY if row & COMPLETE_BIT else MISS


def range_in(row: Row, bound: SeqNum, limit: int) -> RangeAnswer:
    """Return the first `limit` records from `bound` on, as `TagRow.range`."""
    arrays = TagRow(row) if isinstance(row, int) else row
    return arrays.range(bound, limit)
