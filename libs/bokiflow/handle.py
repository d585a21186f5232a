"""A run as whoever knows its id sees it: its result, how far it is, what it can be told.

Whatever a handle is asked is read from the log, so it is the same in every process; only an end is
told at once in the process that executes the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bokiflow.definition import Definition, check_workflow
from bokiflow.operations.signals import check_name
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.errors import (
    FlowSettingsError,
    RunCancelledError,
    RunEndedError,
    RunFailedError,
    UnknownRunError,
)
from bokiflow.runs.fold import Run
from bokiflow.runs.public_call import public_call
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    URGENT_TAG,
    CancelAsked,
    RunFinished,
    RunParked,
    RunRecord,
    Signalled,
    encoded,
    run_tag,
)
from bokiflow.runs.run_log import Logs, append_with_retry, read_run
from bokiflow.runs.states import State
from bokiflow.takeover import crash_loops as suspects
from indilog import Entry, FunctionFailedError, Log, TrimmedError
from indilog.sdk import ResultType, SeqNum

_ResultT_co = TypeVar("_ResultT_co", covariant=True)


@dataclass(frozen=True)
class Status:
    """How a run is, as of a read of the log.

    Attributes:
        steps: how many operations are decided.
        epoch: how often it got an executor.
        executor: who that is.
        problem: why it waits or failed, if it does; of one that runs, how many processes in a row
            ended right after they had begun to execute it, if any.
        place: the seqnum of its start.
        began: when that was, seconds since 1970.
    """

    id: str
    workflow: str
    state: State
    steps: int
    epoch: int
    executor: str
    problem: str | None = None
    place: SeqNum = 0
    began: float = 0.0


def status_of(id: str, run: Run) -> Status:  # noqa: A002
    """Return how a run is that has begun."""
    assert run.started is not None, "only what began has a status"
    assert run.state is not None, "what began has a state"
    finished, parked = run.finished, run.parked
    problem = parked.reason if parked else None
    if run.state is State.RUNNING and run.crashes:
        problem = suspects.problem(run.crashes)
    if finished is not None and finished.failure is not None:
        problem = f"{finished.failure.kind}: {finished.failure.message}"
    return Status(
        id, run.started.workflow, run.state, len(run.steps), run.epoch, run.executor, problem,
        run.started_at, run.began,
    )  # fmt: skip


def unknown(id: str, log_name: str) -> UnknownRunError:  # noqa: A002
    """Return the error that there is no such run."""
    return UnknownRunError(f"There is no run {id!r} in {log_name!r}, or it was forgotten.")


class Handle(Generic[_ResultT_co]):
    """A run, wherever it is executed."""

    def __init__(self, runner: Runner, definition: Definition, id: str, logs: Logs) -> None:  # noqa: A002
        self.id = id
        self._runner = runner
        self._definition = definition
        self._logs = logs

    async def result(self, timeout: float | None = None) -> _ResultT_co:  # noqa: ASYNC109 - its name in API.md
        """Return what the workflow returned, once it has; the run goes on if nobody waits for it.

        Raises:
            RunFailedError: it ended with an error. RunCancelledError: it was cancelled.
            TimeoutError: it has not ended within `timeout` seconds; of a parked run it says why.
            UnknownRunError: there is no such run, or it was forgotten.
            RunIdInUseError: it is a run of another workflow.
        """
        ends = math.inf if timeout is None else waiting.steady_now() + timeout
        finished: RunFinished | None = None
        if (running := self._runner.running.get(self.id)) is not None:
            self._check(running.execution.run)
            left = ends - waiting.steady_now()
            finished = await waiting.wait_within(running.ended, left, self._late(None))
        if finished is None:
            finished = await self._followed(ends)
        return self._value(finished)

    async def _followed(self, ends: float) -> RunFinished:
        """Return how the run ends, from the log."""
        log, run = self._log(), Run()
        while True:
            await self._read(log, run)
            self._check(run)
            if run.finished is not None:
                return run.finished
            left = ends - waiting.steady_now()
            if left <= 0 or await log.read_next(run_tag(self.id), run.end, wait=left) is None:
                raise TimeoutError(self._late(run.parked))

    def _late(self, parked: RunParked | None) -> str:
        how = "it goes on." if parked is None else f"it is parked: {parked.reason}"
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
        """Return how the run is.

        Raises:
            UnknownRunError: as `result`. RunIdInUseError: as `result`.
        """
        run = Run()
        await self._read(self._log(), run)
        self._check(run)
        assert run.started is not None, "a run that was read has begun"
        return status_of(self.id, run)

    async def cancel(self) -> None:
        """Ask for the run to be cancelled: its next operation raises `Cancelled` in it.

        A step that runs is let end. If the run was cancelled before, nothing more happens.

        Raises:
            UnknownRunError: there is no such run. RunEndedError: it has ended otherwise.
            RunIdInUseError: it is a run of another workflow that there is code of.
        """
        run = Run()
        await self._read(self._log(), run)
        if run.started is not None and run.started.workflow in self._runner.definitions:
            self._check(run)  # else no handle of its own could end it
        if run.finished is not None:
            if run.finished.was_cancelled:
                return
            raise RunEndedError(f"Run {self.id!r} has ended; it cannot be cancelled any more.")
        await self._tell(CancelAsked(), EXECUTORS_TAG, URGENT_TAG)
        if (running := self._runner.running.get(self.id)) is not None:
            running.execution.ask_cancel()

    async def signal(self, name: str, value: object = True, *, key: str | None = None) -> None:  # noqa: FBT002 - a value
        """Send the run a value, which it gets by `wf.signal(name)`, once, in the order of the log.

        When this returns, the signal is durable; it is kept until the run asks for it.

        Args:
            name: of the signal.
            value: anything that has a JSON form.
            key: of several signals to a run with the same key, only the first counts.

        Raises:
            UnknownRunError: there is no such run. RunEndedError: it takes no signals any more.
            RunIdInUseError: it is a run of another workflow; nothing was sent.
            FlowSettingsError: the name is empty, or the value has no JSON form; nothing was sent.
        """
        check_name(name)
        text = _signal_text(name, value)
        run = Run()
        await self._read(self._log(), run)
        self._check(run)
        if run.finished is not None:
            raise RunEndedError(f"Run {self.id!r} has ended; nobody would get the signal.")
        await self._tell(Signalled(name, text, waiting.new_name() if key is None else key))

    async def _tell(self, record: RunRecord, *tags: str) -> None:
        entry = Entry(encoded(record), (run_tag(self.id), *tags))
        with public_call():
            await append_with_retry(self._log(), [entry])

    def _check(self, run: Run) -> None:
        assert run.started is not None, "a run that was read has begun"
        check_workflow(self.id, self._definition.name, run.started)

    def _log(self) -> Log:
        return self._logs.log(self._runner.log_name)

    async def _read(self, log: Log, run: Run) -> None:
        try:
            await read_run(log, self.id, run, is_reused=True)
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
