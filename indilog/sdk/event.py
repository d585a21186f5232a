"""An event for callers of a library that wait for each other within one process.

It works on an event loop, and without one under a stepper (`indilog.testing.stepper`).
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - waiting is what it is for
from collections.abc import Generator
from typing import Literal


class _Until:
    """Awaited: yields the event to the stepper, which resumes the coroutine once it is set."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __await__(self) -> Generator[Event, None, None]:
        yield self._event


class Event(asyncio.Event):
    """An event of the event loop. Without a loop, a stepper drives the callers and resumes the
    waiting ones once it is set.
    """

    async def wait(self) -> Literal[True]:
        """Return once it is set."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            while not self.is_set():
                await _Until(self)
            return True
        return await super().wait()
