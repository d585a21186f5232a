"""Simulates time, random choices and scheduling: one scheduler runs the event loops of all
processes.

Every event is a callback at an instant. Instants never decrease, and callbacks of one instant run
in the order in which they were requested. When all callbacks of an instant have run, the clock
jumps to the next instant. Each process has its own asyncio loop (`ProcessLoop`), so code for a real
loop runs unchanged. Tasks and futures are asyncio's; they are deterministic as long as no code
iterates over a set of them (PITFALLS 20).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any, Final, TypeVar

from indilog.testing.simulation.threads import Killed, SimulatedThread

_T = TypeVar("_T")
_enter_loop = asyncio._set_running_loop  # noqa: SLF001 for event loops

START_S: Final = 1_700_000_000.0
"""The first instant of every world, in seconds since 1970."""
_STEP_S: Final = 2e-6
"""Simulated seconds that a callback takes, so that time also passes without timers."""
_NAPS_S: Final = (0.001, 0.001, 0.001, 0.02)
"""Approximate seconds of a disk access in a thread; slow ones leave time for segments to fill."""


class Stuck(AssertionError):  # noqa: N818 what a test says about a run
    """The awaited condition did not become true: no callback is left, or the time is up."""


class Scheduled:
    """A callback at an instant; what `asyncio` calls a handle."""

    __slots__ = ("_cancelled", "args", "callback", "context", "loop", "when_s")

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: ProcessLoop | None,
        context: contextvars.Context | None,
    ) -> None:
        self.when_s = when_s
        self.callback = callback
        self.args = args
        self.loop = loop
        self.context = context
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the callback."""
        self._cancelled = True

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._cancelled

    def when(self) -> float:
        """Return its instant."""
        return self.when_s


class World:
    """The clock, and all scheduled callbacks.

    Attributes:
        now_s: the current instant, in seconds since 1970.
        steps: how many callbacks have run; an earlier event has the smaller number.
        lines: if this is a list, a line is added to it for each event.
    """

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self.now_s = START_S
        self.steps = 0
        self.lines: list[str] | None = None
        self._heap: list[tuple[float, int, Scheduled]] = []
        self._asked = 0
        self._digest = blake2b(digest_size=16)

    def chance(self, purpose: str) -> random.Random:
        """Return a random source that depends only on the seed and `purpose`."""
        return random.Random(f"{self.seed}/{purpose}")  # noqa: S311 it is to be repeated

    # --- trace

    def tell(self, what: str, *parts: bytes) -> None:
        """Add an event to the trace and the digest, with the current time."""
        digest = self._digest
        digest.update(f"{self.now_s!r} {what} {[len(part) for part in parts]}\n".encode())
        for part in parts:
            digest.update(part)
        if self.lines is not None:
            self.lines.append(f"{self.now_s - START_S:12.6f}  {what}")

    @property
    def digest(self) -> str:
        """A hash of all events so far, in order."""
        return self._digest.hexdigest()

    # --- scheduling

    def at(
        self,
        when_s: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 any arguments of the callback
        loop: ProcessLoop | None = None,
        context: contextvars.Context | None = None,
    ) -> Scheduled:
        """Schedule `callback` at an instant, or now if that is past."""
        when_s = max(when_s, self.now_s)
        item = Scheduled(when_s, callback, args, loop, context)
        self._asked += 1
        heappush(self._heap, (when_s, self._asked, item))
        return item

    def after(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Scheduled:  # noqa: ANN401 as `at`
        """Schedule `callback` after `delay_s` seconds."""
        return self.at(self.now_s + delay_s, callback, *args)

    def step(self) -> bool:
        """Run the next callback; return False if there is none."""
        if not self._heap:
            return False
        when_s, _, item = heappop(self._heap)
        if item.cancelled():
            return True
        self.steps += 1
        self.now_s = max(self.now_s, when_s) + _STEP_S
        loop = item.loop
        if loop is None:
            item.callback(*item.args)
        elif loop.paused:
            loop.deferred.append(item)
        elif loop.alive:
            _enter_loop(loop)
            try:
                if item.context is not None:
                    item.context.run(item.callback, *item.args)
                else:
                    item.callback(*item.args)
            except Killed:
                _enter_loop(None)
                loop.on_killed()
            finally:
                _enter_loop(None)
        return True

    def run_until(self, done: Callable[[], bool], within_s: float) -> None:
        """Run callbacks until `done()`.

        Raises:
            Stuck: `done()` does not become true within the simulated seconds.
        """
        end_s = self.now_s + within_s
        while not done():
            if not self._heap:
                raise Stuck("no callback is left")
            if self._heap[0][0] > end_s:
                raise Stuck(f"it did not happen within {within_s:g} simulated seconds")
            self.step()

    def run_for(self, duration_s: float) -> None:
        """Run callbacks for so many simulated seconds."""
        end_s = self.now_s + duration_s
        while self._heap and self._heap[0][0] <= end_s:
            self.step()
        self.now_s = max(self.now_s, end_s)


def _wake(thread: SimulatedThread, nap: int) -> None:
    if not thread.done and thread.naps == nap:
        thread.advance()


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one process from a start to its end.

    A paused loop runs no callbacks; those that become due meanwhile run in order when it resumes. A
    loop that has ended runs no callbacks any more.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.deferred: list[Scheduled] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.threads: list[SimulatedThread] = []
        """The threads whose outcome the loop has not received yet."""
        self.on_killed: Callable[[], None] = self.end
        """Called when the process is killed during an operation (`Killed`)."""
        self._chance = world.chance(f"threads of {name} at {world.now_s!r}")

    @contextmanager
    def running(self) -> Generator[None]:
        """Make this the running loop inside the block."""
        _enter_loop(self)
        try:
            yield
        finally:
            _enter_loop(None)

    def pause(self) -> None:
        """Run nothing until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Resume; callbacks that fell due meanwhile run now, in order."""
        self.paused = False
        deferred, self.deferred = self.deferred, []
        for item in deferred:
            if not item.cancelled():
                again = self.world.at(0.0, item.callback, *item.args, loop=self)
                again.context = item.context

    def end(self) -> None:
        """End the loop: its tasks stop where they are."""
        self.alive = False
        self.paused = False
        self.deferred.clear()
        for thread in self.threads:
            thread.kill()
        self.threads.clear()
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 it is meant
                with self.running():
                    task.get_coro().close()

    # --- asyncio

    def time(self) -> float:
        """Return the instant."""
        return self.world.now_s

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 as asyncio says
        context: contextvars.Context | None = None,
    ) -> Scheduled:
        """Schedule a callback at this instant, after those that were requested before."""
        return self.world.at(0.0, callback, *args, loop=self, context=context)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 as asyncio says
        context: contextvars.Context | None = None,
    ) -> Scheduled:
        """Schedule a callback after a delay."""
        return self.world.at(self.world.now_s + delay, callback, *args, loop=self, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 as asyncio says
        context: contextvars.Context | None = None,
    ) -> Scheduled:
        """Schedule a callback at an instant."""
        return self.world.at(when, callback, *args, loop=self, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, _T],
        *,
        name: object = None,  # noqa: ARG002 only for people
        context: contextvars.Context | None = None,  # noqa: ARG002 each task has a copy
    ) -> asyncio.Task[_T]:
        """Start a task; it ends with the loop at the latest."""
        task = asyncio.Task(coro, loop=self)
        self.tasks = [other for other in self.tasks if not other.done()]
        self.tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self,
        executor: object,  # noqa: ARG002 every pool is this world
        func: Callable[..., _T],
        *args: Any,  # noqa: ANN401 as asyncio says
    ) -> asyncio.Future[_T]:
        """Call `func` in a simulated thread, which takes some time, during which the loop runs.

        The seed chooses whether `func` runs at the begin or at the end of that time. It sleeps
        where it waits for the disk.
        """
        future: asyncio.Future[_T] = self.create_future()

        def begin(done_after_s: float) -> None:
            thread = SimulatedThread(lambda: func(*args))
            thread.advance = lambda: self._advance(thread, future, done_after_s)
            self.threads.append(thread)
            thread.advance()

        takes_s = self._chance.uniform(0.0001, 0.003)
        if self._chance.random() < 0.5:
            begin(takes_s)
        else:
            self.call_later(takes_s, begin, 0.0)
        return future

    def _advance(
        self, thread: SimulatedThread, future: asyncio.Future[Any], done_after_s: float
    ) -> None:
        thread.run()
        if not thread.done:
            nap_s = self._chance.choice(_NAPS_S) * self._chance.uniform(0.1, 1.5)
            self.call_later(nap_s, _wake, thread, thread.naps)
            return
        if isinstance(thread.error, Killed):
            self.threads.remove(thread)
            raise thread.error
        self.call_later(done_after_s, self._resolve, thread, future)

    def _resolve(self, thread: SimulatedThread, future: asyncio.Future[Any]) -> None:
        self.threads.remove(thread)
        if future.done():
            return
        if thread.error is not None:
            future.set_exception(thread.error)
        else:
            future.set_result(thread.result)

    def get_debug(self) -> bool:
        """Return False: the debug mode of asyncio is off."""
        return False

    def is_running(self) -> bool:
        """Return whether the loop has not ended."""
        return self.alive

    def is_closed(self) -> bool:
        """Return whether the loop has ended."""
        return not self.alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an exception that no code has handled."""
        self.world.tell(f"{self.name}: {context.get('message', '')}")
