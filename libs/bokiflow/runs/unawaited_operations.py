"""Finds operations that a workflow began but did not await to their end.

Such an operation runs in another task, or its coroutine was dropped. A workflow that returns before
such an operation ends has failed. Otherwise the run would silently omit a part of its work. Each
`Execution` registers the operations of its workflow in an `AskedOperations`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from bokiflow.runs import waiting
from bokiflow.runs.errors import UnfinishedOperationError

_ValueT = TypeVar("_ValueT")
_KEPT_MIN: Final = 64
_ITERATIONS: Final = 16
"""Largest number of iterations of the event loop until a replayed operation ends, or another one is
replayed. A `gather` takes about five.
"""
GATHER: Final = "gather"
"""The kind of an operation that has no decided outcome of its own; only its parts have outcomes."""


def close_unbegun(coroutines: Sequence[Coroutine[Any, Any, object]]) -> bool:
    """Close the coroutines that have not begun; return whether there were any."""
    unbegun = [c for c in coroutines if inspect.getcoroutinestate(c) == inspect.CORO_CREATED]
    for coroutine in unbegun:
        coroutine.close()
    return bool(unbegun)


class AskedOperation(NamedTuple):
    """A requested operation: its number, name and kind, the coroutine to await, and the coroutines
    of its parts.
    """

    number: str
    name: str
    kind: str
    coroutine: Coroutine[Any, Any, Any]
    parts: Sequence[Coroutine[Any, Any, Any]] = ()

    @property
    def is_left(self) -> bool:
        """Whether the operation has not ended (by a result, an error or a cancellation)."""
        return inspect.getcoroutinestate(self.coroutine) != inspect.CORO_CLOSED

    @property
    def is_running(self) -> bool:
        """Whether the operation's code is running now."""
        return inspect.getcoroutinestate(self.coroutine) == inspect.CORO_RUNNING

    @property
    def is_begun(self) -> bool:
        """Whether the operation was awaited."""
        return inspect.getcoroutinestate(self.coroutine) != inspect.CORO_CREATED

    def __str__(self) -> str:
        return what_is_done(self)


class NamedOperation(Protocol):
    """An operation with its place and its name."""

    @property
    def number(self) -> str:
        """The number of the operation."""

    @property
    def name(self) -> str:
        """The name of the operation."""

    @property
    def kind(self) -> str:
        """The kind of the operation."""


def what_is_done(operation: NamedOperation) -> str:
    """Return a text for people with the kind of an operation and its number."""
    kind, name = operation.kind, operation.name
    what = kind if name == kind else f"{kind} {name!r}"
    return f"{what} (operation {operation.number})"


class AskedOperations:
    """The operations requested in one execution. Ended operations are removed from time to time.

    Attributes:
        replayed: number of outcomes of earlier executions that were replayed.
        total: number of operations requested so far.
    """

    def __init__(self) -> None:
        self.replayed = 0
        self.total = 0
        self._operations: list[AskedOperation] = []
        self._kept_max = _KEPT_MIN
        self._carried_out = 0
        self._is_at_rest = waiting.Gate()
        self._is_at_rest.set()

    def add(
        self,
        number: str,
        name: str,
        kind: str,
        coroutine: Coroutine[Any, Any, _ValueT],
        parts: Sequence[Coroutine[Any, Any, Any]] = (),
    ) -> Coroutine[Any, Any, _ValueT]:
        """Return the coroutine of an operation, which the workflow should await.

        Args:
            number: number of the operation.
            name: name of the operation.
            kind: kind of the operation.
            coroutine: the operation's coroutine.
            parts: the coroutines that the operation runs. If the operation ends before it begins,
                its parts never begin.
        """
        self.total += 1
        self._operations.append(AskedOperation(number, name, kind, coroutine, parts))
        if len(self._operations) > self._kept_max:
            self._operations = self.left()
            self._kept_max = max(_KEPT_MIN, 2 * len(self._operations))
        return coroutine

    def left(self) -> list[AskedOperation]:
        """Return the operations that have not ended."""
        self.close_unbegun()
        return [operation for operation in self._operations if operation.is_left]

    def close_unbegun(self) -> None:
        """End the parts of operations that ended before they began, such as a gather in a task that
        was cancelled.
        """
        for operation in reversed(self._operations):  # inner ones were requested before outer ones
            if operation.parts and not operation.is_left:
                close_unbegun(operation.parts)

    @contextmanager
    def performing(self) -> Iterator[None]:
        """Enter a block that carries out a decided operation, such as the start of a child.
        `run_until_idle` waits for the block's end.
        """
        self._carried_out += 1
        self._is_at_rest.clear()
        try:
            yield
        finally:
            self._carried_out -= 1
            assert self._carried_out >= 0, "each block ends once"
            if not self._carried_out:
                self._is_at_rest.set()

    async def run_until_idle(self) -> None:
        """Run the workflow's tasks until all of them wait. Then all have begun, decided operations
        have finished, and cancelled operations have ended.

        This call ends: each decision is replayed once, and each iteration leaves fewer operations.
        """
        is_on = waiting.has_loop()
        while is_on and (left := len(self.left())):
            replayed = self.replayed
            for _ in range(_ITERATIONS):
                await waiting.pause(0)
            await self._is_at_rest.wait()
            is_on = self.replayed > replayed or len(self.left()) < left

    async def catch_up(self, decided: Collection[str]) -> None:
        """Advance the workflow's tasks after a replayed operation, before the workflow continues.
        As far as the log shows, the tasks then are where they were when that operation was decided.

        A replay does not wait. Without this call, the workflow would find operations unfinished
        that had finished in the earlier execution. It might then cancel or omit them.
        """
        for operation in self._operations:
            is_due = operation.number in decided or operation.kind == GATHER
            if is_due and operation.is_left and not operation.is_running:
                await self.run_until_idle()
                return

    def check(self, decided: Collection[str]) -> None:
        """Check, when the workflow returns, that all its operations have ended or are decided.

        Raises:
            UnfinishedOperationError: an operation has neither ended nor been decided.
        """
        left = [operation for operation in self.left() if operation.number not in decided]
        if not left:
            return
        for operation in left:
            if not operation.is_begun:
                operation.coroutine.close()  # else Python warns again that it was never awaited
        others = f" (and {len(left) - 1:,} more)" if len(left) > 1 else ""
        raise UnfinishedOperationError(
            f"The workflow returned before {left[0]} was finished{others}; await each operation, "
            "several at once with wf.gather."
        )
