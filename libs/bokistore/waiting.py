"""All that BokiStore needs beside the log: to wait until another caller of this process is done."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Literal


class _Pause:
    """Awaited: hands control to whoever drives the coroutine."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Event(asyncio.Event):
    """An event of the event loop; where there is none, a stepper drives the callers, and who waits
    pauses until it is set.
    """

    async def wait(self) -> Literal[True]:
        """Return when it is set."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            while not self.is_set():
                await _Pause()
            return True
        return await super().wait()
