"""Records what callers of the log saw, as evidence for the checkers of `tests.simulation`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from indilog.base.errors import (
    ConditionFailedError,
    DataLossError,
    IndilogError,
    OutcomeUnknownError,
    TrimmedError,
)
from indilog.remote_client import RemoteClient
from tests.simulation.history import APPENDS, Operation

CALL_S_MAX: Final = 90.0


class Recorder:
    """All operations of a run.

    Attributes:
        operations: of the log, by invocation.
        counts: by kind and outcome, also of the libraries.
        acknowledged_at: seconds (`time.monotonic`) of each successful append and push.
        clock_ahead_s: how far the clocks of the cluster may have been ahead of this process's.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.counts: dict[tuple[str, str], int] = {}
        self.acknowledged_at: list[float] = []
        self.sessions = 0
        self.clock_ahead_s = 0.0

    def count(self, kind: str, outcome: str) -> None:
        """Count an operation."""
        self.counts[kind, outcome] = self.counts.get((kind, outcome), 0) + 1

    def session(self) -> int:
        """Return the number of a new session."""
        self.sessions += 1
        return self.sessions

    async def call(
        self,
        client: RemoteClient,
        operation: Operation,
        act: Callable[[], Awaitable[Any]],
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Make a call and record it; return its value, None if it failed."""
        self.operations.append(operation)
        operation.number = len(self.operations) - 1
        operation.position_before = operation.position_after = client.session.position
        operation.invoked, operation.invoked_s = time.monotonic_ns(), time.time()
        try:
            async with asyncio.timeout(CALL_S_MAX):
                operation.value = await act()
            operation.outcome = "ok"
        except (IndilogError, TimeoutError) as error:
            _note(operation, error)
        operation.position_after = client.session.position
        operation.returned_s = time.time() + self.clock_ahead_s
        if operation.outcome != "unknown":
            operation.returned = time.monotonic_ns()
        self.count(operation.kind, operation.outcome)
        if operation.outcome == "ok" and operation.kind in APPENDS:
            self.acknowledged_at.append(time.monotonic())
        return operation.value if operation.outcome == "ok" else None


def _note(operation: Operation, error: IndilogError | TimeoutError) -> None:
    operation.note = f"{type(error).__name__}: {error}"
    match error:
        case ConditionFailedError(last_seqnum=last):
            operation.outcome, operation.value = "failed", last
        case DataLossError():
            operation.outcome = "lost"
        case TrimmedError():
            operation.outcome = "trimmed"
        case OutcomeUnknownError() | TimeoutError():
            operation.outcome = "unknown"
        case _:
            operation.outcome = "failed"
