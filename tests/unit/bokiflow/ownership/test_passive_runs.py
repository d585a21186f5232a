"""A run that only waits leaves the memory, and continues when its wait may be over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bokiflow import RunCancelledError, Startable, Workflow
from bokiflow.runs.records import RunWaits, run_record, run_tag
from indilog.testing import MemoryLogs
from tests.support import leaping_loop
from tests.support.flow_executions import FLOW_LOG
from tests.unit.bokiflow.processes import ShopProcess

LEASE_S = 4.0
HOUR_S = 3600.0  # each second costs a heartbeat


class Process(ShopProcess):
    """A process with a workflow that waits as a test says."""

    def __init__(self, logs: MemoryLogs, body: Callable[[Workflow], Awaitable[Any]]) -> None:
        super().__init__(logs, LEASE_S)
        self.ran = 0

        async def waits(wf: Workflow) -> Any:  # noqa: ANN401
            await wf.step(self.count)
            return await body(wf)

        self.waits: Startable[Any] = self.flow.workflow(waits)

    async def count(self) -> None:
        self.ran += 1

    @property
    def is_passive(self) -> bool:
        return not self.flow.runner.running and not self.flow.runner._starting


def play(
    body: Callable[[Workflow], Awaitable[Any]],
    events: Callable[[Process, MemoryLogs], Awaitable[None]],
) -> None:
    async def main() -> None:
        logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        process = Process(logs, body)
        async with process.driven():
            await process.waits.start(id="r")
            assert not process.is_passive
            await asyncio.sleep(60)
            await events(process, logs)

    leaping_loop.run(main())


async def waits_of(logs: MemoryLogs) -> list[RunWaits]:
    found = [run_record(r.data) for r in await logs.log(FLOW_LOG).read_range(run_tag("r"))]
    return [record for record in found if isinstance(record, RunWaits)]


def test_a_sleeping_run_is_replayed_when_its_time_has_come() -> None:
    async def sleeps(wf: Workflow) -> float:
        await wf.sleep(HOUR_S)
        return asyncio.get_running_loop().time()

    async def events(process: Process, logs: MemoryLogs) -> None:
        assert process.is_passive
        (waits,) = await waits_of(logs)
        assert waits.until == pytest.approx(HOUR_S, abs=1)
        assert "sleep" in waits.what
        ended = await process.waits.handle("r").result(2 * HOUR_S)
        assert ended == pytest.approx(HOUR_S, abs=LEASE_S)
        assert process.ran == 1, "the step was replayed"
        assert (await process.waits.handle("r").status()).epoch == 2

    play(sleeps, events)


@pytest.mark.parametrize("is_in_branches", [True, False])
def test_a_signal_continues_a_passive_run(*, is_in_branches: bool) -> None:
    async def asks(wf: Workflow) -> object:
        if is_in_branches:
            return await wf.gather(wf.signal("go"), wf.signal("go"))
        return [await wf.signal("go"), await wf.signal("go")]

    async def events(process: Process, logs: MemoryLogs) -> None:
        for number in range(2):
            assert process.is_passive
            await process.waits.handle("r").signal("go", number)
            await asyncio.sleep(60)
        assert sorted(await process.waits.handle("r").result(60)) == [0, 1]

    play(asks, events)


def test_a_cancellation_ends_a_passive_run() -> None:
    async def asks(wf: Workflow) -> object:
        return await wf.signal("go")

    async def events(process: Process, logs: MemoryLogs) -> None:
        assert process.is_passive
        await process.waits.handle("r").cancel()
        with pytest.raises(RunCancelledError):
            await process.waits.handle("r").result(60)

    play(asks, events)


def test_another_process_continues_a_passive_run_after_a_crash() -> None:
    async def sleeps(wf: Workflow) -> str:
        await wf.sleep(600)
        return str(await wf.signal("go"))

    async def events(process: Process, logs: MemoryLogs) -> None:
        assert process.is_passive
        process.kill()
        other = Process(logs, sleeps)
        async with other.driven():
            await asyncio.sleep(60)
            assert other.is_passive, "it waits there, too"
            await other.waits.handle("r").signal("go", "on")
            assert await other.waits.handle("r").result(1200) == "on"
        assert other.ran == 0

    play(sleeps, events)


def test_a_run_that_holds_a_lock_stays_in_memory() -> None:
    async def holds(wf: Workflow) -> object:
        async with wf.lock("x", lease=20):
            return await wf.signal("go")

    async def events(process: Process, logs: MemoryLogs) -> None:
        assert not process.is_passive
        await process.waits.handle("r").signal("go", 1)
        assert await process.waits.handle("r").result(60) == 1

    play(holds, events)


def test_a_run_with_tasks_of_its_own_stays_in_memory() -> None:
    async def begins(wf: Workflow) -> object:
        asking = asyncio.create_task(wf.signal("go"))
        return await asking

    async def events(process: Process, logs: MemoryLogs) -> None:
        assert not process.is_passive
        await process.waits.handle("r").signal("go", 1)
        assert await process.waits.handle("r").result(60) == 1

    play(begins, events)


@pytest.mark.parametrize("wait", [Workflow.sleep, Workflow.signal])
@pytest.mark.parametrize("ending", ["returns", "raises", "goes on"])
def test_code_that_catches_the_end_of_its_execution_decides_nothing(
    wait: Callable[..., Awaitable[Any]], ending: str
) -> None:
    awaited, right = (HOUR_S, "None") if wait is Workflow.sleep else ("go", "True")

    async def catches(wf: Workflow) -> str:
        result = "wrong"
        try:
            result = str(await wait(wf, awaited))
        except BaseException as error:
            if ending == "goes on":
                await wf.step(nothing)
            if ending == "raises":
                raise ValueError("wrong") from error
        return result

    async def nothing() -> None:
        raise AssertionError("the run still waits")

    async def events(process: Process, _logs: MemoryLogs) -> None:
        assert process.is_passive
        handle = process.waits.handle("r")
        assert (await handle.status()).state == "running"
        if wait is Workflow.signal:
            await handle.signal("go")
        assert await handle.result(2 * HOUR_S) == right
        assert process.ran == 1

    play(catches, events)


def test_code_that_catches_the_end_of_its_process_decides_nothing() -> None:
    async def catches(wf: Workflow) -> str:
        try:
            return str(await wf.signal("go"))
        except BaseException:  # noqa: BLE001 - as the code of a user does it
            return "wrong"

    async def main() -> None:
        logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        first, second = Process(logs, catches), Process(logs, catches)
        async with first.driven():
            await first.waits.start(id="r")
        async with second.driven():
            handle = second.waits.handle("r")
            assert (await handle.status()).state == "running"
            await handle.signal("go")
            assert await handle.result(60) == "True"

    leaping_loop.run(main())


def test_a_step_that_catches_the_end_of_its_process_is_executed_again() -> None:
    begun = 0

    async def body() -> str:
        nonlocal begun
        begun += 1
        try:
            await asyncio.sleep(2)
        except asyncio.CancelledError:
            return "wrong"
        return "right"

    async def main() -> None:
        logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        first, second = (Process(logs, lambda wf: wf.step(body)) for _ in range(2))
        async with first.driven():
            await first.waits.start(id="r")
            await asyncio.sleep(1)
        async with second.driven():
            assert await second.waits.handle("r").result(60) == "right"
        assert begun == 2

    leaping_loop.run(main())


def test_a_process_becomes_idle_although_a_run_could_have_waited_for_longer() -> None:
    """The timer of the wait kept the process busy, which wrote heartbeats for a day. Each further
    wait of the run left one more timer.
    """

    async def asks(wf: Workflow) -> object:
        for _ in range(3):
            await wf.signal("go", timeout=24 * HOUR_S)
        return 7

    async def events(process: Process, logs: MemoryLogs) -> None:
        timers = process.flow.runner.taking._timers
        for _ in range(3):
            assert process.is_passive
            await process.waits.handle("r").signal("go")
            await asyncio.sleep(60)
            assert len(timers) <= 1
        assert await process.waits.handle("r").result(60) == 7
        await asyncio.sleep(3 * LEASE_S)
        assert not process.flow.runner.owned

    play(asks, events)


def test_a_fork_notices_the_end_of_a_child_that_its_origin_had_started() -> None:
    """The end of the child is a record of the other run. The fork left memory, and never ended."""

    async def main() -> None:
        logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        process = ShopProcess(logs, LEASE_S)

        @process.flow.workflow
        async def child(wf: Workflow) -> object:
            return await wf.signal("go")

        @process.flow.workflow
        async def parent(wf: Workflow) -> object:
            begun = await wf.start_child(child)
            await wf.step(asyncio.sleep, 0, name="step")
            return await begun.result()

        async with process.driven():
            origin = await parent.start(id="p")
            await asyncio.sleep(1)
            fork = await process.flow.fork("p", "step")
            await asyncio.sleep(60)
            [id_] = [run.id for run in await process.flow.runs(workflow="child")]
            await child.handle(id_).signal("go", 7)
            assert await origin.result(60) == 7
            assert await fork.result(60) == 7

    leaping_loop.run(main())
