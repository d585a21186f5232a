"""Child workflows: runs that a step of another run starts.

The id of a child consists of the parent's id and the step's number. So if the start is repeated
after a crash, it finds the existing child. The parent's log records the decision to start before
the child starts. So a later executor of the parent knows all children that may exist. When that
executor compensates the parent, it cancels these children. `Operations.run` and
`Operations.start_child` use `Child`.
"""

from __future__ import annotations

import inspect
import math
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from bokiflow.operations.compensation import Compensations
from bokiflow.operations.notifications import WAIT_S_MAX, decide_waiting, wait_for_record
from bokiflow.runs.errors import FlowSettingsError, RunIdInUseError, UnknownRunError
from bokiflow.runs.execution import Execution, OperationOutcome, raise_failure
from bokiflow.runs.records import (
    INBOX_TAG,
    CancelAsked,
    Origin,
    RecordedFailure,
    RunFinished,
    encode,
    partition_of,
    partition_tag,
    run_tag,
)
from bokiflow.runs.run_log import append_with_retry, read_dependency, read_run
from bokiflow.runs.run_state import RunState
from indilog import Entry, TrimmedError

START_CHILD: Final = "start child"
CHILD: Final = "child"
CANCEL_CHILD: Final = "cancel child"
_DEPTH_MAX: Final = 16
_OTHERS_LOOK_S: Final = 5.0
"""Seconds between two looks for the end of a child that another run started."""


_ResultT_co = TypeVar("_ResultT_co", covariant=True)


@runtime_checkable
class ChildWorkflow(Protocol[_ResultT_co]):
    """A workflow that can be started as a child; `bokiflow.Startable` is one."""

    name: str

    @property
    def log_name(self) -> str:
        """The name of the log of the workflow's runs."""

    def arguments_text(self, given: tuple[object, ...], named: dict[str, object]) -> bytes:
        """Check the arguments and return them as a JSON object."""

    async def start_child(self, arguments: bytes, id: str, parent: Origin) -> None:  # noqa: A002
        """Start the run, unless a run with this id exists, and execute it in this process."""

    def result_of(self, text: bytes) -> _ResultT_co:
        """Return the value of a result's JSON text."""


def check_startable(child: object) -> None:
    """Raise for an object that is not a workflow.

    Raises:
        FlowSettingsError: the argument is not a workflow; the message says what to use instead.
    """
    if inspect.iscoroutine(child):
        child.close()  # else Python warns that it was never awaited
        raise FlowSettingsError(
            f"Give the workflow, then its arguments: wf.run({child.__name__}, ...)."
        )
    if not isinstance(child, ChildWorkflow):
        name = getattr(child, "__name__", repr(child))
        raise FlowSettingsError(
            f"{name} is not a workflow of this flow: for a function of an application use "
            f"wf.call({name}, ...), for any other wf.step({name}, ...)."
        )


class Child(Generic[_ResultT_co]):
    """A child run, as seen by one execution of its parent.

    Attributes:
        id: id of the child run.
        name: name of its workflow.
        number: number of the parent's operation that starts the child.
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
            raise FlowSettingsError(f"Child workflows can be nested at most {_DEPTH_MAX} deep.")
        if startable.log_name != execution.log.name:
            raise FlowSettingsError(
                f"{startable.name} belongs to another flow ({startable.log_name}); start it in a "
                "step."
            )
        self._execution = execution
        self._startable = startable
        self.name = startable.name
        self.number = number
        self._arguments = arguments
        self._is_awaited = False
        self._run = RunState()

    async def start(self, compensations: Compensations, *, is_awaited: bool) -> None:
        """Decide the start of the child, then start it unless it exists.

        Args:
            compensations: the compensations of the parent, to which the child's cancellation is
                added.
            is_awaited: whether the parent waits for the child's end.

        Raises:
            Cancelled: the parent was cancelled; there is no child.
        """
        execution, name = self._execution, self.name
        self._is_awaited = is_awaited

        async def started() -> OperationOutcome:
            return OperationOutcome(msgspec.json.encode(self.id))

        decided = await execution.decide(self.number, name, START_CHILD, started)
        raise_failure(decided)
        self.id = msgspec.json.decode(
            decided.result, type=str
        )  # the child of a fork is the child that the original run started
        compensations.add(self.number, name, CANCEL_CHILD, self._cancel)
        if not execution.is_check:
            with execution.asked.performing():
                await read_dependency(self._start)

    async def _start(self) -> None:
        finished, started = await self._read_end(), self._run.started
        if started is not None and started.parent is None:
            raise RunIdInUseError(
                f"Run {self.id!r} was not started by {self._execution.id!r}; ids that end with a "
                "slash and a number are reserved for children, so choose another id."
            )
        if started is None and finished is None:
            origin = self._execution.origin(self.number, is_awaited=self._is_awaited)
            await self._startable.start_child(self._arguments, self.id, origin)

    async def result(self, number: str) -> _ResultT_co:
        """Wait for the child's end; return its result, decided as operation `number` of the parent.

        Raises:
            StepFailedError: the child failed, or was cancelled independently of the parent.
            Cancelled: the parent was cancelled while waiting.
        """

        async def ended() -> OperationOutcome:
            finished = await self._wait_for_end()
            failure = finished.failure
            if failure is not None and finished.was_cancelled:
                failure = RecordedFailure("RunCancelledError", failure.message)
            return OperationOutcome(finished.result, failure)

        decided = await decide_waiting(self._execution, number, self.name, CHILD, ended)
        raise_failure(decided)
        return self._startable.result_of(decided.result)

    async def _wait_for_end(self, *, wakes: bool = True) -> RunFinished:
        async def found() -> RunFinished | None:
            return await read_dependency(self._read_end)

        # A fork may wait for a child of the run from which it was forked. The end of that child is
        # a record of the other run, and wakes only that run.
        execution = self._execution
        is_of_other = self.id != execution.child_id(self.number)
        look_s = _OTHERS_LOOK_S if is_of_other else WAIT_S_MAX
        execution.pins += is_of_other
        try:
            finished = await wait_for_record(execution, math.inf, found, wakes=wakes, look_s=look_s)
        finally:
            execution.pins -= is_of_other
        assert finished is not None, "the wait has no time limit"
        return finished

    async def _read_end(self) -> RunFinished | None:
        """Return the end of the child; None while the child runs. A trimmed child has ended."""
        log = self._execution.log
        try:
            await read_run(log, self.id, self._run, is_reused=True)
            if self._run.started is None:
                await log.read_next(run_tag(self.id))  # raises if the child was trimmed
        except TrimmedError:
            words = f"Run {self.id!r} has ended and was trimmed after its retention."
            return RunFinished(1, b"", RecordedFailure(UnknownRunError.__name__, words))
        return self._run.finished

    async def _cancel(self, _: str) -> OperationOutcome:
        """Cancel the child if it is still running, and wait for its end."""
        try:
            await read_dependency(self._start)
        except RunIdInUseError:
            return OperationOutcome(b"false")  # the run with this id is not this child
        if await read_dependency(self._read_end) is None:
            there = partition_tag(partition_of(self.id, self._execution.partitions))
            tags = (run_tag(self.id), there, INBOX_TAG)
            entry = Entry(encode(CancelAsked()), tags)
            await append_with_retry(self._execution.log, [entry])
        finished = await self._wait_for_end(wakes=False)
        return OperationOutcome(b"true" if finished.was_cancelled else b"false")
