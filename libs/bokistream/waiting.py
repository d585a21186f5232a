"""Clocks, pauses and tasks of streams. Writers and readers use the event loop only by this module,
so that the stepper of tests can run them without one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

_T = TypeVar("_T")

Background: TypeAlias = asyncio.Task[None]
"""Work that runs on the event loop."""

_YIELDS: Final = 3
"""Iterations of the event loop between two batches: one wakes callers, the others run them."""
_RUNNING: Final[set[asyncio.Task[None]]] = set()
"""Tasks that no caller waits for; the event loop itself keeps weak references only."""


def seconds_now() -> float:
    """Return seconds of a clock that cannot be set and counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def has_loop() -> bool:
    """Return whether an event loop is running; the stepper of tests runs coroutines without one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def pause(seconds: float) -> None:
    """Return after `seconds`; without an event loop, at once."""
    if has_loop():
        await asyncio.sleep(seconds)


async def yield_to_callers() -> None:
    """Let callers run whose records were just appended, so that their next records share a batch.

    Otherwise the first of them would get a batch of its own, and all others would wait for it.
    """
    if has_loop():
        for _ in range(_YIELDS):
            await asyncio.sleep(0)


def run_in_background(work: Coroutine[Any, Any, None]) -> Background | None:
    """Run `work` on the event loop; without one, do nothing and return None."""
    if not has_loop():
        work.close()
        return None
    task = asyncio.get_running_loop().create_task(work)
    _RUNNING.add(task)
    task.add_done_callback(_RUNNING.discard)
    return task


async def begin(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` on the event loop, even if the caller is cancelled; without one, await it."""
    if has_loop():
        run_in_background(work)
    else:
        await work


async def stop(task: Background | None) -> None:
    """Cancel a task, and return when it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


class Ahead:
    """Begins a piece of work at once; its result is awaited later. Without an event loop, the work
    begins when the result is awaited.
    """

    def __init__(self, work: Coroutine[Any, Any, _T]) -> None:
        self._work: Coroutine[Any, Any, Any] = work
        self._task = asyncio.ensure_future(work) if has_loop() else None

    def result(self) -> Awaitable[Any]:
        """Return an awaitable of the result."""
        return self._work if self._task is None else self._task

    async def cancel(self) -> None:
        """Cancel the work, if it is not over."""
        if self._task is None:
            self._work.close()
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # marks the exception as retrieved
