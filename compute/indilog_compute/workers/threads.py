"""Where sync functions run in a worker: threads, a bounded number of them.

Python cannot stop a thread. One whose call is over (its time is, or its caller is gone) is counted
as left behind until it ends by itself; the compute node replaces a worker where one does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from indilog.base.errors import OverloadedError


class FunctionThreads:
    """Runs sync bodies.

    Args:
        threads_max: at once, those left behind included; a further one is refused.
        on_left: called with the number of threads left behind when it changes.

    Attributes:
        used: how many run.
        left: how many of them run on although their call is over.
    """

    def __init__(self, threads_max: int, on_left: Callable[[int], None]) -> None:
        self._threads_max = threads_max
        self._on_left = on_left
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="function")
        self.used = 0
        self.left = 0

    def check_room(self) -> None:
        """Refuse a call for which there is no thread.

        Raises:
            OverloadedError: all are used.
        """
        if self.used >= self._threads_max:
            raise OverloadedError(
                f"{self._threads_max:,} sync functions run in this worker already; try again later."
            )

    async def run(self, body: Callable[[], object]) -> object:
        """Run `body` in a thread and return its result; if cancelled, the thread goes on."""
        assert self.used < self._threads_max, "there was room"
        loop = asyncio.get_running_loop()
        running = self._threads.submit(body)
        self.used += 1
        over = loop.create_future()
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended, over))
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            if not over.done():
                self._change_left(1)
                over.add_done_callback(lambda _: self._change_left(-1))
            raise
        return running.result()

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.shutdown()

    def _ended(self, over: asyncio.Future[None]) -> None:
        self.used -= 1
        over.set_result(None)

    def _change_left(self, by: int) -> None:
        self.left += by
        self._on_left(self.left)
