"""Takes over the open runs of the partitions that this process owns.

When this process begins to own a partition, it reads which runs of the partition are open. It
executes the runs that do not wait, as many at a time as its limits permit. Runs that wait stay out
of memory until their time has come or a record for them arrives. Crash-looping runs are taken in
small groups (`bokiflow.ownership.crash_loops`).

A process executes a run at most once at a time: it takes the run within `RunExecutor.exclusive`.

`driver` claims the partitions. `Runner` has a `Taking` and executes the runs.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import structlog

from bokiflow.definition import Definition
from bokiflow.limits.limit_state import WAITING_MAX, LimitedRun, Turn
from bokiflow.ownership.crash_loops import (
    CRASHES_PARKED,
    CrashLoops,
    Tasks,
    crashes_of,
    is_crash_looping,
    parked_reason,
    retry_s,
)
from bokiflow.ownership.executor import BEATS
from bokiflow.ownership.partition import OwnedPartition
from bokiflow.ownership.partition_state import OpenRun, Phase
from bokiflow.ownership.run_timers import RunTimers
from bokiflow.ownership.skip_unreadable import SkipUnreadable
from bokiflow.replay_check import find_mismatch
from bokiflow.running import LocalRun
from bokiflow.runs import waiting
from bokiflow.runs.errors import Cancelled, FlowSettingsError
from bokiflow.runs.execution import Execution
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    CODE,
    INBOX_TAG,
    CodeVersion,
    OperationNoted,
    RecordedFailure,
    RunForgotten,
    encode,
    limit_tag,
    partition_of,
    partition_tag,
    run_tag,
)
from bokiflow.runs.run_log import append_with_retry, is_transient, read_run, until_done
from bokiflow.runs.run_state import RunState
from bokiflow.turns import LimitExecutor, Turns
from bokiflow.versions import Versions, code_after
from indilog import Entry, IndilogError, Log, TrimmedError
from indilog.sdk import Logs

_TAKEN_AT_ONCE: Final = 16
_PROBLEM_S: Final = 1.0
_WATCH_BEATS: Final = 2
_LOOKS: Final = 64
"""Number of heartbeats for which this process looks for a run whose start has an unknown outcome.
"""
_UNCERTAIN_MAX: Final = 1024
"""Largest number of starts with an unknown outcome that are kept. For further starts, only the
partition is kept.
"""
_FAILURES_MAX: Final = 6
_GIVES_WAY_MAX: Final = 4
"""The last of the growing pauses before a run of a later deployment is taken, counted from 0. All
pauses together last about 8 leases.
"""
_TICK_S_MIN: Final = 0.001
_TAKE: Final = "take"
_TIMERS: Final = "timers"


class RunExecutor(LimitExecutor):
    """The part of an executor for which `Taking` takes over runs.

    Attributes:
        running: the runs that this process executes, by id.
        room_changed: set when this process may execute more runs.
    """

    def __init__(self, log_name: str, lease_s: float, partitions: int, versions: Versions) -> None:
        super().__init__(log_name, lease_s, partitions, versions)
        self.running: dict[str, LocalRun] = {}
        self.room_changed = asyncio.Event()

    @property
    @abstractmethod
    def room(self) -> int:
        """Number of further runs that this process may execute. A run that only waits counts as a
        sixteenth.
        """

    @abstractmethod
    def exclusive(self, run: str) -> AbstractAsyncContextManager[None]:
        """Return a block with exclusive access to a run. Its execution begins in such a block."""

    @abstractmethod
    def want(self, run: str) -> None:
        """Execute a run of an owned partition if it is open.

        If a task has exclusive access to the run, the run is taken when that access ends, unless
        the task has begun to execute the run. That task may have found that another process owned
        the partition, although this process has become the owner since.
        """

    @abstractmethod
    async def take_epoch(
        self,
        log: Log,
        id_: str,
        run: RunState,
        partition: OwnedPartition,
        crashes: int,
        code: CodeVersion | None = None,
    ) -> bool:
        """Begin a new epoch of a run that is executed here. With `code`, the run continues with
        other code. From then on, appends in flight of earlier executions have no effect. Return
        whether the run is open and this executor owns it. If a former owner of the partition has
        taken it meanwhile, it is taken again soon.
        """

    @abstractmethod
    def execute(
        self,
        logs: Logs,
        definition: Definition,
        id: str,  # noqa: A002
        run: RunState,
        partition: OwnedPartition,
    ) -> LocalRun | None:
        """Execute a run of an owned partition in a new task."""


class Taking:
    """Takes over runs of the partitions of one process.

    Attributes:
        turns: the limits of the runs.
        uncertain: runs that this process may have started. The value is the number of heartbeats
            for which the run is still looked for.
        lost_sight_of: partitions of runs that are no longer looked for. The record that starts such
            a run may still arrive.
    """

    def __init__(self, runner: RunExecutor) -> None:
        self._runner = runner
        self._due: dict[str, None] = {}
        self._timers = RunTimers()
        self._timed_in: dict[int, OwnedPartition] = {}
        """The owned partitions when timers of other partitions were last dropped."""
        self._timer_changed = asyncio.Event()
        self._again: set[str] = set()
        """Crash-looping parked runs that must be executed again, because their pause has ended."""
        self._paused: set[str] = set()
        """Runs that were parked as crash-looping and have a timer for their next try."""
        self._retried: set[str] = set()
        """Parked runs to retry with the current code."""
        self._failures: dict[str, int] = {}
        self._tasks = Tasks()
        self._crash_loops = CrashLoops(runner.member.lease.lease_s * _WATCH_BEATS / BEATS)
        self.turns = Turns(runner, self._on_turn)
        self.uncertain: dict[str, int] = {}
        self.lost_sight_of: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether runs are being taken, or will be at a known time."""
        has_tasks = len(self._tasks) > (_TIMERS in self._tasks) or self.turns.has_work
        return bool(has_tasks or self._due or self._timers or self.uncertain or self._crash_loops)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return all tasks that take runs."""
        return [*self._tasks.tasks(), *self._crash_loops.tasks(), *self.turns.tasks()]

    async def stop(self) -> None:
        """Stop taking runs."""
        self._due.clear()
        self._timers.clear()
        await self._tasks.stop()
        await self._crash_loops.stop()
        await self.turns.stop()

    # --- what is due

    def want(self, run: str) -> None:
        """Execute a run of an owned partition if it is open."""
        self._due[run] = None
        self._tasks.begin(_TAKE, self._take_due)

    def want_soon(self, run: str) -> None:
        """Look for a run whose start has an unknown outcome, for some heartbeats."""
        if len(self.uncertain) >= _UNCERTAIN_MAX:
            self.lost_sight_of.add(partition_of(run, self._runner.member.count))
        else:
            self.uncertain[run] = _LOOKS

    def want_later(self, run: str) -> None:
        """Execute a run again after a pause, which grows with each call."""
        failures = self._failures[run] = min(self._failures.pop(run, -1) + 1, _FAILURES_MAX)
        if len(self._failures) > _UNCERTAIN_MAX:
            del self._failures[next(iter(self._failures))]
        self._at(2.0**failures * self._runner.member.lease.lease_s / BEATS, run)

    def wake_at(self, run: str, in_s: float) -> None:
        """Execute a waiting run after `in_s` seconds."""
        self._at(in_s, run)

    def _at(self, in_s: float, run: str) -> None:
        self._timers.set(run, waiting.monotonic_now() + max(0.0, in_s))
        self._timer_changed.set()
        self._tasks.begin(_TIMERS, self._run_timers)

    async def _run_timers(self) -> None:
        while (at := self._timers.next_at()) is not None:
            self._timer_changed.clear()
            left_s = at - waiting.monotonic_now()
            if left_s > 0:
                try:
                    async with asyncio.timeout(max(_TICK_S_MIN, left_s)):
                        await self._timer_changed.wait()
                except TimeoutError:
                    pass
                continue
            run = self._timers.pop_due(waiting.monotonic_now())
            if run is None:
                continue
            if run in self._paused:
                self._paused.discard(run)
                self._begin_group(run)
            else:
                self.want(run)

    def _partition(self, run: str) -> OwnedPartition | None:
        return self._runner.owns(partition_of(run, self._runner.member.count))

    def tidy(self) -> None:
        """Look for runs whose start has an unknown outcome, and check turns. The executor calls
        this after each heartbeat.
        """
        self.turns.tidy()
        self._drop_timers()
        for run, looks in list(self.uncertain.items()):
            if looks <= 0:
                del self.uncertain[run]
                self.lost_sight_of.add(partition_of(run, self._runner.member.count))
                continue
            self.uncertain[run] = looks - 1
            if self._partition(run) is not None:
                self._runner.want(run)

    def _drop_timers(self) -> None:
        """Forget timers of runs in partitions that this process no longer owns."""
        runner = self._runner
        if self._timed_in == runner.owned:
            return
        self._timed_in = dict(runner.owned)
        self._timers.drop_unless(lambda run: partition_of(run, runner.member.count) in runner.owned)

    # --- partitions

    def load(self, partition: OwnedPartition) -> None:
        """Begin to execute the open runs of a partition."""
        name = f"load {partition.number} {partition.since}"
        self._tasks.begin(name, lambda: until_done(partial(self._load, partition), "executor"))

    async def _load(self, partition: OwnedPartition) -> None:
        runner = self._runner
        if partition.is_loaded or not partition.is_owned or runner.logs is None:
            return
        log = runner.own_log(runner.logs)
        await partition.catch_up(log, runner.wanted.pop(partition.number, -1))
        partition.is_loaded = True
        try:
            await self._take_open_runs(log, partition)
        except BaseException:
            partition.is_loaded = False
            raise

    async def _take_open_runs(self, log: Log, partition: OwnedPartition) -> None:
        runner = self._runner
        await log_clock(log).begin(log)
        limits = {run.limit for run in partition.state.runs.values() if run.limit}
        turns = {name: await self._runs_of(log, name) for name in limits}
        for id_, run in list(partition.state.runs.items()):
            if id_ in runner.running:
                continue
            limited = turns.get(run.limit, {}).get(id_)
            # A run that waits for its turn is not read, unless it was executed before or has a
            # notification, such as a cancellation.
            if limited is None or limited.turn != Turn.WAITS or run.epoch or run.notified_at >= 0:
                self._schedule(log, id_, run)
        for name in limits:
            self.turns.look(name)

    async def _runs_of(self, log: Log, limit: str) -> dict[str, LimitedRun]:
        """Return the open runs of a limit; {} if the limit is unreadable. Then its runs are
        unreadable, too, and do not delay the other runs of the partition.
        """
        try:
            return (await self.turns.read(log, limit)).runs
        except IndilogError as error:
            if is_transient(error):
                raise
            structlog.get_logger().error("limit cannot be read", limit=limit, reason=str(error))
            return {}

    def _schedule(self, log: Log, id_: str, run: OpenRun) -> None:
        """Take a run now or later, depending on its phase. A parked run is retried with the current
        code.
        """
        if run.phase == Phase.WAITING and not run.is_notified:
            if run.until is not None:
                self._at(run.until - log_clock(log).now(), id_)
        else:
            if run.phase == Phase.PARKED:
                self._retried.add(id_)
            self._runner.want(id_)

    # --- taking

    async def _take_due(self) -> None:
        runner, crash_looping = self._runner, dict[str, int]()
        while self._due:
            await self._room()
            count = max(1, min(_TAKEN_AT_ONCE, runner.room))
            some = list(self._due)[:count]
            for id_ in some:
                del self._due[id_]
            await asyncio.gather(*(self._take_or_retry(id_, crash_looping) for id_ in some))
        if crash_looping:
            name = f"crash loops {waiting.new_name()}"
            taking = partial(self._crash_loops.take, crash_looping, self._take_one)
            self._crash_loops.begin(name, taking)

    async def _room(self) -> None:
        """Wait until this process may execute one more run."""
        while self._runner.room <= 0:
            self._runner.room_changed.clear()
            await self._runner.room_changed.wait()

    async def _take_or_retry(self, id_: str, crash_looping: dict[str, int] | None) -> None:
        try:
            await self._take(id_, crash_looping)
        except (IndilogError, Stopped) as error:
            structlog.get_logger().warning("executor waits for the log", reason=str(error))
            self._at(_PROBLEM_S, id_)

    async def _take_one(self, id_: str) -> asyncio.Task[None] | None:
        """Take a crash-looping run, and return the task that executes it."""
        await self._take_or_retry(id_, None)
        running = self._runner.running.get(id_)
        return None if running is None else running.task

    def retry(self, run: str) -> None:
        """Execute a parked run again now, even if it is crash-looping."""
        self._retried.add(run)
        self._again.add(run)
        self.want(run)

    def _end_retry(self, run: str) -> None:
        """Forget that a parked run is to be executed again, because it is no longer parked, or
        because something else will execute it.
        """
        self._again.discard(run)
        self._retried.discard(run)

    def _on_turn(self, id_: str, is_parked: bool) -> None:  # noqa: FBT001 - a callback
        """Execute a run that has got its turn, or end a run that gets no turn."""
        partition = self._partition(id_)
        if partition is None or id_ in self._runner.running:
            return
        if is_parked and partition.state.runs[id_].crashes >= CRASHES_PARKED:
            self._begin_group(id_)
        elif is_parked:
            self.retry(id_)
        else:
            self.want(id_)

    def _begin_group(self, id_: str) -> None:
        """Take one run that was parked as crash-looping, separately from all other runs."""
        self._again.add(id_)
        taking = partial(self._crash_loops.take_group, [id_], self._take_one)
        self._crash_loops.begin(id_, taking)

    async def _take(self, id_: str, crash_looping: dict[str, int] | None) -> None:
        """Take an open run and execute it. If `crash_looping` is given and the run is
        crash-looping, do not execute it: add it to `crash_looping`, with its number of crashes.
        """
        partition, runner = self._partition(id_), self._runner
        self._timers.drop(id_)
        self._paused.discard(id_)
        if partition is None:
            self._end_retry(id_)
            if (owned := runner.owned.get(partition_of(id_, runner.member.count))) is not None:
                owned.is_loaded = False  # the lease has ended; loaded again when it is renewed
            return
        if runner.logs is None:
            return
        log = runner.own_log(runner.logs)
        async with runner.exclusive(id_):
            if id_ in runner.running or not partition.is_usable:
                self._end_retry(id_)
                return
            with SkipUnreadable(id_) as skipping:
                await self._take_readable(log, id_, partition, crash_looping)
            if skipping.failed:
                self.want_later(id_)

    async def _take_readable(
        self,
        log: Log,
        id_: str,
        partition: OwnedPartition,
        crash_looping: dict[str, int] | None,
    ) -> None:
        try:
            run = await read_run(log, id_, RunState(), is_reused=True)
        except TrimmedError:
            run = RunState()
        if run.started is None or run.finished is not None:
            self._end_retry(id_)
            return await self._forget(log, id_, run, partition)
        self.uncertain.pop(id_, None)
        if run.parked is not None and id_ not in self._again:
            is_retried = id_ in self._retried or run.is_cancelled_while_parked
            if self._is_paused(log, id_, run) or not is_retried:
                self._end_retry(id_)
                return None
        if run.started.limit is not None and not await self._has_turn(log, id_, run, partition):
            self._end_retry(id_)  # the run is retried when it gets its turn
            return None
        crashes = crashes_of(run, self._runner.member.owners)
        is_looping = is_crash_looping(crashes) and crashes < CRASHES_PARKED
        if crash_looping is not None and is_looping and run.parked is None:
            crash_looping[id_] = crashes
            return None
        return await self._take_run(log, id_, run, partition, crashes)

    async def _has_turn(self, log: Log, id_: str, run: RunState, partition: OwnedPartition) -> bool:
        """Tell whether a run with a limit may execute now. If it may neither execute nor wait, end
        the run.
        """
        limited = await self.turns.find(log, id_, run)
        if limited is None or limited.turn == Turn.HAS_TURN:
            return True
        failure = await self._why_ended(log, id_, run, limited)
        runner = self._runner
        if failure is not None and await runner.take_epoch(log, id_, run, partition, 0):
            execution = Execution(log, id_, run, runner.lease_of(partition), runner.member.count)
            await execution.end_unbegun(failure)
            partition.note_record()
        return False

    async def _why_ended(
        self, log: Log, id_: str, run: RunState, limited: LimitedRun
    ) -> RecordedFailure | None:
        """Return why a run without a turn must end; None: it waits."""
        if limited.turn == Turn.DEADLOCKED:
            assert run.started is not None, "only a run that has begun is deadlocked"
            return RecordedFailure(
                FlowSettingsError.__name__,
                f"Run {id_!r} would wait forever: all runs that have a place in the limit of "
                f"{run.started.workflow!r} wait for it, or for others like it. Give parents and "
                "children different limits.",
            )
        if limited.turn == Turn.SKIPPED:
            reason = await self._why_skipped(log, run)
        elif limited.turn == Turn.REFUSED:
            reason = f"Refused, because {WAITING_MAX:,} runs waited for their turn."
        elif run.cancel_asked and not limited.has_begun:
            reason = "The run was cancelled before it began."
        else:
            return None
        return RecordedFailure(Cancelled.__name__, reason)

    async def _why_skipped(self, log: Log, run: RunState) -> str:
        assert run.started is not None, "only a run that has begun is skipped"
        assert run.started.limit is not None, "only a limited run is skipped"
        first = next(iter((await self.turns.read(log, run.started.limit.name)).having), None)
        other = "an earlier run" if first is None else f"run {first!r}"
        return f"Skipped, because {other} of the same schedule had not ended."

    def _is_paused(self, log: Log, id_: str, run: RunState) -> bool:
        """Tell whether a run was parked as crash-looping. If so, set the timer for its retry."""
        if run.crashes < CRASHES_PARKED:
            return False
        waited_s = max(0.0, log_clock(log).now() - run.parked_at)
        self._paused.add(id_)
        self._at(max(0.0, retry_s(run) - waited_s), id_)
        return True

    async def _forget(self, log: Log, id_: str, run: RunState, partition: OwnedPartition) -> None:
        """Remove a run from the partition's open runs if its start there repeated an earlier start,
        and so opened no run.
        """
        if run.finished is not None:
            self.uncertain.pop(id_, None)
        await partition.catch_up(log)
        known = partition.state.runs.get(id_)
        if known is None or (run.started is not None and run.started_at == known.started_at):
            return
        tags = (limit_tag(known.limit), INBOX_TAG) if known.limit else ()
        forgotten = Entry(
            encode(RunForgotten(id_, known.started_at)), (partition_tag(partition.number), *tags)
        )
        await append_with_retry(log, [forgotten])
        partition.note_record()

    async def _take_run(
        self, log: Log, id_: str, run: RunState, partition: OwnedPartition, crashes: int
    ) -> None:
        runner, was_parked = self._runner, run.parked is not None
        definition = runner.versions.choose(run)
        code = None if definition is None else code_after(run, definition)
        if run.move_asked is not None:
            code = None  # the run is moved below, when earlier executions can decide nothing more
        if await self._waits_for_code(log, id_, run) or self._gives_way(id_, run, code):
            return
        if not await runner.take_epoch(log, id_, run, partition, crashes, code):
            return
        self._end_retry(id_)
        assert run.started is not None, "only a run that has begun is executed"
        assert runner.logs is not None, "runs are taken with access to logs"
        lease = runner.lease_of(partition)
        if run.move_asked is not None:
            definition = await self._move(log, id_, run, definition)
            code = run.code if definition is None else definition.code
            if not await runner.take_epoch(log, id_, run, partition, crashes, code):
                return
        if definition is None:
            reason = f"The deployed code has no workflow {run.started.workflow!r}."
            await Execution(log, id_, run, lease, runner.member.count).park(reason)
        elif crashes >= CRASHES_PARKED and not was_parked:
            await self._park_crash_loop(Execution(log, id_, run, lease, runner.member.count))
        else:
            runner.execute(runner.logs, definition, id_, run, partition)

    async def _waits_for_code(self, log: Log, id_: str, run: RunState) -> bool:
        """Tell whether the code of a run is kept but not loaded in this process. If so, note the
        reason in the run's history, and take the run again later.
        """
        why = self._runner.versions.missing(run)
        if why is None:
            return False
        if run.move_asked is not None and await self._move(log, id_, run, None) is not None:
            return False
        self.want_later(id_)
        known = run.noted.get(CODE)
        if run.epoch and (known is None or known.error != why):
            structlog.get_logger().warning("run waits for its code", run=id_, reason=why)
            since = log_clock(log).now() if known is None else known.since
            note = OperationNoted(run.epoch, CODE, CODE, CODE, since, 1, why)
            await append_with_retry(log, [Entry(encode(note), (run_tag(id_),))])
        return True

    async def _move(
        self, log: Log, id_: str, run: RunState, definition: Definition | None
    ) -> Definition | None:
        """Return the code with which a run continues after a request to move it: the wanted code if
        that can continue the run, else `definition`, the present code.
        """
        assert run.move_asked is not None, "the move was asked for"
        assert run.started is not None, "only a run that has begun is moved"
        assert self._runner.logs is not None, "runs are taken with access to logs"
        wanted = self._runner.versions.of(run.move_asked, run.started.workflow)
        reason: str | None = "its code is not kept"
        if wanted is not None:
            found = await find_mismatch(wanted, log, self._runner.logs, id_, run)
            reason = None if found is None else found.reason
        if reason is None:
            return wanted
        structlog.get_logger().warning(
            "run not moved", run=id_, version=run.move_asked.version, reason=reason
        )
        return definition

    def _gives_way(self, id_: str, run: RunState, code: CodeVersion | None) -> bool:
        """Postpone a run whose deployment is later than the deployment of this process, because
        this process is likely to get the later one soon. Return whether the run was postponed.

        Args:
            id_: id of the run.
            run: the run.
            code: the code to which the run would change here.
        """
        needed, own = run.code, code
        if run.move_asked is not None:
            needed, own = run.move_asked, self._runner.versions.code
        is_later = needed is not None and own is not None and needed.version > own.version
        if not is_later or self._failures.get(id_, 0) >= _GIVES_WAY_MAX:
            return False
        self.want_later(id_)
        return True

    async def _park_crash_loop(self, execution: Execution) -> None:
        """Park a crash-looping run. If the run crashed a process again after its cancellation, end
        it instead.

        A cancelled run is executed once more, alone, so that it can run its compensations.
        """
        run = execution.run
        structlog.get_logger().warning("run parked", run=execution.id, crashes=run.crashes)
        is_cancelled = run.cancel_asked and run.crashes > CRASHES_PARKED
        await execution.park(parked_reason(run.crashes), is_cancelled=is_cancelled)
        if not is_cancelled:
            self._paused.add(execution.id)
            self._at(retry_s(run), execution.id)
