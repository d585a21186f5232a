"""For libraries on the log whose callers in one process wait for one another, in an event loop or
under a stepper.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - waiting is what it is for
from collections.abc import Generator
from typing import Literal


class _Until:
    """Awaited: hands the event to whoever drives the coroutine, which goes on when it is set."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __await__(self) -> Generator[Event, None, None]:
        yield self._event


class Event(asyncio.Event):
    """An event of the event loop; where there is none, a stepper drives the callers, and lets those
    who wait go on when it is set.
    """

    async def wait(self) -> Literal[True]:
        """Return when it is set."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            while not self.is_set():
                await _Until(self)
            return True
        return await super().wait()
