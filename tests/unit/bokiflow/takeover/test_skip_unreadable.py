"""A damaged run does not delay other runs, and streams that no run needs are trimmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from bokiflow import RunCancelledError, Startable, State, Workflow
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    PARKED_TAG,
    CancelAsked,
    ExecutorLeft,
    Heartbeat,
    encode,
    executor_tag,
    run_tag,
)
from bokiflow.takeover import dead_executors
from bokiflow.takeover.cleaning import Cleaner
from bokiflow.takeover.heartbeat import BEATS
from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Log
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio

LEASE_S = 1.0  # a busy machine does not lose it


class DamagedLogs(HookedLogs):
    """Logs whose run `bad` cannot be read while they are damaged."""

    is_damaged = False

    async def before_read(self, read: Read) -> None:
        if read.tag == run_tag("bad") and self.is_damaged:
            raise DataLossError("A record of the run is lost.")


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


async def test_a_run_that_cannot_be_read_is_skipped_and_taken_when_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_executors, "AGE_S_MIN", 0.05)
    logs = DamagedLogs()
    dead, also_dead, new_owner = Process(logs), Process(logs), Process(logs)
    for run in ("bad", "good"):
        await dead.waits.start(id=run)
    await also_dead.waits.start(id="other")
    logs.is_damaged = True
    name = dead.name
    await dead.stop()
    await also_dead.stop()
    async with new_owner.driven():
        await new_owner.goes_on("good")
        await new_owner.goes_on("other")
        await until(lambda: name not in new_owner.flow.runner.executors.known)
        logs.is_damaged = False
        await new_owner.goes_on("bad")


async def test_a_parked_run_that_cannot_be_read_keeps_no_driver_from_its_work() -> None:
    logs = DamagedLogs()
    old, dead, new = Process(logs), Process(logs), Process(logs)
    await old.waits.start(id="bad")
    await old.stop()
    del new.flow.runner.definitions["waits"]
    async with new.driven():
        while (await new.waits.handle("bad").status()).state is not State.PARKED:
            await logs.log(FLOW_LOG).read_next(run_tag("bad"), logs.position, wait=0.1)
    await dead.waits.start(id="r")
    await dead.stop()
    logs.is_damaged = True
    new_owner = Process(logs)
    async with new_owner.driven():
        await new_owner.goes_on("r")
    log = logs.log(FLOW_LOG)
    assert await log.read_range(PARKED_TAG, await floor(log, PARKED_TAG)), "it is parked still"


async def test_a_takeover_that_waits_for_room_delays_no_cancellation() -> None:
    logs = MemoryLogs()
    old, dead, full = Process(logs), Process(logs), Process(logs)
    await old.waits.start(id="parked")
    await old.stop()
    definition = full.flow.runner.definitions.pop("waits")
    async with full.driven():
        while (await full.waits.handle("parked").status()).state is not State.PARKED:
            await logs.log(FLOW_LOG).read_next(run_tag("parked"), logs.position, wait=0.1)
        await dead.waits.start(id="r")
        name = dead.name
        full.flow.runner.executions_max = 0
        await dead.stop()
        await until(lambda: bool(full.flow.runner.on_room))
        await full.waits.handle("parked").cancel()
        with pytest.raises(RunCancelledError):
            await full.waits.handle("parked").result(10)
        assert (await full.waits.handle("r").status()).executor == name, "there is no room"
        full.flow.runner.definitions["waits"] = definition


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
        process.flow.runner._lose()
        process.waits.definition.body = waits
        await until(lambda: bool(process.flow.runner.executors.left_to(process.name)))
        await dead.stop()
        try:
            await process.goes_on("r")
            assert "stubborn" in process.flow.runner.running
        finally:
            gate.set()


async def test_the_cleaning_continues_after_an_unreadable_run() -> None:
    logs = DamagedLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)
    for run in ("bad", "good"):
        await process.waits.start(id=run)
        await process.goes_on(run)
    logs.is_damaged = True
    cleaner = Cleaner(0)
    assert await cleaner.clean(log, 1e12) == 1
    logs.is_damaged = False
    assert await cleaner.clean(log, 1e12) == 1
    await process.stop()


async def floor(log: Log, tag: str) -> SeqNum:
    """Return below which seqnum a tag was trimmed."""
    try:
        await log.read_range(tag)
    except TrimmedError as error:
        return error.first_seqnum
    return 0


async def test_runs_that_continued_are_trimmed_from_the_list_of_parked_runs() -> None:
    logs = MemoryLogs()
    log, old, new = logs.log(FLOW_LOG), Process(logs), Process(logs)
    await old.waits.start(id="r")
    await old.stop()
    definition = new.flow.runner.definitions.pop("waits")
    async with new.driven():
        while (await new.waits.handle("r").status()).state is not State.PARKED:
            await log.read_next(run_tag("r"), logs.position, wait=0.1)
    (parked,) = await log.read_range(PARKED_TAG)
    new.flow.runner.definitions["waits"] = definition
    async with new.driven():
        await new.goes_on("r")
    assert await floor(log, PARKED_TAG) > parked.seqnum


async def test_the_executors_records_are_trimmed_also_when_few_runs_end() -> None:
    logs = MemoryLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)
    await process.waits.start(id="r")
    runner = process.flow.runner
    async with asyncio.timeout(10):
        while not await floor(log, EXECUTORS_TAG):
            await runner._renew(log)
            await runner._trim(log)
    await process.goes_on("r")
    await process.stop()


async def test_records_that_others_may_not_have_read_are_trimmed_a_round_later() -> None:
    logs = MemoryLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)
    await process.waits.start(id="r")
    runner = process.flow.runner
    asked = await log.append(encode(CancelAsked()), tags=[run_tag("else"), EXECUTORS_TAG])
    for _ in range(BEATS):
        runner._ended_since_trim = 1000
        await runner._renew(log)
        await runner._trim(log)
    assert await floor(log, EXECUTORS_TAG) <= asked
    await process.goes_on("r")
    await process.stop()


async def test_the_stream_of_an_executor_that_left_nothing_is_trimmed() -> None:
    logs = MemoryLogs()
    log, process = logs.log(FLOW_LOG), Process(logs)
    await log.append(encode(Heartbeat("gone", 0.001)), tags=[EXECUTORS_TAG])
    await log.append(encode(ExecutorLeft("gone", is_idle=True)), tags=[executor_tag("gone")])
    async with process.driven():
        async with asyncio.timeout(10):
            while not await floor(log, executor_tag("gone")):
                await log.read_next(EXECUTORS_TAG, logs.position, wait=0.05)


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
        runner._on_cancel("r", logs.position)
        return execute(*given)  # type: ignore[arg-type]

    runner.execute = looked_before  # type: ignore[method-assign, assignment]
    handle = await process.waits.start(id="r")
    async with asyncio.timeout(10):
        while (status := await handle.status()).state is State.RUNNING:
            await log.read_next(run_tag("r"), logs.position, wait=0.1)
    assert status.state is State.CANCELLED
    await process.stop()


async def test_a_cancellation_that_is_read_while_the_run_is_parked_takes_effect(
    logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(logs)

    async def takes_more(wf: Workflow, more: int) -> str:
        return str(more)

    reported: list[str] = []
    runner = process.flow.runner
    runner.on_cancel.append(reported.append)
    handle = await process.waits.start(id="r")
    process.waits.definition.body = takes_more  # its task has had no turn yet
    process.waits.definition.__dict__.pop("signature", None)
    running = runner.running["r"]
    park = running.execution.park

    async def park_and_look(reason: str) -> object:
        parked = await park(reason)
        await handle.cancel()
        await runner.look(logs.log(FLOW_LOG))
        assert not reported, "it is executed here still"
        return parked

    monkeypatch.setattr(running.execution, "park", park_and_look)
    await asyncio.wait([running.ended], timeout=10)
    await until(lambda: "r" not in runner.running)
    assert reported == ["r"]
    await process.stop()
