"""Reads that wait until this node has applied the position of their session (ARCHITECTURE 9).

`Reads` adds them, and takes those whose position is applied or that have expired.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Final

from indilog.base.ids import Instant, MetalogPosition
from indilog_compute.reads.operation import Operation, Stage

_HEAP_REST_MAX: Final = 1_000


class ParkedReads:
    """Keeps the reads that wait for a position, oldest first; `Reads` limits their number."""

    __slots__ = ("_by_position", "_numbers", "_parked", "_timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self._parked: dict[Operation, None] = {}
        self._by_position: list[tuple[MetalogPosition, int, Operation]] = []
        """A heap; it may contain reads that have expired."""
        self._numbers = itertools.count()
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self._parked)

    def add(self, operation: Operation) -> None:
        """Let a read wait until its position is applied."""
        assert operation not in self._parked, "a read waits once"
        operation.stage = Stage.POSITION
        self._parked[operation] = None
        entry = (operation.position, next(self._numbers), operation)
        heapq.heappush(self._by_position, entry)

    def take_reached(self, position: MetalogPosition) -> list[Operation]:
        """Remove and return the reads whose position is reached, smallest position first.

        The cost depends on the number of returned reads, and not on the number of reads that wait
        for later positions.
        """
        reached: list[Operation] = []
        while self._by_position and self._by_position[0][0] <= position:
            operation = heapq.heappop(self._by_position)[2]
            if operation in self._parked:
                reached.append(operation)
        return self._remove(reached)

    def take_expired(self, now: Instant) -> list[Operation]:
        """Remove and return the reads that have waited longer than the timeout, oldest first."""
        expired: list[Operation] = []
        for operation in self._parked:
            if now < operation.created + self._timeout_s:
                break
            expired.append(operation)
        self._remove(expired)
        if len(self._by_position) > 2 * len(self._parked) + _HEAP_REST_MAX:
            self._by_position = [e for e in self._by_position if e[2] in self._parked]
            heapq.heapify(self._by_position)
        return expired

    def clear(self) -> list[Operation]:
        """Remove and return all reads."""
        self._by_position.clear()
        return self._remove(list(self._parked))

    def deadline(self) -> Instant | None:
        """When the oldest read expires; None: no read waits."""
        oldest = next(iter(self._parked), None)
        return Instant(oldest.created + self._timeout_s) if oldest is not None else None

    def check_invariants(self) -> None:
        """Assert that the heap contains each waiting read."""
        assert self._parked.keys() <= {operation for _, _, operation in self._by_position}
        assert all(operation.stage is Stage.POSITION for operation in self._parked)

    def _remove(self, operations: list[Operation]) -> list[Operation]:
        for operation in operations:
            del self._parked[operation]
        return operations
