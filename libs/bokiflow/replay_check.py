"""Replays runs without executing or writing anything: for checks of changed code, and for queries.

The workflow is executed against the decided outcomes of a run. An operation that is not decided
never ends here. The replay ends when all coroutines of the workflow wait. The code continues the
run if it has asked for every decided operation, with the same name and kind.

An execution (`bokiflow.runs.execution`) finds the same mismatches when it reaches them, and then
parks the run. `queries`, `taking`, `handle`, `inspection` and `flow` replay runs here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Never

from bokiflow.definition import Definition
from bokiflow.operations.children import CANCEL_CHILD
from bokiflow.operations.compensation import COMPENSATE, run_compensated
from bokiflow.runs import waiting
from bokiflow.runs.errors import ChangedWorkflowError, FlowSettingsError
from bokiflow.runs.execution import PATCH, RETURN, Execution, OperationOutcome
from bokiflow.runs.records import RunFinished, StepDecided
from bokiflow.runs.rounds import ContinuedAsNew
from bokiflow.runs.run_state import RunState
from bokiflow.workflow import Workflow
from indilog import InvalidArgumentsError, Log
from indilog.sdk import Logs

_ITERATIONS: Final = 64
"""Iterations of the event loop without a request after which a workflow counts as waiting."""


class ReplayMismatch(NamedTuple):
    """A run that the code cannot continue.

    Attributes:
        run: id of the run.
        workflow: name of its workflow.
        reason: the first difference, as a sentence.
    """

    run: str
    workflow: str
    reason: str


class _NoLease:
    """The lease of a replay, which decides nothing: it never ends."""

    def is_sure(self) -> bool:
        """See `LeaseCheck.is_sure`."""
        return True

    def has_ended(self) -> bool:
        """See `LeaseCheck.has_ended`."""
        return False


class _ReplayedExecution(Execution):
    """An execution in which undecided operations never end."""

    is_check = True

    async def decide(
        self,
        number: str,
        name: str,
        kind: str,
        produce: Callable[[], Awaitable[OperationOutcome]],  # noqa: ARG002 - nothing is executed
        *,
        may_wait: bool = False,  # noqa: ARG002
        is_cancellable: bool = True,  # noqa: ARG002
        noted_after_s: float | None = None,  # noqa: ARG002
    ) -> StepDecided:
        """Return the decided outcome of an operation. If there is none, wait without end."""
        known = self.find_decided(number, name, kind)
        if known is None:
            return await _never()
        if self._is_driving:
            await self.asked.catch_up(self._decided)
        return known

    async def _append(self, records: object) -> None:
        """Append nothing."""

    async def _continue(self, continued: ContinuedAsNew) -> RunFinished:  # noqa: ARG002
        """Begin no further round."""
        return RunFinished(self.epoch, b"")

    async def replay_until_idle(self) -> None:
        """Return when the workflow's tasks ask for no further operation.

        The replay terminates, because each decision is replayed once.
        """
        is_on = True
        while is_on:
            asked, replayed = self.asked.total, self.asked.replayed
            for _ in range(_ITERATIONS):
                await waiting.pause(0)
            is_on = self.asked.total > asked or self.asked.replayed > replayed

    def first_difference(self) -> ChangedWorkflowError | None:
        """Return the first decided operation that the code did not ask for, or asked for with
        another name or kind.
        """
        if self._changed is not None:
            return self._changed
        for number, record in self._decided.items():
            if number not in self._reached and record.kind not in _NOT_ASKED_FOR:
                was = f"{record.kind} {record.name}"
                return ChangedWorkflowError(self.id, number, was, None)
        return None


_NOT_ASKED_FOR: Final = frozenset({PATCH, RETURN, COMPENSATE, CANCEL_CHILD})
"""Kinds of decisions that the code of a continuing run need not ask for."""


async def _never() -> Never:
    await waiting.Gate().wait()
    raise AssertionError("nothing sets this gate")


class Replayed(NamedTuple):
    """A workflow that was replayed up to the first operation without an outcome.

    Attributes:
        workflow: the workflow's object.
        arguments: the arguments of the workflow.
    """

    workflow: Workflow
    arguments: Mapping[str, Any]


@asynccontextmanager
async def replay(
    definition: Definition,
    log: Log,
    logs: Logs,
    run_id: str,
    run: RunState,
) -> AsyncIterator[Replayed | str]:
    """Enter a block with a replayed run. If the code does not continue the run, the block gets the
    reason as text instead.

    Args:
        definition: the workflow with the code to replay.
        log: log of the run; it is not written.
        logs: source of logs for code between steps, which should use no log.
        run_id: id of the run.
        run: the run, read from the log.
    """
    started = run.started
    assert started is not None, "only a run that has begun is replayed"
    try:
        arguments = definition.signature.arguments(started.arguments)
    except (InvalidArgumentsError, FlowSettingsError, TypeError) as error:
        yield str(error)
        return
    execution = _ReplayedExecution(log, run_id, run, _NoLease())
    wf = Workflow(execution, logs)
    body = run_compensated(wf.compensations, definition.result_text(wf, arguments))
    replaying = waiting.start_task(execution.execute(body))
    try:
        await execution.replay_until_idle()
        difference = execution.first_difference()
        yield Replayed(wf, arguments) if difference is None else str(difference)
    finally:
        replaying.cancel()
        await waiting.wait_done(replaying)
        if not replaying.cancelled():
            replaying.exception()


async def find_mismatch(
    definition: Definition,
    log: Log,
    logs: Logs,
    run_id: str,
    run: RunState,
) -> ReplayMismatch | None:
    """Replay a run with the code of a definition. Return None if the code continues the run. The
    arguments are those of `replay`.
    """
    async with replay(definition, log, logs, run_id, run) as replayed:
        reason = replayed if isinstance(replayed, str) else None
    return None if reason is None else ReplayMismatch(run_id, definition.name, reason)
