"""Queries see what a workflow made of the durable outcomes of its run, and change nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import bokiflow
from bokiflow import Flow, FlowSettingsError, QueryFailedError, RunFailedError, State, Workflow
from bokiflow.runs.records import run_tag
from indilog import App, InvalidArgumentsError, NotFoundError, WrongStateError
from indilog.client import Client
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG, decided
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio


class Picking:
    """A workflow that collects items, and a query of what it has; counts bodies."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.bodies = 0
        self.pick = flow.workflow(self._pick)
        flow.query(self.picked)

    async def _pick(self, wf: Workflow, count: int) -> list[str]:
        async def book(item: str) -> str:
            self.bodies += 1
            return item.upper()

        items: list[str] = []
        wf.vars["items"] = items
        while len(items) < count:
            item = await wf.signal("item")
            items.append(await wf.step(book, item))
        return items

    _pick.__name__ = "pick"

    @staticmethod
    def picked(view: bokiflow.RunView, first: int = 10) -> dict[str, Any]:
        """Return what the run has picked."""
        return {
            "items": view.vars["items"][:first],
            "left": view.arguments["count"] - len(view.vars["items"]),
            "state": view.state,
        }


async def test_a_query_sees_what_the_workflow_has(flow: Flow, logs: MemoryLogs) -> None:
    picking = Picking(flow)
    handle = await picking.pick.start(3, id="a")
    assert await handle.query("picked") == {"items": [], "left": 3, "state": "running"}
    await handle.signal("item", "tea")
    await handle.signal("item", "cup")
    await decided(logs, "a", 4)
    assert await handle.query("picked", first=1) == {
        "items": ["TEA"],
        "left": 1,
        "state": "running",
    }
    await handle.signal("item", "jug")
    await handle.result(5)
    assert (await handle.query("picked"))["state"] == State.DONE


@pytest.mark.leaping  # a heartbeat on a busy machine would be a further record
async def test_a_query_executes_and_appends_nothing(flow: Flow, logs: MemoryLogs) -> None:
    picking = Picking(flow)
    handle = await picking.pick.start(1, id="a")
    await handle.signal("item", "tea")
    await handle.result(5)
    tail, bodies = await logs.log(FLOW_LOG).tail(), picking.bodies
    for _ in range(3):
        await handle.query("picked")
    assert (await logs.log(FLOW_LOG).tail(), picking.bodies) == (tail, bodies)


async def test_another_process_answers_and_does_not_touch_the_run(logs: MemoryLogs) -> None:
    first, second = ShopProcess(logs, 5), ShopProcess(logs, 5)
    handle = await Picking(first.flow).pick.start(2, id="a")
    other = Picking(second.flow)
    await handle.signal("item", "tea")
    await decided(logs, "a", 2)
    assert (await other.pick.handle("a").query("picked"))["items"] == ["TEA"]
    assert other.bodies == 0
    assert not second.flow.runner.running


async def test_a_query_cannot_change_the_executing_workflow(flow: Flow, logs: MemoryLogs) -> None:
    picking = Picking(flow)

    @flow.query
    def spoil(view: bokiflow.RunView) -> int:
        view.vars["items"].append("stolen")
        return len(view.vars["items"])

    handle = await picking.pick.start(1, id="a")
    assert await handle.query("spoil") == 1
    await handle.signal("item", "tea")
    assert await handle.result(5) == ["TEA"]


async def test_a_query_does_not_see_an_outcome_that_is_not_durable(
    logs: MemoryLogs, flow: Flow
) -> None:
    """The query reads the log alone, and does not begin the step's body a second time."""
    started, goes_on = asyncio.Event(), asyncio.Event()
    bodies = list[int]()

    @flow.workflow
    async def waits(wf: Workflow) -> None:
        async def body() -> int:
            bodies.append(1)
            started.set()
            await goes_on.wait()
            return 7

        wf.vars["got"] = None
        wf.vars["got"] = await wf.step(body)

    @flow.query
    def got(view: bokiflow.RunView) -> int | None:
        value: int | None = view.vars["got"]
        return value

    handle = await waits.start(id="a")
    await started.wait()
    assert await handle.query("got") is None
    assert len(bodies) == 1
    goes_on.set()
    await handle.result(5)
    assert await handle.query("got") == 7
    assert await logs.log(FLOW_LOG).read_next(run_tag("a")) is not None


async def test_mistakes_of_a_query_are_one_sentence(flow: Flow) -> None:
    picking = Picking(flow)

    @flow.query
    def wrong(view: bokiflow.RunView) -> int:
        return int(view.vars["unknown"])

    @flow.query
    def no_json(view: bokiflow.RunView) -> dict[str, Any]:
        return {"it": object()}

    handle = await picking.pick.start(1, id="a")
    with pytest.raises(QueryFailedError, match="Query 'wrong' of run 'a' raised KeyError: 'unk"):
        await handle.query("wrong")
    with pytest.raises(QueryFailedError, match="of run 'a': no_json returned a value"):
        await handle.query("no_json")
    with pytest.raises(FlowSettingsError, match="no query 'x' here; there are: no_json, picked, w"):
        await handle.query("x")
    with pytest.raises(InvalidArgumentsError, match="first"):
        await handle.query("picked", first="many")


async def test_a_run_that_does_not_match_the_code_says_so(logs: MemoryLogs) -> None:
    old, new = ShopProcess(logs, 5), ShopProcess(logs, 5)

    @old.flow.workflow
    async def order(wf: Workflow) -> None:
        await wf.step(lambda: 1, name="pay")
        raise ValueError("no")

    def changed() -> Any:  # noqa: ANN401
        @new.flow.workflow
        async def order(wf: Workflow) -> None:
            await wf.step(lambda: 1, name="send")

        new.flow.query(Picking.picked)
        return order

    with pytest.raises(RunFailedError):
        await (await order.start(id="a")).result(5)
    with pytest.raises(QueryFailedError, match=r"cannot be queried: .* decided as 'step pay"):
        await changed().handle("a").query("picked")


async def test_what_is_no_query_is_refused(flow: Flow) -> None:
    async def later(view: bokiflow.RunView) -> None: ...

    def nothing() -> None: ...

    def untyped(other: int) -> int:
        return other

    with pytest.raises(FlowSettingsError, match="must be an ordinary function"):
        flow.query(later)
    with pytest.raises(FlowSettingsError, match=r"must take `view: bokiflow\.RunView` first"):
        flow.query(nothing)
    flow.query(untyped)
    with pytest.raises(FlowSettingsError, match="There are two queries 'untyped'"):
        flow.query(untyped)
    handle = await Picking(flow).pick.start(1)
    with pytest.raises(FlowSettingsError, match="must take `view"):
        await handle.query("untyped", other=1)


async def test_people_ask_queries_steps_and_the_status_in_one_way(logs: MemoryLogs) -> None:
    app = App("shop")
    flow = Flow(app)
    flow.attach(logs)
    picking = Picking(flow)

    @flow.query
    def wrong(view: bokiflow.RunView) -> int:
        return int(view.vars["unknown"])

    await picking.pick.start(2, id="a")
    run = Client(logs).run(app, "a")
    await run.signal("item", "tea")
    await decided(logs, "a", 2)
    assert (await run.query("picked", first=5))["items"] == ["TEA"]
    assert await run.query("book") == "TEA"
    assert await run.query() is None
    with pytest.raises(WrongStateError, match="raised KeyError"):
        await run.query("wrong")
    with pytest.raises(InvalidArgumentsError, match="first"):
        await run.query("picked", first="many")
    with pytest.raises(NotFoundError, match="no query 'book', and only queries have arguments"):
        await run.query("book", first=1)
    with pytest.raises(NotFoundError, match="has no query 'pay', and has decided no such value"):
        await run.query("pay")


async def test_a_query_sees_the_current_round(flow: Flow) -> None:
    @flow.workflow
    async def count(wf: Workflow, number: int) -> None:
        wf.vars["number"] = number
        if number < 3:
            wf.continue_as_new(number + 1)
        await wf.signal("end")

    @flow.query
    def where(view: bokiflow.RunView) -> list[int]:
        return [view.round, view.vars["number"]]

    handle = await count.start(1)
    while (await handle.status()).round < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await handle.query("where") == [3, 3]
    await handle.cancel()
