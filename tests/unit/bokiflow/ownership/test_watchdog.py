"""No body runs here once another process may run it, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from unittest import mock

import pytest

from bokiflow import Startable, Workflow
from bokiflow.ownership.executor import Executor
from bokiflow.ownership.partition import PartitionLease
from bokiflow.runs.execution import Execution
from bokiflow.runs.records import RunStarted, partition_record
from indilog.base.errors import NotReadyError
from indilog.base.log import Entry, Session
from indilog.testing import MemoryLog, MemoryLogs
from tests.support import leaping_loop
from tests.support.hooked_log import HookedLog, Hooks, Read
from tests.unit.bokiflow.processes import ShopProcess

LEASE_S = 8.0


class View(Hooks):
    """The log as one process reaches it.

    Attributes:
        is_cut: whether it cannot be reached.
        start_late_s: how late starts are acknowledged.
    """

    def __init__(self, logs: MemoryLogs) -> None:
        self._logs = logs
        self.is_cut = False
        self.start_late_s = 0.0

    def log(self, name: str) -> MemoryLog:
        return HookedLog(name, logs=self._logs, session=Session(), hooks=self)

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await self._reach()

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if any(isinstance(partition_record(entry.data), RunStarted) for entry in entries):
            self.is_cut = self.start_late_s > 0
            await asyncio.sleep(self.start_late_s)

    async def before_read(self, read: Read) -> None:
        await self._reach()

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if self.is_cut:
            await asyncio.sleep(1.0)
            raise NotReadyError("The log cannot be reached.")


class Process(ShopProcess):
    """A process with a workflow of one long step, or one whose attempts fail."""

    def __init__(self, logs: MemoryLogs, bodies: list[tuple[str, float, str]], name: str) -> None:
        self.view = View(logs)
        super().__init__(self.view, LEASE_S)
        self.label, self.bodies, self.long_s = name, bodies, 0.0
        self.swallowed: tuple[type[BaseException], ...] = ()
        self.work: Startable[str] = self.flow.workflow(self._work)

    async def _work(self, wf: Workflow) -> str:
        return await wf.step(self.body)

    _work.__name__ = "work"

    async def body(self) -> str:
        now = asyncio.get_running_loop().time
        self.bodies.append(("begins", now(), self.label))
        try:
            ends = now() + self.long_s
            while (left_s := ends - now()) > 0:
                with suppress(*self.swallowed):
                    await asyncio.sleep(left_s)
        finally:
            self.bodies.append(("ends", now(), self.label))
        return self.label


def cut_off(*swallowed: type[BaseException]) -> list[tuple[str, float, str]]:
    """Return when bodies ran, of a process that is cut off from the log and of its successor."""

    async def main() -> list[tuple[str, float, str]]:
        logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        bodies: list[tuple[str, float, str]] = []
        first, second = Process(logs, bodies, "first"), Process(logs, bodies, "second")
        first.long_s, first.swallowed = 20 * LEASE_S, swallowed
        await first.work.start(id="r")
        async with second.driven():
            await asyncio.sleep(LEASE_S)
            first.view.is_cut = True
            assert await second.work.handle("r").result(10 * LEASE_S) == "second"
        first.kill()
        return bodies

    return leaping_loop.run(main())


def acknowledged_late() -> list[tuple[str, float, str]]:
    """Return when bodies ran, if the acknowledgement of a start takes several leases."""

    async def main() -> list[tuple[str, float, str]]:
        logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        bodies: list[tuple[str, float, str]] = []
        first, second = Process(logs, bodies, "first"), Process(logs, bodies, "second")
        second.long_s = 10 * LEASE_S
        first.view.start_late_s = 4 * LEASE_S
        starting = asyncio.create_task(first.work.start())
        await asyncio.sleep(1.0)
        (run,) = await second.flow.runs()
        async with second.driven():
            assert await second.work.handle(run.id).result(20 * LEASE_S) == "second"
        starting.cancel()
        first.kill()
        return bodies

    return leaping_loop.run(main())


def test_a_body_is_cancelled_before_its_successor_begins() -> None:
    bodies = cut_off()
    assert [(what, who) for what, _, who in bodies] == [
        ("begins", "first"), ("ends", "first"), ("begins", "second"), ("ends", "second"),
    ]  # fmt: skip


def test_a_body_that_ignores_the_watchdog_is_abandoned_before_its_successor_begins() -> None:
    bodies = cut_off(asyncio.CancelledError)
    assert [(what, who) for what, _, who in bodies] == [
        ("begins", "first"), ("ends", "first"), ("begins", "second"), ("ends", "second"),
    ]  # fmt: skip


def test_without_the_watchdog_a_second_body_runs_beside_the_first() -> None:
    """Planted fault."""

    async def never(_: Executor) -> None:
        await asyncio.sleep(1e6)

    with mock.patch.object(Executor, "_watch", never):
        bodies = cut_off()
    assert [(what, who) for what, _, who in bodies][:2] == [
        ("begins", "first"), ("begins", "second"),
    ]  # fmt: skip


def test_a_start_acknowledged_after_the_lease_begins_no_body_there() -> None:
    assert {who for _, _, who in acknowledged_late()} == {"second"}


def test_without_the_check_a_start_acknowledged_late_begins_a_second_body() -> None:
    """Planted fault."""
    with (
        mock.patch.object(PartitionLease, "has_ended", return_value=False),
        mock.patch.object(Execution, "check_lease"),
    ):
        assert {who for _, _, who in acknowledged_late()} == {"first", "second"}


@pytest.mark.parametrize("is_checked", [True, False])
def test_each_attempt_begins_with_a_check_of_the_lease(*, is_checked: bool) -> None:
    """Also if the watchdog has had no turn yet; without the check, the attempt is made."""

    async def main() -> int:
        logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        process, attempts = Process(logs, [], "first"), 0

        async def fails() -> str:
            nonlocal attempts
            attempts += 1
            process.flow.runner.member.lease.end()
            raise ValueError("again")

        async def works(wf: Workflow) -> str:
            return await wf.step(fails, retries=1, backoff=0)

        process.work.definition.body = works
        await process.work.start(id="r")
        process.flow.runner._background["watch"].cancel()
        process.flow.runner._background["beat"].cancel()
        await asyncio.sleep(LEASE_S / 100)
        process.kill()
        return attempts

    if is_checked:
        assert leaping_loop.run(main()) == 1
    else:
        with mock.patch.object(Execution, "check_lease"):
            assert leaping_loop.run(main()) == 2
