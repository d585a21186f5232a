"""Runs work of a library on the event loop, so that a cancelled caller does not end it.

Without an event loop there are no tasks: a stepper runs the callers (`indilog.testing.stepper`).
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - the work is a task
from collections.abc import Coroutine
from typing import Any, Final

_RUNNING: Final[set[asyncio.Task[None]]] = set()
"""Tasks that no caller waits for; the event loop itself keeps weak references only."""


def run_in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` on the event loop; without one, do nothing and return None."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        work.close()
        return None
    task = loop.create_task(work)
    _RUNNING.add(task)
    task.add_done_callback(_RUNNING.discard)
    return task


async def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`. If the caller is cancelled, the work continues on the event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        await work
        return
    task = run_in_background(work)
    assert task is not None, "there is an event loop"
    await asyncio.shield(task)
