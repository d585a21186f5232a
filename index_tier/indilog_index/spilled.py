"""The part of an index that is only on disk: finds the row groups of a tag in a snapshot, and
caches row groups.

`IndexStore` uses this module. The shell reads the row groups.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import SeqNum, ShardId, TagHash
from indilog.kernel.index_snapshot import GROUP_ROWS, ROW_BYTES, RowGroups, Rows

Found = tuple[list[SeqNum], list[ShardId]]
"""Seqnums, best first, and the shard of each."""

_GROUP_BYTES: Final = 32
"""Bytes that the directory keeps for one row group."""


class GroupDirectory:
    """Finds the row groups that may have rows of a tag at or next to a bound.

    The row groups of a tag are adjacent. All but the first begin with the tag, and all but the last
    end with the tag. So all groups between the first and the last have rows of this tag only, and
    their seqnums ascend.
    """

    __slots__ = ("_groups",)

    def __init__(self, groups: RowGroups) -> None:
        self._groups = groups

    @property
    def memory_bytes(self) -> int:
        """How many bytes the directory takes."""
        return _GROUP_BYTES * len(self._groups.first_tags)

    def of(self, tag: TagHash) -> range:
        """Return the row groups that may have rows of `tag`."""
        value = np.uint64(tag)
        first = int(np.searchsorted(self._groups.last_tags, value, side="left"))
        return range(first, int(np.searchsorted(self._groups.first_tags, value, side="right")))

    def first_for_next(self, tag: TagHash, bound: SeqNum) -> range:
        """Return the row groups to search, in this order, for rows from `bound` on."""
        groups = self.of(tag)
        inner = groups[1:-1]
        if inner and int(self._groups.lowest[inner[0]]) <= bound:
            highest = self._groups.highest[inner.start : inner.stop]
            skipped = int(np.searchsorted(highest, np.uint64(bound), side="left"))
            return range(inner[0] + skipped, groups.stop)
        return groups

    def first_for_prev(self, tag: TagHash, above: SeqNum) -> range:
        """Return the row groups to search, in this order, for rows below `above`."""
        groups = self.of(tag)
        inner = groups[1:-1]
        if inner and int(self._groups.highest[inner[-1]]) >= above - 1:
            lowest = self._groups.lowest[inner.start : inner.stop]
            below = int(np.searchsorted(lowest, np.uint64(above), side="left"))
            return range(groups.start, inner.start + below)[::-1]
        return groups[::-1]


def next_in(rows: Rows, tag: TagHash, bound: SeqNum, limit: SeqNum, count: int) -> Found:
    """Return the `count` smallest seqnums of `tag` in [bound, limit) among `rows`."""
    seqnums, shards = _of_tag(rows, tag)
    start = int(np.searchsorted(seqnums, np.uint64(bound), side="left"))
    end = int(np.searchsorted(seqnums, np.uint64(limit), side="left"))
    end = min(end, start + count)
    return seqnums[start:end].tolist(), shards[start:end].tolist()


def prev_in(rows: Rows, tag: TagHash, above: SeqNum, count: int) -> Found:
    """Return the `count` largest seqnums of `tag` below `above` among `rows`, descending."""
    seqnums, shards = _of_tag(rows, tag)
    end = int(np.searchsorted(seqnums, np.uint64(above), side="left"))
    start = max(0, end - count)
    return seqnums[start:end][::-1].tolist(), shards[start:end][::-1].tolist()


def _of_tag(rows: Rows, tag: TagHash) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
    value = np.uint64(tag)
    start = int(np.searchsorted(rows.tags, value, side="left"))
    end = int(np.searchsorted(rows.tags, value, side="right"))
    return rows.seqnums[start:end], rows.shards[start:end]


class RowCache:
    """The most recently used row groups of one snapshot: at most `bytes_max` bytes, but at least
    one group.
    """

    __slots__ = ("_bytes_max", "_groups", "bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._groups: OrderedDict[int, Rows] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, group: int) -> Rows | None:
        """Return a cached row group; None: it is not cached."""
        if (rows := self._groups.get(group)) is not None:
            self._groups.move_to_end(group)
        return rows

    def put(self, group: int, rows: Rows) -> None:
        """Cache a row group; the least recently used groups are evicted."""
        if group in self._groups:
            return
        self._groups[group] = rows
        self.bytes += ROW_BYTES * len(rows.tags)
        while self.bytes > self._bytes_max and len(self._groups) > 1:
            _, dropped = self._groups.popitem(last=False)
            self.bytes -= ROW_BYTES * len(dropped.tags)

    def clear(self) -> None:
        """Drop everything, because the snapshot was replaced."""
        self._groups.clear()
        self.bytes = 0


assert GROUP_ROWS * ROW_BYTES < 1 << 20, "a row group is small beside any cache"
