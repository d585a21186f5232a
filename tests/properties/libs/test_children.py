"""Two executors of a run that starts a child, in random interleavings, with a cancellation at some
time. The child is executed once, and no child of a cancelled run continues.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from unittest import mock

import msgspec
import pytest

from bokiflow import Workflow
from bokiflow.operations import children
from bokiflow.operations.compensation import Compensations, run_compensated
from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    CancelAsked,
    Origin,
    RunFinished,
    RunStarted,
    encode,
    run_record,
    run_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.base.ids import SeqNum
from indilog.base.log import Log
from indilog.testing import MemoryLogs
from indilog.testing.stepper import SteppedLog, run_stepped
from tests.support.flow_executions import FLOW_LOG, NeverSure, OneLog, begin, take

SCHEDULES = 300
PATIENCE = 0.05
STEPS = 4
CANCEL = 3
PARENT, CHILD = "p", "p@0/1"
_ValueT = TypeVar("_ValueT")


def now(coroutine: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Run a coroutine that awaits only a log in memory to its end."""
    return run_stepped([coroutine], lambda ready: ready[0])[0]


async def pause(_: float) -> None:
    """No time passes."""


class Stepped:
    """A child workflow over a stepped log; `execute_child` executes what is started."""

    name = "child"
    log_name = FLOW_LOG

    def __init__(self, log: Log) -> None:
        self._log = log

    def arguments_text(self, given: tuple[object, ...], named: dict[str, object]) -> bytes:
        return b"{}"

    async def start_child(self, arguments: bytes, id: str, parent: Origin) -> None:  # noqa: A002
        started = RunStarted("child", arguments, "executor", "version", parent)
        await self._log.append(encode(started), tags=[run_tag(id), "children"])

    def result_of(self, text: bytes) -> object:
        return msgspec.json.decode(text)


async def execute_children(log: Log, ran: list[str]) -> None:
    """Execute every child that is started, until the parent has ended."""
    executed: set[str] = set()
    while True:
        is_over = (await read_run(log, PARENT, RunState())).finished is not None
        started = {str(record.tags[0]) for record in await log.read_range("children")}
        for tag in sorted(started - executed):
            await execute_child(log, tag.removeprefix("flow:"), ran)
        executed |= started
        if is_over and not started - executed:
            return


async def execute_child(log: Log, run_id: str, ran: list[str]) -> None:
    run = await read_run(log, run_id, RunState())
    execution = Execution(log, run_id, run, NeverSure())
    wf = Workflow(execution, OneLog(log))

    async def body() -> str:
        ran.append(run_id)
        return "done"

    async def steps() -> bytes:
        return msgspec.json.encode([await wf.step(body) for _ in range(STEPS)])

    await execution.execute(run_compensated(wf.compensations, steps()))


def executing(logs: MemoryLogs) -> Coroutine[Any, Any, RunFinished | None]:
    """Return an execution of the parent by its current executor."""
    log = SteppedLog(logs.log(FLOW_LOG))
    run = now(read_run(logs.log(FLOW_LOG), PARENT, RunState()))
    execution = Execution(log, PARENT, run, NeverSure())
    wf = Workflow(execution, OneLog(log))

    async def body() -> bytes:
        child: Any = Stepped(log)
        return msgspec.json.encode(await wf.run(child))

    async def executed() -> RunFinished | None:
        try:
            return await execution.execute(run_compensated(wf.compensations, body()))
        except Stopped:
            return None

    return executed()


async def cancel(log: Log) -> None:
    await log.append(encode(CancelAsked()), tags=[run_tag(PARENT)])


def ended_at(log: Log, run_id: str) -> list[SeqNum]:
    records = now(log.read_range(run_tag(run_id)))
    return [r.seqnum for r in records if isinstance(run_record(r.data), RunFinished)]


def run_once(seed: int, *, with_cancel: bool) -> tuple[str, str, list[str]]:
    """Return how parent and child end in one interleaving, and the runs of the child's bodies."""
    logs, ran = MemoryLogs(clock=lambda: 1000.0), list[str]()
    plain = logs.log(FLOW_LOG)
    now(begin(plain, PARENT))
    executions: list[Coroutine[Any, Any, Any]] = [executing(logs)]
    now(take(plain, PARENT, "second"))
    executions.append(executing(logs))
    executions.append(execute_children(SteppedLog(plain), ran))
    if with_cancel:
        executions.append(cancel(SteppedLog(plain)))
    dice = random.Random(seed)

    def choose(ready: Sequence[int]) -> int:
        """The process that cancels waits long before it does."""
        others = [number for number in ready if number != CANCEL]
        return (
            CANCEL
            if CANCEL in ready and (not others or dice.random() < PATIENCE)
            else dice.choice(others)
        )

    with mock.patch.object(waiting, "pause", pause):
        run_stepped(executions, choose)
    if with_cancel and (child_ended := ended_at(plain, CHILD)):
        assert child_ended[0] < ended_at(plain, PARENT)[0], "nothing runs on under a run that ended"
    parent = now(read_run(plain, PARENT, RunState()))
    child = now(read_run(plain, CHILD, RunState()))
    assert parent.state is not None
    return parent.state.value, "" if child.state is None else child.state.value, ran


def check_once() -> None:
    for seed in range(SCHEDULES):
        parent, child, ran = run_once(seed, with_cancel=False)
        assert (parent, child, ran) == ("done", "done", [CHILD] * STEPS)


def check_cancelled() -> None:
    ends = set()
    for seed in range(SCHEDULES):
        parent, child, ran = run_once(seed, with_cancel=True)
        ends.add((parent, child))
        assert len(ran) <= STEPS, "no body runs again"
    assert ends >= {("done", "done"), ("cancelled", "cancelled"), ("cancelled", "done")}
    assert ends <= {
        ("done", "done"),
        ("cancelled", ""),
        ("cancelled", "cancelled"),
        ("cancelled", "done"),
    }


def test_a_child_is_executed_once() -> None:
    check_once()


def test_nothing_runs_on_under_a_cancelled_run() -> None:
    check_cancelled()


async def started_always(child: children.Child[Any]) -> None:
    """A planted bug: each executor begins a child of its own."""
    child.id = f"{CHILD}/{random.random()}"
    await child._startable.start_child(b"{}", child.id, Origin(PARENT, "1"))


async def nothing_taken_back(compensations: Compensations) -> list[object]:
    """A planted bug: children are not cancelled."""
    return []


@pytest.mark.parametrize(
    ("where", "what", "planted", "check"),
    [
        (children.Child, "_start", started_always, check_once),
        (Compensations, "run", nothing_taken_back, check_cancelled),
    ],
)
def test_a_planted_bug_is_caught(
    where: object, what: str, planted: Callable[..., Any], check: Callable[[], None]
) -> None:
    with mock.patch.object(where, what, planted), pytest.raises(AssertionError):
        check()
