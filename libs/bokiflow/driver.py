"""Takes over the runs of dead executors. Each process that has the workflows runs a driver.

A driver polls heartbeats 8 times per lease, however many executors there are. It reads no records
of healthy runs, and no records at all while no executor is busy. Records that drivers must handle
at once have a separate tag (`URGENT_TAG`).

When the lease of an executor has ended, the driver reads which runs that executor left unfinished.
If there are any, the order of the log makes one driver the new owner. The new owner takes over as
many of these runs at a time as it may execute. If the new owner crashes, the next owner takes over
the runs of both executors. A run may be assigned to a dead executor after all drivers have read its
stream; drivers find such runs by re-reading the stream (`bokiflow.takeover.dead_executors`).
Crash-looping runs are taken over in small groups (`bokiflow.takeover.crash_loops`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import Stopped, public_call
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    PARKED_TAG,
    RUNS_TAG,
    URGENT_TAG,
    ExecutorDead,
    ExecutorLeft,
    RunTaken,
    encode,
    executor_tag,
    run_in,
    run_tag,
)
from bokiflow.runs.run_log import Logs, append_with_retry, read_run
from bokiflow.runs.run_state import Run
from bokiflow.takeover.cleaning import Cleaner
from bokiflow.takeover.crash_loops import (
    CRASHES_PARKED,
    CrashLoops,
    Tasks,
    crashes_of,
    is_crash_looping,
    retry_s,
)
from bokiflow.takeover.dead_executors import read_orphaned_runs, read_readable
from bokiflow.takeover.heartbeat import BEATS
from bokiflow.takeover.open_runs import find_executors_of_open_runs
from bokiflow.takeover.skip_unreadable import SkipUnreadable
from indilog import DataLossError, Entry, IndilogError, Log, TrimmedError
from indilog.sdk import SeqNum

_AGAIN_S: Final = 0.05
_PROBLEM_S: Final = 1.0
_TAKEN_AT_ONCE: Final = 16
_RETRIED_MAX: Final = 4096
_WATCH_BEATS: Final = 2
_ITERATIONS_PER_LEASE: Final = 8
"""Largest number of iterations per lease, in addition to those for urgent records and due times."""
_DEAD_EXECUTORS: Final = "of dead executors"
_CANCELLED: Final = "of cancelled runs"
_UNKNOWN: Final = "of unknown executors"


class Driver:
    """Continues the runs of a flow when executors crash."""

    def __init__(self, runner: Runner, *, retention_s: float) -> None:
        self._runner = runner
        self._cleaner = Cleaner(retention_s)
        self._cancelled: dict[str, None] = {}
        """Runs that may be parked and whose cancellation is requested."""
        self._crash_loops = CrashLoops(runner.lease_s * _WATCH_BEATS / BEATS)
        self._taking = Tasks()
        """Tasks that take over runs, by dead executor.

        Each dead executor has its own task, so that runs of one that wait for room, or for a body
        that does not end, do not delay the runs of the others.
        """
        self._one_takes = waiting.Mutex()
        self._retried: dict[str, float] = {}
        """When to retry runs that were parked as crash-looping; monotonic time."""

    async def drive(self, logs: Logs) -> None:
        """Watch heartbeats and take over runs until cancelled. Then record that this executor
        leaves, so that other processes continue its runs at once.
        """
        log = logs.log(self._runner.log_name)
        cleaning = asyncio.create_task(self._clean(log, logs))
        on_cancel = self._runner.on_cancel
        try:
            await self._until_done(lambda: self._runner.look(log))
            self._runner.on_crash_loop.append(self._retry_in)
            on_cancel.append(
                self._on_cancel
            )  # earlier cancellations are found with the parked runs
            await self._until_done(lambda: self._resume_parked(log, logs))
            while True:
                await self._until_done(lambda: self._iterate(log, logs))
        finally:
            cleaning.cancel()
            await self._taking.stop()
            await self._crash_loops.stop()
            with suppress(ValueError):
                self._runner.on_crash_loop.remove(self._retry_in)
            with suppress(ValueError):
                on_cancel.remove(self._on_cancel)
            await self._stop(log)

    async def _stop(self, log: Log) -> None:
        """Record that this executor leaves. If the log is unavailable, other drivers take over its
        runs when its lease has ended.
        """
        try:
            with public_call():
                await self._runner.stop(log)
        except IndilogError as error:
            structlog.get_logger().warning("driver cannot record that it leaves", reason=str(error))

    async def _until_done(self, act: Callable[[], Awaitable[object]]) -> None:
        """Run `act`, and retry it while the log is unavailable."""
        while True:
            try:
                await act()
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("driver waits for the log", reason=str(error))
            else:
                return
            await waiting.pause(_PROBLEM_S)

    async def _clean(self, log: Log, logs: Logs) -> None:
        while True:
            await waiting.pause(self._cleaner.interval_s)
            try:
                await self._cleaner.clean(log, await log.now())
                await self._runner.look(log)
                for run, executor in self._cleaner.open.items():
                    if self._has_no_owner(executor) and not self._is_taken(executor):
                        await self._take_all(log, logs, executor, [run])
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("ended runs are not trimmed", reason=str(error))

    async def _iterate(self, log: Log, logs: Logs) -> None:
        runner = self._runner
        await runner.look(log, is_one_page=True)  # one page usually has all notifications
        if runner.executors.lapsed(waiting.monotonic_now()):
            await runner.look(log)
        leaves_at = runner.leaves_at()
        if leaves_at is not None and leaves_at <= waiting.monotonic_now():
            await runner.leave_if_idle(log)
        end = runner.executors.end
        for name in runner.executors.lapsed(waiting.monotonic_now()):
            await self._on_lapsed(log, name, end)
        for name in runner.executors.left_to(runner.lease.name):
            if not self._is_taken(name):
                self._begin(name, partial(self._take_from, log, logs, name))
        if self._have_unknown_expired():
            if runner.executors.dead_executors.due(waiting.monotonic_now()):
                self._begin(_DEAD_EXECUTORS, partial(self._recheck_dead_executors, log, logs))
            if runner.executors.lost_at is not None:
                self._begin(_UNKNOWN, partial(self._look_for_unknown, log))
        self._retry_parked(log, logs)
        if self._cancelled:
            self._begin(_CANCELLED, partial(self._take_cancelled, log, logs))
        await self._wait_for_records(log)

    def _begin(self, name: str, take: Callable[[], Awaitable[None]]) -> None:
        """Take over runs in a task, with retries while the log is unavailable."""
        self._taking.begin(name, lambda: self._until_done(take))

    def _is_taken(self, name: str) -> bool:
        """Whether the runs of an executor are being taken over."""
        return name in self._crash_loops or name in self._taking

    async def _recheck_dead_executors(self, log: Log, logs: Logs) -> None:
        for name in self._runner.executors.dead_executors.due(waiting.monotonic_now()):
            if not self._is_taken(name):
                await self._look_again(log, logs, name)

    async def _take_cancelled(self, log: Log, logs: Logs) -> None:
        while self._cancelled:
            id_ = next(iter(self._cancelled))
            await self._take_parked(log, logs, id_, is_cancelled=True)
            self._cancelled.pop(id_, None)

    async def _wait_for_records(self, log: Log) -> None:
        """Wait for a heartbeat, or until a heartbeat is overdue or a stream must be re-read.

        While an executor is busy, a heartbeat does not end the wait; the next iteration reads it.
        """
        executors = self._runner.executors
        next_retry = min(self._retried.values(), default=None)
        is_taking = self._crash_loops or self._taking
        now = waiting.monotonic_now()
        look_at = now + self._runner.lease_s if is_taking else None
        next_due = None if _DEAD_EXECUTORS in self._taking else executors.dead_executors.next_due()
        if executors.lost_at is not None:
            next_due = look_at if _UNKNOWN in self._taking else self._unknown_until()
        times = (
            executors.next_lapse(),
            self._runner.leaves_at(),
            next_due,
            next_retry,
            look_at,
        )
        next_time = min((time for time in times if time is not None), default=math.inf)
        tag = EXECUTORS_TAG
        if executors.known:
            tag, next_time = (
                URGENT_TAG,
                min(next_time, now + self._runner.lease_s / _ITERATIONS_PER_LEASE),
            )
        try:
            await log.read_next(tag, executors.end, wait=max(_AGAIN_S, next_time - now))
        except (TrimmedError, DataLossError):  # the next iteration skips these records
            await waiting.pause(_AGAIN_S)

    # --- dead executors

    async def _on_lapsed(self, log: Log, name: str, end: SeqNum) -> None:
        """Handle an executor whose lease had ended as of the records below `end`."""
        runner = self._runner
        if name == runner.lease.name:
            await runner.retire(log)
            return
        left = await read_orphaned_runs(log, name)
        if not runner.executors.is_silent(name, end):
            return  # it sent a heartbeat, or another driver handles it
        if not left.runs and not runner.executors.left_to(name):
            runner.executors.forget(name, waiting.monotonic_now())
            if left.end:
                await log.trim(left.end, tag=executor_tag(name))
            return
        lease = runner.current_lease()
        dead = ExecutorDead(name, lease.name, end)
        entry = Entry(encode(dead), (EXECUTORS_TAG,))
        await runner.look(log, await runner.append_with_heartbeat(log, lease, [entry]))

    async def _take_from(self, log: Log, logs: Logs, name: str) -> None:
        """Take over all runs of a dead executor, then record that it has left none."""
        left = await read_orphaned_runs(log, name)
        structlog.get_logger().info("taking over runs", executor=name, runs=len(left.runs))
        are_read = await self._take_all(log, logs, name, left.runs)
        if name not in self._crash_loops:
            await self._taken_from(log, name, left.end if are_read else 0)

    async def _taken_from(self, log: Log, name: str, end: SeqNum) -> None:
        """Record that a dead executor has no readable runs left; trim its stream below `end`."""
        over = Entry(encode(ExecutorLeft(name, is_idle=True)), (EXECUTORS_TAG,))
        seqnum = await append_with_retry(log, [over])
        if end:
            await log.trim(end, tag=executor_tag(name))
        await self._runner.look(log, seqnum)

    async def _look_again(self, log: Log, logs: Logs, name: str) -> None:
        """Take over runs that were assigned to an executor after it was declared dead."""
        dead = self._runner.executors.dead_executors
        now = waiting.monotonic_now()
        left = await read_orphaned_runs(log, name, dead.end(name))
        await self._runner.look(
            log
        )  # each heartbeat is ordered before the records of the lease that it begins
        if self._has_no_owner(name):
            are_read = await self._take_all(log, logs, name, left.runs)
            is_over = are_read and name not in self._crash_loops
            dead.note_read(name, now, left.end if is_over else 0)
        else:
            dead.note_read(name, now, 0)

    def _has_no_owner(self, name: str) -> bool:
        """Tell whether an executor is unknown, so that no driver waits for the end of its lease.

        Several drivers may find that at the same time; the log assigns each run to one of them.
        """
        runner = self._runner
        is_unknown = name != runner.lease.name and name not in runner.executors.known
        return is_unknown and self._have_unknown_expired()

    def _have_unknown_expired(self) -> bool:
        """Tell whether unknown executors are dead: a live one would have sent a new heartbeat by
        now.
        """
        return waiting.monotonic_now() >= self._unknown_until()

    def _unknown_until(self) -> float:
        return self._runner.executors.unknown_until(self._runner.lease_s)

    async def _look_for_unknown(self, log: Log) -> None:
        """Treat unknown executors of open runs as dead. An executor is unknown if all its
        heartbeats were lost.
        """
        executors, lost_at = self._runner.executors, self._runner.executors.lost_at
        names = await find_executors_of_open_runs(log)
        await self._runner.look(log)
        for name in names:
            if self._has_no_owner(name):
                executors.dead_executors.add(name, waiting.monotonic_now())
        if executors.lost_at == lost_at:
            executors.lost_at = None

    async def _take_all(self, log: Log, logs: Logs, name: str, left: list[str]) -> bool:
        """Take over runs of an executor, as many at a time as there is room for. Crash-looping runs
        come last.

        Skip runs that cannot be read. Return whether all runs could be read.
        """
        crash_looping: dict[str, int] = {}
        are_read = True
        while left:
            async with self._one_takes:
                await self._room()
                count = max(1, min(_TAKEN_AT_ONCE, self._runner.room))
                free = [id_ for id_ in left if id_ not in self._runner.running][:count]
                took = (self._take(log, logs, id_, (name,), crash_looping) for id_ in free)
                are_read = all(await asyncio.gather(*took)) and are_read
            left = [id_ for id_ in left if id_ not in free]
            if not free:
                await self._wait_for_task(left)
        if crash_looping:
            taking = partial(self._take_crash_loops, log, logs, name, crash_looping)
            self._crash_loops.begin(name, taking)
        return are_read

    async def _take_crash_loops(
        self, log: Log, logs: Logs, name: str, crash_looping: dict[str, int]
    ) -> None:
        """Take over crash-looping runs of an executor; then record that it has no runs left."""

        async def take(id_: str) -> asyncio.Task[None] | None:
            await self._until_done(lambda: self._take(log, logs, id_, (name,)))
            return self._task(id_)

        async def be_done() -> None:
            left = await read_orphaned_runs(log, name)
            if not left.runs and name in self._runner.executors.left_to(self._runner.lease.name):
                await self._taken_from(log, name, left.end)

        await self._crash_loops.take(crash_looping, take)
        await self._until_done(be_done)

    def _task(self, id_: str) -> asyncio.Task[None] | None:
        running = self._runner.running.get(id_)
        return None if running is None else running.task

    async def _wait_for_task(self, runs: list[str]) -> None:
        """Wait, at most `_PROBLEM_S` seconds, until the task of one of these runs has ended. This
        process executed them under an old name.
        """
        tasks = {task for task in map(self._task, runs) if task is not None}
        if tasks:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(tasks, timeout=_PROBLEM_S, return_when=first)

    async def _room(self) -> None:
        """Wait until this process may execute one more run."""
        if self._runner.room > 0:
            return
        room = asyncio.Event()
        self._runner.on_room.append(room.set)
        try:
            while self._runner.room <= 0:
                room.clear()
                await room.wait()
        finally:
            self._runner.on_room.remove(room.set)

    async def _take(
        self,
        log: Log,
        logs: Logs,
        id_: str,
        holders: Iterable[str],
        crash_looping: dict[str, int] | None = None,
    ) -> bool:
        """If one of `holders` still owns a run, take it over and execute it. If `crash_looping` is
        given, only add a crash-looping run to it, with its number of crashes. Return whether the
        run can be read.
        """
        with SkipUnreadable(id_) as skipping:
            await self._take_readable(log, logs, id_, holders, crash_looping)
        return not skipping.failed

    async def _take_readable(
        self,
        log: Log,
        logs: Logs,
        id_: str,
        holders: Iterable[str],
        crash_looping: dict[str, int] | None,
    ) -> None:
        try:
            run = await read_run(log, id_, Run(), is_reused=True)
        except TrimmedError:
            return
        if run.started is None or run.finished is not None or run.executor not in holders:
            return
        if run.parked is not None:
            return  # `_resume_parked` handles parked runs
        crashes = crashes_of(run, self._runner.executors)
        if crash_looping is not None and is_crash_looping(crashes) and crashes < CRASHES_PARKED:
            crash_looping[id_] = crashes
        else:
            await self._take_run(log, logs, id_, run)

    async def _take_run(self, log: Log, logs: Logs, id_: str, run: Run) -> None:
        """Take over a run that has not ended, unless a new epoch has begun since it was read."""
        runner, before, was_parked = self._runner, run.executor, run.parked is not None
        crashes = crashes_of(run, runner.executors)
        async with runner.assigning(logs, id_) as lease:
            if id_ in runner.running:
                return
            taken = RunTaken(run.epoch + 1, lease.name, crashes)
            tags = (run_tag(id_), RUNS_TAG, executor_tag(lease.name), executor_tag(before))
            seqnum = await runner.append_with_heartbeat(log, lease, [Entry(encode(taken), tags)])
            await read_run(log, id_, run, seqnum)
            if (run.executor, run.epoch) == (lease.name, taken.epoch) and run.finished is None:
                await runner.take_on(logs, log, id_, run, lease, was_parked=was_parked)

    # --- parked runs

    async def _resume_parked(self, log: Log, logs: Logs) -> None:
        """Retry the parked runs with the current code. A run that does not match the code is parked
        again.
        """
        parked: dict[str, SeqNum] = {}
        unreadable: list[SeqNum] = []
        end: SeqNum = 0
        async for record in read_readable(log, PARKED_TAG, 0, unreadable):
            end = record.seqnum + 1
            if (id_ := run_in(record.tags)) is not None:
                parked[id_] = record.seqnum
        for id_ in list(parked):
            if not await self._take_parked(log, logs, id_):
                del parked[id_]
        if end:
            await log.trim(min([*parked.values(), *unreadable, end]), tag=PARKED_TAG)

    def _on_cancel(self, run: str) -> None:
        self._cancelled[run] = None

    def _retry_in(self, id_: str, wait_s: float) -> None:
        if len(self._retried) < _RETRIED_MAX:  # further runs wait until another process starts
            self._retried[id_] = waiting.monotonic_now() + wait_s

    def _retry_parked(self, log: Log, logs: Logs) -> None:
        """Retry runs that were parked as crash-looping, one at a time."""

        async def take(id_: str) -> asyncio.Task[None] | None:
            await self._until_done(lambda: self._take_parked(log, logs, id_, is_its_time=True))
            return self._task(id_)

        now = waiting.monotonic_now()
        for id_ in [id_ for id_, time in self._retried.items() if time <= now]:
            del self._retried[id_]
            self._crash_loops.begin(id_, partial(self._crash_loops.take_group, [id_], take))

    async def _take_parked(
        self,
        log: Log,
        logs: Logs,
        id_: str,
        *,
        is_cancelled: bool = False,
        is_its_time: bool = False,
    ) -> bool:
        """Take over a run if it is parked; with `is_cancelled`, only if it was cancelled while it
        was parked.

        A crash-looping run is executed alone: when its pause has ended, or at once if it was
        cancelled. Return whether the run may still be parked.
        """
        with SkipUnreadable(id_) as skipping:
            return await self._take_parked_readable(
                log, logs, id_, is_cancelled=is_cancelled, is_its_time=is_its_time
            )
        return skipping.failed

    async def _take_parked_readable(
        self, log: Log, logs: Logs, id_: str, *, is_cancelled: bool, is_its_time: bool
    ) -> bool:
        try:
            run = await read_run(log, id_, Run(), is_reused=True)
        except TrimmedError:
            return False
        if run.parked is None:
            return False
        if id_ in self._runner.running or (is_cancelled and not run.is_cancelled_while_parked):
            return True
        if run.crashes >= CRASHES_PARKED and not is_its_time:
            waited_s = max(0.0, log_clock(log).now() - run.parked_at)
            self._retry_in(id_, max(0.0, retry_s(run) - waited_s))
            return True
        if not is_cancelled:
            await self._room()
        await self._take_run(log, logs, id_, run)
        return False
