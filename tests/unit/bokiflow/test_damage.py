"""An unreadable run has not failed: its execution stops, and no compensation runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bokiflow import Flow, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import RunFinished, encode, run_tag
from indilog.base.errors import DataLossError
from indilog.base.log import Record
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG as LOG
from tests.support.flow_executions import OneLog, begin, decided, execute, take
from tests.support.hooked_log import HookedLog, Read

pytestmark = pytest.mark.asyncio


class Damaged(HookedLog):
    """A log of which a run, `r` by default, and a lock cannot be read while it is
    damaged.
    """

    def __init__(self, logs: MemoryLogs, run: Callable[[], str] = lambda: "r") -> None:
        super().__init__(LOG, logs=logs)
        self.is_damaged = self.was_damaged = False
        self._run = run

    async def before_read(self, read: Read) -> None:
        if self.is_damaged and read.tag in {run_tag(self._run()), "lock:hotel:7"}:
            raise DataLossError("A record of the run is lost.")

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        await self.before_read(read)
        return records


Breaks = Callable[[Damaged], Awaitable[None]]


async def forget(log: Damaged) -> None:
    """Another process takes the run, ends it, and it is forgotten."""
    await take(log, "r", "second")
    end = await log.append(encode(RunFinished(2, b"1")), tags=[run_tag("r")])
    await log.trim(end + 1, tag=run_tag("r"))


async def upgrade(log: Damaged) -> None:
    """A later version writes into the run."""
    await log.append(b"\xb0F\x7f", tags=[run_tag("r")])


async def damage(log: Damaged) -> None:
    """A record of the run is lost."""
    log.is_damaged = True


BREAKS = pytest.mark.parametrize("breaks", [forget, upgrade, damage])


@BREAKS
async def test_an_unreadable_run_has_not_failed_and_is_not_compensated(
    logs: MemoryLogs, breaks: Breaks
) -> None:
    log = Damaged(logs)
    await begin(log, "r")
    undone: list[str] = []

    async def trip(wf: Workflow) -> None:
        await wf.step(lambda: "car", name="book", compensate=undone.append)
        await wf.step(lambda: breaks(log), name="break")
        await wf.step(lambda: "room", name="book", compensate=undone.append)

    with pytest.raises(Stopped):
        await execute(log, "r", trip)
    assert undone == []


@BREAKS
async def test_a_run_that_waits_for_an_unreadable_record_has_not_failed(
    logs: MemoryLogs, breaks: Breaks
) -> None:
    log = Damaged(logs)
    await begin(log, "r")
    undone: list[str] = []

    async def trip(wf: Workflow) -> None:
        await wf.step(lambda: "car", name="book", compensate=undone.append)
        await wf.sleep(0.2)
        await wf.signal("paid")

    execution = asyncio.create_task(execute(log, "r", trip))
    await decided(logs, "r", 2)
    await breaks(log)
    with pytest.raises(Stopped):
        await execution
    assert undone == []


async def test_a_child_that_cannot_be_read_has_not_failed(logs: MemoryLogs, flow: Flow) -> None:
    @flow.workflow
    async def child(wf: Workflow) -> int:
        return 1

    plain = logs.log(LOG)
    await begin(plain, "p")
    child_id = ""

    async def parent(wf: Workflow) -> int:
        nonlocal child_id
        running = await wf.start_child(child)
        child_id = running.id
        await child.handle(child_id).result(5)
        log.is_damaged = not log.was_damaged
        log.was_damaged = True
        return await running.result()

    log = Damaged(logs, lambda: child_id)
    with pytest.raises(Stopped):
        await execute(log, "p", parent)
    log.is_damaged = False
    await take(plain, "p", "second")
    finished = await execute(log, "p", parent)
    assert finished.result == b"1"


@pytest.mark.parametrize("when", ["acquire", "check", "release"])
async def test_a_lock_that_cannot_be_read_fails_no_run(logs: MemoryLogs, when: str) -> None:
    log, plain = Damaged(logs, lambda: "another"), logs.log(LOG)
    await begin(plain, "r")
    undone: list[str] = []

    async def hold(wf: Workflow) -> int:
        def at(place: str) -> None:
            log.is_damaged = place == when and not log.was_damaged
            log.was_damaged = log.was_damaged or log.is_damaged

        await wf.step(lambda: "car", name="book", compensate=undone.append)
        at("acquire")
        async with wf.lock("hotel:7") as lock:
            at("check")
            await lock.check()
            at("release")
        return lock.token

    with pytest.raises(Stopped):
        await execute(log, "r", hold)
    await take(plain, "r", "second")
    assert (await execute(log, "r", hold)).failure is None
    assert undone == []


@pytest.mark.parametrize("what", ["run", "child"])
async def test_an_unreadable_run_is_retried_with_growing_pauses_and_continues_once_readable(
    logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    undone: list[str] = []
    pauses: list[float] = []
    ids = {"run": "r", "child": "r"}

    async def pause(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))
        if seconds >= 1:
            pauses.append(seconds)
            log.is_damaged = len(pauses) < 3

    monkeypatch.setattr(waiting, "pause", pause)
    log, flow = Damaged(logs, lambda: ids[what]), Flow("shop", lease=2)
    flow.attach(OneLog(log))

    @flow.workflow
    async def child(wf: Workflow) -> int:
        return 1

    @flow.workflow
    async def parent(wf: Workflow) -> int:
        await wf.step(lambda: "car", name="book", compensate=undone.append)
        running = await wf.start_child(child)
        ids["child"] = running.id
        if not pauses:
            await child.handle(running.id).result(5)
            log.is_damaged = True
        await wf.sleep(0.02)
        return await running.result()

    assert await (await parent.start(id="r")).result(10) == 1
    assert undone == []
    assert len(pauses) == 3
    assert pauses == sorted(set(pauses)), "each is longer"
