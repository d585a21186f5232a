"""Reads that wait until this node has applied the position of their session (ARCHITECTURE 9)."""

from __future__ import annotations

from compute.operation import Operation, Stage
from indilog.ids import Instant, MetalogPosition


class ParkedReads:
    """The reads that wait for a position, oldest first; `Reads` bounds how many there are."""

    __slots__ = ("_parked", "_timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self._parked: dict[Operation, None] = {}
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self._parked)

    def add(self, operation: Operation) -> None:
        """Let a read wait until its position is applied."""
        operation.stage = Stage.POSITION
        self._parked[operation] = None

    def reached(self, position: MetalogPosition) -> list[Operation]:
        """Take out the reads that need no more than `position`."""
        return self._taken([o for o in self._parked if o.position <= position])

    def expired(self, now: Instant) -> list[Operation]:
        """Take out the oldest reads that have taken too long."""
        expired: list[Operation] = []
        for operation in self._parked:
            if now < operation.created + self._timeout_s:
                break
            expired.append(operation)
        return self._taken(expired)

    def clear(self) -> list[Operation]:
        """Take out all reads."""
        return self._taken(list(self._parked))

    def deadline(self) -> Instant | None:
        """When the oldest one takes too long."""
        oldest = next(iter(self._parked), None)
        return Instant(oldest.created + self._timeout_s) if oldest is not None else None

    def _taken(self, operations: list[Operation]) -> list[Operation]:
        for operation in operations:
            del self._parked[operation]
        return operations
