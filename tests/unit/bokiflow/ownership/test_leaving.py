"""A claim hides no open runs, although its executor leaves or fails before it knows its effect."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Startable, Workflow
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    PARTITIONS,
    Claimed,
    executor_record,
    partition_of,
)
from indilog import NotReadyError
from indilog.base.log import Entry
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
LEASE_S = 0.4


class SlowClaims(HookedLogs):
    """Logs in which claims wait before they are in the log, or before they are answered."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = self.is_appended = False
        self.waits, self.go = asyncio.Event(), asyncio.Event()

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if not self.is_appended:
            await self._wait(entries)

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.is_appended:
            await self._wait(entries)

    async def _wait(self, entries: Sequence[Entry]) -> None:
        said = [executor_record(one.data) for one in entries if EXECUTORS_TAG in one.tags]
        if self.is_slow and any(isinstance(one, Claimed) for one in said):
            self.waits.set()
            await self.go.wait()


class Process(ShopProcess):
    """Its workflow waits for `gate`."""

    def __init__(self, logs: HookedLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        self.work: Startable[int] = self.flow.workflow(self._work)

    async def _work(self, wf: Workflow) -> int:
        self.begun.set()
        await wf.step(self.gate.wait)
        return 7

    _work.__name__ = "work"


async def begun_with_a_driver_beside(logs: SlowClaims, process: Process) -> None:
    await process.work.start(id="r")
    await process.begun.wait()
    await asyncio.sleep(3 * LEASE_S)  # the driver is an executor, too
    logs.is_slow = True
    process.kill()


async def test_a_driver_that_leaves_after_its_claim_claims_again() -> None:
    """Its claim took so long that it would have left meanwhile, because it had no open run."""
    logs = SlowClaims()
    dying, other = Process(logs), Process(logs)
    other.gate.set()
    async with asyncio.timeout(60), other.driven():
        await begun_with_a_driver_beside(logs, dying)
        await logs.waits.wait()
        await asyncio.sleep(3 * LEASE_S)
        logs.is_slow = False
        logs.go.set()
        assert await other.work.handle("r").result() == 7


async def test_others_take_what_a_driver_had_claimed_when_it_stopped() -> None:
    """It did not know yet that its claim had taken effect."""
    logs = SlowClaims()
    dying, stopping, third = Process(logs), Process(logs), Process(logs)
    async with asyncio.timeout(60):
        async with stopping.driven():
            await begun_with_a_driver_beside(logs, dying)
            logs.is_appended = True
            await logs.waits.wait()
            logs.is_slow = False
        member = third.flow.runner.member
        member.takes = True
        await third.flow.runner.look(logs)
        assert member.due_claims(()) == [partition_of("r", PARTITIONS)]


class UnreadClaims(HookedLogs):
    """Logs in which the read of executors after the next claim fails.

    Attributes:
        is_away: whether the read after the next claim fails.
        fails: whether the next read fails.
    """

    is_away = False
    fails = False

    async def after_append(self, entries: Sequence[Entry]) -> None:
        said = [executor_record(one.data) for one in entries if EXECUTORS_TAG in one.tags]
        self.fails = self.is_away and any(isinstance(one, Claimed) for one in said)

    async def before_read(self, read: Read) -> None:
        if self.fails and read.tag == EXECUTORS_TAG:
            self.is_away = self.fails = False
            raise NotReadyError("away")


async def test_a_driver_that_could_not_read_its_claim_executes_the_runs() -> None:
    """It owned their partitions, and wrote no heartbeat."""
    logs = UnreadClaims()
    dying, other = Process(logs), Process(logs)
    other.gate.set()
    await dying.work.start(id="r")
    await dying.begun.wait()
    await dying.stop()
    logs.is_away = True
    async with asyncio.timeout(60), other.driven():
        assert await other.work.handle("r").result() == 7
