"""Heartbeats keep their schedule, also while the executor's other work is slow.

The loop's clock jumps, so the tests do not depend on the load of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from bokiflow import Startable, Workflow
from bokiflow.runs.records import Heartbeat, executor_record
from indilog.base.log import Entry
from tests.support import leaping_loop
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

LEASE_S = 8.0
BEAT_S = LEASE_S / 4
LEASES = 10


class SlowLogs(HookedLogs):
    """Logs whose calls take their time.

    Attributes:
        slow_s: how long each takes.
        asked_at: when each heartbeat was sent off, after `slow_s` was set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow_s = 0.0
        self.asked_at: list[float] = []

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if any(isinstance(executor_record(entry.data), Heartbeat) for entry in entries):
            self.asked_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.slow_s)

    async def before_read(self, read: Read) -> None:
        if read.wait is None:
            await asyncio.sleep(self.slow_s)


class Process(ShopProcess):
    """A process with a workflow `waits` that waits for a signal."""

    def __init__(self, logs: SlowLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.waits: Startable[str] = self.flow.workflow(self._waits)

    async def _waits(self, wf: Workflow) -> str:
        return str(await wf.signal("go"))

    _waits.__name__ = "waits"


@asynccontextmanager
async def executing(logs: SlowLogs) -> AsyncIterator[Process]:
    """A process that executes a run which waits; how often it beats counts from here on."""
    process = Process(logs)
    async with process.driven():
        await process.waits.start(id="r")
        logs.asked_at.clear()
        yield process


def test_a_heartbeat_waits_only_for_the_rest_of_its_quarter() -> None:
    async def main() -> None:
        logs = SlowLogs()
        async with executing(logs):
            logs.slow_s = BEAT_S / 4
            await asyncio.sleep(LEASES * LEASE_S)
        gaps = [after - before for before, after in pairwise(logs.asked_at)]
        assert gaps
        assert gaps == [pytest.approx(BEAT_S)] * len(gaps)

    leaping_loop.run(main())


def test_an_executor_whose_log_takes_nearly_half_a_lease_keeps_its_lease() -> None:
    async def main() -> None:
        logs = SlowLogs()
        async with executing(logs) as process:
            name = process.name
            logs.slow_s = 0.23 * LEASE_S
            await asyncio.sleep(LEASES * LEASE_S)
            assert process.name == name
            logs.slow_s = 0.0
            assert (await process.waits.handle("r").status()).epoch == 1

    leaping_loop.run(main())


def test_lookups_of_many_pending_assignments_delay_no_heartbeat() -> None:
    async def main() -> None:
        logs = SlowLogs()
        async with executing(logs) as process:
            name = process.name
            for number in range(500):
                process.flow.runner._pending.note(f"unknown-{number}", 1)
            logs.slow_s = LEASE_S / 500
            await asyncio.sleep(LEASES * LEASE_S)
            assert process.name == name
        gaps = [after - before for before, after in pairwise(logs.asked_at)]
        assert gaps == [pytest.approx(BEAT_S)] * len(gaps)

    leaping_loop.run(main())
