"""Clocks, random names, pauses and threads: BokiFlow's dependencies besides the log.

Other modules use these functions, so that tests can replace them. Correctness does not depend on
clocks, names or pauses.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

_ValueT = TypeVar("_ValueT")

Mutex = asyncio.Lock
"""A mutex that needs an event loop only while a task waits for it."""
Gate = asyncio.Event
"""A flag whose waiting tasks continue when it is set. It needs an event loop only while a task
waits.
"""
Task = asyncio.Task
"""A coroutine that runs by itself on an event loop."""
CancelledError = asyncio.CancelledError
Timer = asyncio.TimerHandle
"""A call in the future, which can be cancelled."""


def seconds_now() -> float:
    """Return seconds since 1970 by the wall clock; only for `Workflow.now`."""
    return time.time()


def monotonic_now() -> float:
    """Return seconds of a clock that cannot be set and stops while the machine sleeps."""
    return time.monotonic()


def passed_now() -> float:
    """Return seconds of a clock that cannot be set and counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def new_name() -> str:
    """Return a unique name."""
    return secrets.token_hex(10)


async def pause(seconds: float) -> None:
    """Return after `seconds`."""
    await asyncio.sleep(seconds)


async def tick(seconds: float) -> None:
    """Return after `seconds`, for periodic background work."""
    await asyncio.sleep(seconds)


def call_later(seconds: float, call: Callable[[], object]) -> Timer | None:
    """Call `call` after `seconds`. Without an event loop, return None and never call it."""
    return asyncio.get_running_loop().call_later(seconds, call) if has_loop() else None


def start_task(asked: Coroutine[Any, Any, _ValueT]) -> asyncio.Task[_ValueT]:
    """Start a task that can be cancelled on its own."""
    return asyncio.create_task(asked)


async def wait_done(task: asyncio.Task[Any]) -> None:
    """Return when a task has ended, also by an error or a cancellation."""
    await asyncio.wait([task])


class _Threads:
    """Counts the threads whose results are no longer needed. A thread cannot be ended."""

    left = 0


def threads_left() -> int:
    """Return how many threads of this process run a sync body whose step has ended."""
    return _Threads.left


async def run_in_thread(body: Callable[[], object]) -> object:
    """Run a sync body in a thread and return its result. If the caller is cancelled, the thread
    continues, and is counted (`threads_left`).
    """
    loop = asyncio.get_running_loop()
    has_begun, has_ended, is_left = False, False, False

    def end() -> None:
        nonlocal has_ended
        has_ended = True
        _Threads.left -= is_left

    def run() -> object:
        nonlocal has_begun
        has_begun = True
        try:
            return body()
        finally:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(end)

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        is_left = has_begun and not has_ended
        _Threads.left += is_left
        raise


class _Ended(BaseException):
    """Raised in a thread whose result is no longer needed."""


class _EndableCall(Generic[_ValueT]):
    """A call in a thread that can be ended from outside."""

    def __init__(self, body: Callable[[], _ValueT]) -> None:
        self._body = body
        self._context = copy_context()
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread while the body runs in it."""

    def __call__(self) -> _ValueT | None:
        try:
            try:
                with self._lock:
                    self._thread = threading.get_ident()
                return self._context.run(self._body)
            finally:
                with self._lock:
                    self._thread = None
                _be_interrupted()
        except _Ended:
            return None

    def end(self) -> None:
        """Raise an error in the body, at its next line of Python."""
        with self._lock:
            if self._thread is not None:
                thread, error = ctypes.c_ulong(self._thread), ctypes.py_object(_Ended)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)


def _be_interrupted() -> None:
    """Do nothing. If an error is pending in this thread, Python raises it at this call."""


class EndableThreads:
    """Runs sync code without effects, in a few threads of its own.

    Args:
        threads_max: largest number of threads; further calls wait.
        name: beginning of the threads' names.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix=name)

    async def run(self, body: Callable[[], _ValueT]) -> _ValueT:
        """Return the result of `body`. If the caller is cancelled, an error ends the body. A body
        that waits outside of Python, or catches all errors, occupies its thread until it ends.
        """
        call = _EndableCall(body)
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            result: Any = await running
        except asyncio.CancelledError:
            call.end()
            raise
        value: _ValueT = result
        return value


async def wait_within(ended: asyncio.Future[_ValueT], seconds: float, late: str) -> _ValueT:
    """Return the result of a future. The future continues after a timeout.

    Raises:
        TimeoutError: no result within `seconds`; the message is `late`.
    """
    if seconds == math.inf:
        return await asyncio.shield(ended)
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            return await asyncio.shield(ended)
    except TimeoutError as error:
        raise TimeoutError(late) from error


async def run_within(asked: Coroutine[Any, Any, _ValueT], seconds: float, late: str) -> _ValueT:
    """Return the result of `asked`, which is cancelled after `seconds`.

    Raises:
        TimeoutError: `asked` took longer; the message is `late`.
    """
    ending = asyncio.timeout(seconds)
    try:
        async with ending:
            return await asked
    except TimeoutError as error:
        if not ending.expired():
            raise
        raise TimeoutError(late) from error


def current_task() -> Task[Any] | None:
    """Return the running task; None without an event loop."""
    return asyncio.current_task() if has_loop() else None


def has_loop() -> bool:
    """Tell whether an event loop is running, so that tasks can be started."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
