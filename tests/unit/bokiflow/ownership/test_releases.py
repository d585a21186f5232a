"""Partitions are released to an executor that joins, also while their runs wait for a lock."""

from __future__ import annotations

import asyncio

import pytest

from bokiflow import Workflow
from indilog.testing import MemoryLogs
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
        self.goes_on = asyncio.Event()

    async def work(self, wf: Workflow, run: int) -> str:
        async with wf.lock("till", lease=3600):
            await wf.step(self.goes_on.wait)
            await wf.step(asyncio.sleep, 0)
        return f"{run} in {self.label}"


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
