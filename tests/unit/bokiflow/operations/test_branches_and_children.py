"""Branches of workflows, and workflows that start others."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta

import pytest

from bokiflow import (
    Cancelled,
    Flow,
    RunCancelledError,
    RunFailedError,
    StepFailedError,
    Workflow,
)
from bokiflow.operations.notifications import wait_for_record
from bokiflow.runs.execution import Execution
from bokiflow.runs.records import ChildEnded, encode, run_tag
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG as LOG
from tests.support.flow_executions import NeverSure, begin, decided, execute, take


@pytest.mark.asyncio
async def test_branches_run_at_once_and_keep_their_numbers(flow: Flow, logs: MemoryLogs) -> None:
    both = asyncio.Barrier(2)

    async def meet(n: int) -> int:
        await both.wait()
        return n

    async def branch(wf: Workflow, n: int) -> int:
        await wf.step(meet, n)
        return await wf.step(meet, n * 10)

    @flow.workflow
    async def fan(wf: Workflow) -> list[int]:
        return await wf.gather(branch(wf, 1), branch(wf, 2))

    assert await (await fan.start(id="fan")).result(10) == [10, 20]
    numbers = {d.number for d in await decided(logs, "fan", 4)}
    assert numbers == {"1.1.1", "1.1.2", "1.2.1", "1.2.2"}


@pytest.mark.asyncio
async def test_steps_can_be_gathered_and_limited(flow: Flow) -> None:
    running, most = 0, 0

    async def square(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return n * n

    @flow.workflow
    async def fan(wf: Workflow) -> list[int]:
        return await wf.gather(*(wf.step(square, n) for n in range(10)), at_once=3)

    assert await (await fan.start()).result(10) == [n * n for n in range(10)]
    assert most == 3


@pytest.mark.asyncio
async def test_every_branch_ends_and_the_first_failure_is_raised(flow: Flow) -> None:
    done: list[str] = []

    async def fail(word: str) -> None:
        raise ValueError(word)

    async def slow(wf: Workflow) -> None:
        await wf.sleep(0.01)
        done.append(await wf.step(lambda: "slow", name="slow"))

    @flow.workflow
    async def fan(wf: Workflow) -> None:
        await wf.gather(slow(wf), wf.step(fail, "one", retries=0), wf.step(fail, "two", retries=0))

    with pytest.raises(RunFailedError, match="ValueError: one"):
        await (await fan.start()).result(10)
    assert done == ["slow"]


@pytest.mark.asyncio
async def test_a_cancellation_reaches_every_branch_once(flow: Flow, logs: MemoryLogs) -> None:
    reported: list[str] = []

    async def branch(wf: Workflow, name: str) -> None:
        try:
            await wf.sleep(timedelta(days=1))
        except Cancelled:
            reported.append(await wf.step(lambda: name, name="cleanup"))
            raise

    @flow.workflow
    async def fan(wf: Workflow) -> None:
        try:
            await wf.gather(branch(wf, "a"), branch(wf, "b"))
        finally:
            reported.append(await wf.step(lambda: "main", name="cleanup"))

    handle = await fan.start(id="fan")
    await decided(logs, "fan", 2)
    await handle.cancel()
    with pytest.raises(RunCancelledError):
        await handle.result(10)
    assert sorted(reported[:2]) == ["a", "b"]
    assert reported[2:] == ["main"]


@pytest.mark.asyncio
async def test_a_branch_may_return_an_error(flow: Flow) -> None:
    async def returns(wf: Workflow) -> Exception:
        return ValueError("no failure")

    @flow.workflow
    async def fan(wf: Workflow) -> list[str]:
        return [str(error) for error in await wf.gather(returns(wf), returns(wf))]

    assert await (await fan.start()).result(10) == ["no failure", "no failure"]


@pytest.mark.parametrize("at_once", [0, -1])
@pytest.mark.asyncio
async def test_at_least_one_branch_runs_at_once(flow: Flow, at_once: int) -> None:
    @flow.workflow
    async def fan(wf: Workflow) -> list[int]:
        return await wf.gather(wf.step(lambda: 1, name="one"), at_once=at_once)

    with pytest.raises(RunFailedError, match="at_once must be 1 or more, not 1 and"):
        await (await fan.start()).result(5)


@pytest.mark.asyncio
async def test_a_record_read_by_another_branch_wakes_a_waiting_one(logs: MemoryLogs) -> None:
    """While a branch looks whether its child has ended, another one may read that it has."""
    log = logs.log(LOG)
    await begin(log, "r")
    execution = Execution(log, "r", await read_run(log, "r", RunState()), NeverSure())
    looks = 0

    async def found() -> str | None:
        nonlocal looks
        looks += 1
        if looks == 2:
            return "ended"
        await log.append(encode(ChildEnded("r/1")), tags=[run_tag("r")])
        await execution.catch_up()  # as for another branch
        return None

    waiting = wait_for_record(execution, math.inf, found)
    assert await asyncio.wait_for(waiting, 5) == "ended"


@pytest.mark.asyncio
async def test_a_child_runs_once_and_gives_its_result_in_its_type(flow: Flow) -> None:
    ran: list[int] = []

    async def body(n: int) -> int:
        ran.append(n)
        return 2 * n

    @flow.workflow
    async def double(wf: Workflow, n: int) -> int:
        return await wf.step(body, n)

    @flow.workflow
    async def both(wf: Workflow) -> list[int]:
        later = await wf.start_child(double, n=5)
        return [await wf.run(double, 4), await later.result(), await later.result()]

    handle = await both.start(id="both")
    assert await handle.result(10) == [8, 10, 10]
    assert sorted(ran) == [4, 5]
    assert await double.handle(f"both@{(await handle.status()).place}/1").result(10) == 10


@pytest.mark.asyncio
async def test_a_child_is_found_again_by_the_next_executor(flow: Flow, logs: MemoryLogs) -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    bodies = 0

    async def body() -> str:
        nonlocal bodies
        bodies += 1
        begun.set()
        await go.wait()
        return "done"

    @flow.workflow
    async def child(wf: Workflow) -> str:
        return await wf.step(body)

    async def parent(wf: Workflow) -> str:
        return await wf.run(child)

    log = logs.log(LOG)
    await begin(log, "p")
    first = asyncio.create_task(execute(log, "p", parent))
    await begun.wait()
    first.cancel()
    await asyncio.wait([first])
    await take(log, "p", "second")
    second = asyncio.create_task(execute(log, "p", parent))
    go.set()
    assert (await asyncio.wait_for(second, 10)).result == b'"done"'
    assert bodies == 1


@pytest.mark.asyncio
async def test_a_child_that_fails_fails_its_parents_operation(flow: Flow) -> None:
    @flow.workflow
    async def child(wf: Workflow) -> None:
        raise Cancelled("no room")

    @flow.workflow
    async def parent(wf: Workflow) -> str:
        try:
            await wf.run(child)
        except StepFailedError as error:
            return error.kind
        return ""

    assert await (await parent.start()).result(10) == "RunCancelledError"


@pytest.mark.asyncio
async def test_a_cancellation_goes_down_the_tree(flow: Flow, logs: MemoryLogs) -> None:
    undone: list[str] = []

    @flow.workflow
    async def leaf(wf: Workflow) -> None:
        await wf.step(lambda: "leaf", name="leaf", compensate=undone.append)
        await wf.sleep(timedelta(days=1))

    @flow.workflow
    async def middle(wf: Workflow) -> None:
        await wf.step(lambda: "middle", name="middle", compensate=undone.append)
        await wf.run(leaf)

    @flow.workflow
    async def root(wf: Workflow) -> None:
        await wf.step(lambda: "root", name="root", compensate=undone.append)
        await wf.start_child(leaf)
        await wf.run(middle)

    handle = await root.start(id="r")
    began = f"r@{(await handle.status()).place}"
    await decided(logs, f"{began}/3/2", 2)
    await decided(logs, f"{began}/2", 2)
    await handle.cancel()
    with pytest.raises(RunCancelledError):
        await handle.result(10)
    assert undone == ["leaf", "middle", "leaf", "root"]
    for run in ("2", "3", "3/2"):
        of = middle if run == "3" else leaf
        assert (await of.handle(f"{began}/{run}").status()).state is State.CANCELLED


@pytest.mark.asyncio
async def test_a_child_outlives_a_parent_that_ends_well(flow: Flow, logs: MemoryLogs) -> None:
    @flow.workflow
    async def child(wf: Workflow) -> str:
        return str(await wf.signal("go"))

    @flow.workflow
    async def parent(wf: Workflow) -> str:
        return (await wf.start_child(child)).id

    handle = child.handle(await (await parent.start()).result(10))
    await handle.signal("go", 1)
    assert await handle.result(10) == "1"


@pytest.mark.asyncio
async def test_a_parent_gets_an_error_if_its_child_was_trimmed(
    flow: Flow, logs: MemoryLogs
) -> None:
    @flow.workflow
    async def child(wf: Workflow) -> int:
        return 1

    @flow.workflow
    async def parent(wf: Workflow) -> str:
        running = await wf.start_child(child)
        await wf.signal("go")
        try:
            await running.result()
        except StepFailedError as error:
            return error.kind
        return ""

    handle = await parent.start(id="p")
    await decided(logs, "p", 1)
    child_id = f"p@{(await handle.status()).place}/1"
    await child.handle(child_id).result(10)
    await logs.log(LOG).trim(logs.position, tag=run_tag(child_id))
    await handle.signal("go")
    assert await handle.result(10) == "UnknownRunError"


@pytest.mark.asyncio
async def test_a_fork_starts_no_child_again_that_its_origin_had_started(
    flow: Flow, logs: MemoryLogs
) -> None:
    ran: list[int] = []

    @flow.workflow
    async def child(wf: Workflow, n: int) -> int:
        ran.append(n)
        return n

    async def last(n: int) -> int:
        return 10 * n

    @flow.workflow
    async def parent(wf: Workflow) -> int:
        running = await wf.start_child(child, 1)
        first = await wf.run(child, 2)
        return await wf.step(last, first + await running.result())

    assert await (await parent.start(id="p")).result(10) == 30
    fork = await flow.fork("p", "last")
    assert await fork.result(10) == 30
    assert sorted(ran) == [1, 2]


@pytest.mark.asyncio
async def test_a_run_that_another_caller_started_is_no_child(flow: Flow) -> None:
    @flow.workflow
    async def child(wf: Workflow) -> int:
        return 1

    undone: list[str] = []

    @flow.workflow
    async def parent(wf: Workflow) -> int:
        wf.compensate(undone.append, "before")
        await wf.signal("go")
        return await wf.run(child)

    handle = await parent.start(id="p")
    await child.start(id=f"p@{(await handle.status()).place}/3")
    await handle.signal("go")
    with pytest.raises(RunFailedError, match=r"RunIdInUseError: .* not started by 'p'"):
        await handle.result(10)
    assert undone == ["before"]
