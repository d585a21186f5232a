"""The status that the last records of a run show is that of its whole history, or is not known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bokiflow import Flow, RunCancelledError, Workflow
from bokiflow.run_status import brief_status, status_of
from bokiflow.runs.decision_numbers import DecisionNumbers
from bokiflow.runs.records import (
    RunFinished,
    RunRecord,
    RunStarted,
    RunTaken,
    StepDecided,
    encode,
    partition_of,
    partition_tag,
    run_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


async def is_brief(flow: Flow, id_: str = "a") -> bool:
    """Compare both; tell whether the last records suffice."""
    log = flow.logs().log(FLOW_LOG)
    while True:
        before = await log.tail()
        brief = await brief_status(log, flow.runner, id_)
        whole = status_of(id_, await read_run(log, id_, RunState(), is_reused=True))
        if await log.tail() == before:
            assert brief is None or brief == whole
            return brief is not None


async def watched(flow: Flow, id_: str = "a") -> AsyncIterator[bool]:
    """Compare both after each record of a run, until it has ended."""
    log, seen = flow.logs().log(FLOW_LOG), 0
    while (record := await log.read_next(run_tag(id_), seen, wait=10)) is not None:
        seen = record.seqnum + 1
        yield await is_brief(flow, id_)
        if (await read_run(log, id_, RunState(), is_reused=True)).finished is not None:
            return


def elsewhere(logs: MemoryLogs) -> Flow:
    """Return the flow in a process that executes nothing."""
    flow = Flow("shop")
    flow.attach(logs)
    return flow


async def test_steps_one_after_the_other_and_the_status_are_seen(
    logs: MemoryLogs, flow: Flow
) -> None:
    @flow.workflow
    async def order(wf: Workflow) -> int:
        for number in range(20):
            await wf.step(lambda number=number: number, name="count")
            if number in {3, 9}:
                wf.set_status({"at": number})
            if number == 12:
                await wf.sleep(0)
        value: int = await wf.signal("go")
        return value

    handle = await order.start(id="a")
    other, brief = elsewhere(logs), list[bool]()

    async def watch() -> None:
        async for one in watched(other):
            brief.append(one)

    watching = asyncio.create_task(watch())
    await handle.signal("go", 1)
    await handle.result(10)
    await watching
    assert await is_brief(other)
    assert sum(brief) > len(brief) // 2
    assert (await handle.status()).value == {"at": 9}


async def test_a_run_in_any_state_is_seen(logs: MemoryLogs) -> None:
    """Begun, waiting out of memory, taken over, parked, and ended in each way."""
    one, two = ShopProcess(logs, 0.5), ShopProcess(logs, 0.5)
    other = elsewhere(logs)

    def order(flow: Flow, last: str) -> None:
        @flow.workflow
        async def order(wf: Workflow, fails: bool) -> int:
            await wf.step(lambda: 1, name="first")
            await wf.signal("go")
            await wf.step(lambda: 1, name=last)
            await wf.signal("on")
            if fails:
                raise ValueError("no")
            return 1

    order(one.flow, "second")
    order(two.flow, "changed")
    for id_, fails in (("done", False), ("failed", True), ("gone", False), ("parks", False)):
        await one.flow.start("order", {"fails": fails}, id=id_)
        await asyncio.sleep(0.05)
        assert await is_brief(other, id_)
        await one.flow.handle("order", id_).signal("go")
        await asyncio.sleep(0.05)
        assert await is_brief(other, id_)
    await one.flow.handle("order", "gone").cancel()
    for id_ in ("done", "failed"):
        await one.flow.handle("order", id_).signal("on")
    with pytest.raises(RunCancelledError):
        await one.flow.handle("order", "gone").result(5)
    await asyncio.sleep(0.1)
    for id_ in ("done", "failed", "gone"):
        assert await is_brief(other, id_)
    one.kill()
    async with two.driven():
        while (await two.flow.handle("order", "parks").status()).state != "parked":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await is_brief(other, "parks")


async def test_concurrent_branches_rounds_and_forks_are_never_wrong(
    logs: MemoryLogs, flow: Flow
) -> None:
    @flow.workflow
    async def order(wf: Workflow, rounds: int) -> int:
        async def slow(number: int) -> int:
            await asyncio.sleep(0.001 * (number % 3))
            return number

        wf.set_status({"round": rounds})
        await wf.gather(*(wf.step(slow, number) for number in range(12)))
        await wf.step(slow, 1, name="middle")
        wf.publish("there")
        await wf.step(slow, 1, name="last")
        if rounds:
            wf.continue_as_new(rounds - 1)
        return 1

    other = elsewhere(logs)
    handle = await order.start(2, id="a")
    async for _ in watched(other):
        pass
    await handle.result(10)
    assert await is_brief(other)
    fork = await flow.fork("a", "middle")
    async for _ in watched(other, fork.id):
        pass


async def append(logs: MemoryLogs, *records: RunRecord) -> None:
    partition = partition_tag(partition_of("a", 64))
    for record in records:
        tags: tuple[str, ...] = (run_tag("a"),)
        if not isinstance(record, StepDecided):
            tags = (*tags, partition)
        await logs.log(FLOW_LOG).append(encode(record), tags=tags)


def step(epoch: int, number: int, nth: int) -> StepDecided:
    return StepDecided(epoch, str(number), "s", "step", b"1", nth=nth)


BEGUN = RunStarted("order", b"{}", "x", "v")


@pytest.mark.parametrize("records", [
    [BEGUN, step(1, 1, 1), BEGUN],
    [BEGUN, step(1, 1, 1), step(1, 2, 0), step(1, 3, 2)],
    [BEGUN, step(1, 1, 1), step(1, 2, 2), step(1, 2, 2)],
    [BEGUN, step(1, 1, 1), RunTaken(2, "y"), step(1, 2, 2), step(2, 2, 2)],
    [BEGUN, step(1, 1, 1), RunTaken(2, "y"), step(1, 2, 2), step(1, 3, 3)],
    [BEGUN, step(1, 1, 1), RunTaken(2, "y"), step(2, 2, 0), RunTaken(2, "z"), step(2, 3, 2)],
    [BEGUN, step(1, 1, 1), RunTaken(2, "y"), RunFinished(1, b"1", executor="x", steps=1)],
    [BEGUN, step(1, 1, 1), RunFinished(1, b"1", executor="x", steps=1), RunTaken(2, "y")],
    [BEGUN, step(1, 1, 1), step(1, 2, 2), RunFinished(1, b"1", workflow="order")],
])  # fmt: skip
async def test_records_without_an_effect_do_not_mislead(
    logs: MemoryLogs, records: list[RunRecord]
) -> None:
    await append(logs, *records)
    await is_brief(elsewhere(logs))


def numbers(records: list[StepDecided]) -> list[tuple[int, int]]:
    return [(record.nth, record.status_at) for record in records]


async def test_a_decision_has_a_number_only_if_no_other_one_is_in_flight() -> None:
    run = RunState()
    run.apply(0, 1.0, BEGUN)
    counting, one = DecisionNumbers(run), step(1, 1, 0)
    first = counting.begin([one])
    second = counting.begin([one])
    assert (numbers(first), numbers(second)) == ([(1, -1)], [(0, -1)])
    counting.end(first, [7])
    assert numbers(counting.begin([one])) == [(0, -1)]
    counting.end(second, [8])
    counting.end([one], [9])
    status = StepDecided(1, "4", "", "status", b"1")
    batch = [one, status, one]
    assert numbers(counting.begin(batch)) == [(4, -1), (5, -1), (0, -1)]
    counting.end(batch, [10, 11, 12])
    assert numbers(counting.begin([one])) == [(7, 11)]
    counting.fail()
    assert numbers(counting.begin([one])) == [(0, -1)], "the record may be in the log"
