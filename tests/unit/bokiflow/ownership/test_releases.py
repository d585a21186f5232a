"""Partitions are released to an executor that joins, also while their runs wait for a lock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Workflow
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    PARTITIONS,
    Claimed,
    Heartbeat,
    Released,
    encode,
    executor_record,
    partition_of,
)
from bokiflow.runs.run_log import PATIENCE_TRIES
from indilog import NotReadyError
from indilog.base.log import Entry
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLogs
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
LEASE_S = 0.4
RUNS = 12


class Process(ShopProcess):
    """Its runs need one lock, and hold it during two steps."""

    def __init__(self, logs: MemoryLogs, label: str) -> None:
        super().__init__(logs, LEASE_S)
        self.label = label
        self.flow.workflow(self.work)
        self.flow.workflow(self.stay)
        self.flow.workflow(self.wait)
        self.goes_on = asyncio.Event()

    async def work(self, wf: Workflow, run: int) -> str:
        async with wf.lock("till", lease=3600):
            await wf.step(self.goes_on.wait)
            await wf.step(asyncio.sleep, 0)
        return f"{run} in {self.label}"

    async def stay(self, wf: Workflow) -> None:
        await wf.step(self.goes_on.wait)

    async def wait(self, wf: Workflow) -> None:
        await wf.signal("go")


async def test_the_holder_of_a_lock_and_those_who_wait_for_it_move_to_another_process() -> None:
    logs = MemoryLogs()
    first, second = Process(logs, "first"), Process(logs, "second")
    async with asyncio.timeout(60), first.driven():
        for run in range(RUNS):
            await first.flow.start("work", {"run": run}, id=f"r{run}")
        async with second.driven():
            second.goes_on.set()
            await asyncio.sleep(4 * LEASE_S)  # the first one begins to release partitions
            first.goes_on.set()
            ended = [await first.flow.handle("work", f"r{run}").result() for run in range(RUNS)]
    assert {text.split()[-1] for text in ended} == {"first", "second"}


async def test_a_body_delays_the_release_of_its_own_partition_only() -> None:
    """Runs of the other partitions to be released would begin no body until it ends."""
    logs = MemoryLogs()
    first, second = Process(logs, "first"), Process(logs, "second")
    stuck = [f"s{run}" for run in range(RUNS)]
    there = {partition_of(run, PARTITIONS) for run in stuck}
    others = [f"w{n}" for n in range(PARTITIONS) if partition_of(f"w{n}", PARTITIONS) not in there]
    async with asyncio.timeout(60), first.driven():
        for run in stuck:
            await first.flow.start("stay", {}, id=run)
        for run in others:
            await first.flow.start("wait", {}, id=run)
        async with second.driven():
            await asyncio.sleep(4 * LEASE_S)
            for run in others:
                handle = first.flow.handle("wait", run)
                await handle.signal("go")
                await handle.result(5)
            assert second.flow.runner.owned
            first.goes_on.set()
            second.goes_on.set()


class Unreleased(HookedLogs):
    """Logs to which no release of partitions can be appended for a while."""

    left = PATIENCE_TRIES
    """Number of appends that fail."""

    async def before_append(self, entries: Sequence[Entry]) -> None:
        said = [executor_record(one.data) for one in entries if EXECUTORS_TAG in one.tags]
        if self.left and any(isinstance(one, Released) for one in said):
            self.left -= 1
            raise NotReadyError("away")


async def test_partitions_are_released_although_the_log_has_refused_it_before() -> None:
    """The other process is gone by then. No body began any more in partitions to be released, and
    nothing released them.
    """
    logs = Unreleased()
    first, second = Process(logs, "first"), Process(logs, "second")
    first.goes_on.set()
    async with asyncio.timeout(300), first.driven():
        await first.flow.start("wait", {})
        async with second.driven():
            while logs.left == PATIENCE_TRIES:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        while logs.left:  # noqa: ASYNC110
            await asyncio.sleep(LEASE_S)
        for run in range(RUNS):
            await first.flow.start("work", {"run": run}, id=f"r{run}")
            result = await first.flow.handle("work", f"r{run}").result(30)
            assert result == f"{run} in first"


async def test_a_lost_partition_is_given_up_as_soon_as_the_lease_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was given up after further claims only, which append. A body could begin meanwhile."""
    logs, there = MemoryLogs(), partition_of("r", PARTITIONS)
    process = Process(logs, "first")
    runner, seen = process.flow.runner, asyncio.Queue[bool]()
    await runner.join(logs, range(PARTITIONS))
    await process.flow.start("wait", {}, id="other")
    assert partition_of("other", PARTITIONS) != there

    async def claim_hops() -> None:
        await seen.put(there in runner.owned)

    monkeypatch.setattr(runner, "_claim_hops", claim_hops)
    log = logs.log("shop/flow")
    beat = Heartbeat("new", LEASE_S, True, True, PARTITIONS, b"", 0)
    claimed = Claimed("new", (there,), await log.tail())
    await log.append_batch([Entry(encode(one), (EXECUTORS_TAG,)) for one in (beat, claimed)])
    assert await seen.get() is False
    await process.stop()
