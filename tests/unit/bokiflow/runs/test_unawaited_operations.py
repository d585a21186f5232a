"""A workflow that returns before all its operations have finished fails with an error that names
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bokiflow import Flow, RunFailedError, Workflow
from bokiflow.history import decided_before
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.unawaited_operations import AskedOperations
from bokistore import Store, Transaction
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG, begin, decided, execute, take

pytestmark = pytest.mark.asyncio


async def ended(flow: Flow, body: Callable[[Workflow], Coroutine[Any, Any, str]]) -> str:
    """Return what a workflow returned, or what is said of its run."""
    handle = await flow.workflow(body).start()
    try:
        return await handle.result(10)
    except RunFailedError as error:
        return str(error).partition("UnfinishedOperationError: ")[2]


async def test_a_step_running_in_a_task_is_reported(flow: Flow) -> None:
    gate = asyncio.Event()
    tasks = []

    async def forgets(wf: Workflow) -> str:
        tasks.append(asyncio.create_task(wf.step(gate.wait, name="mail")))
        await wf.step(lambda: 1, name="price")
        return "done"

    assert await ended(flow, forgets) == (
        "The workflow returned before step 'mail' (operation 1) was finished; "
        "await each operation, several at once with wf.gather."
    )
    gate.set()
    await tasks[0]


async def empty(wf: Workflow) -> None: ...


async def nothing(_: Transaction) -> None: ...


OPERATIONS: dict[str, Callable[[Workflow, Flow], Coroutine[Any, Any, Any]]] = {
    "step 'mail' (operation 1)": lambda wf, _: wf.step(
        lambda: 1, name="mail", compensate=lambda _: 1
    ),
    "sleep (operation 2)": lambda wf, _: wf.sleep(1),
    "signal 'paid' (operation 1)": lambda wf, _: wf.signal("paid"),
    "step 'mail' (operation 1) was finished (and 1 more)": lambda wf, _: wf.gather(
        wf.step(lambda: 1, name="mail")
    ),
    "call 'shop.mail' (operation 1)": lambda wf, _: wf.call("shop.mail"),
    "child 'empty' (operation 2)": lambda wf, flow: wf.run(flow.workflow(empty)),
    "start child 'empty' (operation 1)": lambda wf, flow: wf.start_child(flow.workflow(empty)),
    "transaction 'nothing' (operation 1)": lambda wf, flow: wf.transact(
        Store(flow.logs().log("a")), nothing
    ),
}


@pytest.mark.parametrize("reported", OPERATIONS)
async def test_an_operation_that_is_never_awaited_is_reported(flow: Flow, reported: str) -> None:
    async def drops(wf: Workflow) -> str:
        _ = OPERATIONS[reported](wf, flow)
        return "done"

    assert reported in await ended(flow, drops)


async def test_a_child_result_that_is_never_awaited_is_reported(flow: Flow) -> None:
    child = flow.workflow(empty)

    async def drops(wf: Workflow) -> str:
        running = await wf.start_child(child)
        _ = running.result()
        return "done"

    assert "child 'empty' (operation 2)" in await ended(flow, drops)


async def test_operations_that_ended_in_a_task_do_not_fail_the_workflow(flow: Flow) -> None:
    """With a result, an error that is never awaited, or because it was cancelled."""

    async def fails() -> None:
        raise ValueError("no")

    async def races(wf: Workflow) -> str:
        tasks = [
            asyncio.create_task(wf.signal("never")),
            asyncio.create_task(wf.step(lambda: 1, name="one")),
            asyncio.create_task(wf.step(fails, retries=0)),
        ]
        await asyncio.wait(tasks[1:])
        assert tasks[2].exception() is not None
        tasks[0].cancel()
        return "done"

    assert await ended(flow, races) == "done"


async def test_earlier_steps_are_compensated(flow: Flow) -> None:
    undone: list[str] = []

    async def drops(wf: Workflow) -> str:
        await wf.step(lambda: "car", name="book", compensate=undone.append)
        _ = wf.signal("paid")
        return "done"

    assert "signal 'paid' (operation 2)" in await ended(flow, drops)
    assert undone == ["car"]


@pytest.mark.parametrize("turns", [0, 5])
async def test_an_operation_that_is_decided_by_now_is_finished(
    logs: MemoryLogs, turns: int
) -> None:
    """A later execution need not wait for such an operation before it returns."""
    log = logs.log(FLOW_LOG)
    await begin(log, "r")
    is_first = True
    tasks: list[asyncio.Task[int]] = []

    async def later(step: Coroutine[Any, Any, int]) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await step

    async def forgets(wf: Workflow) -> str:
        tasks.append(asyncio.create_task(later(wf.step(lambda: 1, name="mail"))))
        if is_first:
            await tasks[0]
            raise Stopped("its process is gone")
        return "done"

    with pytest.raises(Stopped):
        await execute(log, "r", forgets)
    await take(log, "r", "second")
    is_first = False
    assert (await execute(log, "r", forgets)).result == b'"done"'
    assert await tasks[-1] == 1


async def test_every_execution_comes_to_the_same_end(logs: MemoryLogs) -> None:
    """The end is the same for an execution that finds an operation finished which was unfinished
    when the workflow first returned.
    """
    log, gate = logs.log(FLOW_LOG), asyncio.Event()
    await begin(log, "r")
    undone: list[str] = []

    async def undo(what: str) -> None:
        undone.append(what)
        if len(undone) == 1:
            raise Stopped("its process is gone")

    async def forgets(wf: Workflow) -> str:
        await wf.step(lambda: "car", name="book", compensate=undo)
        tasks.append(asyncio.create_task(wf.step(gate.wait, name="mail")))
        return "done"

    tasks: list[asyncio.Task[Any]] = []
    with pytest.raises(Stopped):
        await execute(log, "r", forgets)
    gate.set()
    await tasks[0]
    assert [record.name for record in await decided(logs, "r", 3)] == ["book", "return", "mail"]
    _, before = decided_before(await read_run(log, "r", RunState()), "mail")
    assert [record.name for record in before] == ["book"], "a fork may come to another end"
    await take(log, "r", "second")
    failure = (await execute(log, "r", forgets)).failure
    assert failure is not None
    assert failure.kind == "UnfinishedOperationError"
    assert "'mail' (operation 2)" in failure.message
    assert undone == ["car", "car"]


async def test_operations_that_have_ended_are_not_kept() -> None:
    asked = AskedOperations()

    async def one() -> None: ...

    for number in range(10_000):
        await asked.add(f"{number}", "one", "step", one())
        assert len(asked._operations) <= 64
    waiting = [asked.add(f"{number}", "one", "step", one()) for number in range(1000)]
    assert len(asked.left()) == 1000
    for coroutine in waiting:
        coroutine.close()
    assert asked.left() == []
