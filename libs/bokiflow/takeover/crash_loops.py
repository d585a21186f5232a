"""Runs that may end the processes that execute them: with care, and not for ever.

A step that calls `os._exit`, or takes all memory, ends its worker, and would end the next one that
takes its run over, with whatever else runs there. So a takeover counts how many executors in a row
ended without a sign of life since they got the run and without deciding anything of it. From the
second one on it is a suspect, like whatever was taken together with it: suspects are taken in
small groups after growing pauses, at last alone, and each group is watched for a moment before the
next one. So runs that only stood beside such a one are soon told apart from it. After the fifth the
run is parked, which `status()` shows, and tried again from time to time: memory or code may be
better then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import structlog

from bokiflow.runs import waiting
from bokiflow.runs.fold import Run
from bokiflow.takeover.executors import Executors

Take: TypeAlias = Callable[[str], Awaitable[asyncio.Task[None] | None]]
"""Takes a run, and tells in which task it is executed here, if it is."""

_CRASH_LOOPING_FROM: Final = 2
CRASHES_PARKED: Final = 5
"""Executors in a row after which a run is parked."""
_PAUSE_S_MAX: Final = 600.0
_GROUP_MAX: Final = 16


def crashes_of(run: Run, executors: Executors) -> int:
    """Return how many executors in a row ended soon after they got a run and decided nothing of it,
    with its last one, who is gone.
    """
    known = executors.known.get(run.executor)
    if run.parked is not None or known is None or known.has_left:
        return run.crashes
    return run.crashes + 1 if known.seqnum < run.taken_at else 0


def is_crash_looping(crashes: int) -> bool:
    """Whether a run is taken with care."""
    return crashes >= _CRASH_LOOPING_FROM


def pause_s(crashes: int) -> float:
    """Return how long to wait before such a run is taken: 1 s, doubled each time, to 10 minutes."""
    return min(2.0 ** min(crashes - _CRASH_LOOPING_FROM, 20), _PAUSE_S_MAX)


def retry_s(run: Run) -> float:
    """Return how long a run that was parked because its executors ended waits from then on: not at
    all if it was cancelled.
    """
    return 0.0 if run.cancel_asked else pause_s(run.crashes)


def group_size(crashes: int) -> int:
    """Return how many such runs are taken at once: 16, 4, then one by one."""
    return max(1, _GROUP_MAX >> (2 * (crashes - _CRASH_LOOPING_FROM)))


def problem(crashes: int) -> str:
    """Return what a run that goes on may do to those who execute it."""
    processes = "1 process" if crashes == 1 else f"{crashes} processes in a row"
    return (
        f"{processes} ended right after they had begun to execute it; something in it may end them "
        "(os._exit, too much memory)."
    )


def parked_reason(crashes: int) -> str:
    """Return why such a run is parked."""
    return (
        f"{problem(crashes)} It is tried again in {pause_s(crashes):,.0f} s; cancel it to end it."
    )


class Tasks:
    """Tasks that take runs over, one for each name at most."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether there is one of that name."""
        return name in self._tasks

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tasks)

    def begin(self, name: str, taking: Callable[[], Awaitable[None]]) -> None:
        """Begin one, unless it is at work; `name` says whose runs it takes."""
        if name in self._tasks:
            return
        task = self._tasks[name] = asyncio.ensure_future(taking())
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("runs are not taken over", executor=name, exc_info=error)

    async def stop(self) -> None:
        """Take nothing any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CrashLoops(Tasks):
    """Takes suspects in groups, one group after the other, whoever left them.

    Args:
        watch_s: how long a group is watched before the next one is taken.
    """

    def __init__(self, watch_s: float) -> None:
        super().__init__()
        self._watch_s = watch_s
        self._alone = waiting.Mutex()

    async def take(self, runs: dict[str, int], take: Take) -> None:
        """Take runs, whose crashes are given."""
        left = sorted(runs, key=runs.__getitem__)
        while left:
            crashes = runs[left[0]]
            same = [run for run in left if runs[run] == crashes]
            group = same[: group_size(crashes)]
            left = [run for run in left if run not in group]
            await waiting.pause(pause_s(crashes))
            await self.take_group(group, take)

    async def take_group(self, runs: list[str], take: Take) -> None:
        """Take runs, and return when they are over or were survived for long enough."""
        async with self._alone:
            tasks = [task for run in runs if (task := await take(run)) is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=self._watch_s)
