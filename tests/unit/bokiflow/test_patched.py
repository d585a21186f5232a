"""Changed code continues old runs on their old path, and takes the new path in all others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import pytest_asyncio

from bokiflow import Workflow
from bokiflow.runs.errors import ChangedWorkflowError
from bokiflow.runs.public_call import Stopped
from indilog.testing import MemoryLog
from tests.support.flow_executions import begin, execute

pytestmark = pytest.mark.asyncio
Body = Callable[[Workflow], Awaitable[object]]


def step(
    wf: Workflow, done: list[str], name: str, *, stops: bool = False
) -> Coroutine[Any, Any, str]:
    async def body() -> str:
        if stops:
            raise Stopped("The process ends here.")
        done.append(name)
        return name

    return wf.step(body, name=name)


def old(done: list[str], *, stops_at: str = "") -> Body:
    async def body(wf: Workflow) -> object:
        first = await step(wf, done, "price")
        second = await step(wf, done, "pay", stops=stops_at == "pay")
        third = await step(wf, done, "send", stops=stops_at == "send")
        return [first, second, third]

    return body


def new(done: list[str], *, stops_at: str = "") -> Body:
    async def body(wf: Workflow) -> object:
        first = await step(wf, done, "price")
        if wf.patched("reserve first"):
            await step(wf, done, "reserve")
        second = await step(wf, done, "pay", stops=stops_at == "pay")
        third = await step(wf, done, "send", stops=stops_at == "send")
        return [first, second, third]

    return body


def newest(done: list[str]) -> Body:
    """The old path is deleted."""

    async def body(wf: Workflow) -> object:
        first = await step(wf, done, "price")
        await step(wf, done, "reserve")
        second = await step(wf, done, "pay")
        return [first, second, await step(wf, done, "send")]

    return body


@pytest_asyncio.fixture
async def log() -> MemoryLog:
    log = MemoryLog("shop/flow")
    await begin(log, "run")
    return log


async def interrupted(log: MemoryLog, body: Body) -> None:
    with pytest.raises(Stopped):
        await execute(log, "run", body)


async def test_a_new_run_takes_the_new_path(log: MemoryLog) -> None:
    done: list[str] = []
    await execute(log, "run", new(done))
    assert done == ["price", "reserve", "pay", "send"]


async def test_a_run_that_passed_the_place_keeps_the_old_path(log: MemoryLog) -> None:
    done: list[str] = []
    await interrupted(log, old(done, stops_at="send"))
    await execute(log, "run", new(done))
    assert done == ["price", "pay", "send"]


async def test_a_run_that_has_not_reached_the_place_takes_the_new_path(log: MemoryLog) -> None:
    done: list[str] = []
    await interrupted(log, old(done, stops_at="pay"))
    await execute(log, "run", new(done))
    assert done == ["price", "reserve", "pay", "send"]


async def test_the_path_is_decided_once(log: MemoryLog) -> None:
    done: list[str] = []
    await interrupted(log, new(done, stops_at="pay"))
    await interrupted(log, new(done, stops_at="send"))
    await execute(log, "run", new(done))
    assert done == ["price", "reserve", "pay", "send"]


async def test_the_call_may_be_deleted_with_the_old_path(log: MemoryLog) -> None:
    done: list[str] = []
    await interrupted(log, new(done, stops_at="send"))
    await execute(log, "run", newest(done))
    assert done == ["price", "reserve", "pay", "send"]


async def test_code_that_changed_without_it_is_still_found(log: MemoryLog) -> None:
    await interrupted(log, old([], stops_at="send"))
    with pytest.raises(ChangedWorkflowError):
        await execute(log, "run", newest([]))


async def test_branches_decide_for_themselves(log: MemoryLog) -> None:
    """One branch had passed the place before the change, the other one had not."""
    done: list[str] = []

    def both(stops_at: str, *, is_patched: bool = True) -> Body:
        async def branch(wf: Workflow, name: str) -> None:
            if is_patched and wf.patched("check"):
                await step(wf, done, f"check {name}")
            await step(wf, done, name, stops=stops_at == name)
            await step(wf, done, f"end {name}", stops=stops_at.startswith("end"))

        async def body(wf: Workflow) -> object:
            return await wf.gather(branch(wf, "a"), branch(wf, "b"))

        return body

    await interrupted(log, both("b", is_patched=False))
    await interrupted(log, both("end"))
    await execute(log, "run", both(""))
    assert sorted(done) == ["a", "b", "check b", "end a", "end b"]
