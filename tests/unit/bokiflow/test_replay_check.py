"""A check tells which open runs changed code cannot continue, and does nothing else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from bokiflow import Flow, Workflow
from bokiflow.definition import Definition
from bokiflow.replay_check import find_mismatch
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import run_tag
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.flow_executions import OneLog, begin, execute

pytestmark = pytest.mark.asyncio
Body = Callable[[Workflow], Coroutine[Any, Any, None]]
done: Final[list[str]] = []


async def say(word: str) -> str:
    done.append(word)
    return word


async def stop() -> None:
    raise Stopped("The process ends here.")


async def part(wf: Workflow, name: str) -> None:
    await wf.step(say, name, name=name)


async def old(wf: Workflow) -> None:
    await wf.step(say, "price", name="price")
    async with wf.lock("shelf"):
        await wf.gather(part(wf, "a"), part(wf, "b"))
        wf.now()
        await wf.step(stop, name="send")


async def grown(wf: Workflow) -> None:
    """There are more steps after the decided ones."""
    await old(wf)
    await wf.step(say, "mail", name="mail")


async def patched(wf: Workflow) -> None:
    if wf.patched("check"):
        await wf.step(say, "check", name="check")
    await old(wf)


async def inserted(wf: Workflow) -> None:
    await wf.step(say, "check", name="check")
    await old(wf)


async def renamed_in_branch(wf: Workflow) -> None:
    await wf.step(say, "price", name="price")
    async with wf.lock("shelf"):
        await wf.gather(part(wf, "a"), part(wf, "c"))
        wf.now()
        await wf.step(stop, name="send")


async def less_in_branch(wf: Workflow) -> None:
    await wf.step(say, "price", name="price")
    async with wf.lock("shelf"):
        await wf.gather(part(wf, "a"))
        wf.now()
        await wf.step(stop, name="send")


async def shortened(wf: Workflow) -> None:
    await wf.step(say, "price", name="price")


async def failing(wf: Workflow) -> None:
    await wf.step(say, "price", name="price", compensate=say)
    raise ValueError("wrong")


async def with_arguments(wf: Workflow, item: str) -> None:
    await old(wf)


@pytest.mark.parametrize("body", [old, grown, patched])
async def test_code_that_continues_the_run_is_accepted(body: Body) -> None:
    assert await mismatch(body) is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            inserted,
            "step 1 was decided as 'step price', but this execution called 'step check' there",
        ),
        (
            renamed_in_branch,
            "step 3.2.1 was decided as 'step b', but this execution called 'step c' there",
        ),
        (less_in_branch, "step 3.2.1 was decided as 'step b', but this execution ended before it"),
        (shortened, "step 2 was decided as 'lock shelf', but this execution ended before it"),
        (failing, "but this execution ended before it with ValueError: wrong"),
        (with_arguments, "item"),
    ],
)
async def test_code_that_does_not_continue_the_run_is_named(body: Body, words: str) -> None:
    reason = await mismatch(body)
    assert reason is not None
    assert words in reason


async def mismatch(body: Body) -> str | None:
    """Interrupt a run of the old code, and check it with `body`."""
    log = MemoryLog("shop/flow")
    await begin(log, "run")
    with pytest.raises(Stopped):
        await execute(log, "run", old)
    before = await log.tail()
    done.clear()
    run = await read_run(log, "run", RunState())
    found = await find_mismatch(Definition("tested", body), log, OneLog(log), "run", run)
    assert await log.tail() == before, "nothing is written"
    assert done == [], "nothing is executed"
    return None if found is None else found.reason


@pytest.mark.leaping  # a heartbeat on a busy machine would be a further record
async def test_the_runs_of_a_flow_are_checked_with_their_children() -> None:
    logs = MemoryLogs()

    def flow_of(name: str) -> Flow:
        flow = Flow("shop")
        flow.attach(logs)

        async def part(wf: Workflow) -> None:
            await wf.signal("go")

        child = flow.workflow(part)

        async def order(wf: Workflow) -> None:
            await wf.start_child(child)
            await wf.signal(name)

        flow.workflow(order)
        return flow

    flow = flow_of("paid")
    started = flow.handle("order", "1")
    await flow.runner.start(logs, flow.runner.definitions["order"], b"{}", "1")
    log = logs.log("shop/flow")
    child_begun = await log.read_next(
        run_tag(flow.runner.running["1"].execution.child_id("1")), wait=20
    )
    assert child_begun is not None
    before = logs.position
    assert await flow_of("paid").check_replay() == []
    assert await flow_of("approved").check_replay() == []
    empty = Flow("shop")
    empty.attach(logs)
    found = await empty.check_replay()
    assert [m.reason for m in found if m.run == "1"] == ["The code has no workflow 'order'."]
    assert logs.position == before
    await started.cancel()
