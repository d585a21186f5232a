"""Lookups that wait until a row group of the snapshot is read.

The shell answers every read, so these lookups need no deadline here; the engine has a deadline for
each lookup. `IndexNode` owns the one `SpilledLookups`.
"""

from __future__ import annotations

from typing import NamedTuple

from indilog.base.ids import NodeId
from indilog.kernel.index_snapshot import ReadRows
from indilog.wire.messages import IndexLookup
from indilog_index.index_store import Search


class SpilledLookup(NamedTuple):
    """One lookup, the engine that sent it, and the state of its search."""

    origin: NodeId
    lookup: IndexLookup
    search: Search


class SpilledLookups:
    """At most `lookups_max` lookups; each row group is requested once for all of them."""

    __slots__ = ("_count", "_lookups_max", "_waiting")

    def __init__(self, lookups_max: int) -> None:
        self._lookups_max = lookups_max
        self._waiting: dict[ReadRows, list[SpilledLookup]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """Whether no further lookup may wait."""
        return self._count >= self._lookups_max

    def put(self, needed: ReadRows, waiting: SpilledLookup) -> bool:
        """Let a lookup wait for `needed`; return whether the caller must request the row group."""
        assert not self.full, "checked by the caller"
        self._count += 1
        others = self._waiting.get(needed)
        if others is None:
            self._waiting[needed] = [waiting]
            return True
        others.append(waiting)
        return False

    def clear(self) -> list[SpilledLookup]:
        """Remove and return all lookups."""
        lookups = [waiting for of_group in self._waiting.values() for waiting in of_group]
        self._waiting.clear()
        self._count = 0
        return lookups

    def take(self, read: ReadRows) -> list[SpilledLookup]:
        """Remove and return the lookups that waited for a row group."""
        waiting = self._waiting.pop(read, [])
        self._count -= len(waiting)
        assert self._count >= 0
        return waiting
