"""An event loop whose time jumps to the next timer: for tests of events over many seconds, of
their frequency and of leases, on logs in memory. A busy machine changes nothing. It waits for no
socket; its time stands while a thread of its executor runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar
from unittest import mock

from bokiflow.runs import waiting

_ValueT = TypeVar("_ValueT")
_THREAD_S_MAX = 60.0
"""How long (s, real) the loop waits for a thread."""


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time does not advance while a task or a thread runs."""

    def __init__(self) -> None:
        super().__init__()
        self._leapt_s = 0.0
        self._threads = 0
        selector: Any = self._selector  # type: ignore[attr-defined]
        self._select = selector.select
        selector.select = self._leap

    def _leap(self, timeout_s: float | None) -> list[object]:
        if timeout_s is None or (self._threads and timeout_s):
            events: list[object] = self._select(_THREAD_S_MAX)
            assert events, "all tasks wait, and no timer is set or a thread does not end"
            return events
        self._leapt_s += max(0.0, timeout_s)
        return []

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., _ValueT], *args: object
    ) -> asyncio.Future[_ValueT]:
        """Run `func` in a thread."""
        ended = super().run_in_executor(executor, func, *args)
        self._threads += 1
        ended.add_done_callback(self._on_thread_end)
        return ended

    def _on_thread_end(self, _: object) -> None:
        self._threads -= 1

    def time(self) -> float:
        """Return the seconds since the loop was created."""
        return self._leapt_s


def run(main: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Return the result of `main`; BokiFlow uses the clocks of the loop meanwhile."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        now = runner.get_loop().time
        with mock.patch.multiple(waiting, monotonic_now=now, seconds_now=now, passed_now=now):
            return runner.run(main)
