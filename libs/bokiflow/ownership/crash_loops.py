"""Handles crash-looping runs: runs that may crash the processes that execute them.

A step that calls `os._exit`, uses all memory, or blocks the event loop, ends its worker. It would
also end the next worker that takes over the run, and so interrupt all other runs there. So each
takeover counts the executors in a row that crashed soon after they got the run. Soon means before
their next heartbeat, and before a step was decided.

After the second such crash the run counts as crash-looping. The runs that were taken over together
with it count as crash-looping, too. Such runs are taken over in groups, which become smaller with
each crash and finally contain one run. The pauses between takeovers grow. Each group is watched for
some seconds before the next group is taken over. So the run that crashes its processes is separated
from runs that were only in the same process.

After the fifth crash the run is parked, which `status()` shows. A parked run is retried with
growing pauses, because memory or code may have changed. `taking` takes over runs with `CrashLoops`,
and `turns` uses `Tasks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import structlog

from bokiflow.ownership.owners import Owners
from bokiflow.runs import waiting
from bokiflow.runs.run_state import RunState

Take: TypeAlias = Callable[[str], Awaitable[asyncio.Task[None] | None]]
"""Takes over a run, and returns the task that executes it here, if there is one."""

_CRASH_LOOPING_FROM: Final = 2
CRASHES_PARKED: Final = 5
"""Number of crashed executors in a row after which a run is parked."""
_PAUSE_S_MAX: Final = 600.0
_GROUP_MAX: Final = 16


def crashes_of(run: RunState, owners: Owners) -> int:
    """Return how many executors in a row crashed soon after they got a run, and before they decided
    a step of it. The run's last executor is counted if it is dead.
    """
    beat_at = owners.dead.get(run.executor)
    if run.parked is not None or run.waits is not None or beat_at is None:
        return run.crashes
    return run.crashes + 1 if beat_at < run.taken_at else 0


def is_crash_looping(crashes: int) -> bool:
    """Whether a run with so many crashes counts as crash-looping."""
    return crashes >= _CRASH_LOOPING_FROM


def pause_s(crashes: int) -> float:
    """Return the seconds before a crash-looping run is taken over: 1 after the second crash,
    doubled for each further crash, up to 600.
    """
    return min(2.0 ** min(crashes - _CRASH_LOOPING_FROM, 20), _PAUSE_S_MAX)


def retry_s(run: RunState) -> float:
    """Return the seconds until a run parked as crash-looping is retried; 0 if the run was
    cancelled.
    """
    return 0.0 if run.cancel_asked else pause_s(run.crashes)


def group_size(crashes: int) -> int:
    """Return how many crash-looping runs are taken over together: 16 after the second crash, then
    4, then 1.
    """
    return max(1, _GROUP_MAX >> (2 * (crashes - _CRASH_LOOPING_FROM)))


def problem(crashes: int) -> str:
    """Return the problem of a crash-looping run as text, for its status."""
    processes = "1 process" if crashes == 1 else f"{crashes} processes in a row"
    return (
        f"{processes} ended right after they had begun to execute it; a step of it may end them "
        "(os._exit, too much memory, a blocked event loop)."
    )


def parked_reason(crashes: int) -> str:
    """Return a text that says why a crash-looping run is parked."""
    return f"{problem(crashes)} It is retried in {pause_s(crashes):,.0f} s; cancel it to end it."


class Tasks:
    """Tasks that take over runs, at most one for each name."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        """Tell whether a task with this name is running."""
        return name in self._tasks

    def __len__(self) -> int:
        """Return the number of running tasks."""
        return len(self._tasks)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the running tasks."""
        return list(self._tasks.values())

    def begin(self, name: str, taking: Callable[[], Awaitable[None]]) -> None:
        """Start a task, unless a task with this name is running."""
        running = self._tasks.get(name)
        if running is not None and not running.done():
            return
        task = self._tasks[name] = asyncio.ensure_future(taking())
        task.add_done_callback(lambda ended: self._on_task_ended(name, ended))

    def _on_task_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("runs are not taken over", executor=name, exc_info=error)

    async def stop(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CrashLoops(Tasks):
    """Takes over crash-looping runs in groups, one group after the other.

    Args:
        watch_s: seconds for which a group is watched before the next group is taken over.
    """

    def __init__(self, watch_s: float) -> None:
        super().__init__()
        self._watch_s = watch_s
        self._alone = waiting.Mutex()

    async def take(self, runs: dict[str, int], take: Take) -> None:
        """Take over runs. `runs` has the number of crashes of each run; runs with fewer crashes
        come first.
        """
        left = sorted(runs, key=runs.__getitem__)
        while left:
            crashes = runs[left[0]]
            same = [run for run in left if runs[run] == crashes]
            group = same[: group_size(crashes)]
            left = [run for run in left if run not in group]
            await waiting.pause(pause_s(crashes))
            await self.take_group(group, take)

    async def take_group(self, runs: list[str], take: Take) -> None:
        """Take over runs. Return when they have ended, or have run for `watch_s` seconds without a
        crash.
        """
        async with self._alone:
            tasks = [task for run in runs if (task := await take(run)) is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=self._watch_s)
