"""Runs that were assigned to an executor after all drivers had read its stream are taken over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest

from bokiflow import Startable, Workflow
from bokiflow.flow import RETENTION_S
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    RUNS_TAG,
    ExecutorDead,
    ExecutorLeft,
    Heartbeat,
    encode,
    executor_tag,
)
from bokiflow.takeover import dead_executors
from bokiflow.takeover.dead_executors import (
    AGE_S_MAX,
    AGE_S_MIN,
    NAMES_MAX,
    DeadExecutors,
    read_orphaned_runs,
)
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Entry, Log, Session
from indilog.testing import MemoryLogs
from indilog.testing.memory_log import MemoryLog
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio

LEASE_S = 0.2


class SlowLog(MemoryLog):
    """A log whose appends of single records wait until the platform goes on."""

    slow: SlowLogs

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        given = tuple(tags)
        if self.slow.goes_on is None or not self.slow.holds(given):
            return await super().append(data, tags=given)
        self.slow.arrived.set()
        held = asyncio.create_task(self._later(data, given))
        self.slow.held.append(held)
        return await asyncio.shield(held)

    async def _later(self, data: bytes, tags: tuple[UserTag, ...]) -> SeqNum:
        assert self.slow.goes_on is not None
        await self.slow.goes_on.wait()
        return await super().append(data, tags=tags)


class SlowLogs(MemoryLogs):
    """Logs of a platform that can hold back given records.

    Attributes:
        goes_on: while set to an event, appends that `holds` names wait for it; a caller that asked
        for
            them may be gone by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.goes_on: asyncio.Event | None = None
        self.arrived = asyncio.Event()
        self.held: list[asyncio.Task[SeqNum]] = []
        self.holds: Callable[[tuple[UserTag, ...]], bool] = lambda tags: RUNS_TAG in tags

    def log(self, name: str, session: Session | None = None) -> SlowLog:
        log = SlowLog(name, logs=self, session=session)
        log.slow = self
        return log


class Process(ShopProcess):
    """A process with a workflow `two` of two steps."""

    def __init__(self, logs: MemoryLogs, retention_s: float = RETENTION_S) -> None:
        super().__init__(logs, LEASE_S, retention_s)
        self.two: Startable[str] = self.flow.workflow(self._two)

    async def _two(self, wf: Workflow) -> str:
        return await wf.step(lambda: "1") + await wf.step(lambda: "2")

    _two.__name__ = "two"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_executors, "AGE_S_MIN", 0.05)


async def until(what: Callable[[], bool], log: Log) -> None:
    """Return when something holds, which news of executors may bring about."""
    async with asyncio.timeout(10):
        while not what():
            await log.read_next(EXECUTORS_TAG, await log.tail(), wait=0.05)


async def stalled(logs: SlowLogs, process: Process) -> asyncio.Task[object]:
    """Begin a run whose start is on its way when this returns."""
    assert await (await process.two.start(id="before")).result(10) == "12"
    logs.goes_on = asyncio.Event()
    starting: asyncio.Task[object] = asyncio.create_task(process.two.start(id="r"))
    await logs.arrived.wait()
    return starting


async def test_a_start_ordered_after_its_dead_executor_was_forgotten_is_executed() -> None:
    logs = SlowLogs()
    dying, other = Process(logs), Process(logs)
    async with other.driven():
        starting = await stalled(logs, dying)
        assert logs.goes_on is not None
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        dying.kill()
        log, name = logs.log("shop/flow"), dying.flow.runner.lease.name
        await until(lambda: name in other.flow.runner.executors.known, log)
        await until(lambda: name not in other.flow.runner.executors.known, log)
        logs.goes_on.set()
        await asyncio.gather(*logs.held)
        assert await other.two.handle("r").result(10) == "12"
        assert (await other.two.handle("r").status()).epoch == 2


async def test_a_start_ordered_after_its_process_changed_its_name_is_executed() -> None:
    logs = SlowLogs()
    process = Process(logs)
    async with process.driven():
        starting = await stalled(logs, process)
        assert logs.goes_on is not None
        name = process.flow.runner.lease.name
        process.flow.runner._lose()
        await until(lambda: name not in process.flow.runner.executors.known, logs.log("shop/flow"))
        logs.goes_on.set()
        await starting
        assert await process.two.handle("r").result(10) == "12"


async def test_a_start_whose_caller_is_cancelled_is_executed_by_the_same_process() -> None:
    logs = SlowLogs()
    process = Process(logs)
    starting = await stalled(logs, process)  # without a driver: no process sees to it
    assert logs.goes_on is not None
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    logs.goes_on.set()
    await asyncio.gather(*logs.held)
    assert await process.two.handle("r").result(10) == "12"
    status = await process.two.handle("r").status()
    assert (status.executor, status.epoch) == (process.flow.runner.lease.name, 1)
    process.kill()


async def test_a_process_that_stops_during_a_start_leaves_it_to_others() -> None:
    logs = SlowLogs()
    stopping, other = Process(logs), Process(logs)
    async with other.driven():
        async with stopping.driven():
            starting = await stalled(logs, stopping)
        assert logs.goes_on is not None
        logs.goes_on.set()
        await starting
        assert await other.two.handle("r").result(10) == "12"


async def test_garbage_collection_finds_runs_of_unknown_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of an executor that is not even remembered."""
    logs, process = MemoryLogs(), Process(MemoryLogs())
    process.flow.attach(logs)
    await process.two.start(id="r")
    process.kill()
    await logs.log("shop/flow").trim(await logs.log("shop/flow").tail(), tag=EXECUTORS_TAG)
    monkeypatch.setattr("bokiflow.takeover.cleaning.INTERVAL_S_MIN", 0.05)
    other = Process(logs, retention_s=0.1)
    async with other.driven():
        assert await other.two.handle("r").result(10) == "12"


async def test_a_takeover_trims_no_further_than_it_has_read() -> None:
    """What comes to a dead executor between the look and the word that it is done is kept."""
    logs = SlowLogs()
    logs.holds = lambda tags: tags == (EXECUTORS_TAG,)
    log, new_owner = logs.log("shop/flow"), Process(logs)
    await log.append(encode(Heartbeat("gone", 0.001)), tags=[EXECUTORS_TAG])
    await log.append(
        encode(ExecutorDead("gone", new_owner.flow.runner.lease.name, 1)), tags=[EXECUTORS_TAG]
    )
    logs.goes_on = asyncio.Event()  # holds `left`, after the look
    async with new_owner.driven():
        await logs.arrived.wait()
        late = Process(logs)
        late.flow.runner.lease.name = "gone"
        late.flow.runner.lease.renew(waiting.passed_now() + 3600)
        await late.two.start(id="r")
        late.kill()
        logs.goes_on.set()
        assert await new_owner.two.handle("r").result(10) == "12"


async def test_the_read_part_of_a_dead_executors_stream_is_not_read_again() -> None:
    log = MemoryLogs().log("flow")
    tag = executor_tag("gone")
    await log.append_batch([Entry(encode(ExecutorLeft("gone", is_idle=True)), (tag,))] * 3)
    assert await read_orphaned_runs(log, "gone") == ([], 3)
    assert await read_orphaned_runs(log, "gone", 3) == ([], 3)


async def test_dead_executors_are_read_at_growing_intervals_and_then_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_executors, "AGE_S_MIN", AGE_S_MIN)
    gone, now, looks = DeadExecutors(), 1000.0, 0
    gone.add("a", now)
    while (again := gone.next_due()) is not None:
        assert not gone.due(again - 0.01)
        assert gone.due(again) == ["a"]
        now, looks = again, looks + 1
        gone.note_read("a", now, SeqNum(looks))
        assert gone.next_due() is None or gone.end("a") == looks
    assert looks <= 20
    assert now >= 1000 + AGE_S_MAX
    for n in range(NAMES_MAX + 5):
        gone.add(str(n), now)
    names = gone.due(now + AGE_S_MIN)
    assert (len(names), names[0]) == (NAMES_MAX, "5")
