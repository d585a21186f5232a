"""Runs that become due while the lease of their process has ended."""

from __future__ import annotations

import asyncio

import pytest

from bokiflow import Workflow
from indilog.testing import MemoryLogs
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


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
