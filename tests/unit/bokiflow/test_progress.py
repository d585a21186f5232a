"""What a workflow publishes reaches its readers once each, in order, across re-executions."""

from __future__ import annotations

import pytest

from bokiflow import Flow, RunFailedError, Workflow
from bokiflow.operations.progress import event_in, status_value_in
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import RunRecord
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.flow_executions import begin, execute

pytestmark = pytest.mark.asyncio


async def nothing() -> None:
    """Do nothing."""


@pytest.fixture
def flow() -> Flow:
    flow = Flow("shop")
    flow.attach(MemoryLogs())
    return flow


async def test_events_reach_a_reader_while_the_run_waits(flow: Flow) -> None:
    @flow.workflow
    async def order(wf: Workflow) -> None:
        wf.publish({"stage": "packed"})
        await wf.signal("go")
        wf.publish({"stage": "sent"})

    handle = await order.start()
    found = []
    async for event in handle.events():
        found.append(event.value["stage"])
        if len(found) == 1:
            await handle.signal("go")
    assert found == ["packed", "sent"]


async def test_a_reader_continues_after_the_last_event_that_it_has(flow: Flow) -> None:
    @flow.workflow
    async def order(wf: Workflow) -> None:
        for number in range(3):
            wf.publish(number)

    handle = await order.start()
    await handle.result()
    events = [event async for event in handle.events()]
    assert [event.value for event in events] == [0, 1, 2]
    later = [event.value async for event in handle.events(after=events[0].seqnum)]
    assert later == [1, 2]


async def test_a_re_execution_publishes_nothing_again() -> None:
    log = MemoryLog("shop/flow")
    await begin(log, "run")

    async def body(wf: Workflow, *, stops: bool) -> None:
        wf.publish("first")
        wf.set_status("begun")
        await wf.step(nothing)
        wf.publish("second")
        await wf.step(nothing)
        if stops:
            raise Stopped("The process ends here.")
        wf.set_status("done")

    with pytest.raises(Stopped):
        await execute(log, "run", lambda wf: body(wf, stops=True))
    await execute(log, "run", lambda wf: body(wf, stops=False))
    run, effects = RunState(), list[tuple[int, RunRecord]]()
    await read_run(log, "run", run, on_effect=lambda *effect: effects.append(effect))
    events = [event.value for effect in effects if (event := event_in(*effect)) is not None]
    assert events == ["first", "second"]
    assert status_value_in(run) == "done"


async def test_the_status_shows_what_was_set_last(flow: Flow) -> None:
    @flow.workflow
    async def order(wf: Workflow) -> None:
        wf.set_status({"parts": 1})
        wf.set_status({"parts": 2})
        wf.publish("set")
        await wf.signal("go")

    handle = await order.start()
    async for _ in handle.events():
        assert (await handle.status()).value == {"parts": 2}
        await handle.signal("go")
    assert (await handle.status()).value == {"parts": 2}


@pytest.mark.parametrize(
    ("event", "words"), [(object(), "has no JSON form"), ("x" * 20_000, "the limit is 16,384")]
)
async def test_an_event_that_cannot_be_recorded_is_refused(
    flow: Flow, event: object, words: str
) -> None:
    @flow.workflow
    async def order(wf: Workflow) -> None:
        wf.publish(event)

    with pytest.raises(RunFailedError, match=words):
        await (await order.start()).result()
