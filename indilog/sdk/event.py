"""An event for callers of a library that wait for each other within one process.

It works on an event loop, or without one under a stepper (`indilog.testing.stepper`). `Replica` and
libraries use `Event`.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - the event waits on the event loop
from collections.abc import Generator
from typing import Literal


class _Until:
    """An awaitable that yields the event to the stepper, which resumes the coroutine when the event
    is set.
    """

    def __init__(self, event: Event) -> None:
        self._event = event

    def __await__(self) -> Generator[Event, None, None]:
        yield self._event


class Event(asyncio.Event):
    """An event of the event loop. Without a loop, a stepper runs the callers. When the event is
    set, the stepper resumes the callers that wait for it.
    """

    async def wait(self) -> Literal[True]:
        """Return when the event is set."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            while not self.is_set():
                await _Until(self)
            return True
        return await super().wait()

    async def wait_within(self, seconds: float) -> bool:
        """Tell whether the event is set within `seconds`. Without a loop, wait without a limit."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return await self.wait()
        try:
            async with asyncio.timeout(seconds):
                return await self.wait()
        except TimeoutError:
            return self.is_set()
