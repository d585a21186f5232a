"""The Suffix: which shard holds each of the newest records of the whole log (thesis 5.1.1).

The Suffix is a chain with one member per cut. A member's key is the highest seqnum of the cut. A
shard's upper bound in a cut is the highest seqnum of its records in that cut. For each productive
shard of the cut, the member keeps two numbers of 2 bytes: the distance from the shard's upper bound
to the key, and the shard id. All members lie one after the other in flat arrays:

    keys       [  6,        9,           ... ]    highest seqnum of each member
    ends       [  2,        5,           ... ]    end of the member's part of the two arrays below
    distances  [  0, 3,     0, 1, 2,     ... ]    key - upper bound, ascending
    shards     [  1, 0,     2, 1, 0,     ... ]    the shard of each distance: the last one first

If the upper bounds of a cut differ by more than fits into 2 bytes, the cut becomes several members,
each with consecutive upper bounds. A shard may have any number of records in a cut, because only
upper bounds are stored.

The number of members and their bytes are limited. Moving `_start` evicts the oldest member. When
an eighth of the maximum number of members is evicted, the arrays are moved down; this costs one
short memmove every few thousand cuts. If the limit in bytes is exceeded (by cuts with very many
shards), an eighth of the members is evicted at once. `LocalIndex` calls `Suffix`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from sys import getsizeof
from typing import Final

from indilog.base.ids import SeqNum, ShardId
from indilog.kernel.metalog import Span
from indilog_compute.local_index.answers import EMPTY, MISS, Answer, Found, Matches, RangeAnswer

DISTANCE_MAX: Final = 0xFFFF
_DEAD_MIN: Final = 64
_MEMBER_BYTES: Final = 16
_BOUND_BYTES: Final = 4
_ARRAYS_BYTES: Final = 1024
"""Fixed bytes of the four arrays, besides their elements and the sixteenth that they reserve."""


class Suffix:
    """Knows the shard of every seqnum in [head, tail); lookups of these seqnums never miss.

    Attributes:
        head: the lowest known seqnum; equal to `tail` if no seqnum is known.
        tail: the log's tail after all applied cuts.
        hits: number of answered lookups.
        misses: number of lookups that were not answered.
    """

    __slots__ = (
        "_base", "_bytes_max", "_cuts_max", "_dead_max", "_distances", "_ends", "_keys", "_shards",
        "_start", "head", "hits", "misses", "tail",
    )  # fmt: skip

    def __init__(self, cuts_max: int, tail: SeqNum = 0, *, bytes_max: int = 1 << 40) -> None:
        self._cuts_max = cuts_max if bytes_max else 0
        self._bytes_max = bytes_max
        self._dead_max = max(_DEAD_MIN, cuts_max // 8)
        self._keys = array("Q")
        self._ends = array("Q")
        self._distances = array("H")
        self._shards = array("H")
        self._start = 0
        """Index of the first member; evicted members are still in the arrays before it."""
        self._base = 0
        """Number of elements that were removed from the front of `_shards`. The values of `_ends`
        also count the removed elements.
        """
        self.head = self.tail = tail
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """Number of members in the chain."""
        return len(self._keys) - self._start

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays, including evicted members that were not removed yet."""
        return sum(map(getsizeof, (self._keys, self._ends, self._distances, self._shards)))

    def apply(self, spans: Sequence[Span]) -> None:
        """Add one cut: the spans that one metalog entry ordered, ascending by shard and seqnum."""
        near: list[Span] = []
        end = self.tail
        for span in spans:
            assert span.first_seqnum == end, "cuts follow on without gaps"
            if not span.length:
                continue
            end += span.length
            if near and end - near[0].end_seqnum > DISTANCE_MAX:
                self._add_member(near)
                near = []
            near.append(span)
        if near:
            self._add_member(near)
        self.tail = end
        self._evict()

    def _add_member(self, spans: Sequence[Span]) -> None:
        key = spans[-1].end_seqnum - 1
        self._keys.append(key)
        for span in reversed(spans):
            self._distances.append(key - (span.end_seqnum - 1))
            self._shards.append(span.shard)
        self._ends.append(self._base + len(self._shards))

    def _evict(self) -> None:
        excess = len(self) - self._cuts_max
        too_large = self._too_large()
        if excess <= 0 and not too_large:
            return
        if too_large:
            excess = max(excess, len(self) // 8 + 1)
        self._start += min(excess, len(self))
        self.head = self._keys[self._start - 1] + 1
        if self._start >= self._dead_max or self._too_large():
            self._move_down()

    def _too_large(self) -> bool:
        """Whether the arrays may exceed the limit in bytes. An array that grows reserves up to a
        sixteenth more than it needs.
        """
        contents = _MEMBER_BYTES * len(self._keys) + _BOUND_BYTES * len(self._shards)
        return contents > (self._bytes_max - _ARRAYS_BYTES) // 17 * 16

    def _move_down(self) -> None:
        """Remove evicted members from the arrays, without a Python loop. The cost is amortised over
        `_dead_max` cuts.
        """
        base = self._ends[self._start - 1]
        dead = base - self._base
        del self._keys[: self._start], self._ends[: self._start]
        del self._distances[:dead], self._shards[:dead]
        self._base = base
        self._start = 0

    def find_next(self, bound: SeqNum) -> Answer:
        """Return the first record from `bound` on (algorithm 1): the record at `bound`, because
        seqnums are dense.
        """
        if bound < self.head or not self._cuts_max:
            self.misses += 1
            return MISS
        self.hits += 1
        if bound >= self.tail:
            return EMPTY
        return Found(bound, self._shard_at(bound))

    def find_prev(self, bound: SeqNum) -> Answer:
        """Return the last record up to `bound`: the record at `bound`, or the last record of the
        log if `bound` lies after it.
        """
        holds_last = self.tail == 0 or self.head < self.tail
        if bound < self.head or not holds_last or not self._cuts_max:
            self.misses += 1
            return MISS
        self.hits += 1
        if not self.tail:
            return EMPTY
        bound = min(bound, self.tail - 1)
        return Found(bound, self._shard_at(bound))

    def find_range(self, bound: SeqNum, limit: int) -> RangeAnswer:
        """Return the first `limit` records from `bound` on, or fewer if the log ends before."""
        if bound < self.head or not self._cuts_max:
            self.misses += 1
            return MISS
        self.hits += 1
        end = max(bound, min(bound + limit, self.tail))
        shards: list[ShardId] = []
        reached = bound
        for shard, run_end in self._runs(bound, end):
            shards += [shard] * (run_end - reached)
            reached = run_end
        return Matches(range(bound, end), shards)

    def shard_of(self, seqnum: SeqNum) -> ShardId | None:
        """Return the shard of `seqnum`; None: it is not known here, or no record is there yet."""
        if self.head <= seqnum < self.tail:
            self.hits += 1
            return self._shard_at(seqnum)
        self.misses += 1
        return None

    def _shard_at(self, seqnum: SeqNum) -> ShardId:
        """Find the member, then the shard in it: two binary searches (Alg1:9, Alg1:11-12)."""
        member = bisect_left(self._keys, seqnum, self._start)
        first, end = self._part(member)
        if end - first == 1:
            return ShardId(self._shards[first])
        distance = self._keys[member] - seqnum
        return ShardId(self._shards[bisect_right(self._distances, distance, first, end) - 1])

    def _part(self, member: int) -> tuple[int, int]:
        """Return the start and the end of a member's part of the arrays."""
        first = self._ends[member - 1] - self._base if member else 0
        return first, self._ends[member] - self._base

    def _runs(self, start: SeqNum, end: SeqNum) -> Iterator[tuple[ShardId, SeqNum]]:
        """Yield the runs of seqnums in [start, end), ascending: the shard and the end of each."""
        if start >= end:
            return
        for member in range(bisect_left(self._keys, start, self._start), len(self._keys)):
            key = self._keys[member]
            first, stop = self._part(member)
            for index in range(stop - 1, first - 1, -1):
                run_end = key - self._distances[index] + 1
                if run_end > start:
                    yield ShardId(self._shards[index]), min(run_end, end)
                if run_end >= end:
                    return

    def check_invariants(self) -> None:
        """Assert that the bounds hold and that the chain is contiguous from head to tail."""
        assert len(self) <= self._cuts_max, "more members than allowed"
        assert self._start < self._dead_max, "evicted members are removed in time"
        assert len(self._keys) == len(self._ends), "a member has a key and a part"
        assert len(self._shards) == len(self._distances), "a distance has a shard"
        assert self.head <= self.tail, "the head never passes the tail"
        assert not self._cuts_max or self.size_bytes <= max(self._bytes_max, _ARRAYS_BYTES)
        assert len(self) == 0 or self._keys[-1] == self.tail - 1, "the chain ends at the tail"
        assert len(self) > 0 or self.head == self.tail, "no members, nothing known"
