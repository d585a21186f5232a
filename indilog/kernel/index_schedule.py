"""The schedule: which index shard has the index data of a metalog position (thesis 5.3.1, round
robin; 5.6.3, adding and removing index shards).

Only this module has the rule. The schedule is a list of eras; while the cluster runs, eras are only
added. Within an era, positions are assigned to its index shards round robin. If a later era leaves
an index shard out, the shard is retired. A retired shard gets no further positions, and still
answers lookups about the positions that it has. `View` holds the schedule; storage nodes and index
nodes evaluate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from indilog.base.ids import MetalogPosition

NO_POSITION: Final[MetalogPosition] = 2**62
"""A position after every possible one."""


class IndexEra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From `start` until the next era, position p belongs to `shards[p % len(shards)]`."""

    start: MetalogPosition
    shards: tuple[int, ...]


Eras = Sequence[IndexEra]
"""Ascending by start; the first one starts at 0."""


def index_shard_at(eras: Eras, position: MetalogPosition) -> int:
    """Return the index shard that gets the index data of `position`."""
    era = next(era for era in reversed(eras) if era.start <= position)
    return era.shards[position % len(era.shards)]


def previous_of(eras: Eras, position: MetalogPosition) -> MetalogPosition:
    """Return the last position below `position` of the same index shard; -1: there is none."""
    return last_below(eras, index_shard_at(eras, position), position)


def last_below(eras: Eras, index_shard: int, end: MetalogPosition) -> MetalogPosition:
    """Return the last position of an index shard below `end`; -1: there is none."""
    for era in reversed(eras):
        if era.start < end:
            if index_shard in era.shards:
                step = len(era.shards)
                last = end - 1 - (end - 1 - era.shards.index(index_shard)) % step
                if last >= era.start:
                    return last
            end = era.start
    return -1


def first_difference(before: Eras, after: Eras) -> MetalogPosition:
    """Return the first position that the two schedules may give to different index shards."""
    for old, new in zip(before, after, strict=False):
        if old != new:
            return min(old.start, new.start)
    longer = before[len(after) :] or after[len(before) :]
    return longer[0].start if longer else NO_POSITION


def eras_below(eras: Eras, position: MetalogPosition) -> tuple[IndexEra, ...]:
    """Return the eras that cover positions below `position`."""
    return tuple(era for era in eras if era.start < position)


class PositionRange(NamedTuple):
    """The positions first, first + step, ... below `end`; at least one."""

    first: MetalogPosition
    end: MetalogPosition
    step: int


class IndexPositions:
    """The metalog positions of one index shard, ascending; there may be none."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Sequence[PositionRange]) -> None:
        self._ranges = tuple(ranges)
        assert all(one.first < one.end and one.step > 0 for one in ranges), "no range is empty"
        ends = [bound for first, end, _ in ranges for bound in (first, end)]
        assert ends == sorted(ends), "ranges ascend and do not overlap"

    @classmethod
    def of(cls, eras: Eras, index_shard: int) -> IndexPositions:
        """Return the positions of one index shard."""
        ranges = []
        ends = [*(era.start for era in eras[1:]), NO_POSITION]
        for era, end in zip(eras, ends, strict=True):
            if index_shard in era.shards:
                step = len(era.shards)
                first = era.start + (era.shards.index(index_shard) - era.start) % step
                if first < end:
                    ranges.append(PositionRange(first, end, step))
        return cls(ranges)

    def __contains__(self, position: MetalogPosition) -> bool:
        for first, end, step in self._ranges:  # they do not overlap
            if first <= position < end:
                return not (position - first) % step
        return False

    @property
    def end(self) -> MetalogPosition:
        """The end of the positions; `NO_POSITION`: the index shard is not retired, so none."""
        return self._ranges[-1].end if self._ranges else 0

    def first_from(self, position: MetalogPosition) -> MetalogPosition:
        """Return the first one at or after `position`; `NO_POSITION`: there is none."""
        return self.range_from(position).first

    def range_from(self, position: MetalogPosition) -> PositionRange:
        """Return the first range of the positions at or after `position`."""
        for first, end, step in self._ranges:
            if position < end:
                following = max(first, position + (first - position) % step)
                if following < end:
                    return PositionRange(following, end, step)
        return PositionRange(NO_POSITION, NO_POSITION, 1)

    def after(self, position: MetalogPosition, count: int) -> MetalogPosition:
        """Skip `count` of the positions at or after `position`; return the one that follows."""
        assert count >= 0, "positions are counted forwards"
        run = self.range_from(position)
        while run.first < NO_POSITION:
            here = (run.end - run.first + run.step - 1) // run.step
            if count < here:
                return run.first + count * run.step
            count -= here
            run = self.range_from(run.end)
        return NO_POSITION


EVERY_POSITION: Final = IndexPositions([PositionRange(0, NO_POSITION, 1)])
"""All positions: those of an engine."""
