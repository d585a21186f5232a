"""Threads of a simulated process. They are real threads, but only one runs at a time, while the
scheduler waits.

A thread yields (`sleep`) where the real one would wait for the disk. So the event loop of its
process runs between the begin and the end of a sync, as on a real machine. A seed replays the run.
`ProcessLoop.run_in_executor` creates the threads, and the simulated disk lets them sleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """Raised to end the process: only `finally` blocks still run."""


class SimulatedThread:
    """A function that runs concurrently with the event loop of its process.

    Attributes:
        done: whether it has returned or raised.
        result: the function's result.
        error: the exception that it raised.
        naps: how often it has slept.
        advance: resumes the thread at once, and schedules its wake-up if it sleeps again; set by
            the loop.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._turn = _held_lock()
        self._rest = _held_lock()
        self._killed = False
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.naps = 0
        self.advance: Callable[[], None] = self.run
        (_idle.pop() if _idle else _Carrier()).carry(self)

    def run(self) -> None:
        """Run the thread until it sleeps or is done."""
        self._turn.release()
        self._rest.acquire()

    def sleep(self) -> None:
        """Called by the function: yield to the world until `run`."""
        self.naps += 1
        self._rest.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """Raise `Killed` where the thread sleeps."""
        self._killed = True
        while not self.done:
            self.run()

    def main(self) -> None:
        """Run to the end; called in the real thread that carries it."""
        _here.thread = self
        self._turn.acquire()
        try:
            if not self._killed:
                self.result = self._function()
        except BaseException as error:  # noqa: BLE001 as an executor does
            self.error = error
        self.done = True

    def leave(self) -> None:
        """Continue without the real thread, which may now run another simulated thread."""
        self._rest.release()


class _Carrier:
    """A real thread that runs simulated threads one after the other.

    Starting a real thread for each simulated one would take longer than most of them run.
    """

    def __init__(self) -> None:
        self._given = _held_lock()
        self._thread: SimulatedThread | None = None
        threading.Thread(target=self._main, daemon=True).start()

    def carry(self, thread: SimulatedThread) -> None:
        """Begin with a simulated thread, which waits to be resumed for the first time."""
        self._thread = thread
        self._given.release()

    def _main(self) -> None:
        while True:
            self._given.acquire()
            assert self._thread is not None
            thread, self._thread = self._thread, None
            thread.main()
            _idle.append(self)
            thread.leave()
            del thread


_idle: list[_Carrier] = []
"""The idle real threads."""


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Here(threading.local):
    thread: SimulatedThread | None = None


_here = _Here()


def current_thread() -> SimulatedThread | None:
    """Return the simulated thread that runs; None: a loop, or the world."""
    return _here.thread


class SimulatedLock:
    """Replaces `threading.Lock`. A loop that waits for it runs the thread that holds it."""

    def __init__(self) -> None:
        self._held = False
        self._holder: SimulatedThread | None = None

    def __enter__(self) -> None:
        while self._held:
            assert self._holder is not None, "a loop does not sleep while it holds the lock"
            assert current_thread() is None, "a process has one thread that takes locks"
            self._holder.advance()
        self._held, self._holder = True, current_thread()

    def __exit__(self, *_: object) -> None:
        self._held, self._holder = False, None


class Threading:
    """Replaces the module `threading`: only its locks are simulated."""

    Lock = SimulatedLock

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 any attribute of `threading`
        return getattr(threading, name)
