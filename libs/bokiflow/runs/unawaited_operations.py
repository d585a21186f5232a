"""What a workflow asked for and did not await to its end (a task of its own, or a lost coroutine).

A workflow that returns meanwhile has failed: else its run would be done although a part of it is
not, and nobody would hear of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from bokiflow.runs import waiting
from bokiflow.runs.errors import UnfinishedOperationError

_ValueT = TypeVar("_ValueT")
_KEPT_MIN: Final = 64
_TURNS: Final = 16
"""Turns of the event loop within which one of the operations that are only replayed comes to its
end, or replays another one; a `gather` takes about five."""
GATHER: Final = "gather"
"""The kind of what is decided by its parts alone."""


class AskedOperation(NamedTuple):
    """An operation that was asked for: what decides it, and the coroutine that is awaited."""

    number: str
    name: str
    kind: str
    coroutine: Coroutine[Any, Any, Any]

    @property
    def is_left(self) -> bool:
        """Whether it has not come to its end, by a result, an error or a cancellation."""
        return inspect.getcoroutinestate(self.coroutine) != inspect.CORO_CLOSED

    @property
    def is_running(self) -> bool:
        """Whether it is the one whose code runs now."""
        return inspect.getcoroutinestate(self.coroutine) == inspect.CORO_RUNNING

    @property
    def is_begun(self) -> bool:
        """Whether anybody has awaited it."""
        return inspect.getcoroutinestate(self.coroutine) != inspect.CORO_CREATED

    def __str__(self) -> str:
        what = self.kind if self.name == self.kind else f"{self.kind} {self.name!r}"
        return f"{what} (operation {self.number})"


class AskedOperations:
    """The operations that one execution was asked for, but for most of those that have ended.

    Attributes:
        replayed: how many outcomes were replayed that an execution before had decided.
    """

    def __init__(self) -> None:
        self.replayed = 0
        self._operations: list[AskedOperation] = []
        self._kept_max = _KEPT_MIN
        self._carried_out = 0
        self._is_at_rest = waiting.Gate()
        self._is_at_rest.set()

    def add(
        self, number: str, name: str, kind: str, coroutine: Coroutine[Any, Any, _ValueT]
    ) -> Coroutine[Any, Any, _ValueT]:
        """Return the coroutine of an operation, which the workflow should await.

        Args:
            number: of what decides it.
            name: of that.
            kind: of that.
            coroutine: what is awaited.
        """
        self._operations.append(AskedOperation(number, name, kind, coroutine))
        if len(self._operations) > self._kept_max:
            self._operations = self.left()
            self._kept_max = max(_KEPT_MIN, 2 * len(self._operations))
        return coroutine

    def left(self) -> list[AskedOperation]:
        """Return those that have not come to their ends."""
        return [operation for operation in self._operations if operation.is_left]

    @contextmanager
    def performing(self) -> Iterator[None]:
        """What is decided is made so meanwhile: its operation comes to its end then."""
        self._carried_out += 1
        self._is_at_rest.clear()
        try:
            yield
        finally:
            self._carried_out -= 1
            if not self._carried_out:
                self._is_at_rest.set()

    async def run_until_idle(self) -> None:
        """Let tasks of the workflow go on up to what they wait for, so that they have begun, what
        is decided is finished, and what was cancelled has ended.

        It ends: what was decided before is replayed once, and fewer are left each time.
        """
        is_on = waiting.has_loop()
        while is_on and (left := len(self.left())):
            replayed = self.replayed
            for _ in range(_TURNS):
                await waiting.pause(0)
            await self._is_at_rest.wait()
            is_on = self.replayed > replayed or len(self.left()) < left

    async def catch_up(self, decided: Collection[str]) -> None:
        """Before the workflow goes on behind an operation that is replayed: let its tasks come as
        far as they were when that was decided, as far as that is known.

        Else a replay, which waits for nothing, would find undone, cancel or leave out what was
        finished in the execution before.
        """
        for operation in self._operations:
            is_due = operation.number in decided or operation.kind == GATHER
            if is_due and operation.is_left and not operation.is_running:
                await self.run_until_idle()
                return

    def check(self, decided: Collection[str]) -> None:
        """Look whether all have come to their ends, or are decided, now that the workflow returns.

        Raises:
            UnfinishedOperationError: one is not.
        """
        left = [operation for operation in self.left() if operation.number not in decided]
        if not left:
            return
        for operation in left:
            if not operation.is_begun:
                operation.coroutine.close()  # else Python says again that nobody awaited it
        others = f" (and {len(left) - 1:,} more)" if len(left) > 1 else ""
        raise UnfinishedOperationError(
            f"The workflow returned before {left[0]} was finished{others}; await each operation, "
            "several at once with wf.gather."
        )
