"""Executes the runs of one process.

A run that is started here begins in a partition that this process owns, so no other process
executes the run. After an interrupted execution, the next execution has a new epoch. So if appends
of the interrupted execution are still in flight, they have no effect.

`flow` starts runs with `Runner`. `taking` takes over the open runs of a partition.
`runs.execution` executes one run. The base classes are in `taking`, `turns` and
`ownership.executor`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from bokiflow.definition import Definition, check_same_run
from bokiflow.limits.limit_state import WAITING_MAX
from bokiflow.operations.compensation import run_compensated
from bokiflow.operations.notifications import WAIT_COUNTER
from bokiflow.ownership.member import share_of
from bokiflow.ownership.partition import OwnedPartition
from bokiflow.ownership.partition_state import PartitionState
from bokiflow.queries import QueryLimits
from bokiflow.running import LocalRun, await_body
from bokiflow.runs import waiting
from bokiflow.runs.errors import ChangedWorkflowError, FlowSettingsError, RunIdInUseError
from bokiflow.runs.execution import Execution
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import CALL, Stopped
from bokiflow.runs.recent_starts import RecentStarts
from bokiflow.runs.records import (
    INBOX_TAG,
    PARTITIONS,
    CancelAsked,
    CodeVersion,
    MoveAsked,
    Origin,
    RetryAsked,
    RunFinished,
    RunLimit,
    RunRecord,
    RunStarted,
    RunTaken,
    StepDecided,
    encode,
    limit_tags,
    partition_of,
    partition_tag,
    run_tag,
    starts_tag,
)
from bokiflow.runs.rounds import ContinuedAsNew, trim_past
from bokiflow.runs.run_log import RunUnreadable, append_with_retry, is_transient, read_run
from bokiflow.runs.run_state import RunState
from bokiflow.taking import RunExecutor, Taking
from bokiflow.versions import Versions
from bokiflow.workflow import Workflow
from indilog import (
    Context,
    Entry,
    IndilogError,
    InvalidArgumentsError,
    Log,
    OverloadedError,
    TooLargeError,
)
from indilog.sdk import Logs, SeqNum

EXECUTIONS_MAX: Final = 1024
"""Default for the number of runs that a process executes concurrently."""
RUNS_PER_EXECUTION: Final = 16
"""Number of waiting runs that count as much as one executing run."""
_CANCELS_MAX: Final = 4096
_RUNS_READ_MAX: Final = 64
"""Largest number of runs that are kept in memory after a read of their status. The least recently
used run is dropped first. Each run takes as much memory as an executing run.
"""
_AGAIN_S: Final = 1.0
_AGAIN_S_MAX: Final = 60.0
_NAMES: Final = 4096
"""Largest number of random ids that are tried to find one in a partition of this process."""


@dataclass(slots=True)
class _Exclusive:
    mutex: waiting.Mutex = field(default_factory=waiting.Mutex)
    users: int = 0
    is_wanted: bool = False


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """The settings of an executor; see also the arguments of `bokiflow.Flow`.

    Attributes:
        lease_s: seconds after this process's last heartbeat until other processes take over its
            runs.
        executions_max: largest number of runs that this process executes concurrently.
        partitions: number of partitions, if this process is the first user of the flow.
        retention_s: seconds for which an ended run is kept.
        passive_after_s: seconds after which a run that only waits is removed from memory.
        cancel_grace_s: seconds after a cancellation until bodies of the run are ended.
        query_timeout_s: seconds after which a query of a run fails.
    """

    lease_s: float
    executions_max: int = EXECUTIONS_MAX
    partitions: int = PARTITIONS
    retention_s: float = 0.0
    passive_after_s: float = math.inf
    cancel_grace_s: float = math.inf
    query_timeout_s: float = math.inf


class Runner(RunExecutor):
    """Executes runs.

    Args:
        log_name: name of the log of the runs.
        versions: the workflows, in the deployments that are loaded in this process.
        scope: the platform whose runs are executed (`Log.scope`).
        settings: the settings of this executor.

    Attributes:
        scope, settings: see the arguments.
        recent_starts: the newest starts, in which runs are found by the beginning of their ids.
        taking: takes over open runs of the partitions that this process owns.
        runs_read: the runs whose status was read last, by id.
        query_limits: limits of the queries that this process answers.
    """

    def __init__(
        self, log_name: str, versions: Versions, scope: object, settings: RunnerSettings
    ) -> None:
        super().__init__(log_name, settings.lease_s, settings.partitions, versions)
        self.scope = scope
        self.settings = settings
        self.query_limits = QueryLimits(settings.query_timeout_s)
        self.taking = Taking(self)
        self.recent_starts = RecentStarts()
        self.runs_read: LRUCache[str, RunState] = LRUCache(_RUNS_READ_MAX)
        self._partitions_read: dict[int, OwnedPartition] = {}
        """Partitions of other executors, as read by the last list or search of runs."""
        self._starting = 0
        self._resting = 0
        self._exclusive: dict[str, _Exclusive] = {}
        self._cancels: LRUCache[str, SeqNum] = LRUCache(_CANCELS_MAX)
        """The seqnum of the last cancellation that was read for a run, by the run's id. A run may
        have been read before its cancellation and be executed after it.
        """

    # --- beginning runs

    async def start(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        id: str | None,  # noqa: A002 - a public name
        *,
        parent: Origin | None = None,
        limit: RunLimit | None = None,
    ) -> tuple[str, LocalRun | None]:
        """Start a run, unless a run with this id exists. Return the id, and the run if this process
        executes it. `limit`: the limit of the run; None: the limit of its workflow, if there is
        one.

        Raises:
            RunIdInUseError: a run of another workflow has this id.
            OverloadedError: this process executes too many runs, or too many runs wait for their
                turn; nothing was done.
            InvalidArgumentsError: the arguments give no valid key or priority of the limit; nothing
                was done.
        """
        if id is not None and (running := self.running.get(id)) is not None:
            running.check_same_run(definition, arguments)
            return id, running
        limit = limit or definition.limit_of(arguments)
        if parent is None:  # a parent must not wait for room for its child
            self._check_room(limit)
        self._starting += 1
        try:
            run_id = await self._place(logs, id)
            async with self.exclusive(run_id), self._looked_for(run_id):
                if (running := self.running.get(run_id)) is not None:  # started meanwhile
                    running.check_same_run(definition, arguments)
                    return run_id, running
                started = RunStarted(
                    definition.name,
                    arguments,
                    "",
                    definition.version,
                    parent,
                    limit=limit,
                    code=definition.code,
                )
                return run_id, await self._begin(
                    logs, run_id, definition, started, is_new=id is None
                )
        finally:
            self._starting -= 1
            self.room_changed.set()

    async def _place(self, logs: Logs, id_: str | None) -> str:
        """Return the id of a run to start. Its partition is owned by this process, if possible."""
        member, log = self.member, self.own_log(logs)
        await member.look_once(log)
        if id_ is None:
            if not self._has_usable():
                await self.look(logs)
                await self.join(logs, share_of(member))
            return self._new_id()
        if self.owns(partition_of(id_, member.count)) is None:
            await self.look(logs)
            number = partition_of(id_, member.count)
            if number in self.owned or member.is_claimable(number):
                await self.join(logs, [number])
        return id_

    def _has_usable(self) -> bool:
        """Tell whether this process owns a partition in which runs may begin."""
        return self.member.lease.is_sure() and any(p.is_usable for p in self.owned.values())

    def _new_id(self) -> str:
        name = waiting.new_name()
        for _ in range(_NAMES if self._has_usable() else 0):
            if self.owns(partition_of(name, self.member.count)) is not None:
                break
            name = waiting.new_name()
        return name

    async def _begin(
        self, logs: Logs, run_id: str, definition: Definition, started: RunStarted, *, is_new: bool
    ) -> LocalRun | None:
        log, number = logs.log(self.log_name), partition_of(run_id, self.member.count)
        partition = self.owns(number)
        if partition is not None and started.limit is None:
            started = replace(started, executor=self.member.name)
        tags = _start_tags(run_id, started, number, is_here=bool(started.executor))
        again = list[str]()
        entry = Entry(encode(started), tags)
        seqnum = await append_with_retry(log, [entry], lambda: again.append(run_id))
        run = RunState()
        if partition is not None:
            partition.note_record()
        if partition is not None and is_new and not again:  # no earlier copy of the start exists
            run.apply(seqnum, max(0.0, log_clock(log).now()), started)
        else:
            await read_run(log, run_id, run, seqnum, is_reused=True)
        assert run.started is not None, "the start was read"
        if run.finished is not None and partition is not None:
            self.taking.want(run_id)  # `Taking` removes this start from the open runs
        check_same_run(run_id, definition, started.arguments, run)
        is_its = run.started_at == seqnum and run.epoch == 1
        if is_its and partition is not None and not self.lease_of(partition).has_ended():
            return self.execute(logs, definition, run_id, run, partition)
        if run.finished is None:
            await self._leave_to_owner(logs, number, run_id, started.limit)
        return None

    async def _leave_to_owner(
        self, logs: Logs, number: int, run_id: str, limit: RunLimit | None
    ) -> None:
        """Let the owner of the partition execute a run. If there is no owner, this process executes
        it.
        """
        if self.owns(number) is not None:
            self._want_started(run_id, limit)
            return
        await self.look(logs)
        if self.member.is_claimable(number):
            await self.join(logs, [number])
        elif not self.member.takes:
            self.hop(number)

    def _want_started(self, run_id: str, limit: RunLimit | None) -> None:
        """Execute a run that has started, as soon as it has its turn."""
        if limit is None:
            self.taking.want(run_id)
        else:
            self.taking.turns.look(limit.name)

    async def fork(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        forked: Origin,
        decided: Sequence[StepDecided],
    ) -> str:
        """Start a run with outcomes that are already decided; return its id.

        Raises:
            TooLargeError: the outcomes do not fit into one batch of records; nothing was done.
        """
        limit = definition.limit_of(arguments)
        self._check_room(limit)
        self._starting += 1
        try:
            run_id = await self._place(logs, None)
            async with self.exclusive(run_id), self._looked_for(run_id):
                log, number = logs.log(self.log_name), partition_of(run_id, self.member.count)
                partition, name = self.owns(number), self.member.name
                started = RunStarted(
                    definition.name,
                    arguments,
                    name,
                    definition.version,
                    forked=forked,
                    limit=limit,
                    code=definition.code,
                )
                is_here = partition is not None
                tags = _start_tags(run_id, started, number, is_here=is_here)
                steps = [Entry(encode(step), tags[:1]) for step in decided]
                last = await append_with_retry(log, [Entry(encode(started), tags), *steps])
                run = await read_run(log, run_id, RunState(), last)
                if partition is not None:
                    partition.note_record()
                may_begin = partition is not None and not self.lease_of(partition).has_ended()
                if partition is not None and may_begin and limit is None:
                    self.execute(logs, definition, run_id, run, partition)
                else:
                    await self._leave_to_owner(logs, number, run_id, limit)
        finally:
            self._starting -= 1
            assert self._starting >= 0, "each start ends once"
            self.room_changed.set()
        return run_id

    @asynccontextmanager
    async def exclusive(self, run: str) -> AsyncIterator[None]:
        """See `RunExecutor.exclusive`."""
        alone = self._exclusive.setdefault(run, _Exclusive())
        alone.users += 1
        try:
            async with alone.mutex:
                yield
        finally:
            alone.users -= 1
            assert alone.users >= 0, "each user leaves once"
            if not alone.users:
                del self._exclusive[run]
                if alone.is_wanted and run not in self.running:
                    self.taking.want(run)

    def want(self, run: str) -> None:
        """See `RunExecutor.want`."""
        if (alone := self._exclusive.get(run)) is not None:
            alone.is_wanted = True
        else:
            self.taking.want(run)

    @asynccontextmanager
    async def _looked_for(self, run: str) -> AsyncIterator[None]:
        """Enter a block that appends the start of a run. If the append fails, its record may be in
        flight or in the log. So this process looks for the run afterwards.
        """
        try:
            yield
        except (TooLargeError, RunIdInUseError):
            raise
        except BaseException as error:  # also if the caller is cancelled
            if not _has_done_nothing(error):
                self.taking.want_soon(run)
            raise

    async def read_partition(self, log: Log, number: int, *, own: SeqNum = -1) -> PartitionState:
        """Return the open runs of a partition of any executor. They reflect all records that the
        session of `log` sees. If `own` is given, they also reflect the partition's record at this
        seqnum.
        """
        partition = self.owned.get(number)
        if partition is None:
            partition = self._partitions_read.setdefault(number, OwnedPartition(number, 0))
        else:
            self._partitions_read.pop(number, None)
        await partition.catch_up(log, own)
        return partition.state

    # --- room

    def _check_room(self, limit: RunLimit | None) -> None:
        if limit is not None and self.taking.turns.is_full(limit.name):
            raise OverloadedError(
                f"{WAITING_MAX:,} runs wait for their turn in {limit.name!r} already; try again "
                "later."
            )
        if self.room <= 0:
            raise OverloadedError(
                f"{self.settings.executions_max:,} workflows run in this process already; try "
                "again later."
            )

    @property
    def room(self) -> int:
        """See `RunExecutor.room`."""
        runs = len(self.running) + self._starting
        busy = runs - self._resting
        return min(
            self.settings.executions_max - busy,
            self.settings.executions_max * RUNS_PER_EXECUTION - runs,
        )

    def _count_waiting(self, running: LocalRun, by: int) -> None:
        """Count an operation of a run that begins to wait (`by` is 1) or stops waiting (-1)."""
        was_resting = running.waits > 0
        running.waits += by
        assert running.waits >= 0, "each wait ends once"
        self._resting += (running.waits > 0) - was_resting
        assert 0 <= self._resting <= len(self.running) + 1, (
            "only runs of this process are counted as waiting"
        )
        if self.room > 0:
            self.room_changed.set()

    # --- executing

    def execute(
        self,
        logs: Logs,
        definition: Definition,
        id: str,  # noqa: A002
        run: RunState,
        partition: OwnedPartition,
    ) -> LocalRun | None:
        """See `RunExecutor.execute`."""
        if id in self.running or not partition.is_usable:
            return self.running.get(id)
        running = LocalRun(definition, self._execution(logs, id, run, partition), partition)
        self.running[id] = running
        self._notify_cancelled(running.execution)
        running.task = asyncio.create_task(self._execute(logs, running))
        running.task.add_done_callback(partial(self._on_task_ended, running))
        return running

    def _execution(
        self, logs: Logs, id_: str, run: RunState, partition: OwnedPartition
    ) -> Execution:
        lease, log = self.lease_of(partition), logs.log(self.log_name)
        listed_s, grace_s = self.settings.retention_s / 2, self.settings.cancel_grace_s
        return Execution(log, id_, run, lease, self.member.count, listed_s, grace_s)

    async def _execute(self, logs: Logs, running: LocalRun) -> None:
        CALL.set(None)  # the task outlives the call that started it
        if isinstance(logs, Context):
            logs.begin()
        WAIT_COUNTER.set(partial(self._count_waiting, running))
        try:
            running.end(await self._execute_with_retry(logs, running))
        except ChangedWorkflowError as error:
            structlog.get_logger().warning("run parked", run=error.run, reason=str(error))

    def _on_task_ended(self, running: LocalRun, task: asyncio.Task[None]) -> None:
        """Handle the end of a run's task, which may have been cancelled before it began."""
        id_, partition = running.execution.id, running.partition
        del self.running[id_]
        partition.note_record()
        is_cancelled = not running.has_finished and self._is_cancelled(running.execution)
        has_finished = running.has_finished
        running.end(None)
        self.room_changed.set()
        if not partition.is_usable:
            return
        if task.cancelled():
            is_wanted = running.is_notified if running.is_passive else running.was_stopped
        elif (error := task.exception()) is not None:
            structlog.get_logger().error("execution of a run failed", run=id_, exc_info=error)
            self.taking.want_later(id_)
            return
        else:
            is_wanted = is_cancelled or (running.is_passive and not has_finished)
        if not self.member.lease.is_sure():
            partition.is_loaded = False
        elif is_wanted:
            self.taking.want(id_)

    async def _execute_with_retry(self, logs: Logs, running: LocalRun) -> RunFinished | None:
        """Execute a run until it ends, with retries. Return None if only the execution ended: the
        run was parked, leaves memory, or is executed by another process, now or soon.
        """
        wait_s, is_again = _AGAIN_S, False
        while True:
            try:
                if is_again:
                    anew = await self._next_execution(logs, running)
                    if not isinstance(anew, Execution):
                        return anew
                    running.execution = anew
                    self._notify_cancelled(anew)
                return await self._rounds(logs, running)
            except ChangedWorkflowError:
                raise
            except (Stopped, IndilogError) as error:
                if running.partition.is_releasing or running.is_passive:
                    running.is_notified = True
                    return None
                structlog.get_logger().warning(
                    "run is retried", run=running.execution.id, reason=str(error)
                )
                is_away = not isinstance(error, RunUnreadable) and (
                    isinstance(error, Stopped) or is_transient(error)
                )
                wait_s = _AGAIN_S if is_away else min(2 * wait_s, _AGAIN_S_MAX)
            await waiting.pause(wait_s)
            is_again = True

    async def _rounds(self, logs: Logs, running: LocalRun) -> RunFinished | None:
        """Execute a run in its current epoch, round after round."""
        while True:
            try:
                return await self._once(logs, running)
            except ContinuedAsNew:
                await self._begin_round(logs, running)

    async def _begin_round(self, logs: Logs, running: LocalRun) -> None:
        """Begin the next round of a run after its round has ended in this process.

        Raises:
            Stopped: another process may execute the run now.
        """
        before, partition = running.execution, running.partition
        partition.note_record()
        await trim_past(before.log, before.id, before.run)
        if self.lease_of(partition).has_ended():
            raise Stopped("The lease of this executor has ended.")
        running.definition = self.versions.choose(before.run) or running.definition
        running.execution = self._execution(logs, before.id, before.run, partition)
        running.waits_since = None
        self._notify_cancelled(running.execution)

    async def _once(self, logs: Logs, running: LocalRun) -> RunFinished | None:
        """Execute the current round of a run."""
        execution, definition = running.execution, running.definition
        started = execution.run.started
        assert started is not None, "only a run that has begun is executed"
        await log_clock(execution.log).begin(execution.log)
        wf = Workflow(execution, logs)
        try:
            arguments = definition.signature.arguments(started.arguments)
        except (InvalidArgumentsError, FlowSettingsError, TypeError) as error:
            return await execution.park(str(error))
        code = await_body(definition.result_text(wf, arguments))
        body = execution.grace.run_workflow(code, execution.mark_notified)
        calls = running.calls = wf.held_calls
        try:
            finished = await execution.execute(run_compensated(wf.compensations, body))
        except ContinuedAsNew:
            await calls.release_all()
            raise
        except ChangedWorkflowError:  # the run is parked
            await calls.release_recorded()
            raise
        await calls.release_all()
        return finished

    async def _next_execution(
        self, logs: Logs, running: LocalRun
    ) -> Execution | RunFinished | None:
        """Return the next execution of a run if this process still owns its partition. Otherwise
        return the run's end, or None if the run has not ended.
        """
        before, partition = running.execution, running.partition
        log, id_ = before.log, before.id
        run = await read_run(log, id_, RunState(), is_reused=True)
        if run.started_at != before.run.started_at:
            return None  # the run has ended and was trimmed
        if run.finished is not None or run.parked is not None or not partition.is_usable:
            return run.finished
        if self.lease_of(partition).has_ended():
            raise Stopped("The lease of this executor has ended.")
        if await self.take_epoch(log, id_, run, partition, run.crashes):
            return self._execution(logs, id_, run, partition)
        return run.finished

    async def take_epoch(
        self,
        log: Log,
        id_: str,
        run: RunState,
        partition: OwnedPartition,
        crashes: int,
        code: CodeVersion | None = None,
    ) -> bool:
        """See `RunExecutor.take_epoch`."""
        taken = RunTaken(run.epoch + 1, self.member.name, crashes, code)
        assert run.started is not None, "only a run that has begun is taken"
        tags = (run_tag(id_), partition_tag(partition.number), *limit_tags(run.started.limit))
        seqnum = await append_with_retry(log, [Entry(encode(taken), tags)])
        partition.note_record()
        await read_run(log, id_, run, seqnum)
        is_its = (run.epoch, run.executor) == (taken.epoch, taken.executor)
        if not is_its and run.finished is None:  # a former owner of the partition has taken it
            self.taking.wake_at(id_, _AGAIN_S)
        return is_its and run.finished is None and run.parked is None

    # --- notifications

    def _on_news(self, partition: OwnedPartition, run: str, record: RunRecord | None) -> None:
        partition.note_record()
        if isinstance(record, CancelAsked):
            self._cancels[run] = self._inbox.end or 0
        if (running := self.running.get(run)) is not None:
            running.is_notified = True
            if isinstance(record, CancelAsked):
                self._notify_cancelled(running.execution)
            elif isinstance(record, MoveAsked):
                self.begin(f"move {run}", partial(self._end_for_move, running))
        elif isinstance(record, RetryAsked | MoveAsked):
            self.taking.retry(run)
        elif isinstance(record, RunStarted):
            self._want_started(run, record.limit)
        else:
            self.want(run)

    def _is_cancelled(self, execution: Execution) -> bool:
        """Tell whether a cancellation of this run and round was read. A cancellation of an earlier
        run with the same id, or of an earlier round, does not count.
        """
        return self._cancels.get(execution.id, -1) > execution.run.round_at

    def _notify_cancelled(self, execution: Execution) -> None:
        if self._is_cancelled(execution):
            execution.ask_cancel()

    # --- see `RunExecutor`

    def _has_work(self) -> bool:
        return bool(self.running or self._starting or self.taking.has_work)

    def _stop_runs(self, partition: OwnedPartition | None = None) -> list[asyncio.Task[None]]:
        tasks = []
        for running in self.running.values():
            if running.task is not None and partition in {None, running.partition}:
                if running.was_stopped:
                    running.execution.grace.abandon()
                running.was_stopped = True
                running.cancel()
                tasks.append(running.task)
        return tasks

    def _load(self, partition: OwnedPartition) -> None:
        self.taking.load(partition)

    def _on_limit(self, limit: str) -> None:
        self.taking.turns.on_record(limit)

    def _uncertain(self) -> set[int]:
        uncertain = {partition_of(run, self.member.count) for run in self.taking.uncertain}
        return uncertain | self.taking.lost_sight_of

    def _tidy(self) -> None:
        self.taking.tidy()
        now = waiting.monotonic_now()
        for id_, running in self.running.items():
            if not running.may_be_passive:
                running.waits_since = None
            elif running.waits_since is None or running.waits_end != running.execution.run.end:
                running.waits_since, running.waits_end = now, running.execution.run.end
            elif now - running.waits_since >= self.settings.passive_after_s:
                self.begin(f"passive {id_}", partial(self._make_passive, running))

    async def _make_passive(self, running: LocalRun) -> None:
        """End an execution that only waits. The run is taken again when its wait may be over."""
        execution, task = running.execution, running.task
        if running.is_passive or not running.may_be_passive or task is None or task.done():
            return
        until = min((ends for ends, _, _ in execution.waits.values()), default=math.inf)
        what = ", ".join(map(str, execution.asked.left()))
        running.is_passive = execution.is_ending = True
        running.is_notified = False
        # Records before `end` were handled long ago. A later record may be being handled now.
        end = running.waits_end
        try:
            await execution.note_waits(None if until == math.inf else until, what, end)
            if running.calls is not None:
                await running.calls.release_recorded()
            page = await execution.log.read_range(run_tag(execution.id), end)
            running.is_notified = running.is_notified or len(page) > 1
        except BaseException:
            running.is_notified = True  # so that the run is taken again
            raise
        finally:
            running.cancel()
        await asyncio.wait([task])
        if not running.is_notified and not running.has_finished and until < math.inf:
            self.taking.wake_at(execution.id, until - log_clock(execution.log).now())

    async def _end_for_move(self, running: LocalRun) -> None:
        """End an execution when its bodies have ended. Then `Taking` takes the run again."""
        running.is_passive = running.execution.is_ending = True
        while (task := running.task) is not None and not task.done():
            if running.may_stop:
                running.cancel()
            await asyncio.wait([task], timeout=_AGAIN_S)

    async def _wait_for_bodies(
        self, partitions: Collection[OwnedPartition]
    ) -> Collection[OwnedPartition]:
        while True:
            left = [one for one in self.running.values() if one.partition in partitions]
            for one in left:
                if one.may_stop and one.task is not None:
                    one.cancel()
            ended = set(partitions).difference(one.partition for one in left)
            if ended:
                return ended
            tasks = [one.task for one in left if one.task is not None]
            await asyncio.wait(tasks, timeout=_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)

    async def _stop_taking(self) -> None:
        await self.taking.stop()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return all tasks of this executor."""
        running = [one.task for one in self.running.values() if one.task is not None]
        return [*super().tasks(), *running, *self.taking.tasks()]


def _start_tags(run: str, started: RunStarted, partition: int, *, is_here: bool) -> tuple[str, ...]:
    """Return the tags of a start.

    `is_here`: whether the executor that appends the start executes the run. If so, no other
    executor needs to read the record at once.
    """
    wakes = () if is_here else (INBOX_TAG,)
    lists = (starts_tag(None), starts_tag(started.workflow), *limit_tags(started.limit))
    return (run_tag(run), *lists, partition_tag(partition), *wakes)


def _has_done_nothing(error: BaseException) -> bool:
    """Tell whether a public call that fails with `error` has certainly appended nothing."""
    call = CALL.get()
    has_answer = isinstance(error, IndilogError | Stopped)
    return call is not None and has_answer and call.has_done_nothing
