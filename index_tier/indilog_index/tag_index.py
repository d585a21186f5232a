"""The tag index of one index node: tag → seqnums, in flat arrays (thesis 5.2).

The thesis keeps a shard id with each seqnum. Here the shard is kept once for each run of
consecutive seqnums, in *spans*. A bisection finds the shard of a seqnum. The spans are needed
anyway, as the index of the empty tag. So a tag takes one array with 8 bytes per record, instead of
two arrays with 10 bytes.

Seqnums arrive in ascending order and are appended, so every array stays sorted.

Added parts *wait* until the next lookup, or until there are many. All waiting parts are then sorted
by tag, so that each tag takes one step for all its records in these parts.

Each generation of `IndexStore` has a `TagIndex`, or a `RecentIndex` if a checkpoint restored it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import EMPTY_TAG, SeqNum, ShardId, TagHash
from indilog.kernel.index_snapshot import Rows
from indilog.kernel.metalog import Floor
from indilog.roles.tags_sorted import WAITING_MAX, rows_by_tag
from indilog.wire.messages import ShardTags
from indilog_index.sweep import Sweep

Matches: TypeAlias = tuple[tuple[SeqNum, ...], tuple[ShardId, ...]]
"""Seqnums, best first, and the shard of each."""

_ENTRY_BYTES: Final = 8
_SPAN_BYTES: Final = 18
_TAG_BYTES: Final = 150
"""Bytes that a tag takes besides its entries: its array, its key and its slot in the mapping."""


class TagIndex:
    """Finds the records of a tag among the added records.

    Attributes:
        end: the seqnum after the last added record.
        entries: number of pairs of record and tag.
    """

    __slots__ = (
        "_columns", "_dead", "_ends", "_firsts", "_shards", "_sweep", "_waiting",
        "_waiting_entries", "end", "entries",
    )  # fmt: skip

    def __init__(self, end: SeqNum = 0) -> None:
        self._columns: dict[TagHash, array[int]] = {}
        self._waiting: list[ShardTags] = []
        """Waiting parts: they are counted in `_ends` and `entries`, but are not in `_columns`
        yet.
        """
        self._waiting_entries = 0
        self._firsts = array("Q")
        self._ends = array("Q")
        self._shards = array("H")
        self._dead: deque[array[int]] = deque()
        """Forgotten records that sweeps must remove from other tags: an ascending array for each
        sweep.
        """
        self._sweep: Sweep | None = None
        self.end = end
        self.entries = 0

    @property
    def tags(self) -> int:
        """Number of different tags."""
        self.sort_waiting()
        return len(self._columns)

    @property
    def spans(self) -> int:
        """Number of runs of consecutive seqnums of one shard."""
        return len(self._firsts)

    @property
    def memory_bytes(self) -> int:
        """About how many bytes the index takes. Waiting parts count as if all their tags
        were new.
        """
        tags = len(self._columns) + self._waiting_entries
        pending = sum(map(len, self._dead)) + (len(self._sweep.dead) if self._sweep else 0)
        return (
            _ENTRY_BYTES * (self.entries + pending)
            + _TAG_BYTES * tags
            + _SPAN_BYTES * len(self._firsts)
        )

    def add(self, part: ShardTags) -> None:
        """Add records that follow all earlier records; the part's columns must fit each other."""
        first = part.first_seqnum
        assert first >= self.end, "parts are added in the order of their seqnums"
        end = self.end = first + part.count
        self._add_span(first, end, part.shard)
        entries = len(part.tags) // _ENTRY_BYTES
        self.entries += entries
        self._waiting.append(part)
        self._waiting_entries += entries
        if self._waiting_entries >= WAITING_MAX:
            self.sort_waiting()

    def sort_waiting(self) -> None:
        """Add waiting parts to the columns, because reads search the columns only. Another thread
        may read only if no part waits.
        """
        if not self._waiting:
            return
        parts, self._waiting, self._waiting_entries = self._waiting, [], 0
        rows = rows_by_tag(parts)
        if rows is None:
            for part in parts:
                self._add_tags(part)
            return
        columns = self._columns
        seqnums = memoryview(rows.seqnums)
        for tag, start, end in rows.groups:
            column = columns.get(tag)
            if column is None:
                column = columns[tag] = array("Q")
            column.frombytes(seqnums[_ENTRY_BYTES * start : _ENTRY_BYTES * end])

    def next(self, tag: TagHash, bound: SeqNum, limit: SeqNum, count: int) -> Matches:
        """Return the `count` smallest seqnums of `tag` in [bound, limit), ascending."""
        if tag == EMPTY_TAG:
            return self._next_any(bound, limit, count)
        self.sort_waiting()
        column = self._columns.get(tag)
        if column is None:
            return (), ()
        start = bisect_left(column, bound)
        return self._with_shards(
            column[start : bisect_left(column, limit, start, min(start + count, len(column)))]
        )

    def prev(self, tag: TagHash, bound: SeqNum, limit: SeqNum, count: int) -> Matches:
        """Return the `count` largest seqnums of `tag` in [0, min(bound, limit - 1)], descending."""
        above = min(bound + 1, limit)
        if tag == EMPTY_TAG:
            return self._prev_any(above, count)
        self.sort_waiting()
        column = self._columns.get(tag)
        if column is None:
            return (), ()
        end = bisect_left(column, above)
        seqnums, shards = self._with_shards(column[max(0, end - count) : end])
        return seqnums[::-1], shards[::-1]

    def rows(self) -> Rows:
        """Return everything as rows of a snapshot, beginning with the rows of the empty tag.

        Rows of forgotten records are left out, even if no sweep has removed them yet. Otherwise all
        later snapshots would keep them. Another thread may call this if no part waits and the index
        does not change.
        """
        rows = self._all_rows()
        dead = self._pending()
        return rows.chosen(~np.isin(rows.seqnums, np.concatenate(dead))) if dead else rows

    def _pending(self) -> list[NDArray[np.uint64]]:
        """Return the forgotten records that sweeps have not removed yet."""
        pending = [np.array(dead, np.uint64) for dead in self._dead]
        if self._sweep is not None:
            pending.append(np.array(self._sweep.dead, np.uint64))
        return pending

    def _all_rows(self) -> Rows:
        self.sort_waiting()
        firsts = np.frombuffer(self._firsts, np.uint64)
        counts = (np.frombuffer(self._ends, np.uint64) - firsts).astype(np.int64)
        span_shards = np.frombuffer(self._shards, np.uint16)
        total = int(counts.sum())
        offsets = np.cumsum(counts) - counts
        skipped = firsts.astype(np.int64) - offsets
        records = (np.repeat(skipped, counts) + np.arange(total)).astype(np.uint64)
        whole = Rows(np.zeros(total, np.uint64), records, np.repeat(span_shards, counts))
        if not self._columns:
            return whole
        columns = [(tag, self._columns[tag]) for tag in sorted(self._columns)]
        lengths = [len(column) for _, column in columns]
        tags = np.repeat(np.array([tag for tag, _ in columns], np.uint64), lengths)
        seqnums = np.concatenate([np.frombuffer(column, np.uint64) for _, column in columns])
        spans = np.searchsorted(firsts, seqnums, side="right") - 1
        return Rows(
            np.concatenate([whole.tags, tags]),
            np.concatenate([whole.seqnums, seqnums]),
            np.concatenate([whole.shards, span_shards[spans]]),
        )

    # --- trimming

    @property
    def sweeping(self) -> bool:
        """Whether forgotten records are still to be removed from other tags."""
        return self._sweep is not None or bool(self._dead)

    def trim(self, floor: Floor) -> None:
        """Forget a tag's records below a floor. If the floor is of a log, `sweep` removes the log's
        records from other tags.
        """
        self.sort_waiting()
        column = self._columns.get(floor.tag)
        if column is None:
            return
        end = bisect_left(column, floor.until)
        if end and floor.of_log:
            self._dead.append(column[:end])
        del column[:end]
        self.entries -= end
        if not column:
            del self._columns[floor.tag]

    def runs(self) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
        """Return all runs of consecutive seqnums (a row each: first, end), and their shards."""
        bounds = np.stack([np.array(self._firsts), np.array(self._ends)], axis=1)
        return bounds.astype(np.uint64), np.array(self._shards, np.uint16)

    def forget(self, dead: NDArray[np.uint64]) -> None:
        """Drop records that no read may return any more; `sweep` removes them."""
        self.sort_waiting()
        if len(dead):
            self._dead.append(array("Q", dead.tobytes()))

    def sweep(self, tags: int) -> None:
        """Remove forgotten records from the next `tags` tags."""
        if self._sweep is None:
            if not self._dead:
                return
            dead = self._dead.popleft()
            # The last span may still grow.
            spans = min(bisect_right(self._ends, dead[-1] + 1), len(self._ends) - 1)
            self._sweep = Sweep(self._columns, dead, self._firsts[: max(spans, 0)])
        removed, done = self._sweep.advance(tags)
        self.entries -= removed
        assert self.entries >= 0
        if done:
            self._end_sweep(self._sweep)

    def _end_sweep(self, sweep: Sweep) -> None:
        """Drop spans without records, and the memory of tags that were removed."""
        self._sweep = None
        kept = np.flatnonzero(sweep.used)
        spans = len(sweep.used)
        if len(kept) < spans:
            for column, kind in ((self._firsts, "Q"), (self._ends, "Q"), (self._shards, "H")):
                head = np.array(column[:spans])
                column[:spans] = array(kind, head[kept].tobytes())
        if len(self._columns) < sweep.tags // 2:
            self._columns = dict(self._columns)

    # --- adding

    def _add_span(self, first: SeqNum, end: SeqNum, shard: ShardId) -> None:
        if self._ends and self._ends[-1] == first and self._shards[-1] == shard:
            self._ends[-1] = end
            return
        self._firsts.append(first)
        self._ends.append(end)
        self._shards.append(shard)

    def _add_tags(self, part: ShardTags) -> None:
        """Add the tags of one part."""
        first, end = part.first_seqnum, part.first_seqnum + part.count
        tags = array("Q", part.tags)
        width = part.tag_counts[0]
        if part.tag_counts.count(width) < part.count:
            self._add_rows(
                tags, chain.from_iterable(map(repeat, range(first, end), part.tag_counts))
            )
            return
        if not width:
            return
        leading = tags[::width]
        if leading.count(leading[0]) == part.count:
            # The first tag of a record is the tag of its log, usually the same in the whole part.
            self._add_run(leading[0], range(first, end))
            if width == 1:
                return
            del tags[::width]
            width -= 1
        rows = range(first, end)
        self._add_rows(
            tags, rows if width == 1 else chain.from_iterable(map(repeat, rows, repeat(width)))
        )

    def _add_run(self, tag: TagHash, seqnums: Iterable[SeqNum]) -> None:
        column = self._columns.get(tag)
        if column is None:
            column = self._columns[tag] = array("Q")
        column.extend(seqnums)

    def _add_rows(self, tags: Iterable[TagHash], seqnums: Iterable[SeqNum]) -> None:
        """Add pairs of tag and seqnum, ascending; a tag that a record has twice counts once."""
        columns = self._columns
        find = columns.get
        for tag, seqnum in zip(tags, seqnums, strict=True):
            column = find(tag)
            if column is None:
                columns[tag] = array("Q", (seqnum,))
            elif column[-1] < seqnum:
                column.append(seqnum)

    # --- finding

    def _with_shards(self, seqnums: array[int]) -> Matches:
        firsts, shards = self._firsts, self._shards
        if len(seqnums) == 1:
            return (seqnums[0],), (ShardId(shards[bisect_right(firsts, seqnums[0]) - 1]),)
        found: list[ShardId] = []
        span = 0
        for seqnum in seqnums:
            span = bisect_right(firsts, seqnum, span)
            found.append(ShardId(shards[span - 1]))
        return tuple(seqnums), tuple(found)

    def _next_any(self, bound: SeqNum, limit: SeqNum, count: int) -> Matches:
        """Walk the spans, because every record has the empty tag."""
        seqnums: list[SeqNum] = []
        shards: list[ShardId] = []
        for span in range(bisect_right(self._ends, bound), len(self._ends)):
            first = max(bound, self._firsts[span])
            length = min(self._ends[span], limit) - first
            if length <= 0 or count <= len(seqnums):
                break
            length = min(length, count - len(seqnums))
            seqnums += range(first, first + length)
            shards += [ShardId(self._shards[span])] * length
        return tuple(seqnums), tuple(shards)

    def _prev_any(self, above: SeqNum, count: int) -> Matches:
        seqnums: list[SeqNum] = []
        shards: list[ShardId] = []
        for span in range(bisect_left(self._firsts, above) - 1, -1, -1):
            if count <= len(seqnums):
                break
            end = min(self._ends[span], above)
            length = min(end - self._firsts[span], count - len(seqnums))
            seqnums += range(end - 1, end - 1 - length, -1)
            shards += [ShardId(self._shards[span])] * length
        return tuple(seqnums), tuple(shards)
