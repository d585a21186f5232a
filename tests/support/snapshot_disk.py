"""A disk for index snapshots that is a dictionary, for tests of roles: with row groups of any size,
and damage.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import assert_never

import numpy as np

from indilog.kernel.index_snapshot import (
    IndexSnapshot,
    OpenSnapshot,
    ReadRows,
    RowGroups,
    Rows,
    RowsRead,
    SnapshotAnswer,
    SnapshotOpened,
    SnapshotRequest,
    SnapshotWritten,
    WriteSnapshot,
    dead_in,
    merged,
    regrouped,
    untrimmed,
)
from indilog.kernel.tag_filter import TagFilter


class SnapshotDisk:
    """Keeps all written snapshots, as lists of row groups."""

    def __init__(self, group_rows: int = 2) -> None:
        self._group_rows = group_rows
        self._kept: dict[int, tuple[IndexSnapshot, list[Rows]]] = {}
        self._full = False

    def answer(self, request: SnapshotRequest) -> SnapshotAnswer:
        match request:
            case OpenSnapshot(below):
                newest = max((p for p in self._kept if p < below), default=None)
                return SnapshotOpened(self._kept[newest][0] if newest is not None else None)
            case WriteSnapshot(info, base):
                lost = base is not None and base not in self._kept
                written = None if self._full or lost else self.write(request)
                return SnapshotWritten(info.position, written, base_lost=lost)
            case ReadRows(position, group):
                return RowsRead(position, group, self.rows(position, group))
            case unreachable:
                assert_never(unreachable)

    def write(self, request: WriteSnapshot) -> IndexSnapshot:
        before: Iterable[Rows] = []
        if request.base is not None:
            kept, before = self._kept[request.base]
            if (floors := request.floors) is not None:
                before = untrimmed(before, floors, dead_in(kept.groups, floors, before.__getitem__))
        groups = list(regrouped(merged(before, request.recent()), self._group_rows))
        bounds = (
            [int(g.tags[0]) for g in groups],
            [int(g.tags[-1]) for g in groups],
            [int(g.seqnums.min()) for g in groups],
            [int(g.seqnums.max()) for g in groups],
        )
        directory = RowGroups(*(np.array(values, np.uint64) for values in bounds))
        columns = [g.tags for g in groups]
        tags = TagFilter.of(np.concatenate([*columns, np.empty(0, np.uint64)]))
        snapshot = IndexSnapshot(request.info, directory, sum(map(len, columns)), tags)
        self._kept[request.info.position] = snapshot, groups
        return snapshot

    def rows(self, position: int, group: int) -> Rows | None:
        kept = self._kept.get(position)
        return kept[1][group] if kept is not None else None

    def groups(self, position: int) -> list[Rows]:
        """Return the row groups of a snapshot."""
        return self._kept[position][1]

    def heal(self) -> None:
        """Provide space for snapshots from now on."""
        self._full = False

    def damage(self, chance: Random) -> None:
        """Lose a snapshot, refuse the next ones for lack of space, or restore it."""
        if self._kept and chance.random() < 0.5:
            del self._kept[chance.choice(list(self._kept))]
        self._full = chance.random() < 0.3
