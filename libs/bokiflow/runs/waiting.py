"""What BokiFlow needs of the world beside the log: a clock, chance for names, pauses, threads.

Only here, so that tests put their own in the place of each; nothing of it decides anything.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_ValueT = TypeVar("_ValueT")

Mutex = asyncio.Lock
"""Needs an event loop only when somebody waits for it."""
Gate = asyncio.Event
"""Alike: whoever waits for it goes on once it is set."""


def seconds_now() -> float:
    """Return seconds since 1970 by the wall clock: what a workflow is told, and nothing else."""
    return time.time()


def steady_now() -> float:
    """Return seconds that nobody sets; they stand still while the machine sleeps."""
    return time.monotonic()


def passed_now() -> float:
    """Return seconds that nobody sets and that pass while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def new_name() -> str:
    """Return a name that nobody else has."""
    return secrets.token_hex(10)


async def pause(seconds: float) -> None:
    """Return after `seconds`."""
    await asyncio.sleep(seconds)


def start_task(asked: Coroutine[Any, Any, _ValueT]) -> asyncio.Task[_ValueT]:
    """Begin something that can be cancelled by itself."""
    return asyncio.create_task(asked)


async def wait_done(task: asyncio.Task[Any]) -> None:
    """Return when a task is over, however it ended."""
    await asyncio.wait([task])


async def run_in_thread(body: Callable[[], object]) -> object:
    """Run a sync body in a thread and return its result."""
    return await asyncio.to_thread(body)


async def wait_within(ended: asyncio.Future[_ValueT], seconds: float, late: str) -> _ValueT:
    """Return what a future gives, which goes on if it gives nothing in time.

    Raises:
        TimeoutError: it does not within `seconds`; it says `late`.
    """
    if seconds == math.inf:
        return await asyncio.shield(ended)
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            return await asyncio.shield(ended)
    except TimeoutError as error:
        raise TimeoutError(late) from error


def has_loop() -> bool:
    """Whether an event loop runs, so that tasks can be made."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
