"""An event loop whose time jumps to the next timer: for tests of events over many seconds, and of
their frequency, on logs in memory. It waits for no socket and no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

from bokiflow.runs import waiting

_ValueT = TypeVar("_ValueT")


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time does not advance while a task runs."""

    def __init__(self) -> None:
        super().__init__()
        self._leapt_s = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        selector.select = self._leap

    def _leap(self, timeout_s: float | None) -> list[object]:
        assert timeout_s is not None, "all tasks wait, and no timer is set"
        self._leapt_s += max(0.0, timeout_s)
        return []

    def time(self) -> float:
        """Return the seconds since the loop was created."""
        return self._leapt_s


def run(main: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Return the result of `main`; BokiFlow uses the clocks of the loop meanwhile."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        now = runner.get_loop().time
        with mock.patch.multiple(waiting, monotonic_now=now, seconds_now=now, passed_now=now):
            return runner.run(main)
