"""Runs are seen and steered on every kind of log, by a process that does not execute them."""

from __future__ import annotations

import asyncio

import pytest

from bokiflow import Flow, Workflow
from indilog import App, NotFoundError, WrongStateError
from indilog.base.log import LogSource
from indilog.client import Client

pytestmark = pytest.mark.asyncio


class Process:
    """A program with the workflow, in a session of its own."""

    def __init__(self, logs: LogSource, name: str) -> None:
        self.app = App("shop")
        self.client = Client(logs)
        self.flow = Flow(self.app, log=name)
        self.flow.attach(self.client)
        self.order = self.flow.workflow(self._order)

    async def _order(self, wf: Workflow, count: int) -> list[object]:
        async def pay() -> int:
            return count

        paid = await wf.step(pay)
        wf.publish({"paid": paid})
        return [paid, await wf.signal("go")]


async def test_another_process_sees_and_steers_runs(logs: LogSource, name: str) -> None:
    executing, watching = Process(logs, name), Process(logs, name)
    for number in range(3):
        await executing.order.start(number, id=f"r{number}")

    async def ids(**filters: object) -> list[str]:
        await watching.client.log(name).tail()  # its session then sees what was appended before
        return [run.id for run in await watching.client.runs(watching.app, **filters)]  # type: ignore[arg-type]

    assert await ids() == ["r2", "r1", "r0"]
    page = await watching.client.runs(watching.app, limit=2)
    rest = await watching.client.runs(watching.app, page=page.next)
    assert [run.id for run in (*page, *rest)] == ["r2", "r1", "r0"]
    run = watching.client.run(watching.app, "r1")
    seen: list[object] = []
    async with asyncio.timeout(60):
        async for event in run.events():
            seen.append(event.data)
            if event.kind == "published":
                await run.signal("go", "now")
    assert seen == [
        {"state": "running", "problem": None},
        {"paid": 1},
        {"state": "done", "problem": None},
    ]
    assert (await run.result(wait=60)).result == [1, "now"]
    found = await run.show()
    assert (found.result, await run.query("pay")) == ([1, "now"], 1)
    assert await ids(state="done") == ["r1"]
    with pytest.raises(WrongStateError):
        await run.cancel()
    with pytest.raises(NotFoundError):
        await watching.client.run(watching.app, "r3").show()
    await watching.client.run(watching.app, "r2").signal("go")
    await watching.client.run(watching.app, "r0").signal("go")
    assert await executing.order.handle("r2").result(60) == [2, True]
    assert await executing.order.handle("r0").result(60) == [0, True]
