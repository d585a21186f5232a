"""A client that waits for the end of a run, while the run is parked, retried, ended or trimmed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bokiflow import Flow, Workflow
from bokiflow.collecting import Collector
from bokiflow.runs.records import PARTITIONS, run_tag
from indilog import App, NotFoundError
from indilog.base.log import Session
from indilog.client import Client
from indilog.runs import Run
from indilog.sdk.runs import RunResult
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, Hooks, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
LEASE_S = 0.4
RETENTION_S = 100.0


class Process(ShopProcess):
    """A process whose workflow `order` waits for a signal, or does not accept its arguments."""

    def __init__(self, logs: MemoryLogs, *, is_broken: bool = False) -> None:
        super().__init__(logs, LEASE_S)

        async def order(wf: Workflow, count: int) -> list[object]:
            return [count, await wf.signal("paid")]

        async def broken(wf: Workflow) -> list[object]:
            return []

        broken.__name__ = "order"
        self.order = self.flow.workflow(order)
        if is_broken:
            self.flow.definitions.clear()
            self.flow.workflow(broken)

    async def start(self, run: str) -> None:
        await self.order.start(7, id=run)


class Watched(Hooks):
    """A client's view of logs, in which something happens before it waits for a run's records.

    Attributes:
        then: what happens, once.
        waits: set when the client waits.
    """

    def __init__(self, logs: MemoryLogs, then: Callable[[], Awaitable[None]] | None = None) -> None:
        self.waits = asyncio.Event()
        self.then = then
        self._logs = logs

    def log(self, name: str, session: Session | None = None) -> HookedLog:
        return HookedLog(name, logs=self._logs, session=session, hooks=self)

    async def before_read(self, read: Read) -> None:
        if read.wait is not None and read.tag == run_tag("r"):
            self.waits.set()
            if self.then is not None:
                then, self.then = self.then, None
                await then()

    def run(self) -> Run:
        """Return the handle of a program that executes no runs."""
        app = App("shop")
        Flow(app)
        return Client(self).run(app, "r")


async def test_a_wait_lasts_while_a_run_is_parked_and_ends_with_the_run(logs: MemoryLogs) -> None:
    old = Process(logs)
    await old.start("r")
    watched = Watched(logs)
    waiting = asyncio.create_task(watched.run().result())
    await asyncio.wait_for(watched.waits.wait(), 30)
    old.kill()
    async with Process(logs, is_broken=True).driven(), asyncio.timeout(30):
        while (found := await watched.run().result(wait=0)).state != "parked":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert found.result is None
    assert "count" in (found.problem or "")
    assert await watched.run().result(wait=0.2) == found, "a limited wait says so"
    assert not waiting.done()
    corrected = Process(logs)
    async with corrected.driven():
        await corrected.order.handle("r").retry()
        await corrected.order.handle("r").signal("paid", "cash")
        assert await asyncio.wait_for(waiting, 30) == RunResult("done", [7, "cash"], None)


async def test_a_run_that_ends_and_is_trimmed_during_a_wait_is_not_found() -> None:
    now = 1000.0
    logs = MemoryLogs(clock=lambda: now)
    process = Process(logs)
    await process.flow.runner.join(logs, range(PARTITIONS))
    await process.start("r")

    async def end_and_trim() -> None:
        nonlocal now
        await process.order.handle("r").signal("paid")
        await process.order.handle("r").result(10)
        now += RETENTION_S + 1
        collector = Collector(process.flow.runner, RETENTION_S)
        assert await collector.collect(logs.log("shop/flow"), now) == 1

    watched = Watched(logs, end_and_trim)
    with pytest.raises(NotFoundError, match="trimmed"):
        await asyncio.wait_for(watched.run().result(), 30)


async def test_a_run_whose_end_is_kept_has_its_result_after_a_trim_of_earlier_records() -> None:
    """The wait meets the trim. The application then says how the run ended."""
    logs = MemoryLogs()
    process = Process(logs)
    await process.start("r")

    async def end_and_trim() -> None:
        log = logs.log("shop/flow")
        await process.order.handle("r").signal("paid")
        await process.order.handle("r").result(10)
        last = await log.read_prev(run_tag("r"))
        assert last is not None
        await log.trim(last.seqnum, tag=run_tag("r"))

    watched = Watched(logs, end_and_trim)
    found = await asyncio.wait_for(watched.run().result(), 30)
    assert found == RunResult("done", [7, True], None)
