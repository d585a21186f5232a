"""A durable run continues despite failures after its append, and appends in flight of an
interrupted execution have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from bokiflow import Startable, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution
from bokiflow.runs.records import (
    PARTITIONS,
    RunFinished,
    RunRecord,
    RunStarted,
    RunTaken,
    StepDecided,
    partition_of,
    run_record,
    run_tag,
)
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError, OutcomeUnknownError
from indilog.base.log import Entry
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 2.0  # a busy machine does not lose it


class BrokenLogs(HookedLogs):
    """Logs that fail as a test says.

    Attributes:
        reads_fail: how many further reads of runs fail.
        fails_after: after such a record is appended, the next read of a run fails.
        is_held: selects appends that stay in flight; their entries are in `held`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_fail = 0
        self.fails_after: type | None = None
        self.held: list[Entry] = []
        self.is_held: Callable[[RunRecord | None], bool] = lambda _: False

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if any(self.is_held(run_record(entry.data)) for entry in entries):
            self.held += entries
            raise AppendOutcomeUnknownError("no answer yet")

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.fails_after is None:
            return
        if any(isinstance(run_record(entry.data), self.fails_after) for entry in entries):
            self.fails_after = None
            self.reads_fail = 1

    async def before_read(self, read: Read) -> None:
        if read.is_page and str(read.tag).startswith("flow:") and self.reads_fail:
            self.reads_fail -= 1
            raise NotReadyError("the platform begins")


class Process(ShopProcess):
    """A process with a workflow `two` of two steps."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.assigning: list[str] = []
        self.first = 0
        self.on_second: asyncio.Event | None = None
        self.may_end = asyncio.Event()
        self.two: Startable[str] = self.flow.workflow(self._two)

    async def _two(self, wf: Workflow) -> str:
        async def first() -> str:
            self.first += 1
            if self.first == 2 and self.on_second is not None:
                self.on_second.set()
                await self.may_end.wait()
            return f"first {self.first}"

        async def second(before: str) -> str:
            self.assigning.append(before)
            return "12"

        return await wf.step(second, await wf.step(first))

    _two.__name__ = "two"


async def test_a_start_that_fails_after_its_append_continues_in_this_process() -> None:
    logs = BrokenLogs()
    process = Process(logs)
    await (await process.two.start(id="before")).result(10)
    logs.reads_fail = 1
    with pytest.raises(OutcomeUnknownError, match="the platform begins"):
        await process.two.start(id="r")
    assert await process.two.handle("r").result(10) == "12"
    await process.stop()


async def test_a_start_that_fails_after_its_append_may_be_repeated() -> None:
    logs = BrokenLogs()
    process = Process(logs)
    await (await process.two.start(id="before")).result(10)
    logs.reads_fail = 1
    with pytest.raises(OutcomeUnknownError, match="the platform begins"):
        await process.two.start(id="r")
    handle = await process.two.start(id="r")
    assert await handle.result(10) == "12"
    await process.stop()


async def test_a_takeover_that_fails_after_its_append_continues() -> None:
    logs = BrokenLogs()
    dead, other = Process(logs), Process(logs)
    await dead.two.start(id="r")
    await dead.stop()

    @other.flow.workflow
    async def waits(wf: Workflow) -> None:
        await wf.signal("never")

    await waits.start()  # so this process sends heartbeats and keeps its runs
    logs.fails_after = RunTaken
    async with other.driven():
        assert await other.two.handle("r").result(10) == "12"
    assert logs.fails_after is None


async def test_an_interrupted_execution_is_followed_by_one_in_a_new_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other process would continue the run, because this one still sends heartbeats."""
    process, finish, breaks = Process(MemoryLogs()), Execution._finish, [True]

    async def _finish(self: Execution, finished: RunFinished) -> RunFinished:
        if breaks and breaks.pop():
            raise RuntimeError("a mistake of our own")
        return await finish(self, finished)

    monkeypatch.setattr(Execution, "_finish", _finish)
    with capture_logs():  # to draw the first traceback may take longer than the lease
        handle = await process.two.start(id="r")
        assert await handle.result(10) == "12"
    status = await handle.status()
    assert (status.epoch, status.executor) == (2, process.flow.runner.member.name)
    await process.stop()


async def test_an_abandoned_append_has_no_effect_once_the_run_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = BrokenLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)

    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    logs.is_held = lambda record: isinstance(record, StepDecided) and record.result == b'"first 1"'
    process.on_second = again = asyncio.Event()
    handle = await process.two.start(id="r")
    monkeypatch.setattr(waiting, "pause", pause)
    await again.wait()  # the first execution gave its append up, the next one begins
    monkeypatch.undo()
    await MemoryLogs.log(logs, FLOW_LOG).append(logs.held[0].data, tags=logs.held[0].tags)
    process.may_end.set()
    assert await handle.result(10) == "12"
    decided = [run_record(r.data) for r in await log.read_range(run_tag("r"))]
    epoch, steps = 1, dict[str, bytes]()
    for record in decided:
        if isinstance(record, RunTaken):
            epoch = record.epoch
        if isinstance(record, StepDecided) and record.epoch == epoch:
            steps.setdefault(record.number, record.result)
    assert [f'"{given}"'.encode() for given in process.assigning] == [steps["1"]]
    assert (await handle.status()).epoch == 2
    await process.stop()


async def test_a_start_in_flight_when_its_process_dies_begins_a_run() -> None:
    """It is ordered after another process has claimed the partition and read its runs."""
    logs = BrokenLogs()
    dead, other = Process(logs), Process(logs)
    await (await dead.two.start(id="r")).result(10)
    await logs.log(FLOW_LOG).trim(logs.position, tag=run_tag("r"))
    logs.is_held = lambda record: isinstance(record, RunStarted)
    starting = asyncio.create_task(dead.two.start(id="r"))
    while not logs.held:  # noqa: ASYNC110 - no event announces it
        await asyncio.sleep(0)
    starting.cancel()
    dead.kill()
    async with other.driven():
        while len(other.flow.runner.owned) < PARTITIONS:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        await MemoryLogs.log(logs, FLOW_LOG).append(logs.held[0].data, tags=logs.held[0].tags)
        assert await other.two.handle("r").result(10) == "12"


async def test_a_start_whose_caller_is_cancelled_begins_a_run_if_it_is_durable() -> None:
    logs = BrokenLogs()
    process = Process(logs)
    await process.flow.runner.join(logs, range(PARTITIONS))
    logs.is_held = lambda record: isinstance(record, RunStarted)
    starting = asyncio.create_task(process.two.start(id="r"))
    while not logs.held:  # noqa: ASYNC110 - no event announces it
        await asyncio.sleep(0)
    starting.cancel()
    await MemoryLogs.log(logs, FLOW_LOG).append(logs.held[0].data, tags=logs.held[0].tags)
    assert await process.two.handle("r").result(10) == "12"
    await process.stop()


async def test_a_start_in_a_partition_of_another_process_runs_there() -> None:
    logs = MemoryLogs()
    owner, other = Process(logs), Process(logs)
    async with owner.driven():
        await (await owner.two.start()).result(10)  # it owns all partitions
        handle = await other.two.start(id="r")
        assert await handle.result(10) == "12"
        assert (owner.first, other.first) == (2, 0)
        assert (await handle.status()).epoch == 1
        handle = await other.two.start()
        assert await handle.result(10) == "12"
        forked = await other.flow.fork("r", "second")
        assert await forked.result(10) == "12"
        assert other.first == 0


async def test_a_repeated_start_of_an_ended_run_leaves_nothing_open() -> None:
    logs = MemoryLogs()
    process = Process(logs)
    await (await process.two.start(id="r")).result(10)
    assert await (await process.two.start(id="r")).result(10) == "12"
    runner = process.flow.runner
    (partition,) = [p for p in runner.owned.values() if p.number == partition_of("r", PARTITIONS)]
    async with asyncio.timeout(10):
        while partition.state.runs or not partition.is_loaded or runner.taking.has_work:
            await asyncio.sleep(0.01)
            await partition.catch_up(logs.log(FLOW_LOG))
    assert process.first == 1
    await process.stop()
