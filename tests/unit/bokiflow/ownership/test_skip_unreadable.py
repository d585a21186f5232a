"""A run that cannot be read, or a body that does not end, does not delay other runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from bokiflow import Startable, State, Workflow, taking
from bokiflow.collecting import Collector
from bokiflow.runs.records import PARTITIONS, run_tag
from indilog.base.errors import DataLossError
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 1.0  # a busy machine does not lose it


class DamagedLogs(HookedLogs):
    """Logs whose run `bad` cannot be read while they are damaged."""

    is_damaged = False
    error: Exception = DataLossError("A record of the run is lost.")

    async def before_read(self, read: Read) -> None:
        if read.tag == run_tag("bad") and self.is_damaged:
            raise self.error


class Process(ShopProcess):
    """A process with a workflow `waits` that waits for a signal."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.waits: Startable[str] = self.flow.workflow(self._waits)

    async def _waits(self, wf: Workflow) -> str:
        return str(await wf.signal("go"))

    _waits.__name__ = "waits"

    async def goes_on(self, run: str) -> None:
        handle = self.waits.handle(run)
        await handle.signal("go", "on")
        assert await handle.result(10) == "on"


async def until(what: Callable[[], bool]) -> None:
    """Return when something holds."""
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [DamagedLogs.error, ValueError("a fault of the code")])
async def test_a_run_that_cannot_be_read_is_skipped_and_taken_when_it_can(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(taking, "_TAKEN_AT_ONCE", 1)
    logs = DamagedLogs()
    logs.error = error
    dead, also_dead, new_owner = Process(logs), Process(logs), Process(logs)
    for run in ("bad", "good"):
        await dead.waits.start(id=run)
    await also_dead.waits.start(id="other")
    logs.is_damaged = True
    await dead.stop()
    await also_dead.stop()
    async with new_owner.driven():
        await until(lambda: {"good", "other"} <= new_owner.flow.runner.running.keys())
        await new_owner.goes_on("good")
        await new_owner.goes_on("other")
        logs.is_damaged = False
        await new_owner.goes_on("bad")


async def test_a_body_that_ignores_its_cancellation_delays_no_takeover() -> None:
    logs = MemoryLogs()
    process, dead = Process(logs), Process(logs)
    gate = asyncio.Event()

    async def stubborn() -> str:
        while not gate.is_set():
            with suppress(asyncio.CancelledError):
                await gate.wait()
        return "at last"

    async def steps(wf: Workflow) -> str:
        return await wf.step(stubborn)

    waits = process.waits.definition.body
    process.waits.definition.body = steps
    await dead.waits.start(id="r")
    async with process.driven():
        await process.waits.start(id="stubborn")
        await asyncio.sleep(0)
        process.flow.runner.member.lease.end()
        process.waits.definition.body = waits
        await until(process.flow.runner.member.lease.is_sure)
        await dead.stop()
        try:
            await process.goes_on("r")
            assert "stubborn" in process.flow.runner.running
        finally:
            gate.set()


async def test_the_collection_continues_after_an_unreadable_run() -> None:
    logs = DamagedLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)
    await process.flow.runner.join(logs, range(PARTITIONS))
    for run in ("bad", "good"):
        await process.waits.start(id=run)
        await process.goes_on(run)
    logs.is_damaged = True
    collector = Collector(process.flow.runner, 0)
    assert await collector.collect(log, 1e12) == 1
    logs.is_damaged = False
    assert await collector.collect(log, 1e12) == 1
    await process.stop()


async def test_a_cancellation_that_was_read_before_the_run_is_executed_counts(
    logs: MemoryLogs,
) -> None:
    """The cancellation is after the records read by the runner, and no process waits for it."""
    process, log = Process(logs), logs.log(FLOW_LOG)

    async def steps(wf: Workflow) -> str:
        return await wf.step(lambda: "1", name="one") + await wf.step(lambda: "2", name="two")

    process.waits.definition.body = steps
    runner = process.flow.runner
    execute = runner.execute

    def looked_before(*given: object) -> object:
        runner._cancels["r"] = logs.position
        return execute(*given)  # type: ignore[arg-type]

    runner.execute = looked_before  # type: ignore[method-assign, assignment]
    handle = await process.waits.start(id="r")
    async with asyncio.timeout(10):
        while (status := await handle.status()).state is State.RUNNING:
            await log.read_next(run_tag("r"), logs.position, wait=0.1)
    assert status.state is State.CANCELLED
    await process.stop()
