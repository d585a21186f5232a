"""Executes the runs of one process.

Before this process appends a record that assigns a run to it, it registers the run as pending. The
run stays pending until it is executed, parked or owned by another executor. So a durable run is
executed even if its start fails halfway (`bokiflow.takeover.pending_assignments`). After an
interrupted execution, the next execution has a new epoch. So appends of the interrupted execution
that are still in flight have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import structlog
from cachetools import LRUCache

from bokiflow.definition import Definition, check_same_run
from bokiflow.operations.compensation import run_compensated
from bokiflow.operations.notifications import WAIT_COUNTER
from bokiflow.running import LocalRun, await_body
from bokiflow.runs import waiting
from bokiflow.runs.errors import ChangedWorkflowError, FlowSettingsError, RunIdInUseError
from bokiflow.runs.execution import Execution
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import CALL, Stopped
from bokiflow.runs.records import (
    RUNS_TAG,
    Origin,
    RunFinished,
    RunStarted,
    RunTaken,
    StepDecided,
    encode,
    executor_tag,
    run_tag,
)
from bokiflow.runs.run_log import Logs, RunUnreadable, is_transient, read_run
from bokiflow.runs.run_state import Run
from bokiflow.takeover.crash_loops import CRASHES_PARKED, parked_reason, retry_s
from bokiflow.takeover.heartbeat import HeartbeatSender
from bokiflow.takeover.lease import Lease
from bokiflow.takeover.pending_assignments import PendingAssignments
from bokiflow.workflow import Workflow
from indilog import (
    Context,
    Entry,
    IndilogError,
    InvalidArgumentsError,
    Log,
    OverloadedError,
    TooLargeError,
    TrimmedError,
)
from indilog.sdk import SeqNum

EXECUTIONS_MAX: Final = 1024
"""Default for the number of runs that a process executes concurrently."""
RUNS_PER_EXECUTION: Final = 16
"""Waiting runs that count as much as one executing run."""
_CANCELS_MAX: Final = 4096
_AGAIN_S: Final = 1.0
_AGAIN_S_MAX: Final = 60.0


class Runner(HeartbeatSender):
    """Executes runs.

    Args:
        log_name: name of the log of the runs.
        definitions: the workflows, by name.
        lease_s: seconds after this process's last heartbeat until other processes take over its
            runs.
        executions_max: largest number of runs that this process executes concurrently.

    Attributes:
        running: the runs that this process executes, by id.
    """

    def __init__(
        self,
        log_name: str,
        definitions: dict[str, Definition],
        *,
        lease_s: float,
        executions_max: int = EXECUTIONS_MAX,
    ) -> None:
        super().__init__(log_name, lease_s)
        self.definitions = definitions
        self.running: dict[str, LocalRun] = {}
        self.executions_max = executions_max
        self._starting = 0
        self._resting = 0
        self._pending = PendingAssignments()
        self._left_from: SeqNum | None = None
        self._cancels: LRUCache[str, SeqNum] = LRUCache(_CANCELS_MAX)
        """The last cancellations that were read.

        They are kept because a run may have been read before its cancellation, or may be parked
        later.
        """
        self.on_room: list[Callable[[], None]] = []
        self.on_cancel: list[Callable[[str], None]] = []
        """Called with the id of a run whose cancellation is requested and that is not executed
        here.
        """
        self.on_crash_loop: list[Callable[[str, float], None]] = []
        """Called with the id of a run that was parked as crash-looping, and the seconds until its
        retry.
        """

    def retry(self, run: str) -> bool:
        """Let the driver of this process execute a parked run again, soon and alone.

        Returns:
            Whether there is a driver.
        """
        for notify in self.on_crash_loop:
            notify(run, 0.0)
        return bool(self.on_crash_loop)

    # --- beginning runs

    async def start(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        id: str | None,  # noqa: A002 - a public name
        *,
        parent: Origin | None = None,
    ) -> tuple[str, LocalRun | None]:
        """Start a run, unless a run with this id exists. Return the id, and the run if it executes
        here.

        Raises:
            RunIdInUseError: a run of another workflow has this id.
            OverloadedError: this process executes too many runs; nothing was done.
        """
        if id is not None and (running := self.running.get(id)) is not None:
            running.check_same_run(definition, arguments)
            return id, running
        if parent is None:  # a parent must not wait for room for its child
            self._check_room()
        run_id = waiting.new_name() if id is None else id
        self._starting += 1
        try:
            async with self.assigning(logs, run_id) as lease:
                if (running := self.running.get(run_id)) is not None:  # started meanwhile
                    running.check_same_run(definition, arguments)
                    return run_id, running
                origin = (definition, arguments, parent)
                return run_id, await self._begin(logs, run_id, lease, *origin, is_new=id is None)
        finally:
            self._starting -= 1

    async def _begin(
        self,
        logs: Logs,
        run_id: str,
        lease: Lease,
        definition: Definition,
        arguments: bytes,
        parent: Origin | None,
        *,
        is_new: bool,
    ) -> LocalRun | None:
        log = logs.log(self.log_name)
        started = RunStarted(definition.name, arguments, lease.name, definition.version, parent)
        tags = (run_tag(run_id), RUNS_TAG, executor_tag(lease.name))
        entries, again = [Entry(encode(started), tags)], list[str]()
        seqnum = await self.append_with_heartbeat(log, lease, entries, lambda: again.append(run_id))
        run = Run()
        if is_new and not again:  # otherwise an earlier copy may be the run's start
            run.apply(seqnum, 0.0, started)  # its time is not needed here
            return self.execute(logs, definition, run_id, run, lease)
        await read_run(log, run_id, run, seqnum, is_reused=True)
        assert run.started is not None, "the start was read"
        check_same_run(run_id, definition, arguments, run.started)
        if not _is_open(run, lease):
            return None
        if run.started_at != seqnum and not await self._retake(log, run_id, run, lease):
            return None  # an earlier start began the run, and it has ended since
        try:
            return await self.take_on(logs, log, run_id, run, lease)
        except Stopped as stopped:
            if stopped.error is not None:
                raise
            return None  # another process executes it

    async def fork(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        forked: Origin,
        decided: Sequence[StepDecided],
    ) -> str:
        """Start a run with decided outcomes; return its id.

        Raises:
            TooLargeError: the outcomes do not fit into one batch of records; nothing was done.
        """
        self._check_room()
        log, run_id, version = logs.log(self.log_name), waiting.new_name(), definition.version
        self._starting += 1
        try:
            async with self.assigning(logs, run_id) as lease:
                started = RunStarted(definition.name, arguments, lease.name, version, forked=forked)
                tags = (run_tag(run_id), RUNS_TAG, executor_tag(lease.name))
                steps = [Entry(encode(step), tags[:1]) for step in decided]
                entries = [Entry(encode(started), tags), *steps]
                last = await self.append_with_heartbeat(log, lease, entries)
                run = await read_run(log, run_id, Run(), last)
                self.execute(logs, definition, run_id, run, lease)
        finally:
            self._starting -= 1
            assert self._starting >= 0, "each start ends once"
        return run_id

    def _check_room(self) -> None:
        if self.room <= 0:
            raise OverloadedError(
                f"{self.executions_max:,} workflows run in this process already; try again later."
            )

    @property
    def room(self) -> int:
        """How many more runs this process may execute; a run that only waits counts as a
        sixteenth.
        """
        runs = len(self.running) + self._starting
        busy = runs - self._resting
        return min(self.executions_max - busy, self.executions_max * RUNS_PER_EXECUTION - runs)

    def _count_waiting(self, running: LocalRun, by: int) -> None:
        """Count an operation of a run that begins (1) or stops (-1) waiting."""
        was_resting = running.waits > 0
        running.waits += by
        assert running.waits >= 0, "each wait ends once"
        self._resting += (running.waits > 0) - was_resting
        assert 0 <= self._resting <= len(self.running) + 1, (
            "only runs of this process are counted as waiting"
        )
        if self.room > 0:
            self._notify_room()

    def _notify_room(self) -> None:
        for notify in self.on_room:
            notify()

    def execute(
        self,
        logs: Logs,
        definition: Definition,
        id: str,  # noqa: A002
        run: Run,
        lease: Lease,
    ) -> LocalRun | None:
        """Execute a run of this process in a new task."""
        if id in self.running or lease is not self.lease:
            return self.running.get(id)
        execution = Execution(logs.log(self.log_name), id, run, lease)
        running = self.running[id] = LocalRun(definition, execution)
        self._notify_cancelled(execution)
        running.task = asyncio.create_task(self._execute(logs, running))
        running.task.add_done_callback(partial(self._on_task_ended, logs, running))
        self._keep_beating(logs)
        return running

    async def _execute(self, logs: Logs, running: LocalRun) -> None:
        CALL.set(None)  # the task outlives the call that started it
        if isinstance(logs, Context):
            logs.begin()
        WAIT_COUNTER.set(partial(self._count_waiting, running))
        try:
            running.end(await self._execute_with_retry(logs, running))
        except ChangedWorkflowError as error:
            structlog.get_logger().warning("run parked", run=error.run, reason=str(error))

    def _on_task_ended(self, logs: Logs, running: LocalRun, task: asyncio.Task[None]) -> None:
        """Handle the end of a run's task, which may have been cancelled before it began."""
        execution = running.execution
        id_, run = execution.id, execution.run
        del self.running[id_]
        if not running.has_finished and self._is_cancelled(execution):
            for notify in self.on_cancel:  # the run may be parked
                notify(id_)
        running.end(None)
        self._ended_since_trim += 1
        if task.cancelled() and run.executor == self.lease.name:
            self._leave_to_new_owner(run.started_at)
        elif not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("execution of a run failed", run=id_, exc_info=error)
            # This executor owns the run, so no other process continues it.
            if run.executor == self.lease.name:
                self._pending.note_interrupted(
                    id_, run.started_at, execution.epoch, running.failures
                )
                self._keep_beating(logs)
        self._notify_room()

    async def _execute_with_retry(self, logs: Logs, running: LocalRun) -> RunFinished | None:
        """Execute a run until it ends, with retries. None: another process executes the run."""
        wait_s, is_again = _AGAIN_S, False
        while True:
            try:
                if is_again:
                    anew = await self._next_execution(running)
                    if not isinstance(anew, Execution):
                        return anew
                    running.execution = anew
                    self._notify_cancelled(anew)
                return await self._once(logs, running)
            except ChangedWorkflowError:
                raise
            except (Stopped, IndilogError) as error:
                structlog.get_logger().warning(
                    "run is retried", run=running.execution.id, reason=str(error)
                )
                is_away = not isinstance(error, RunUnreadable) and (
                    isinstance(error, Stopped) or is_transient(error)
                )
                wait_s = _AGAIN_S if is_away else min(2 * wait_s, _AGAIN_S_MAX)
            await waiting.pause(wait_s)
            is_again = True

    async def _once(self, logs: Logs, running: LocalRun) -> RunFinished | None:
        """Execute a run in its current epoch."""
        execution, definition = running.execution, running.definition
        started = execution.run.started
        assert started is not None, "only a run that has begun is executed"
        await log_clock(execution.log).begin(execution.log)
        wf = Workflow(execution, logs)
        try:
            arguments = definition.signature.arguments(started.arguments)
        except (InvalidArgumentsError, FlowSettingsError, TypeError) as error:
            return await execution.park(str(error))
        body = await_body(definition.result_text(wf, arguments))
        return await execution.execute(run_compensated(wf.compensations, body))

    async def _next_execution(self, running: LocalRun) -> Execution | RunFinished | None:
        """Return the next execution of a run if this executor still owns the run, else the run's
        end.
        """
        before, lease = running.execution, self.current_lease()
        log, id_ = before.log, before.id
        run = await read_run(log, id_, Run(), is_reused=True)
        if run.started_at != before.run.started_at:
            return None  # the run has ended and was trimmed
        if _is_open(run, lease) and await self._retake(log, id_, run, lease):
            return Execution(log, id_, run, lease)
        return run.finished

    async def _retake(self, log: Log, id_: str, run: Run, lease: Lease) -> bool:
        """Begin a new epoch of a run that this executor owns and does not execute. Then appends in
        flight of an earlier execution have no effect. Return whether this executor owns the run.
        """
        taken = RunTaken(
            run.epoch + 1, lease.name, run.crashes
        )  # the number of crashes is unchanged
        tags = (run_tag(id_), RUNS_TAG, executor_tag(lease.name))
        try:
            seqnum = await self.append_with_heartbeat(log, lease, [Entry(encode(taken), tags)])
        except BaseException:
            if lease is self.lease:  # the append may take effect after this run has stopped
                self._leave_to_new_owner(run.started_at)
            raise
        await read_run(log, id_, run, seqnum)
        return _is_open(run, lease) and run.epoch == taken.epoch

    # --- assignments of runs to this executor

    @asynccontextmanager
    async def assigning(self, logs: Logs, id_: str) -> AsyncIterator[Lease]:
        """Enter a block that assigns a run to this executor and begins to execute it. Only one such
        block per run is active at a time.

        If the block fails, this process looks for the run later. Use one log object to append and
        to read the record: the session of another log object may not see the record yet.
        """
        pending = self._pending
        async with pending.exclusive(id_):
            lease = self.current_lease()
            before = pending.note(id_, self.executors.end)
            try:
                yield lease
            except (TooLargeError, RunIdInUseError):
                pending.restore(id_, before)
                raise
            except BaseException as error:
                # Also if the caller is cancelled: the record may be in flight.
                if _has_done_nothing(error):
                    pending.restore(id_, before)
                elif lease is not self.lease or not pending.has_room:
                    # The new owner of this executor's runs looks for it.
                    self._leave_to_new_owner(pending.clear(id_))
                else:
                    self._keep_beating(logs)
                raise
            pending.clear(id_)

    async def take_on(
        self, logs: Logs, log: Log, id_: str, run: Run, lease: Lease, *, was_parked: bool = False
    ) -> LocalRun | None:
        """Execute a run of this executor, or park it if its code is missing or it is crash-looping.

        The caller must have exclusive access to the run (`assigning`).
        """
        assert run.started is not None, "only a run that has begun is executed"
        definition = self.definitions.get(run.started.workflow)
        if definition is None:
            reason = f"The deployed code has no workflow {run.started.workflow!r}."
            await Execution(log, id_, run, lease).park(reason)
        elif run.crashes >= CRASHES_PARKED and not was_parked:
            await self._park_crash_loop(Execution(log, id_, run, lease))
        else:
            return self.execute(logs, definition, id_, run, lease)
        return None

    async def _park_crash_loop(self, execution: Execution) -> None:
        """Park a crash-looping run. If it crashed a process after its cancellation, end it instead.

        After its cancellation, a run is executed once more, alone, so that it can run its
        compensations.
        """
        run = execution.run
        structlog.get_logger().warning("run parked", run=execution.id, crashes=run.crashes)
        is_cancelled = run.cancel_asked and run.crashes > CRASHES_PARKED
        await execution.park(parked_reason(run.crashes), is_cancelled=is_cancelled)
        if not is_cancelled:
            for notify in self.on_crash_loop:
                notify(execution.id, retry_s(run))

    async def _on_beat(self, log: Log, logs: Logs) -> None:
        """Look for runs whose assignment to this executor had an unknown outcome."""
        for id_ in self._pending.due():
            try:
                await self._look_for(log, logs, id_)
            except IndilogError as error:
                if is_transient(error):
                    raise
                structlog.get_logger().error("run cannot be read", run=id_, reason=str(error))
                self._leave_to_new_owner(self._pending.look_again(id_))

    async def _look_for(self, log: Log, logs: Logs, id_: str) -> None:
        pending, lease = self._pending, self.lease
        if id_ not in pending:
            return  # the run began to execute while other runs were looked up
        if pending.is_in_use(id_):
            return  # an assignment in progress must not delay heartbeats
        async with pending.exclusive(id_):
            try:
                run = await read_run(log, id_, Run(), is_reused=True)
            except TrimmedError:
                run = Run()
            if lease is not self.lease:
                return  # the new owner of this executor's runs looks for it
            assert id_ in pending, "only a lost lease removes it meanwhile"
            if id_ in self.running:
                pending.clear(id_)
                return
            if not _is_open(run, lease):
                pending.look_again(id_)  # the record that assigns it may still be in flight
                return
            failures = pending.failures(id_)
            if run.epoch != pending.epoch(id_) or await self._retake(log, id_, run, lease):
                running = await self.take_on(logs, log, id_, run, lease)
                if running is not None:
                    running.failures = failures
            pending.clear(id_)

    # --- state announced to other processes

    @property
    def _is_busy(self) -> bool:
        """Whether this executor executes a run, or may own a run whose assignment has an unknown
        outcome.
        """
        return bool(self.running or self._starting or self._pending)

    @property
    def _may_be_assigned(self) -> bool:
        """Whether a record in flight may assign a run to this executor."""
        return bool(self._starting or self._pending) or self._left_from is not None

    def _leave_to_new_owner(self, place: SeqNum | None) -> None:
        """Leave assignments at seqnum `place` or later to the new owner of this executor's runs."""
        if place is not None:
            self._left_from = place if self._left_from is None else min(self._left_from, place)

    def _on_lost(self) -> None:
        self._left_from = None
        self._pending.reset()  # the new owner of this executor's runs looks for them
        for task in self._tasks():
            task.cancel()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [running.task for running in self.running.values() if running.task is not None]

    def _on_cancel(self, run: str, seqnum: SeqNum) -> None:
        self._cancels[run] = seqnum
        if (running := self.running.get(run)) is not None:
            self._notify_cancelled(running.execution)
        else:
            for notify in self.on_cancel:
                notify(run)

    def _is_cancelled(self, execution: Execution) -> bool:
        """Tell whether a cancellation of this run was read (not of an earlier run with the same
        id).
        """
        return self._cancels.get(execution.id, -1) > execution.run.started_at

    def _notify_cancelled(self, execution: Execution) -> None:
        if self._is_cancelled(execution):
            execution.ask_cancel()

    @property
    def _needed_from(self) -> SeqNum:
        """A seqnum below which no record assigns a run that this executor still has or may get."""
        runs = (running.execution.run.started_at for running in self.running.values())
        end = self.executors.end if self._left_from is None else self._left_from
        return min((*runs, *self._pending.since, end))


def _has_done_nothing(error: BaseException) -> bool:
    """Tell whether a public call that fails with `error` has certainly appended nothing."""
    call = CALL.get()
    has_answer = isinstance(error, IndilogError | Stopped)
    return call is not None and has_answer and call.has_done_nothing


def _is_open(run: Run, lease: Lease) -> bool:
    """Tell whether a run is running and owned by the executor of a lease."""
    is_its = run.started is not None and run.executor == lease.name
    return is_its and run.finished is None and run.parked is None
