"""Runs a workflow's own coroutine, and makes its decisions durable before each wait.

`bokiflow.runs.execution.Execution` runs each workflow through `FlushBeforeAwait`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, Protocol


class Unflushed(Protocol):
    """The part of an execution that appends its decisions."""

    @property
    def has_unflushed(self) -> bool:
        """Whether a decision is not durable yet, and no task is appending it."""

    async def flush(self) -> None:
        """Append all decisions that are not durable. It raises the errors of `Execution.flush`."""

    def drive(self, *, on: bool) -> None:
        """Note that the workflow's own coroutine begins or stops running."""


class FlushBeforeAwait:
    """Runs a workflow's coroutine in a separate context. Before the coroutine waits, its decisions
    are made durable.
    """

    def __init__(
        self, execution: Unflushed, body: Coroutine[Any, Any, bytes], context: Context
    ) -> None:
        self._execution = execution
        self._body = body
        self._context = context

    def __await__(self) -> Generator[Any, Any, bytes]:
        execution = self._execution
        error: BaseException | None = None
        while True:
            try:
                awaited = self._step(error)
            except StopIteration as end:
                result: bytes = end.value
                return result
            error = None
            try:
                if execution.has_unflushed:
                    yield from execution.flush().__await__()
                yield awaited
            except BaseException as raised:  # noqa: BLE001 - the error is raised in the workflow
                error = raised

    def _step(self, error: BaseException | None) -> Any:  # noqa: ANN401 - any awaitable
        execution = self._execution
        execution.drive(on=True)
        try:
            if error is None:
                return self._context.run(self._body.send, None)
            return self._context.run(self._body.throw, error)
        finally:
            execution.drive(on=False)
