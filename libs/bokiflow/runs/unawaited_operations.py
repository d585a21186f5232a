"""Operations that a workflow requested but did not await to their end.

They run in another task, or their coroutine was dropped. A workflow that returns before them has
failed. Otherwise its run would silently end without a part of its work.
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
_ITERATIONS: Final = 16
"""Within so many iterations of the event loop, one of the replayed operations ends or another one
is replayed; a `gather` takes about five.
"""
GATHER: Final = "gather"
"""The kind of an operation that is decided only by its parts."""


class AskedOperation(NamedTuple):
    """A requested operation: its number, name and kind, and the coroutine to await."""

    number: str
    name: str
    kind: str
    coroutine: Coroutine[Any, Any, Any]

    @property
    def is_left(self) -> bool:
        """Whether it has not ended, by a result, an error or a cancellation."""
        return inspect.getcoroutinestate(self.coroutine) != inspect.CORO_CLOSED

    @property
    def is_running(self) -> bool:
        """Whether its code is running now."""
        return inspect.getcoroutinestate(self.coroutine) == inspect.CORO_RUNNING

    @property
    def is_begun(self) -> bool:
        """Whether it was awaited."""
        return inspect.getcoroutinestate(self.coroutine) != inspect.CORO_CREATED

    def __str__(self) -> str:
        what = self.kind if self.name == self.kind else f"{self.kind} {self.name!r}"
        return f"{what} (operation {self.number})"


class AskedOperations:
    """The operations requested in one execution, except most of those that have ended.

    Attributes:
        replayed: outcomes of earlier executions that were replayed, a count.
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
            number: of the deciding operation.
            name: of the deciding operation.
            kind: of the deciding operation.
            coroutine: to await.
        """
        self._operations.append(AskedOperation(number, name, kind, coroutine))
        if len(self._operations) > self._kept_max:
            self._operations = self.left()
            self._kept_max = max(_KEPT_MIN, 2 * len(self._operations))
        return coroutine

    def left(self) -> list[AskedOperation]:
        """Return the operations that have not ended."""
        return [operation for operation in self._operations if operation.is_left]

    @contextmanager
    def performing(self) -> Iterator[None]:
        """A block that carries out a decision; its operation ends afterwards."""
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
        """Run the workflow's tasks until all of them wait: they have begun, decided operations have
        finished, and cancelled ones have ended.

        It terminates: each decision is replayed once, and each round leaves fewer operations.
        """
        is_on = waiting.has_loop()
        while is_on and (left := len(self.left())):
            replayed = self.replayed
            for _ in range(_ITERATIONS):
                await waiting.pause(0)
            await self._is_at_rest.wait()
            is_on = self.replayed > replayed or len(self.left()) < left

    async def catch_up(self, decided: Collection[str]) -> None:
        """Before the workflow continues after a replayed operation, advance its tasks to where they
        were when that operation was decided, as far as the log shows that.

        A replay does not wait. Without this it would find operations unfinished, cancel them or
        leave them out, although they were finished in the earlier execution.
        """
        for operation in self._operations:
            is_due = operation.number in decided or operation.kind == GATHER
            if is_due and operation.is_left and not operation.is_running:
                await self.run_until_idle()
                return

    def check(self, decided: Collection[str]) -> None:
        """Check that all operations have ended or are decided, now that the workflow returns.

        Raises:
            UnfinishedOperationError: one has not and is not.
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
