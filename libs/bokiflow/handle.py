"""A handle on a run: waits for its result, reads its status, sends signals, and cancels it.

A handle reads everything from the log, so it gives the same answers in every process. If this
process executes the run, waiting for the result needs no read. A signal, a cancellation or a retry
is one append, and reads only the run's partition, however long the history of the run is.
`Startable` and `Flow` make handles; `inspection` uses them for operations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Generic, TypeVar

from bokiflow.definition import Definition, check_workflow
from bokiflow.operations.notifications import WAIT_S_MAX
from bokiflow.operations.progress import PublishedEvent, event_in
from bokiflow.operations.signals import check_name
from bokiflow.queries import Query
from bokiflow.replay_check import find_mismatch
from bokiflow.run_lists import find_run
from bokiflow.run_status import Status, brief_status, status_of
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.errors import (
    FlowSettingsError,
    QueryFailedError,
    RunCancelledError,
    RunEndedError,
    RunFailedError,
    RunNotMovedError,
    RunNotParkedError,
    UnknownRunError,
)
from bokiflow.runs.public_call import public_call
from bokiflow.runs.records import (
    INBOX_TAG,
    CancelAsked,
    MoveAsked,
    RetryAsked,
    RunFinished,
    RunParked,
    RunRecord,
    Signalled,
    encode,
    partition_of,
    partition_tag,
    run_tag,
)
from bokiflow.runs.run_log import append_with_retry, read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State
from indilog import DataLossError, Entry, FunctionFailedError, Log, TrimmedError
from indilog.sdk import Logs, ResultType, SeqNum, plain_value
from indilog.sdk.runs import RunInfo

_ResultT_co = TypeVar("_ResultT_co", covariant=True)


def unknown(id: str, log_name: str) -> UnknownRunError:  # noqa: A002
    """Return the error for a run that does not exist."""
    return UnknownRunError(
        f"There is no run {id!r} in {log_name!r}, or it was trimmed after its retention."
    )


class Handle(Generic[_ResultT_co]):
    """A handle on one run, which any process may be executing."""

    def __init__(
        self,
        runner: Runner,
        definition: Definition,
        id: str,  # noqa: A002
        logs: Logs,
        queries: Mapping[str, Query],
    ) -> None:
        self.id = id
        self._queries = queries
        self._runner = runner
        self._definition = definition
        self._logs = logs

    async def result(self, timeout: float | None = None) -> _ResultT_co:  # noqa: ASYNC109 - its name in API.md
        """Wait for the end of the run and return what the workflow returned.

        The run continues if the caller stops waiting.

        Raises:
            RunFailedError: the run ended with an error.
            RunCancelledError: the run was cancelled.
            TimeoutError: the run has not ended within `timeout` seconds. The message says why a
                parked run waits.
            UnknownRunError: there is no such run, or it was trimmed after its retention.
            RunIdInUseError: the run with this id is of another workflow.
        """
        ends = math.inf if timeout is None else waiting.monotonic_now() + timeout
        finished: RunFinished | None = None
        if (running := self._runner.running.get(self.id)) is not None:
            self._check(running.execution.run)
            left = ends - waiting.monotonic_now()
            finished = await waiting.wait_within(running.ended, left, self._late(None))
        if finished is None:
            finished = await self._follow(ends)
        return self._value(finished)

    async def _follow(self, ends: float) -> RunFinished:
        """Wait for the record that ends the run, and return it."""
        log, run = self._log(), RunState()
        while True:
            await self._read(log, run)
            self._check(run)
            if run.finished is not None:
                return run.finished
            left = ends - waiting.monotonic_now()
            if left <= 0 or await log.read_next(run_tag(self.id), run.end, wait=left) is None:
                raise TimeoutError(self._late(run.parked))

    def _late(self, parked: RunParked | None) -> str:
        how = "it continues." if parked is None else f"it is parked: {parked.reason}"
        return f"Run {self.id!r} has not ended in time; {how}"

    def _value(self, finished: RunFinished) -> _ResultT_co:
        failure = finished.failure
        if failure is not None:
            kind = RunCancelledError if finished.was_cancelled else RunFailedError
            raise kind(self.id, failure.kind, failure.message)
        value: Any = self._definition.signature.result(finished.result)
        result: _ResultT_co = value
        return result

    async def status(self) -> Status:
        """Return the status of the run.

        The call reads the last records of the run. These records do not suffice while branches run
        concurrently, or after a takeover until two further operations are decided. Then the first
        call in a process reads the whole history. Later calls read only new records, if the run is
        one of the 64 runs whose status was read last.

        Raises:
            UnknownRunError, RunIdInUseError: as `result`.
        """
        if self.id not in self._runner.runs_read:
            brief = await brief_status(self._log(), self._runner, self.id)
            if brief is not None:
                check_workflow(self.id, self._definition.name, brief.workflow)
                return brief
        run = await self._take_known()
        try:
            await self._read(self._log(), run)
        except UnknownRunError:
            if run.started is None:
                raise
            run = RunState()  # the run was trimmed; another run may have its id
            await self._read(self._log(), run)
        self._check(run)
        self._runner.runs_read[self.id] = run
        return status_of(self.id, run)

    async def _take_known(self) -> RunState:
        """Return the run as read for its last status, and remove it from `Runner.runs_read`, so
        that no concurrent call changes it. If the run is not known, or may have been trimmed,
        return a run without records.
        """
        run = self._runner.runs_read.pop(self.id, None) or RunState()
        if run.finished is None:
            return run
        try:
            end = await self._log().read_next(run_tag(self.id), run.ended_at)
        except (TrimmedError, DataLossError):
            return RunState()
        return run if end is not None and end.seqnum == run.ended_at else RunState()

    async def events(self, after: SeqNum = -1) -> AsyncIterator[PublishedEvent]:
        """Yield the events that the run publishes (`Workflow.publish`): first the events so far,
        then new events. The iteration ends when the run has ended. For a run with rounds
        (`Workflow.continue_as_new`), events of trimmed rounds are missing.

        Args:
            after: seqnum of the last event that the caller has; -1: begin with the first event.

        Raises:
            UnknownRunError, RunIdInUseError: as `result`.
        """
        log, run, found = self._log(), RunState(), deque[PublishedEvent]()

        def collect(seqnum: SeqNum, record: RunRecord) -> None:
            nonlocal after
            if seqnum > after and (event := event_in(seqnum, record)) is not None:
                after = seqnum
                found.append(event)

        while True:
            await self._read(log, run, collect)
            self._check(run)
            while found:
                yield found.popleft()
            if run.finished is not None:
                return
            await log.read_next(run_tag(self.id), run.end, wait=WAIT_S_MAX)

    async def cancel(self) -> None:
        """Request the cancellation of the run. The run's next operation then raises `Cancelled` in
        the workflow.

        A step that is executing finishes first, or is ended after `Flow(cancel_grace=)`. Cancelling
        a cancelled run has no effect.

        Raises:
            UnknownRunError: there is no such run.
            RunEndedError: the run has ended without a cancellation.
            RunIdInUseError: the run with this id is of another workflow of this flow.
        """
        info = await self._find()
        if info.workflow in self._runner.definitions:
            # if the run's workflow has no code any more, only this handle can end the run
            check_workflow(self.id, self._definition.name, info.workflow)
        if info.state == State.CANCELLED:
            return
        if info.end is not None:
            raise RunEndedError(f"Run {self.id!r} has ended; it can no longer be cancelled.")
        await self._append_record(CancelAsked())
        if (running := self._runner.running.get(self.id)) is not None:
            running.execution.ask_cancel()

    async def retry(self) -> None:
        """Execute a parked run again now, with the deployed code. When this returns, the request is
        durable.

        Raises:
            UnknownRunError, RunIdInUseError: as `result`.
            RunNotParkedError: the run is not parked.
        """
        info = await self._find()
        check_workflow(self.id, self._definition.name, info.workflow)
        if info.state != State.PARKED:
            raise RunNotParkedError(
                f"Run {self.id!r} is {info.state}, so it is not retried; only parked runs are."
            )
        await self._append_record(RetryAsked())

    async def move(self, version: int | None = None) -> int:
        """Continue the run with the code of another deployment. Return that deployment's number.

        First, this call replays the run with that code. When the call returns, the request is
        durable. The owner of the run then lets bodies of steps end, replays the run again, and
        moves it.

        Args:
            version: number of a deployment whose code is kept; None: the newest one.

        Raises:
            UnknownRunError, RunIdInUseError: as `result`.
            RunEndedError: the run has ended.
            RunNotMovedError: the code of that deployment does not continue the run's history.
            FlowSettingsError: there is no such code, or the run would not stay with it.
        """
        run = RunState()
        await self._read(self._log(), run)
        self._check(run)
        return await self.move_read(run, version)

    async def move_read(self, run: RunState, version: int | None) -> int:
        """Do the same as `move` for a run that was already read."""
        assert run.started is not None, "a run that was read has begun"
        if run.finished is not None:
            raise RunEndedError(f"Run {self.id!r} has ended; it is not moved.")
        definition = self._runner.versions.target(run.started.workflow, version)
        code = definition.code
        assert code is not None, "deployed code has a version"
        if run.code is not None and run.code.digest == code.digest:
            return code.version
        found = await find_mismatch(definition, self._log(), self._logs, self.id, run)
        if found is not None:
            raise RunNotMovedError(
                f"Run {self.id!r} was not moved to deployment {code.version}: {found.reason}"
            )
        await self._append_record(MoveAsked(code))
        return code.version

    async def signal(self, name: str, value: object = True, *, key: str | None = None) -> None:  # noqa: FBT002 - a value
        """Send the run a value. `wf.signal(name)` returns each value once, in log order.

        When this returns, the signal is durable. It stays in the log until the run reads it.

        Args:
            name: name of the signal.
            value: any value that has a JSON form.
            key: idempotency key. Of several signals to a run with the same key, only the first
                takes effect. None: a new key.

        Raises:
            UnknownRunError: there is no such run.
            RunEndedError: the run has ended.
            RunIdInUseError: the run with this id is of another workflow; nothing was sent.
            FlowSettingsError: the name is empty, or the value has no JSON form; nothing was sent.
        """
        check_name(name)
        text = _signal_text(name, value)
        info = await self._find()
        check_workflow(self.id, self._definition.name, info.workflow)
        if info.end is not None:
            raise RunEndedError(f"Run {self.id!r} has ended; it would not receive the signal.")
        await self._append_record(Signalled(name, text, waiting.new_name() if key is None else key))

    async def query(self, name: str, /, **arguments: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return the answer of a query (`Flow.query`) about the run after its durable outcomes.

        The run is replayed with the code with which it continues. Nothing is executed or appended.

        Args:
            name: name of the query.
            arguments: its arguments.

        Raises:
            UnknownRunError, RunIdInUseError: as `result`.
            FlowSettingsError: the flow has no such query.
            InvalidArgumentsError: the arguments do not fit the query.
            QueryFailedError: the code does not match the run, the query raised, or the query did
                not answer within `Flow(query_timeout=)`.
        """
        run = RunState()
        await self._read(self._log(), run)
        self._check(run)
        return await self.answer(run, name, arguments)

    async def answer(self, run: RunState, name: str, arguments: Mapping[str, object]) -> Any:  # noqa: ANN401
        """Return the answer of a query for a run that was already read; see `query`."""
        runner = self._runner
        versions = runner.versions
        if (why := versions.missing(run)) is not None:
            raise QueryFailedError(f"Run {self.id!r} cannot be queried here. {why}")
        definition, queries = versions.choose(run) or self._definition, versions.queries_of(run)
        query: Query | None = queries.get(name)
        if query is None:
            there = ", ".join(sorted(queries)) or "none"
            raise FlowSettingsError(f"There is no query {name!r} here; there are: {there}.")
        of, limits = (self.id, run), runner.query_limits
        text = await query.answer(definition, self._log(), self._logs, of, arguments, limits)
        return plain_value(text)

    async def _append_record(self, record: RunRecord) -> None:
        with public_call():
            log, member = self._log(), self._runner.member
            await member.look_once(log)
            there = partition_tag(partition_of(self.id, member.count))
            entry = Entry(encode(record), (run_tag(self.id), there, INBOX_TAG))
            await append_with_retry(log, [entry])

    async def _find(self) -> RunInfo:
        """Return the run as its partition or its end shows it. Its history is not read.

        Raises:
            UnknownRunError: there is no such run.
        """
        with public_call():
            info = await find_run(self._log(), self._runner, self.id)
        if info is None:
            raise unknown(self.id, self._runner.log_name)
        return info

    def _check(self, run: RunState) -> None:
        assert run.started is not None, "a run that was read has begun"
        check_workflow(self.id, self._definition.name, run.started.workflow)

    def _log(self) -> Log:
        return self._logs.log(self._runner.log_name)

    async def _read(
        self, log: Log, run: RunState, on_effect: Callable[[SeqNum, RunRecord], None] | None = None
    ) -> None:
        try:
            await read_run(log, self.id, run, is_reused=True, on_effect=on_effect)
        except TrimmedError as error:
            raise unknown(self.id, self._runner.log_name) from error
        if run.started is None:
            raise unknown(self.id, self._runner.log_name)

    def __repr__(self) -> str:
        return f"Handle({self.id!r}, workflow={self._definition.name!r})"


def _signal_text(name: str, value: object) -> bytes:
    try:
        return ResultType(name, Any).text(value)
    except FunctionFailedError as error:
        raise FlowSettingsError(
            f"Signal {name!r} was not sent: its value, of type {type(value).__name__}, "
            f"has no JSON form."
        ) from error
