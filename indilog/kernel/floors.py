"""The floors of logs and tags, and which records are dead below them (ARCHITECTURE 13).

`Trim` entries of the metalog raise floors. Floors only grow, so they may be applied early, twice
and in any order. A log may have many floors, for example one for each object of a store. So floors
are in sorted arrays, 24 bytes each; only the newest ones are in a small mapping. The floor of a tag
is dropped when the floor of its log is as high: records below it are trimmed with the log. Storage
nodes, index nodes and `indilog_pipeline` each keep a `Trimmed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indilog.base.ids import SeqNum, TagHash
from indilog.kernel.metalog import NO_FLOORS, Floor, FloorCursor

Column: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_NO_LOG: Final = TagHash(0)
_RECENT_MAX: Final = 1024
_FLOOR_BYTES: Final = 24
_RECENT_BYTES: Final = 150
"""Bytes that a floor in the mapping costs in CPython."""


class FloorColumns(NamedTuple):
    """Tags that have a floor, ascending; their floors; the tags of their logs, 0 if not known."""

    tags: Column
    untils: Column
    logs: Column


class Floors:
    """The floors of tags; the floor of a tag without one is 0.

    Attributes:
        highest: the highest of all floors; no record at or above it is trimmed.
    """

    __slots__ = ("_logs", "_recent", "_tags", "_untils", "highest")

    def __init__(self) -> None:
        self._tags: Column = np.empty(0, np.uint64)
        self._untils: Column = np.empty(0, np.uint64)
        self._logs: Column = np.empty(0, np.uint64)
        self._recent: dict[TagHash, tuple[SeqNum, TagHash]] = {}
        self.highest: SeqNum = 0

    def __len__(self) -> int:
        """An upper bound of how many tags have a floor: a recent floor may count twice."""
        return len(self._tags) + len(self._recent)

    @property
    def memory_bytes(self) -> int:
        """About how many bytes they take."""
        return _FLOOR_BYTES * len(self._tags) + _RECENT_BYTES * len(self._recent)

    def raise_to(self, tag: TagHash, until: SeqNum, log: TagHash = _NO_LOG) -> bool:
        """Raise the floor of a tag of `log` to `until`; return whether it was lower before."""
        if until <= self.of(tag):
            return False
        self._recent[tag] = until, log
        self.highest = max(self.highest, until)
        if len(self._recent) > _RECENT_MAX + len(self._tags) // 64:
            self._merge()
        return True

    def of(self, tag: TagHash) -> SeqNum:
        """Return the floor of `tag`."""
        recent = self._recent.get(tag)
        if recent is not None:
            return recent[0]
        if not len(self._tags):
            return 0
        place = int(np.searchsorted(self._tags, np.uint64(tag)))
        found = place < len(self._tags) and int(self._tags[place]) == tag
        return int(self._untils[place]) if found else 0

    def of_each(self, tags: Column) -> Column:
        """Return the floor of each of many tags."""
        self._merge()
        if not len(self._tags):
            return np.zeros(len(tags), np.uint64)
        places = np.minimum(np.searchsorted(self._tags, tags), len(self._tags) - 1)
        return np.where(self._tags[places] == tags, self._untils[places], np.uint64(0))

    def columns(self) -> FloorColumns:
        """Return all floors; later changes do not affect the returned columns."""
        self._merge()
        return FloorColumns(self._tags, self._untils, self._logs)

    def restore(self, columns: FloorColumns) -> None:
        """Replace all floors with those that `columns` returned."""
        self._tags, self._untils, self._logs = columns
        self._recent.clear()
        self.highest = int(columns.untils.max()) if len(columns.untils) else 0

    def above(self, tag: TagHash, count: int) -> Iterator[tuple[TagHash, SeqNum, TagHash]]:
        """Yield the floors of the first `count` tags above `tag`, in order, with their logs."""
        self._merge()
        start = int(np.searchsorted(self._tags, np.uint64(tag), side="right"))
        columns = (column[start : start + count].tolist() for column in self.columns())
        yield from zip(*columns, strict=True)

    def drop(self, log: TagHash, until: SeqNum) -> None:
        """Drop the floors of tags of `log` that are not above `until`.

        All floors are compared: 0.4 ms for a million of them.
        """
        for tag, (floor, of) in list(self._recent.items()):
            if of == log and floor <= until:
                del self._recent[tag]
        drop = (self._logs == log) & (self._untils <= until)
        if drop.any():
            self._tags, self._untils, self._logs = (
                column[~drop] for column in (self._tags, self._untils, self._logs)
            )

    def check_invariants(self) -> None:
        """Assert that the arrays are sorted, and that `highest` is no lower than any floor."""
        assert bool(np.all(self._tags[:-1] < self._tags[1:])), "tags ascend, each once"
        assert bool(np.all(self._untils <= self.highest)), "no floor is above the highest"
        assert all(until <= self.highest for until, _ in self._recent.values())
        assert bool(np.all(self._untils > 0)), "a tag without a floor is not kept"

    def _merge(self) -> None:
        """Move recent floors into the arrays."""
        if not self._recent:
            return
        count = len(self._recent)
        tags = np.fromiter(self._recent.keys(), np.uint64, count)
        recent = self._recent.values()
        untils = np.fromiter((until for until, _ in recent), np.uint64, count)
        logs = np.fromiter((log for _, log in recent), np.uint64, count)
        self._recent.clear()
        keep = ~np.isin(self._tags, tags)
        tags = np.concatenate((self._tags[keep], tags))
        untils = np.concatenate((self._untils[keep], untils))
        logs = np.concatenate((self._logs[keep], logs))
        order = np.argsort(tags)
        self._tags, self._untils, self._logs = tags[order], untils[order], logs[order]
        assert len(self._tags) == len(self._untils) == len(self._logs)


class Trimmed:
    """All floors of logs and of tags that are known.

    A record is *dead* if it is below the floor of its log, or if it has tags and is below the
    floors of all of them. No lookup finds a dead record; only a read of its seqnum could.
    """

    __slots__ = ("logs", "tags")

    def __init__(self) -> None:
        self.logs = Floors()
        self.tags = Floors()

    @property
    def highest(self) -> SeqNum:
        """No record at or above this seqnum is trimmed."""
        return max(self.logs.highest, self.tags.highest)

    def apply(self, floors: Iterable[Floor]) -> list[Floor]:
        """Raise floors; return those that were raised."""
        return [floor for floor in floors if self._raise(floor)]

    def _raise(self, floor: Floor) -> bool:
        tag, until, of_log, log = floor
        if of_log:
            raised = self.logs.raise_to(tag, until)
            if raised:
                self.tags.drop(tag, until)
            return raised
        covered = log and until <= self.logs.of(log)
        return not covered and self.tags.raise_to(tag, until, log)

    def page(self, after: FloorCursor, count: int) -> tuple[tuple[Floor, ...], bool]:
        """Return the first `count` floors after a cursor, and whether no others follow.

        Floors of logs come last. If a trim between two pages drops a tag's floor, the log's floor
        that covers it is in a later page. So the pages together contain or cover every floor that
        existed at the first page.
        """
        assert count > 0, "a page without floors would never end"
        page: list[Floor] = []
        if not after.of_log:
            page += self._page_of(self.tags, after.tag, count, of_log=False)
        log_tag = after.tag if after.of_log else 0
        page += self._page_of(self.logs, log_tag, count - len(page), of_log=True)
        return tuple(page), len(page) < count

    @staticmethod
    def _page_of(floors: Floors, tag: TagHash, count: int, *, of_log: bool) -> list[Floor]:
        return [Floor(tag, until, of_log, log) for tag, until, log in floors.above(tag, count)]

    @staticmethod
    def cursor_after(page: Sequence[Floor]) -> FloorCursor:
        """Return where the next page begins."""
        return FloorCursor(page[-1].of_log, page[-1].tag) if page else NO_FLOORS

    def dead(self, first_seqnum: SeqNum, tag_counts: bytes, tags: bytes) -> Mask:
        """Return which of consecutive records are dead, given their tag columns.

        The first tag of a record is its log's. A record without tags is a tombstone, so it is dead.
        """
        counts = np.frombuffer(tag_counts, np.uint8).astype(np.int64)
        seqnums = np.arange(len(counts), dtype=np.uint64) + np.uint64(first_seqnum)
        return self.dead_at(seqnums, counts, np.frombuffer(tags, np.uint64))

    def dead_at(self, seqnums: Column, counts: npt.NDArray[np.int64], column: Column) -> Mask:
        """Return which records are dead, given their seqnums, their numbers of tags, and the tags
        of all of them.
        """
        dead: Mask = counts == 0
        if not len(column):
            return dead
        starts = np.minimum(np.cumsum(counts) - counts, len(column) - 1)
        dead |= self.logs.of_each(column[starts]) > seqnums
        if self.tags.highest > seqnums.min():
            of_tag = np.repeat(np.arange(len(counts)), counts)
            others = np.ones(len(column), np.bool_)
            others[starts[counts > 0]] = False
            alive = others & (self.tags.of_each(column) <= seqnums[of_tag])
            dead |= (counts > 1) & (np.bincount(of_tag[alive], minlength=len(counts)) == 0)
        return dead
