"""Runs sync functions in a bounded number of threads of a worker.

Python cannot stop a thread. If a call timed out or was cancelled, its thread counts as *left* until
it returns. If the thread does not return, the compute node replaces the worker. `WorkerRunner`
calls `FunctionThreads`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from indilog.base.errors import OverloadedError


class FunctionThreads:
    """Runs sync bodies.

    Args:
        threads_max: largest number of running threads, including threads that are left; a further
            call is refused.
        on_left: called with the number of threads that are left when this number changes.
        on_thread: called before each new thread begins.

    Attributes:
        used: number of running threads.
        left: number of running threads whose calls have ended.
    """

    def __init__(
        self,
        threads_max: int,
        on_left: Callable[[int], None],
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._threads_max = threads_max
        self._on_left = on_left
        self._on_thread = on_thread
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="function")
        self._most = 0
        """The largest number of threads that ran at once; no more were begun."""
        self.used = 0
        self.left = 0

    def check_room(self) -> None:
        """Check that a thread is free.

        Raises:
            OverloadedError: all threads are in use.
        """
        if self.used >= self._threads_max:
            raise OverloadedError(
                f"{self._threads_max:,} sync functions run in this worker already; try again later."
            )

    async def run(self, body: Callable[[], object]) -> object:
        """Run `body` in a thread and return its result. If the caller is cancelled, the thread
        continues.
        """
        assert self.used < self._threads_max, "`check_room` was called first"
        loop = asyncio.get_running_loop()
        self.used += 1
        if self.used > self._most:
            self._most = self.used
            self._on_thread()
        running = self._threads.submit(body)
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

    def close(self, *, waits: bool = True) -> None:
        """Run no further body. If `waits`, wait until all threads have ended."""
        self._threads.shutdown(wait=waits)

    def _ended(self, over: asyncio.Future[None]) -> None:
        self.used -= 1
        assert self.used >= 0, "a thread ends once"
        over.set_result(None)

    def _change_left(self, by: int) -> None:
        self.left += by
        assert self.left >= 0, "a thread that was left behind returns once"
        self._on_left(self.left)
