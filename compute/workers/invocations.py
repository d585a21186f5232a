"""Results of asynchronous invocations, kept for asking: bounded, in memory, the oldest finished one
forgotten first.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable

from indilog.calls import Failed, Returned


class State(enum.StrEnum):
    """How far an asynchronous invocation is."""

    SCHEDULED = "scheduled"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Invocation:
    """One asynchronous invocation.

    Attributes:
        outcome: valid from `DONE` or `FAILED` on.
    """

    __slots__ = ("function", "id", "outcome", "state", "waiting")

    def __init__(self, id: str, function: str) -> None:  # noqa: A002 - it is called so
        self.id = id
        self.function = function
        self.state = State.SCHEDULED
        self.outcome: Returned | Failed | None = None
        self.waiting: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self.outcome is not None


class Invocations:
    """Those that wait or run, and the last `results_kept_max` that ended."""

    def __init__(self, results_kept_max: int) -> None:
        self._results_kept_max = results_kept_max
        self._open: dict[str, Invocation] = {}
        self._over: OrderedDict[str, Invocation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._over)

    @property
    def open(self) -> int:
        """How many wait or run."""
        return len(self._open)

    def add(self, invocation: Invocation) -> None:
        """Keep a new one."""
        assert invocation.id not in self._open, "invocation ids are unique"
        self._open[invocation.id] = invocation

    def get(self, id: str) -> Invocation | None:  # noqa: A002 - it is called so
        """Return the invocation, or None: there was none, or its result was forgotten."""
        if (invocation := self._open.get(id)) is not None:
            return invocation
        if (invocation := self._over.get(id)) is not None:
            self._over.move_to_end(id)
        return invocation

    def ended(self, invocation: Invocation, outcome: Returned | Failed) -> None:
        """Keep the outcome, tell those who wait for it, forget the least recently asked for."""
        invocation.outcome = outcome
        invocation.state = State.DONE if isinstance(outcome, Returned) else State.FAILED
        del self._open[invocation.id]
        self._over[invocation.id] = invocation
        while len(self._over) > self._results_kept_max:
            self._over.popitem(last=False)
        waiting, invocation.waiting = invocation.waiting, []
        for told in waiting:
            told()
