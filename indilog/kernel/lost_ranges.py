"""Records whose tags are lost: ranges of seqnums that no index covers (decision 0024).

Storage reports in index data which records of a position are lost. Index nodes and compute nodes
keep these ranges. A read whose answer would cross one raises `DataLossError`. A range shrinks only
when records in it are trimmed, so that no read needs them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from indilog.base.errors import DataLossError
from indilog.base.ids import SeqNum


class LostRange(NamedTuple):
    """Seqnums [start, end), at least one."""

    start: SeqNum
    end: SeqNum

    def error(self) -> DataLossError:
        """Return the error of a read that cannot be answered because of this range."""
        last = self.end - 1
        one = self.start == last
        which = f"seqnum {last}" if one else f"seqnums {self.start} to {last}"
        return DataLossError(
            f"The tags of {which} are lost by damage, so the answer may lie there. Read on from "
            f"seqnum {self.end}, or backwards from below {self.start}.",
            seqnum=self.start,
            next_seqnum=self.end,
        )


class LostRanges:
    """At most `ranges_max` ranges, ascending; none touches another.

    Above the limit the two neighbours with the smallest gap are merged. The records between them
    then count as lost for lookups by tag; a read by seqnum still finds them.
    """

    __slots__ = ("_ends", "_ranges_max", "_starts")

    def __init__(self, ranges: Iterable[LostRange] = (), *, ranges_max: int) -> None:
        self._ranges_max = ranges_max
        self._starts: list[SeqNum] = []
        self._ends: list[SeqNum] = []
        for one in ranges:
            self.add(one)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[LostRange]:
        return map(LostRange, self._starts, self._ends)

    def add(self, lost: LostRange) -> None:
        """Add a range, merged with those that it touches."""
        assert lost.start < lost.end, "a range has a seqnum"
        first = bisect_left(self._ends, lost.start)
        after = bisect_right(self._starts, lost.end)
        start, end = lost
        if first < after:
            start = min(start, self._starts[first])
            end = max(end, self._ends[after - 1])
        self._starts[first:after] = [start]
        self._ends[first:after] = [end]
        if len(self) > self._ranges_max:
            self._join_nearest()
        assert len(self) <= self._ranges_max, "one range more than allowed is merged"

    def _join_nearest(self) -> None:
        gaps = [start - end for start, end in zip(self._starts[1:], self._ends, strict=False)]
        index = gaps.index(min(gaps))
        del self._starts[index + 1], self._ends[index]

    def ascending(self, start: SeqNum, end: SeqNum) -> Iterator[LostRange]:
        """Yield the lost parts of [start, end), ascending."""
        for index in range(bisect_right(self._ends, start), len(self)):
            if max(start, self._starts[index]) >= end:
                return
            yield LostRange(max(start, self._starts[index]), min(end, self._ends[index]))

    def descending(self, start: SeqNum, end: SeqNum) -> Iterator[LostRange]:
        """Yield the lost parts of [start, end), descending."""
        for index in range(bisect_left(self._starts, end) - 1, -1, -1):
            if min(end, self._ends[index]) <= start:
                return
            yield LostRange(max(start, self._starts[index]), min(end, self._ends[index]))

    def any(self, start: SeqNum, end: SeqNum) -> bool:
        """Return whether any part of [start, end) is lost."""
        return next(self.ascending(start, end), None) is not None

    def check_invariants(self) -> None:
        """Assert the limit and the order."""
        assert len(self) <= self._ranges_max
        bounds = [bound for one in self for bound in one]
        assert bounds == sorted(set(bounds)), "ranges ascend and do not touch"


def within(ranges: Sequence[LostRange], start: SeqNum, end: SeqNum) -> bool:
    """Return whether these ranges ascend and lie in [start, end).

    A message may have any ranges, so they are checked.
    """
    for one in ranges:
        if not start <= one.start < one.end <= end:
            return False
        start = one.end
    return True
