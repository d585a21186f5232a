"""Interleaves executions over a log call by call, without an event loop.

A `SteppedLog` pauses before each call. `run_stepped` runs coroutines that await only such logs, and
at each pause calls a function that chooses the coroutine to continue. `interleavings` tries all
choices. So a test determines the order of events exactly, and a failure is reproduced by the same
choices. The tests of libraries use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, TypeAlias, TypeVar

from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import After, Entry, Log, Record
from indilog.base.retention import Retention
from indilog.sdk.event import Event

_T = TypeVar("_T")

Choose: TypeAlias = Callable[[Sequence[int]], int]
"""Chooses the execution to continue, given the numbers of the executions that can continue."""


class _Pause:
    """An awaitable that returns control to `run_stepped`."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class SteppedLog(Log):
    """A log that pauses before each call. Its time does not pass, so a `wait` ends at once.

    Attributes:
        appended: seqnums that were appended through it, in order.
    """

    def __init__(self, log: Log) -> None:
        self.name = log.name
        self.appended: list[SeqNum] = []
        self._log = log

    @property
    def scope(self) -> object:
        """See `Log.scope`."""
        return self._log.scope

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """See `Log.append`."""
        await _Pause()
        seqnum = await self._log.append(data, tags=tags)
        self.appended.append(seqnum)
        return seqnum

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """See `Log.append_batch`."""
        await _Pause()
        seqnums = await self._log.append_batch(entries, after=after)
        self.appended += seqnums
        return seqnums

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """See `Log.read`."""
        await _Pause()
        return await self._log.read(seqnum, fresh=fresh)

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,  # noqa: ARG002
        fresh: bool = False,
    ) -> Record | None:
        """See `Log.read_next`."""
        await _Pause()
        return await self._log.read_next(tag, bound, fresh=fresh)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """See `Log.read_prev`."""
        await _Pause()
        return await self._log.read_prev(tag, bound, fresh=fresh)

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,  # noqa: ARG002
        fresh: bool = False,
    ) -> list[Record]:
        """See `Log.read_range`."""
        await _Pause()
        return await self._log.read_range(tag, bound, limit=limit, fresh=fresh)

    async def tail(self) -> SeqNum:
        """See `Log.tail`."""
        await _Pause()
        return await self._log.tail()

    async def now(self) -> float:
        """See `Log.now`."""
        await _Pause()
        return await self._log.now()

    async def find_time(self, time: float) -> SeqNum:
        """See `Log.find_time`."""
        await _Pause()
        return await self._log.find_time(time)

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """See `Log.trim`."""
        await _Pause()
        await self._log.trim(until, tag=tag)

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """See `Log.set_retention`."""
        await _Pause()
        await self._log.set_retention(age_s=age_s, size_bytes=size_bytes)

    async def retention(self) -> Retention:
        """See `Log.retention`."""
        await _Pause()
        return await self._log.retention()

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """See `Log.set_aux`."""
        await _Pause()
        await self._log.set_aux(seqnum, aux)


def run_stepped(executions: Sequence[Coroutine[Any, Any, _T]], choose: Choose) -> list[_T]:
    """Run all executions step by step until they end, and return their results in order. Each runs
    in its own context, as a task does.

    Raises:
        Exception: the error of an execution; the other executions are closed.
    """
    results: dict[int, _T] = {}
    running = dict(enumerate(executions))
    contexts = [copy_context() for _ in executions]
    waits_for: dict[int, Event] = {}
    try:
        while running:
            ready = [n for n in running if n not in waits_for or waits_for[n].is_set()]
            assert ready, "all coroutines wait for one another"
            number = choose(ready)
            waits_for.pop(number, None)
            try:
                paused_by = contexts[number].run(running[number].send, None)
            except StopIteration as end:
                results[number] = end.value
                del running[number]
            else:
                if isinstance(paused_by, Event):
                    waits_for[number] = paused_by
    finally:
        for number, execution in running.items():
            contexts[number].run(execution.close)
    return [results[number] for number in range(len(executions))]


class _Trail:
    """The choices of one run: a given prefix, then always the first option."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self._prefix = prefix
        self._taken: list[tuple[int, int]] = []

    def choose(self, ready: Sequence[int]) -> int:
        depth = len(self._taken)
        place = self._prefix[depth] if depth < len(self._prefix) else 0
        self._taken.append((place, len(ready)))
        return ready[place]

    def next_prefix(self) -> list[int] | None:
        """Return the choices that lead to the next run, None after the last."""
        for depth in range(len(self._taken) - 1, -1, -1):
            place, count = self._taken[depth]
            if place + 1 < count:
                return [taken for taken, _ in self._taken[:depth]] + [place + 1]
        return None


def interleavings(run: Callable[[Choose], _T], *, runs_max: int = 100_000) -> Iterator[_T]:
    """Call `run` once for every sequence of choices, and yield its results. Each call of `run` must
    create new state.

    Raises:
        AssertionError: there are more than `runs_max` sequences; the executions are too long.
    """
    prefix: Sequence[int] = ()
    for _ in range(runs_max):
        trail = _Trail(prefix)
        yield run(trail.choose)
        further = trail.next_prefix()
        if further is None:
            return
        prefix = further
    raise AssertionError(f"more than {runs_max} interleavings; shorten the executions")
