"""Runs that become due while the lease of their process has ended."""

from __future__ import annotations

import asyncio

import pytest

from bokiflow import Workflow
from bokiflow.runs.records import limit_tag
from indilog import DataLossError, IndilogError, NotReadyError
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
LEASE_S = 0.4


class Unread(HookedLogs):
    """Logs whose reads of the limit of `limited` fail `count` times."""

    def __init__(self, error: IndilogError) -> None:
        super().__init__()
        self.error = error
        self.count = 0

    async def before_read(self, read: Read) -> None:
        if read.tag == limit_tag("limited") and self.count:
            self.count -= 1
            raise self.error


class Process(ShopProcess):
    """Its runs wait until the process may finish them."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.may_finish = asyncio.Event()
        self.flow.workflow(self.free)
        self.flow.workflow(concurrency=1)(self.limited)

    async def free(self, wf: Workflow) -> str:
        await wf.step(self.may_finish.wait)
        return wf.id

    async def limited(self, wf: Workflow) -> str:
        return await self.free(wf)

    async def is_killed(self, *workflows: str) -> None:
        """Start a run of each workflow, all in one partition, and crash when they execute."""
        for place, workflow in enumerate(workflows):
            await self.flow.start(workflow, {}, id=f"r@{place}")
        while len(self.flow.runner.running) < len(workflows):  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        self.kill()


async def test_a_run_that_was_due_without_a_lease_is_executed_after_its_renewal() -> None:
    """A partition was being loaded when the lease ended, and counted as loaded later."""
    shop = ShopProcess(MemoryLogs(), 5.0)
    began = asyncio.Event()

    async def waits(wf: Workflow) -> int:
        again = began.is_set()
        began.set()
        if not again:
            await asyncio.Event().wait()
        return 7

    handle = await shop.flow.workflow(waits).start(id="r")
    await began.wait()
    runner = shop.flow.runner
    runner._end_task("watch")  # it looked a moment ago
    runner.member.lease.end()
    await asyncio.wait(runner._stop_runs())
    await asyncio.sleep(0)
    (partition,) = runner.owned.values()
    partition.is_loaded = True
    assert runner.owns(partition.number) is None
    runner.taking.want("r")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not runner.running
    assert runner.owns(partition.number) is None
    assert await handle.result(60) == 7
    await shop.stop()


async def test_a_partition_is_loaded_again_if_the_limit_of_a_run_could_not_be_read() -> None:
    """The partition counted as loaded, although its runs had not been taken."""
    logs = Unread(NotReadyError("away"))
    dying, other = Process(logs), Process(logs)
    other.may_finish.set()
    await dying.is_killed("limited")
    logs.count = 20  # more than one read repeats
    async with asyncio.timeout(120), other.driven():
        assert await other.flow.handle("limited", "r@0").result() == "r@0"


async def test_an_unreadable_limit_does_not_delay_the_other_runs_of_a_partition() -> None:
    logs = Unread(DataLossError("lost", seqnum=0))
    dying, other = Process(logs), Process(logs)
    other.may_finish.set()
    await dying.is_killed("limited", "free")
    logs.count = 1_000_000
    async with asyncio.timeout(120), other.driven():
        assert await other.flow.handle("free", "r@1").result() == "r@1"
        logs.count = 0
        assert await other.flow.handle("limited", "r@0").result() == "r@0"
