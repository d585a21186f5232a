"""The index of one index node, in memory and on the disk (unbounded in thesis 5.2).

Index data arrives in log order, so the index is a sequence of *generations*, each an index of
consecutive seqnums (`TagIndex`, or `RecentIndex` if a checkpoint restored the generation). When the
newest generation is large enough, it is closed. Then a new snapshot is written, which merges the
previous snapshot with all later closed generations. A generation that a snapshot covers stays in
memory for speed, and is dropped when memory is short. Its rows are then read from the file, one row
group at a time; recently used row groups are cached. A lookup searches memory and disk.

This module does no I/O: a search returns the row group that it needs, and the shell reads this row
group. `IndexNode` owns the one `IndexStore`; `Snapshots` decides when to write a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import MetalogPosition, SeqNum, ShardId, TagHash
from indilog.kernel.index_snapshot import IndexSnapshot, ReadRows, Rows, SnapshotInfo, sorted_rows
from indilog.kernel.lost_ranges import LostRanges
from indilog.kernel.metalog import Floor
from indilog.wire.messages import Direction, ShardTags
from indilog_index.discards import Runs, seqnums_in
from indilog_index.recent_rows import AddedParts, RecentIndex
from indilog_index.spilled import Found, GroupDirectory, RowCache, next_in, prev_in
from indilog_index.tag_index import Matches, TagIndex

_CACHE_SHARE: Final = 4
"""This fraction (1/4) of the memory is for cached row groups and the filter of the snapshot's
tags.
"""
_FILTER_SHARE: Final = 16
"""At most this fraction (1/16) of the memory is for the filter of the snapshot's tags."""
_RESIDENT_SHARE: Final = 2
"""Generations that a snapshot covers are dropped while all generations take more than this fraction
(1/2) of the memory.
"""


class Search:
    """The state of one lookup in the index. After a wait for the disk it resumes where it stopped.

    Attributes:
        bound: where a search for NEXT resumes, inclusive.
        above: where a search for PREV resumes, exclusive.
        left: number of matches that are still wanted.
        seqnums, shards: the matches found, best first.
        started: whether a search for PREV has searched the memory.
    """

    __slots__ = (
        "_base", "_groups", "above", "bound", "direction", "left", "limit", "seqnums", "shards",
        "started", "tag",
    )  # fmt: skip

    def __init__(
        self, direction: Direction, tag: TagHash, bound: SeqNum, limit: SeqNum, count: int
    ) -> None:
        self.direction = direction
        self.tag = tag
        self.bound = bound
        self.limit = limit
        self.above = min(bound + 1, limit)
        self.left = count
        self.seqnums: list[SeqNum] = []
        self.shards: list[ShardId] = []
        self.started = False
        self._base: IndexSnapshot | None = None
        self._groups: deque[int] = deque()

    @property
    def matches(self) -> Matches:
        """The matches found, best first."""
        return tuple(self.seqnums), tuple(self.shards)

    def take(self, found: Found | Matches) -> None:
        """Add matches; each of them is worse than all earlier matches."""
        seqnums, shards = found
        if not seqnums:
            return
        self.seqnums += seqnums
        self.shards += shards
        self.left -= len(seqnums)
        if self.direction is Direction.NEXT:
            self.bound = seqnums[-1] + 1
        else:
            self.above = seqnums[-1]

    def groups_of(self, base: IndexSnapshot, directory: GroupDirectory) -> deque[int]:
        """Return the row groups of `base` that are still to be searched."""
        if self._base is not base:
            self._base = base
            if self.direction is Direction.NEXT:
                self._groups = deque(directory.first_for_next(self.tag, self.bound))
            else:
                self._groups = deque(directory.first_for_prev(self.tag, self.above))
        return self._groups


class _Generation:
    """The index of consecutive seqnums from `start` on; records are added until it is closed.

    Attributes:
        records: number of added records, which are the empty tag's rows in a snapshot.
        added: the index data from which `index` was made, kept for checkpoints; it may still have
            trimmed records. None: the generation was restored from rows, or is in the snapshot.
        position, end: of a closed generation, the metalog position and the seqnum where it ends.
    """

    __slots__ = ("added", "end", "index", "position", "records", "start")

    def __init__(self, start: SeqNum) -> None:
        self.start = start
        self.index: TagIndex | RecentIndex = TagIndex(start)
        self.added: AddedParts | None = AddedParts()
        self.records = 0
        self.position: MetalogPosition = 0
        self.end: SeqNum = start

    @property
    def rows(self) -> int:
        """Number of rows that the generation makes in a snapshot."""
        return self.index.entries + self.records

    @property
    def memory_bytes(self) -> int:
        """About how many bytes of memory the generation takes."""
        added = self.added.memory_bytes if self.added is not None else 0
        return self.index.memory_bytes + added

    @property
    def restored(self) -> bool:
        """Whether a checkpoint restored this generation."""
        return isinstance(self.index, RecentIndex)

    def add(self, part: ShardTags) -> None:
        """Add records that follow all earlier records."""
        assert isinstance(self.index, TagIndex), "a restored generation is closed"
        self.index.add(part)
        self.records += part.count
        if self.added is not None:
            self.added.add(part)

    def sort_waiting(self) -> None:
        """Add all waiting parts to the columns, so that a thread may read the index."""
        if isinstance(self.index, TagIndex):
            self.index.sort_waiting()

    def trim(self, floor: Floor) -> None:
        """Drop records below a floor. If a log was trimmed, `sweep` removes its records from other
        tags.
        """
        self.index.trim(floor)
        self._forget_added()

    def sweep(self, tags: int) -> None:
        """Remove dropped records from the next `tags` tags."""
        self.index.sweep(tags)
        self._forget_added()

    def _forget_added(self) -> None:
        """Rebuild `added` from the index, once the index has dropped more than half of its entries.
        So the work is proportional to the number of dropped entries, not to the number of trims.
        """
        if self.added is None or not isinstance(self.index, TagIndex) or self.index.sweeping:
            return
        if 2 * self.index.entries < self.added.entries:
            self.added = AddedParts.of(self.index.rows())

    def copied(self) -> Callable[[], Rows]:
        """Copy everything; return a function that makes rows of the copy, in any thread."""
        return self.added.copied() if self.added is not None else self.index.rows


class Unwritten(NamedTuple):
    """The input of the next snapshot, which covers all positions below `position`.

    Attributes:
        tail: all seqnums are below this seqnum.
        rows: returns the rows that the previous snapshot lacks; may run in a thread.
        discarded: records of the previous snapshot that the next snapshot must leave out.
    """

    position: MetalogPosition
    tail: SeqNum
    rows: Callable[[], Rows]
    discarded: NDArray[np.uint64]


class IndexStore:
    """Finds the records of a tag in memory and in the snapshot.

    Args:
        memory_bytes_max: bytes of generations and row groups together. A single position may exceed
            this limit. The copies that are made while a snapshot is written do not count.
        entries_min: smallest number of new entries that makes a snapshot due.
        lost_max: largest number of ranges of lost records that are kept.

    Attributes:
        filter_bytes_max: largest number of bytes of the filter of a snapshot's tags.
        full: whether nothing may be added until a snapshot is written.
        lost: records whose tags are lost.
    """

    def __init__(self, *, memory_bytes_max: int, entries_min: int, lost_max: int = 1024) -> None:
        self._lost_max = lost_max
        self.lost = LostRanges(ranges_max=lost_max)
        self._resident_bytes_max = memory_bytes_max // _RESIDENT_SHARE
        self._full_bytes = memory_bytes_max - memory_bytes_max // _CACHE_SHARE
        self._entries_min = entries_min
        self._closed: list[_Generation] = []
        self._closed_bytes = 0
        self._newest = _Generation(0)
        self._base: IndexSnapshot | None = None
        self._directory: GroupDirectory | None = None
        self.filter_bytes_max = memory_bytes_max // _FILTER_SHARE
        self._cache = RowCache(memory_bytes_max // _CACHE_SHARE - self.filter_bytes_max)
        self._writing: list[_Generation] = []
        self._deferred_floors: list[Floor] = []
        self._deferred_discards: list[Runs] = []
        """Discarded runs that arrived while the generations in `_writing` must not change;
        `_deferred_floors` has the floors that arrived then.
        """
        self._discarded_in_base = self._discarded_in_write = np.empty(0, np.uint64)
        """Discarded records that have rows in the snapshot. `_discarded_in_write` has those of them
        that the snapshot being written leaves out.
        """
        self.full = False

    # --- status

    @property
    def end(self) -> SeqNum:
        """The seqnum after the last added record."""
        return self._newest.index.end

    @property
    def base(self) -> IndexSnapshot | None:
        """The newest snapshot."""
        return self._base

    @property
    def entries(self) -> int:
        """Number of pairs of record and tag in memory."""
        return sum(generation.index.entries for generation in (*self._closed, self._newest))

    @property
    def resident_bytes(self) -> int:
        """About how many bytes the generations take."""
        return self._closed_bytes + self._newest.memory_bytes

    @property
    def memory_bytes(self) -> int:
        """About how many bytes the whole store takes in memory."""
        directory = self._directory.memory_bytes if self._directory is not None else 0
        tags = len(self._base.tags.bits) if self._base is not None else 0
        cached = self._cache.bytes + self._discarded_in_base.nbytes
        return self.resident_bytes + cached + directory + tags

    @property
    def memory_from(self) -> SeqNum:
        """The first seqnum in memory; all greater seqnums are in memory, too."""
        return self._closed[0].start if self._closed else self._newest.start

    def status(self) -> dict[str, int]:
        """Return the status for operators.

        `tags` and `entries` are counted in memory; a tag counts in each generation that has it.
        `snapshot_rows` counts rows in the snapshot, `spilled_rows` the snapshot rows that are not
        in memory.
        """
        indexes = [generation.index for generation in (*self._closed, self._newest)]
        rows = self._base.rows if self._base is not None else 0
        covered = sum(g.rows for g in self._closed if self._is_covered(g))
        return {
            "entries": self.entries,
            "tags": sum(index.tags for index in indexes),
            "spans": sum(index.spans for index in indexes),
            "generations": len(indexes),
            "bytes": self.memory_bytes,
            "snapshot_rows": rows,
            "spilled_rows": max(0, rows - covered),
            "row_groups_cached": len(self._cache),
            "lost_ranges": len(self.lost),
        }

    # --- adding

    def add(self, part: ShardTags) -> None:
        """Add records that follow all earlier records; the part's columns must fit each other."""
        for lost in part.lost:
            self.lost.add(lost)
        self._newest.add(part)
        if self.resident_bytes >= self._full_bytes:
            self._newest.sort_waiting()  # the estimate of waiting parts is an upper bound
            self.full = self.resident_bytes >= self._full_bytes

    # --- trimming

    def skip(self, end: SeqNum) -> None:
        """Leave out the records up to `end`, which were trimmed before they arrived."""
        self._newest.index.end = end

    @property
    def sweeping(self) -> bool:
        """Whether dropped records are still to be removed from other tags."""
        return any(g.index.sweeping for g in self._changeable)

    def trim(self, floor: Floor) -> None:
        """Drop records below a floor in memory; lookups skip the snapshot's rows below the floor.

        Generations that are being written must not change, so they are trimmed afterwards.
        """
        if self._writing:
            self._deferred_floors.append(floor)
        for generation in self._changeable:
            generation.trim(floor)
        self._measure()

    def runs(self) -> dict[ShardId, Runs]:
        """Return the runs of consecutive seqnums in memory, by shard.

        Generations that are being written are left out, because they must not change now.
        """
        parts = [generation.index.runs() for generation in self._changeable]
        bounds = np.concatenate([bounds for bounds, _ in parts])
        shards = np.concatenate([of_part for _, of_part in parts])
        return {
            ShardId(int(shard)): bounds[shards == shard] for shard in np.unique(shards).tolist()
        }

    def forget(self, discarded: Runs) -> None:
        """Drop records that no read may return any more, from memory and from the next snapshot.

        Generations that are being written are changed afterwards.
        """
        if self._writing:
            self._deferred_discards.append(discarded)
        self._forget_in(self._changeable, discarded)
        self._measure()

    def _forget_in(self, generations: Sequence[_Generation], discarded: Runs) -> None:
        for generation in generations:
            end = generation.end if generation is not self._newest else self.end
            generation.index.forget(seqnums_in(discarded, generation.start, end))
        if self._base is not None:
            in_base = seqnums_in(discarded, 0, self._base.info.tail)
            self._discarded_in_base = np.union1d(self._discarded_in_base, in_base)

    def sweep(self, tags: int) -> None:
        """Remove forgotten records from the next `tags` tags."""
        for generation in self._changeable:
            if generation.index.sweeping:
                generation.sweep(tags)
                self._measure()
                return

    @property
    def _changeable(self) -> list[_Generation]:
        """The generations that no thread is reading."""
        return [g for g in (*self._closed, self._newest) if g not in self._writing]

    def _measure(self) -> None:
        self._closed_bytes = sum(g.memory_bytes for g in self._closed)
        self.full = self.resident_bytes >= self._full_bytes

    # --- finding

    def search(self, search: Search) -> ReadRows | None:
        """Resume a search; return the row group that it needs, or None when it is complete."""
        if search.direction is Direction.NEXT:
            return self._search_next(search)
        return self._search_prev(search)

    def _search_next(self, search: Search) -> ReadRows | None:
        start = self.memory_from
        if search.bound < start and (needed := self._search_base(search)) is not None:
            return needed
        for generation in self._closed:
            if search.left and search.bound < generation.end:
                self._take_next(search, generation.index)
        if search.left:
            self._take_next(search, self._newest.index)
        return None

    def _take_next(self, search: Search, index: TagIndex | RecentIndex) -> None:
        search.take(index.next(search.tag, search.bound, search.limit, search.left))

    def _take_prev(self, search: Search, generation: _Generation) -> None:
        if search.left and search.above > generation.start:
            bound, limit = search.above - 1, search.above
            search.take(generation.index.prev(search.tag, bound, limit, search.left))

    def _search_prev(self, search: Search) -> ReadRows | None:
        if not search.started:
            search.started = True
            self._take_prev(search, self._newest)
            for generation in reversed(self._closed):
                self._take_prev(search, generation)
            search.above = min(search.above, self.memory_from)
        return self._search_base(search)

    def _search_base(self, search: Search) -> ReadRows | None:
        """Search the part of the snapshot that is not in memory.

        All matches of a row group are taken, also those that are in memory now. Memory may have
        dropped them when the search resumes after a wait.
        """
        base, directory = self._base, self._directory
        if base is None or directory is None or not base.tags.may_hold(search.tag):
            return None
        start = self.memory_from
        groups = search.groups_of(base, directory)
        backward = search.direction is Direction.PREV
        while groups and search.left and (backward or search.bound < start):
            rows = self._cache.get(groups[0])
            if rows is None:
                return ReadRows(base.info.position, groups[0])
            groups.popleft()
            if backward:
                search.take(prev_in(rows, search.tag, search.above, search.left))
            else:
                search.take(next_in(rows, search.tag, search.bound, search.limit, search.left))
        return None

    def keep(self, group: int, rows: Rows) -> None:
        """Cache a row group of the newest snapshot that was read."""
        self._cache.put(group, rows)

    # --- snapshots

    @property
    def due(self) -> bool:
        """Whether to write a snapshot: much is new, memory is short, or the last one failed."""
        if self._writing:
            return False
        restored = [g for g in self._closed if g.restored and not self._is_covered(g)]
        fresh = [*restored, self._newest]
        rows, size = sum(g.rows for g in fresh), sum(g.memory_bytes for g in fresh)
        covered = self._base.rows if self._base is not None else 0
        return (
            rows >= max(self._entries_min, covered // 2)
            or (rows > 0 and size > self._resident_bytes_max)
            or self._failed
        )

    @property
    def _failed(self) -> bool:
        """Whether a closed generation is in no snapshot, because the last write failed."""
        last = self._closed[-1] if self._closed else None
        return last is not None and not last.restored and not self._is_covered(last)

    @property
    def closed_position(self) -> MetalogPosition:
        """The end of the positions in the snapshot and in the generations that are closed for the
        next snapshot; 0: there are none.
        """
        base = self.base.info.position if self.base is not None else 0
        return max((base, *(generation.position for generation in self._closed)))

    def close_generation(self, position: MetalogPosition) -> Unwritten:
        """Return the input of the next snapshot: everything that was added below `position`.

        After a failed write, this method returns the same generations again. `written` must be
        called before the next call of this method.
        """
        assert not self._writing, "one snapshot at a time"
        if not self._failed:
            closed = self._newest
            closed.sort_waiting()
            closed.position, closed.end = position, self.end
            self._closed.append(closed)
            self._closed_bytes += closed.memory_bytes
            self._newest = _Generation(closed.end)
            self.full = self.resident_bytes >= self._full_bytes
        fresh = self._writing = [g for g in self._closed if not self._is_covered(g)]
        rows = partial(_rows_of, [generation.index for generation in fresh])
        self._discarded_in_write = self._discarded_in_base
        return Unwritten(fresh[-1].position, fresh[-1].end, rows, self._discarded_in_write)

    def written(self, snapshot: IndexSnapshot | None) -> None:
        """Adopt the snapshot that was written; None: writing failed."""
        assert self._writing, "a generation was closed"
        for floor in self._deferred_floors:
            for generation in self._writing:
                generation.trim(floor)
        if snapshot is not None:
            self._discarded_in_base = np.setdiff1d(
                self._discarded_in_base, self._discarded_in_write
            )
            self._adopt(snapshot)
        for discarded in self._deferred_discards:
            self._forget_in(self._writing, discarded)
        self._discarded_in_write = np.empty(0, np.uint64)
        self._writing, self._deferred_floors, self._deferred_discards = [], [], []
        self._measure()
        if snapshot is not None:
            self.shrink()

    def restore(self, snapshot: IndexSnapshot) -> None:
        """Begin with a snapshot; the store must be empty."""
        assert self.end == 0, "nothing was added"
        self._newest = _Generation(snapshot.info.tail)
        self.lost = LostRanges(snapshot.info.lost, ranges_max=self._lost_max)
        self._adopt(snapshot)

    # --- checkpoints

    def unwritten_rows(self) -> Callable[[], Rows]:
        """Copy the entries that the snapshot lacks; return a function that makes rows of them."""
        fresh = [g for g in self._closed if not self._is_covered(g)] + [self._newest]
        copies = [generation.copied() for generation in fresh]
        return lambda: sorted_rows([copy() for copy in copies])

    def add_checkpoint(self, rows: Rows, info: SnapshotInfo) -> None:
        """Add the rows of a checkpoint that the snapshot lacks; without a snapshot, all rows."""
        start = self._newest.start
        assert self.end == start <= info.tail, "nothing was added"
        rows = rows.chosen(rows.seqnums >= np.uint64(start))
        recent = _Generation(start)
        recent.index, recent.added = RecentIndex(rows, info.tail), None
        recent.records = len(rows.tags) - recent.index.entries
        assert not len(rows.seqnums) or int(rows.seqnums.max()) < info.tail
        recent.position, recent.end = info.position, info.tail
        self._closed.append(recent)
        self._newest = _Generation(info.tail)
        self.lost = LostRanges((*self.lost, *info.lost), ranges_max=self._lost_max)
        self._measure()

    def shrink(self) -> None:
        """Drop generations that the snapshot covers, oldest first, while memory is short."""
        while (
            self._closed
            and self.resident_bytes > self._resident_bytes_max
            and self._is_covered(self._closed[0])
        ):
            self._closed_bytes -= self._closed.pop(0).memory_bytes
        self.full = self.resident_bytes >= self._full_bytes

    def check_invariants(self) -> None:
        """Assert that no seqnum is missing between disk and memory, and that sums are right."""
        for before, after in pairwise((*self._closed, self._newest)):
            assert before.end == after.start
        assert self.full == (self.resident_bytes >= self._full_bytes)
        assert self._closed_bytes == sum(g.memory_bytes for g in self._closed)
        covered = self._base.info.tail if self._base is not None else 0
        assert self.memory_from <= covered or not self.memory_from
        self.lost.check_invariants()

    def _adopt(self, snapshot: IndexSnapshot) -> None:
        self._base = snapshot
        for generation in self._closed:
            if self._is_covered(generation):
                generation.added = None
        self._directory = GroupDirectory(snapshot.groups)
        self._cache.clear()
        self._measure()

    def _is_covered(self, generation: _Generation) -> bool:
        return self._base is not None and generation.end <= self._base.info.tail


def _rows_of(indexes: Sequence[TagIndex | RecentIndex]) -> Rows:
    return sorted_rows([index.rows() for index in indexes])
