"""Executes the runs of one process, and shows that it lives while it does.

A process has a name and a lease on all its runs together: one record each quarter of the lease,
and none while it executes nothing. While less than half of the lease is over, nobody else can have
taken a run (unless clocks of compute nodes differ by the other half), so steps cost an append and
no read; otherwise each append is followed by a look whether it counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from bokiflow import waiting
from bokiflow.compensation import compensated
from bokiflow.definition import Definition, check_same_run
from bokiflow.departed import left_by
from bokiflow.errors import ChangedWorkflowError, FlowSettingsError
from bokiflow.execution import Execution
from bokiflow.executors import Executors
from bokiflow.fold import Run
from bokiflow.lease import Lease
from bokiflow.news import RESTS
from bokiflow.records import (
    EXECUTORS_TAG,
    RUNS_TAG,
    Alive,
    CancelAsked,
    Decided,
    Finished,
    Left,
    Origin,
    Started,
    encoded,
    executor_record,
    executor_tag,
    run_in,
    run_record,
    run_tag,
)
from bokiflow.run_log import Stopped, appended, patiently, read_run
from bokiflow.running import Running, awaited
from bokiflow.workflow import Logs, Workflow
from indilog.app import Context
from indilog.errors import (
    IndilogError,
    InvalidArgumentsError,
    OverloadedError,
    TooLargeError,
    TrimmedError,
)
from indilog.ids import SeqNum
from indilog.log import Entry, Log, Record

EXECUTIONS_MAX: Final = 1024
"""Runs that a process executes at once, unless told otherwise."""
RUNS_PER_EXECUTION: Final = 16
"""Runs in a process for each that it may execute at once; the others wait for news or a time."""
BEATS: Final = 4
_PAGE: Final = 1000
_AGAIN_S: Final = 1.0
_TRIM_EVERY: Final = 512
_UNCLEAR_MAX: Final = 1024
_UNCLEAR_BEATS: Final = 64


class Runner:
    """Executes runs.

    Args:
        log_name: of the log of the runs.
        definitions: the workflows, by name.
        lease_s: how long after its last sign of life somebody else takes its runs.
        executions_max: how many it executes at once.

    Attributes:
        running: by run id.
        executors: who lives, as far as it was read.
    """

    def __init__(
        self,
        log_name: str,
        definitions: dict[str, Definition],
        *,
        lease_s: float,
        executions_max: int = EXECUTIONS_MAX,
    ) -> None:
        self.log_name = log_name
        self.definitions = definitions
        self.running: dict[str, Running] = {}
        self.executors = Executors()
        self.lease_s = lease_s
        self.executions_max = executions_max
        self.lease = Lease(lease_s)
        self._beating: asyncio.Task[None] | None = None
        self._starting = 0
        self._resting = 0
        self._ended_since_trim = 0
        self._unclear: dict[str, int] = {}
        """Runs that this executor may have got, though it was not told; how often to look yet."""
        self.on_room: list[Callable[[], None]] = []
        self.on_cancel: list[Callable[[str], None]] = []
        """Told which run that is not executed here somebody wants cancelled."""

    # --- beginning runs

    async def start(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        id: str | None,  # noqa: A002 - it is called so
        *,
        parent: Origin | None = None,
    ) -> tuple[str, Running | None]:
        """Begin a run, unless there is one of this id; return its id, and it if it is executed
        here.

        Raises:
            RunIdInUseError: there is one, of another workflow.
            OverloadedError: too many runs are executed here; nothing was done.
        """
        if id is not None and (running := self.running.get(id)) is not None:
            begun = running.execution.run.started
            assert begun is not None, "only what began is executed"
            check_same_run(id, definition, arguments, begun)
            return id, running
        if parent is None:  # one that runs must not wait for room for what it starts
            self._check_room()
        self._starting += 1
        try:
            return await self._begin(logs, definition, arguments, id, parent)
        finally:
            self._starting -= 1

    async def _begin(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        id: str | None,  # noqa: A002
        parent: Origin | None,
    ) -> tuple[str, Running | None]:
        log = logs.log(self.log_name)
        run_id = waiting.new_name() if id is None else id
        lease = self.living()
        started = Started(definition.name, arguments, lease.name, definition.version, parent)
        tags = (run_tag(run_id), RUNS_TAG, executor_tag(lease.name))
        again: list[str] = []
        seqnum = await self.append_given(
            log, logs, lease, run_id, [Entry(encoded(started), tags)], lambda: again.append(run_id)
        )
        run = Run()
        if id is None and not again:  # else an earlier copy is the run's place
            run.apply(seqnum, waiting.seconds_now(), started)
        else:
            await read_run(log, run_id, run, seqnum, is_reused=True)
            assert run.started is not None, "our own append is visible to us"
            check_same_run(run_id, definition, arguments, run.started)
            if run.executor != lease.name or run.finished is not None or run.parked is not None:
                return run_id, self.running.get(run_id)
        return run_id, self.execute(logs, definition, run_id, run, lease)

    async def fork(
        self,
        logs: Logs,
        definition: Definition,
        arguments: bytes,
        forked: Origin,
        decided: Sequence[Decided],
    ) -> str:
        """Begin a run in which `decided` is decided already; return its id.

        Raises:
            TooLargeError: that is more than one batch of records holds; nothing was done.
        """
        self._check_room()
        log, run_id, lease = logs.log(self.log_name), waiting.new_name(), self.living()
        started = Started(definition.name, arguments, lease.name, definition.version, forked=forked)
        tags = (run_tag(run_id), RUNS_TAG, executor_tag(lease.name))
        steps = [Entry(encoded(step), tags[:1]) for step in decided]
        self._starting += 1
        try:
            entries = [Entry(encoded(started), tags), *steps]
            last = await self.append_given(log, logs, lease, run_id, entries)
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

    def _rests(self, running: Running, by: int) -> None:
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
    ) -> Running | None:
        """Execute a run whose executor this process is, in a task of its own."""
        if id in self.running or lease is not self.lease:
            return self.running.get(id)
        execution = Execution(logs.log(self.log_name), id, run, lease)
        running = self.running[id] = Running(definition, execution)
        running.task = asyncio.create_task(self._execute(logs, running))
        running.task.add_done_callback(partial(self._ended, running))
        self._keep_beating(logs)
        return running

    async def _execute(self, logs: Logs, running: Running) -> None:
        if isinstance(logs, Context):
            logs.begin()
        RESTS.set(partial(self._rests, running))
        try:
            running.end(await self._executed(logs, running))
        except ChangedWorkflowError as error:
            structlog.get_logger().warning("run parked", run=error.run, reason=str(error))

    def _ended(self, running: Running, task: asyncio.Task[None]) -> None:
        """A run is not executed here any more; also one whose task was cancelled unbegun."""
        del self.running[running.execution.id]
        running.end(None)
        self._ended_since_trim += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error(
                "run is not executed any more", run=running.execution.id, exc_info=error
            )
        self._tell_room()

    async def _executed(self, logs: Logs, running: Running) -> Finished | None:
        """Execute a run to its end; again if the log was away. None: somebody else does."""
        execution, definition = running.execution, running.definition
        while True:
            started = execution.run.started
            assert started is not None, "only what began is executed"
            wf = Workflow(execution, logs)
            try:
                try:
                    arguments = definition.signature.arguments(started.arguments)
                except (InvalidArgumentsError, FlowSettingsError, TypeError) as error:
                    return await execution.park(str(error))
                body = awaited(definition.result_text(wf, arguments))
                return await execution.execute(compensated(wf.compensations, body))
            except ChangedWorkflowError:
                raise
            except (Stopped, IndilogError) as error:
                structlog.get_logger().warning(
                    "run is tried again", run=execution.id, reason=str(error)
                )
            await waiting.pause(_AGAIN_S)
            run = await read_run(execution.log, execution.id, Run(), is_reused=True)
            if run.started_at != execution.run.started_at:
                return None  # it ended and was forgotten
            if run.finished is not None or run.epoch != execution.epoch:
                return run.finished
            lease = self.lease
            if run.executor != lease.name:
                return None
            execution = running.execution = Execution(execution.log, execution.id, run, lease)

    # --- signs of life

    def living(self) -> Lease:
        """Return the lease under which this process executes what it begins now."""
        if self.lease.has_ended():
            self._lose()
        return self.lease

    async def append_alive(
        self,
        log: Log,
        lease: Lease,
        entries: list[Entry],
        on_again: Callable[[], None] | None = None,
    ) -> SeqNum:
        """Append records of this executor, and before them that it lives, if need be."""
        if lease.is_sure():
            return await appended(log, entries, on_again)
        now = waiting.seconds_now()
        last = await appended(log, [self._alive(lease), *entries], on_again)
        lease.renewed(now)
        return last

    async def append_given(
        self,
        log: Log,
        logs: Logs,
        lease: Lease,
        run: str,
        entries: list[Entry],
        on_again: Callable[[], None] | None = None,
    ) -> SeqNum:
        """As `append_alive`, for records that give a run to this executor: if it ends before it
        knows whether they are there, this process looks for the run later. The caller reads with
        `log` what it has appended; another one may not show it yet.
        """
        try:
            return await self.append_alive(log, lease, entries, on_again)
        except TooLargeError:
            raise
        except BaseException:  # also of a caller that is cancelled: the record is on its way
            if lease is self.lease and len(self._unclear) < _UNCLEAR_MAX:
                self._unclear[run] = _UNCLEAR_BEATS
                self._keep_beating(logs)
            raise

    async def _look_for_unclear(self, logs: Logs) -> None:
        """Execute the runs that this executor has got without being told."""
        log = logs.log(self.log_name)
        for id_, beats in list(self._unclear.items()):
            try:
                run = await read_run(log, id_, Run(), is_reused=True)
            except TrimmedError:
                run = Run()
            started = run.started
            if started is not None and run.finished is None and run.executor == self.lease.name:
                self._unclear.pop(id_, None)
                if (definition := self.definitions.get(started.workflow)) is not None:
                    self.execute(logs, definition, id_, run, self.lease)
            elif beats > 1 and id_ in self._unclear:
                self._unclear[id_] = beats - 1
            else:
                self._unclear.pop(id_, None)

    def _alive(self, lease: Lease) -> Entry:
        alive = Alive(lease.name, self.lease_s)
        return Entry(encoded(alive), (EXECUTORS_TAG,))

    def _keep_beating(self, logs: Logs) -> None:
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat(logs))

    @property
    def _is_busy(self) -> bool:
        """Whether it executes anything, or may have to."""
        return bool(self.running or self._starting or self._unclear)

    async def _beat(self, logs: Logs) -> None:
        """Say that it lives as long as it executes anything."""
        log = logs.log(self.log_name)
        while self._is_busy:
            await waiting.pause(self.lease_s / BEATS)
            try:
                await self._renew(log)
                await self._look_for_unclear(logs)
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("executor cannot renew its lease", reason=str(error))

    async def _renew(self, log: Log) -> None:
        lease, now = self.lease, waiting.seconds_now()
        if not lease.has_ended():
            seqnum = await appended(log, [self._alive(lease)])
            await self.look(log, seqnum)
            if lease is self.lease and not (
                lease.has_ended() or self.executors.has_heir(lease.name)
            ):
                lease.renewed(now)
                await self._trim(log)
                return
        if lease is self.lease:
            self._lose()

    def _lose(self) -> None:
        """Others may have its runs: stop them, and go on under another name."""
        self.lease = Lease(self.lease_s)
        self._unclear.clear()  # whoever inherits the old name looks for them
        for running in list(self.running.values()):
            if running.task is not None:
                running.task.cancel()

    async def look(self, log: Log, until: SeqNum = -1) -> None:
        """Read what is new of executors and cancellations, at least up to `until`."""
        executors = self.executors
        while True:
            try:
                page = await log.read_range(EXECUTORS_TAG, executors.end, limit=_PAGE)
            except TrimmedError as error:
                executors.end = max(executors.end, error.first_seqnum)
                continue
            for record in page:
                if record.seqnum >= executors.end:
                    self._on_record(record)
            if not page or executors.end > until >= 0:
                return

    def _on_record(self, record: Record) -> None:
        self.executors.apply(record.seqnum, record.time, executor_record(record.data))
        run = run_in(record.tags)
        if run is not None and isinstance(run_record(record.data), CancelAsked):
            if (running := self.running.get(run)) is None:
                for told in self.on_cancel:
                    told(run)
            elif record.seqnum > running.execution.run.started_at:  # not of an earlier run
                running.execution.ask_cancel()

    async def _trim(self, log: Log) -> None:
        """Now and then, forget the starts and ends of what is over."""
        if self._ended_since_trim < _TRIM_EVERY:
            return
        self._ended_since_trim = 0
        needed = [running.execution.run.started_at for running in self.running.values()]
        if needed and not (self._starting or self._unclear):
            await log.trim(min(needed), tag=executor_tag(self.lease.name))
        await log.trim(self.executors.needed_from, tag=EXECUTORS_TAG)

    # --- the end

    async def retire(self, log: Log) -> None:
        """Its lease has ended: if it has nothing to execute, say so, that nobody needs to look."""
        name = self.lease.name
        if self.lease.has_ended():
            idle = not (self._is_busy or self.executors.left_to(name))
            self._lose()
            if idle:
                await self._leave(log, name)

    async def _leave(self, log: Log, name: str) -> None:
        """Say that an executor is gone, and whether it has left anything."""
        left = await patiently(partial(left_by, log, name))
        is_idle = not (left.runs or self.executors.left_to(name))
        await appended(log, [Entry(encoded(Left(name, is_idle=is_idle)), (EXECUTORS_TAG,))])
        if is_idle:
            with suppress(IndilogError):  # it saves others reading, no more
                await log.trim(left.end, tag=executor_tag(name))

    async def stop(self, log: Log) -> None:
        """Stop everything and say so; others go on with it at once."""
        tasks = [running.task for running in self.running.values() if running.task is not None]
        if self._beating is not None:
            tasks.append(self._beating)
            self._beating = None
        name = self.lease.name
        self.lease = Lease(self.lease_s)
        self._unclear.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave(log, name)
