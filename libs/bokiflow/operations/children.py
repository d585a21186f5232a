"""Child workflows: runs that a step of another run started.

A child is known by the run and step of its parent, so starting it again after a crash finds the one
that was started. The parent first decides that it will start it, so whoever executes the parent
later knows of every child there can be, and cancels it if the parent is taken back.
"""

from __future__ import annotations

import inspect
import math
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from bokiflow.operations.compensation import Compensations
from bokiflow.operations.notifications import decide_waiting, wait_for_record
from bokiflow.runs.errors import FlowSettingsError, RunIdInUseError, UnknownRunError
from bokiflow.runs.execution import Execution, OperationOutcome, raise_failure
from bokiflow.runs.fold import Run
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    URGENT_TAG,
    CancelAsked,
    Origin,
    RecordedFailure,
    RunFinished,
    encoded,
    run_tag,
)
from bokiflow.runs.run_log import append_with_retry, read_dependency, read_run
from indilog import Entry, TrimmedError

START_CHILD: Final = "start child"
CHILD: Final = "child"
CANCEL_CHILD: Final = "cancel child"
_DEPTH_MAX: Final = 16


_ResultT_co = TypeVar("_ResultT_co", covariant=True)


@runtime_checkable
class ChildWorkflow(Protocol[_ResultT_co]):
    """A workflow that can be started as a child; `bokiflow.Startable` is one."""

    name: str

    @property
    def log_name(self) -> str:
        """The log of its runs."""

    def arguments_text(self, given: tuple[object, ...], named: dict[str, object]) -> bytes:
        """Return arguments as a JSON object; checked."""

    async def start_child(self, arguments: bytes, id: str, parent: Origin) -> None:  # noqa: A002
        """Begin the run, unless there is one of this id, and execute it in this process."""

    def result_of(self, text: bytes) -> _ResultT_co:
        """Return the value that JSON text of a result stands for."""


def check_startable(child: object) -> None:
    """Refuse what is no workflow as a child.

    Raises:
        FlowSettingsError: it is none; says what to use for it.
    """
    if inspect.iscoroutine(child):
        child.close()  # else Python warns that nobody awaited it
        raise FlowSettingsError(
            f"Give the workflow, then its arguments: wf.run({child.__name__}, ...)."
        )
    if not isinstance(child, ChildWorkflow):
        name = getattr(child, "__name__", repr(child))
        raise FlowSettingsError(
            f"{name} is no workflow of this flow: for a function of an application use "
            f"wf.call({name}, ...), for any other wf.step({name}, ...)."
        )


class Child(Generic[_ResultT_co]):
    """A child of a run, as its execution knows it.

    Attributes:
        id: of its run.
        name: of its workflow.
        number: of the operation that starts it.
    """

    def __init__(
        self,
        execution: Execution,
        startable: ChildWorkflow[_ResultT_co],
        number: str,
        arguments: bytes,
    ) -> None:
        self.id = execution.child_id(number)
        run_tag(self.id)
        if self.id.count("/") > _DEPTH_MAX:
            raise FlowSettingsError(f"Workflows start each other {_DEPTH_MAX} deep at most.")
        if startable.log_name != execution.log.name:
            raise FlowSettingsError(
                f"{startable.name} is of another flow ({startable.log_name}); start it in a step."
            )
        self._execution = execution
        self._startable = startable
        self.name = startable.name
        self.number = number
        self._arguments = arguments
        self._run = Run()

    async def start(self, compensations: Compensations) -> None:
        """Decide that it is started, and start it unless it was.

        Raises:
            Cancelled: the run was cancelled; there is no child.
        """
        execution, name = self._execution, self.name

        async def started() -> OperationOutcome:
            return OperationOutcome(msgspec.json.encode(self.id))

        decided = await execution.decide(self.number, name, START_CHILD, started)
        raise_failure(decided)
        self.id = msgspec.json.decode(
            decided.result, type=str
        )  # a fork has the child of its origin
        compensations.add(self.number, name, CANCEL_CHILD, self._cancelled)
        with execution.asked.performing():
            await read_dependency(self._start)

    async def _start(self) -> None:
        finished, started = await self._finished(), self._run.started
        if started is not None and started.parent is None:
            raise RunIdInUseError(
                f"Run {self.id!r} was not started by {self._execution.id!r}; ids that end in a "
                "slash and a number are those of children, choose others."
            )
        if started is None and finished is None:
            origin = Origin(self._execution.id, self.number)
            await self._startable.start_child(self._arguments, self.id, origin)

    async def result(self, number: str) -> _ResultT_co:
        """Return its result, once it has ended, decided as operation `number` of the parent.

        Raises:
            StepFailedError: it failed, or was cancelled by somebody else.
            Cancelled: the parent was cancelled meanwhile.
        """

        async def ended() -> OperationOutcome:
            finished = await self._ended()
            failure = finished.failure
            if failure is not None and finished.was_cancelled:
                failure = RecordedFailure("RunCancelledError", failure.message)
            return OperationOutcome(finished.result, failure)

        decided = await decide_waiting(self._execution, number, self.name, CHILD, ended)
        raise_failure(decided)
        return self._startable.result_of(decided.result)

    async def _ended(self, *, wakes: bool = True) -> RunFinished:
        async def found() -> RunFinished | None:
            return await read_dependency(self._finished)

        finished = await wait_for_record(self._execution, math.inf, found, wakes=wakes)
        assert finished is not None, "it waits without end"
        return finished

    async def _finished(self) -> RunFinished | None:
        """Return how it ended, if it has; a child that is forgotten is told from a new one."""
        log = self._execution.log
        try:
            if self._run.started is None:
                await log.read_next(run_tag(self.id))
            await read_run(log, self.id, self._run)
        except TrimmedError:
            words = f"Run {self.id!r} ended long ago and is forgotten."
            return RunFinished(1, b"", RecordedFailure(UnknownRunError.__name__, words))
        return self._run.finished

    async def _cancelled(self, _: str) -> OperationOutcome:
        """Cancel the child if it runs, and wait for its end."""
        try:
            await read_dependency(self._start)
        except RunIdInUseError:
            return OperationOutcome(b"false")  # it is nobody's child
        if await read_dependency(self._finished) is None:
            tags = (run_tag(self.id), EXECUTORS_TAG, URGENT_TAG)
            entry = Entry(encoded(CancelAsked()), tags)
            await append_with_retry(self._execution.log, [entry])
        finished = await self._ended(wakes=False)
        return OperationOutcome(b"true" if finished.was_cancelled else b"false")
