"""Executes the runs of one process.

What gives a run to this process is registered before it is appended, and until the run is executed,
parked or found to be another's: so a run that is durable is executed, whatever fails on the way
(`bokiflow.takeover.pending_assignments`). An execution that was broken off is followed by one in a
new epoch, so that nothing counts that it still has on its way.
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
from bokiflow.operations.notifications import RESTS
from bokiflow.running import LocalRun, await_body
from bokiflow.runs import waiting
from bokiflow.runs.errors import ChangedWorkflowError, FlowSettingsError, RunIdInUseError
from bokiflow.runs.execution import Execution
from bokiflow.runs.fold import Run
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import CALL, Stopped
from bokiflow.runs.records import (
    RUNS_TAG,
    Origin,
    RunFinished,
    RunStarted,
    RunTaken,
    StepDecided,
    encoded,
    executor_tag,
    run_tag,
)
from bokiflow.runs.run_log import Logs, RunUnreadable, is_transient, read_run
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
"""Runs that a process executes at once, unless told otherwise."""
RUNS_PER_EXECUTION: Final = 16
"""Runs in a process for each that it may execute at once; the others wait for news or a time."""
_CANCELS_MAX: Final = 4096
_AGAIN_S: Final = 1.0
_AGAIN_S_MAX: Final = 60.0


class Runner(HeartbeatSender):
    """Executes runs.

    Args:
        log_name: of the log of the runs.
        definitions: the workflows, by name.
        lease_s: how long after its last sign of life somebody else takes its runs.
        executions_max: how many it executes at once.

    Attributes:
        running: by run id.
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
        """Cancellations that were read last: a run may have been read without, or end parked."""
        self.on_room: list[Callable[[], None]] = []
        self.on_cancel: list[Callable[[str], None]] = []
        """Told which run that is not executed here somebody wants cancelled."""
        self.on_crash_loop: list[Callable[[str, float], None]] = []
        """Told which run was parked because it ended its executors, and for how many seconds."""

    # --- beginning runs

    async def start(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        id: str | None,  # noqa: A002 - it is called so
        *,
        parent: Origin | None = None,
    ) -> tuple[str, LocalRun | None]:
        """Begin a run, unless there is one of this id; return its id, and it if it is executed
        here.

        Raises:
            RunIdInUseError: there is one, of another workflow.
            OverloadedError: too many runs are executed here; nothing was done.
        """
        if id is not None and (running := self.running.get(id)) is not None:
            running.check_same_run(definition, arguments)
            return id, running
        if parent is None:  # one that runs must not wait for room for what it starts
            self._check_room()
        run_id = waiting.new_name() if id is None else id
        self._starting += 1
        try:
            async with self.assigning(logs, run_id) as lease:
                if (running := self.running.get(run_id)) is not None:  # meanwhile
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
        entries, again = [Entry(encoded(started), tags)], list[str]()
        seqnum = await self.append_with_heartbeat(log, lease, entries, lambda: again.append(run_id))
        run = Run()
        if is_new and not again:  # else an earlier copy is the run's place
            run.apply(seqnum, 0.0, started)  # its time matters to nobody here
            return self.execute(logs, definition, run_id, run, lease)
        await read_run(log, run_id, run, seqnum, is_reused=True)
        assert run.started is not None, "its start was read"
        check_same_run(run_id, definition, arguments, run.started)
        if not _is_open(run, lease):
            return None
        if run.started_at != seqnum and not await self._retake(log, run_id, run, lease):
            return None  # an earlier start had it, and it has ended since
        try:
            return await self.take_on(logs, log, run_id, run, lease)
        except Stopped as stopped:
            if stopped.error is not None:
                raise
            return None  # somebody else executes it

    async def fork(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        forked: Origin,
        decided: Sequence[StepDecided],
    ) -> str:
        """Begin a run in which `decided` is decided already; return its id.

        Raises:
            TooLargeError: that is more than one batch of records holds; nothing was done.
        """
        self._check_room()
        log, run_id, version = logs.log(self.log_name), waiting.new_name(), definition.version
        self._starting += 1
        try:
            async with self.assigning(logs, run_id) as lease:
                started = RunStarted(definition.name, arguments, lease.name, version, forked=forked)
                tags = (run_tag(run_id), RUNS_TAG, executor_tag(lease.name))
                steps = [Entry(encoded(step), tags[:1]) for step in decided]
                entries = [Entry(encoded(started), tags), *steps]
                last = await self.append_with_heartbeat(log, lease, entries)
                run = await read_run(log, run_id, Run(), last)
                self.execute(logs, definition, run_id, run, lease)
        finally:
            self._starting -= 1
        return run_id

    def _check_room(self) -> None:
        if self.room <= 0:
            raise OverloadedError(
                f"{self.executions_max:,} workflows run in this process already; try again later."
            )

    @property
    def room(self) -> int:
        """How many further runs it may execute; those that only wait count little."""
        runs = len(self.running) + self._starting
        busy = runs - self._resting
        return min(self.executions_max - busy, self.executions_max * RUNS_PER_EXECUTION - runs)

    def _rests(self, running: LocalRun, by: int) -> None:
        """An operation of a run begins or ceases to wait."""
        was_resting = running.waits > 0
        running.waits += by
        self._resting += (running.waits > 0) - was_resting
        if self.room > 0:
            self._tell_room()

    def _tell_room(self) -> None:
        for told in self.on_room:
            told()

    def execute(
        self,
        logs: Logs,
        definition: Definition,
        id: str,  # noqa: A002
        run: Run,
        lease: Lease,
    ) -> LocalRun | None:
        """Execute a run whose executor this process is, in a task of its own."""
        if id in self.running or lease is not self.lease:
            return self.running.get(id)
        execution = Execution(logs.log(self.log_name), id, run, lease)
        running = self.running[id] = LocalRun(definition, execution)
        self._tell_cancelled(execution)
        running.task = asyncio.create_task(self._execute(logs, running))
        running.task.add_done_callback(partial(self._ended, logs, running))
        self._keep_beating(logs)
        return running

    async def _execute(self, logs: Logs, running: LocalRun) -> None:
        CALL.set(None)  # it outlives the call that began it
        if isinstance(logs, Context):
            logs.begin()
        RESTS.set(partial(self._rests, running))
        try:
            running.end(await self._executed(logs, running))
        except ChangedWorkflowError as error:
            structlog.get_logger().warning("run parked", run=error.run, reason=str(error))

    def _ended(self, logs: Logs, running: LocalRun, task: asyncio.Task[None]) -> None:
        """A run is not executed here any more; also one whose task was cancelled unbegun."""
        execution = running.execution
        id_, run = execution.id, execution.run
        del self.running[id_]
        if not running.has_finished and self._is_cancelled(execution):
            for told in self.on_cancel:  # it may be parked
                told(id_)
        running.end(None)
        self._ended_since_trim += 1
        if task.cancelled() and run.executor == self.lease.name:
            self._leave_to_new_owner(run.started_at)
        elif not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("execution of a run broke off", run=id_, exc_info=error)
            if run.executor == self.lease.name:  # nobody else goes on with it
                self._pending.broke_off(id_, run.started_at, execution.epoch, running.failures)
                self._keep_beating(logs)
        self._tell_room()

    async def _executed(self, logs: Logs, running: LocalRun) -> RunFinished | None:
        """Execute a run to its end; again if the log was away. None: somebody else does."""
        wait_s, is_again = _AGAIN_S, False
        while True:
            try:
                if is_again:
                    anew = await self._anew(running)
                    if not isinstance(anew, Execution):
                        return anew
                    running.execution = anew
                    self._tell_cancelled(anew)
                return await self._once(logs, running)
            except ChangedWorkflowError:
                raise
            except (Stopped, IndilogError) as error:
                structlog.get_logger().warning(
                    "run is tried again", run=running.execution.id, reason=str(error)
                )
                is_away = not isinstance(error, RunUnreadable) and (
                    isinstance(error, Stopped) or is_transient(error)
                )
                wait_s = _AGAIN_S if is_away else min(2 * wait_s, _AGAIN_S_MAX)
            await waiting.pause(wait_s)
            is_again = True

    async def _once(self, logs: Logs, running: LocalRun) -> RunFinished | None:
        """Execute a run in the epoch that it has."""
        execution, definition = running.execution, running.definition
        started = execution.run.started
        assert started is not None, "only what began is executed"
        await log_clock(execution.log).begin(execution.log)
        wf = Workflow(execution, logs)
        try:
            arguments = definition.signature.arguments(started.arguments)
        except (InvalidArgumentsError, FlowSettingsError, TypeError) as error:
            return await execution.park(str(error))
        body = await_body(definition.result_text(wf, arguments))
        return await execution.execute(run_compensated(wf.compensations, body))

    async def _anew(self, running: LocalRun) -> Execution | RunFinished | None:
        """Return the next execution of a run that is still this executor's, else its end."""
        before, lease = running.execution, self.current_lease()
        log, id_ = before.log, before.id
        run = await read_run(log, id_, Run(), is_reused=True)
        if run.started_at != before.run.started_at:
            return None  # it ended and was forgotten
        if _is_open(run, lease) and await self._retake(log, id_, run, lease):
            return Execution(log, id_, run, lease)
        return run.finished

    async def _retake(self, log: Log, id_: str, run: Run, lease: Lease) -> bool:
        """Begin a new epoch of a run that this executor has and does not execute: what an execution
        of before has on its way counts no more. Return whether it has the run.
        """
        taken = RunTaken(run.epoch + 1, lease.name, run.crashes)  # nobody has crashed
        tags = (run_tag(id_), RUNS_TAG, executor_tag(lease.name))
        try:
            seqnum = await self.append_with_heartbeat(log, lease, [Entry(encoded(taken), tags)])
        except BaseException:
            if lease is self.lease:  # it may come when this run is executed no more
                self._leave_to_new_owner(run.started_at)
            raise
        await read_run(log, id_, run, seqnum)
        return _is_open(run, lease) and run.epoch == taken.epoch

    # --- runs that this executor may have without being told

    @asynccontextmanager
    async def assigning(self, logs: Logs, id_: str) -> AsyncIterator[Lease]:
        """What gives a run to this executor, and what follows: alone, as far as this run goes.

        If it does not come to its end, this process looks for the run later. Whoever reads what it
        has appended does so with the same log; another one may not show it yet.
        """
        unclear = self._pending
        async with unclear.alone(id_):
            lease = self.current_lease()
            before = unclear.note(id_, self.executors.end)
            try:
                yield lease
            except (TooLargeError, RunIdInUseError):
                unclear.restore(id_, before)
                raise
            except BaseException as error:
                # Of a caller that is cancelled, too: the record is on its way.
                if _has_done_nothing(error):
                    unclear.restore(id_, before)
                elif lease is not self.lease or not unclear.has_room:
                    # Whoever inherits the name looks for it.
                    self._leave_to_new_owner(unclear.clear(id_))
                else:
                    self._keep_beating(logs)
                raise
            unclear.clear(id_)

    async def take_on(
        self, logs: Logs, log: Log, id_: str, run: Run, lease: Lease, *, was_parked: bool = False
    ) -> LocalRun | None:
        """Execute a run that this executor has, unless it must wait for other code or better times.

        The caller is alone with it.
        """
        assert run.started is not None, "only what began is executed"
        definition = self.definitions.get(run.started.workflow)
        if definition is None:
            reason = f"There is no workflow {run.started.workflow!r} in the code that is deployed."
            await Execution(log, id_, run, lease).park(reason)
        elif run.crashes >= CRASHES_PARKED and not was_parked:
            await self._park_crash_loop(Execution(log, id_, run, lease))
        else:
            return self.execute(logs, definition, id_, run, lease)
        return None

    async def _park_crash_loop(self, execution: Execution) -> None:
        """Let a run wait that ended its executors; end it if it did so although it was cancelled.

        A cancelled one had its chance to take back what it did once it was cancelled, alone.
        """
        run = execution.run
        structlog.get_logger().warning("run parked", run=execution.id, crashes=run.crashes)
        is_given_up = run.cancel_asked and run.crashes > CRASHES_PARKED
        await execution.park(parked_reason(run.crashes), is_given_up=is_given_up)
        if not is_given_up:
            for told in self.on_crash_loop:
                told(execution.id, retry_s(run))

    async def _on_beat(self, log: Log, logs: Logs) -> None:
        """Look for the runs that this executor has got without being told."""
        for id_ in self._pending.due():
            try:
                await self._look_for(log, logs, id_)
            except IndilogError as error:
                if is_transient(error):
                    raise
                structlog.get_logger().error("run cannot be read", run=id_, reason=str(error))
                self._leave_to_new_owner(self._pending.look_again(id_))

    async def _look_for(self, log: Log, logs: Logs, id_: str) -> None:
        unclear, lease = self._pending, self.lease
        if unclear.is_under_way(id_):
            return  # whoever gives it does not hold up the signs of life
        async with unclear.alone(id_):
            try:
                run = await read_run(log, id_, Run(), is_reused=True)
            except TrimmedError:
                run = Run()
            if lease is not self.lease or id_ not in unclear:
                return
            if id_ in self.running:
                unclear.clear(id_)
                return
            if not _is_open(run, lease):
                unclear.look_again(id_)  # what gives it to this executor may still come
                return
            failures = unclear.failures(id_)
            if run.epoch != unclear.epoch(id_) or await self._retake(log, id_, run, lease):
                running = await self.take_on(logs, log, id_, run, lease)
                if running is not None:
                    running.failures = failures
            unclear.clear(id_)

    # --- what others see of this process

    @property
    def _is_busy(self) -> bool:
        """Whether it executes anything, or may have to."""
        return bool(self.running or self._starting or self._pending)

    @property
    def _is_owed(self) -> bool:
        """Whether anything that is on its way may give this executor a run."""
        return bool(self._starting or self._pending) or self._left_from is not None

    def _leave_to_new_owner(self, place: SeqNum | None) -> None:
        """What gave this executor a run at `place` or later is for those who inherit its name."""
        if place is not None:
            self._left_from = place if self._left_from is None else min(self._left_from, place)

    def _on_lost(self) -> None:
        self._left_from = None
        self._pending.reset()  # whoever inherits the old name looks for them
        for task in self._tasks():
            task.cancel()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [running.task for running in self.running.values() if running.task is not None]

    def _on_cancel(self, run: str, seqnum: SeqNum) -> None:
        self._cancels[run] = seqnum
        if (running := self.running.get(run)) is not None:
            self._tell_cancelled(running.execution)
        else:
            for told in self.on_cancel:
                told(run)

    def _is_cancelled(self, execution: Execution) -> bool:
        """Whether a cancellation of the run was read: not one of an earlier run of that id."""
        return self._cancels.get(execution.id, -1) > execution.run.started_at

    def _tell_cancelled(self, execution: Execution) -> None:
        if self._is_cancelled(execution):
            execution.ask_cancel()

    @property
    def _needed_from(self) -> SeqNum:
        """Below this seqnum nothing gave this executor a run that it still has or may get."""
        runs = (running.execution.run.started_at for running in self.running.values())
        end = self.executors.end if self._left_from is None else self._left_from
        return min((*runs, *self._pending.since, end))


def _has_done_nothing(error: BaseException) -> bool:
    """Whether a public call that fails so has appended nothing: so it is if the log always said."""
    call = CALL.get()
    has_answer = isinstance(error, IndilogError | Stopped)
    return call is not None and has_answer and call.has_done_nothing


def _is_open(run: Run, lease: Lease) -> bool:
    """Whether an executor has a run that goes on."""
    is_its = run.started is not None and run.executor == lease.name
    return is_its and run.finished is None and run.parked is None
