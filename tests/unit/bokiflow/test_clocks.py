"""Whether an executor counts as dead depends only on the speed of clocks, not on their settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest

from bokiflow import Startable, Workflow
from bokiflow.ownership.crash_loops import CRASHES_PARKED
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    PARTITIONS,
    RUNS_TAG,
    Claimed,
    Heartbeat,
    Released,
    RunParked,
    RunStarted,
    RunTaken,
    encode,
    executor_record,
    partition_of,
    partition_tag,
    run_tag,
)
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 2.0
HOUR_S = 3600.0
AHEAD: ContextVar[float] = ContextVar("ahead", default=0.0)
"""Lead of the running tasks' machine clocks; its monotonic clock has another start."""


class Machine(ShopProcess):
    """A process with clocks of its own and a workflow `waits` that waits for a signal."""

    def __init__(self, logs: MemoryLogs, ahead_s: float = 0.0) -> None:
        super().__init__(logs, LEASE_S)
        self.waits: Startable[str] = self.flow.workflow(self._waits)
        self._ahead_s = ahead_s

    async def _waits(self, wf: Workflow) -> str:
        return str(await wf.signal("go"))

    _waits.__name__ = "waits"

    @asynccontextmanager
    async def driven(self) -> AsyncIterator[None]:
        before = AHEAD.set(self._ahead_s)  # tasks have a copy of what is set when they are made
        async with super().driven():
            AHEAD.reset(before)
            # Otherwise a handle would look first, by its clock.
            while not self.flow.runner.member._has_looked:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
            yield

    async def epoch(self, run: str) -> int:
        return (await self.waits.handle(run).status()).epoch


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> MemoryLogs:
    def seconds() -> float:
        return asyncio.get_running_loop().time()

    def wall() -> float:
        return 1.7e9 + seconds() + AHEAD.get()

    monkeypatch.setattr(waiting, "seconds_now", wall)
    monkeypatch.setattr(waiting, "monotonic_now", lambda: seconds() + 5 * AHEAD.get())
    monkeypatch.setattr(waiting, "passed_now", lambda: seconds() + 7 * AHEAD.get())
    return MemoryLogs(clock=wall)


async def beats(logs: MemoryLogs, name: str, count: int) -> None:
    """Return when an executor has shown that often that it lives."""
    log, bound = logs.log(FLOW_LOG), 0
    while count:
        record = await log.read_next(EXECUTORS_TAG, bound, wait=10)
        assert record is not None
        bound = record.seqnum + 1
        said = executor_record(record.data)
        count -= isinstance(said, Heartbeat) and said.executor == name


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
async def test_a_live_executor_keeps_its_runs_for_any_clock_of_a_driver(
    logs: MemoryLogs, ahead_s: float
) -> None:
    executor, other = Machine(logs), Machine(logs, ahead_s)
    handle = await executor.waits.start(id="r")
    async with other.driven():
        await beats(logs, executor.name, 10)
        assert await executor.epoch("r") == 1, "no other process has taken it"
        await handle.signal("go", "on")
        assert await handle.result(10) == "on"


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("is_driven_before", [True, False])
async def test_a_dead_executor_is_taken_over_independently_of_a_drivers_clock(
    logs: MemoryLogs, ahead_s: float, *, is_driven_before: bool
) -> None:
    """A driver that starts after the executor's end takes over, too."""
    executor, other = Machine(logs), Machine(logs, ahead_s)
    await executor.waits.start(id="r")
    if not is_driven_before:
        executor.kill()
    async with other.driven():
        if is_driven_before:
            await beats(logs, executor.name, 2)
            executor.kill()
        handle = other.waits.handle("r")
        await handle.signal("go", "on")
        assert await handle.result(10) == "on"
        assert await other.epoch("r") == 2


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
async def test_a_parked_crash_loop_is_retried_independently_of_a_drivers_clock(
    logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    monkeypatch.setattr("bokiflow.taking.retry_s", lambda _: 0.05)
    log, other = logs.log(FLOW_LOG), Machine(logs, ahead_s)
    there = partition_tag(partition_of("r", PARTITIONS))
    for said in (Heartbeat("fifth", 0.1, False, True, PARTITIONS, b"", 0), Claimed("fifth", (), 0)):
        await log.append(encode(said), tags=[EXECUTORS_TAG])
    for record, tags in (
        (RunStarted("waits", b"{}", "first", "v"), [RUNS_TAG]),
        (RunTaken(2, "fifth", CRASHES_PARKED), []),
        (RunParked(2, "v", "it crashes its executors"), []),
    ):
        await log.append(encode(record), tags=[run_tag("r"), there, *tags])
    async with other.driven():
        handle = other.waits.handle("r")
        await handle.signal("go", "on")
        assert await handle.result(10) == "on"


async def test_drivers_whose_clocks_differ_leave_each_other_alone(logs: MemoryLogs) -> None:
    machines = [Machine(logs, ahead_s) for ahead_s in (-HOUR_S, 0.0, HOUR_S)]
    async with machines[0].driven(), machines[1].driven(), machines[2].driven():
        for number, machine in enumerate(machines):
            before = AHEAD.set(machine._ahead_s)
            await machine.waits.start(id=str(number))
            AHEAD.reset(before)
        await beats(logs, machines[1].name, 8)
        claims = await deaths(logs)
        assert claims == [], "no live executor was declared dead"
        for number, machine in enumerate(machines):
            await machine.waits.handle(str(number)).signal("go", "on")
            assert await machine.waits.handle(str(number)).result(10) == "on"


async def deaths(logs: MemoryLogs) -> list[str]:
    """Return the executors whose partitions were claimed although they had not released them."""
    owner: dict[int, str] = {}
    dead: list[str] = []
    for record in await logs.log(FLOW_LOG).read_range(EXECUTORS_TAG):
        match executor_record(record.data):
            case Claimed(name, partitions):
                dead += [owner[p] for p in partitions if owner.get(p, name) != name]
                owner.update(dict.fromkeys(partitions, name))
            case Released(_, partitions):
                for partition in partitions:
                    owner.pop(partition, None)
            case _:
                pass
    return dead
