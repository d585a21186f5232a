"""Late records without effect hide no run from the drivers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Startable, State, Workflow
from bokiflow.ownership.partition import OwnedPartition
from bokiflow.ownership.partition_state import Phase
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    INBOX_TAG,
    PARTITIONS,
    RUNS_TAG,
    Claimed,
    Heartbeat,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    encode,
    partition_of,
    partition_tag,
    run_record,
    run_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.base.errors import AppendOutcomeUnknownError
from indilog.base.log import Entry, Log
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 0.3
THERE = partition_tag(partition_of("r", PARTITIONS))
START = Entry(
    encode(RunStarted("waits", b"{}", "dead", "version")), (run_tag("r"), RUNS_TAG, THERE)
)
LIVES = Entry(encode(Heartbeat("dead", LEASE_S, False, True, PARTITIONS, b"", 0)), (EXECUTORS_TAG,))
OWNS = Entry(encode(Claimed("dead", (partition_of("r", PARTITIONS),), 0)), (EXECUTORS_TAG,))
FINISHED = Entry(encode(RunFinished(1, b'"old"')), (run_tag("r"), THERE))
PARKED = Entry(encode(RunParked(1, "version", "for a test")), (run_tag("r"), THERE))


def taken(epoch: int, executor: str = "dead") -> Entry:
    return Entry(encode(RunTaken(epoch, executor)), (run_tag("r"), THERE))


class Process(ShopProcess):
    """A process with a workflow `waits` that waits for a signal, and `long`, whose second execution
    does not end before it may.
    """

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.waits: Startable[str] = self.flow.workflow(self._waits)
        self.long: Startable[str] = self.flow.workflow(self._long)
        self.bodies, self.is_again, self.may_end = 0, asyncio.Event(), asyncio.Event()

    async def _waits(self, wf: Workflow) -> str:
        return str(await wf.signal("go"))

    async def _long(self, wf: Workflow) -> str:
        return await wf.step(self.body)

    _waits.__name__, _long.__name__ = "waits", "long"

    async def body(self) -> str:
        self.bodies += 1
        if self.bodies == 2:
            self.is_again.set()
            await self.may_end.wait()
        return "done"

    async def goes_on(self) -> None:
        handle = self.waits.handle("r")
        await handle.signal("go", "on")
        assert await handle.result(10) == "on"


class NoEnd(HookedLogs):
    """Logs that hold back the end of the first epoch, and say nothing of it."""

    held: Sequence[Entry] = ()
    reads = 0

    async def before_read(self, read: Read) -> None:
        self.reads += 1

    async def before_append(self, entries: Sequence[Entry]) -> None:
        records = (run_record(entry.data) for entry in entries)
        if any(isinstance(record, RunFinished) and record.epoch == 1 for record in records):
            self.held = entries
            raise AppendOutcomeUnknownError("It has no answer yet.")


async def gives_up_an_end_that_comes_late(
    monkeypatch: pytest.MonkeyPatch, logs: NoEnd, process: Process
) -> None:
    """The process executes the run again meanwhile."""
    pause = waiting.pause

    async def briefly(pause_s: float) -> None:
        await pause(min(pause_s, 0.01))

    with monkeypatch.context() as patched:
        patched.setattr(waiting, "pause", briefly)
        await process.long.start(id="r")
        await process.is_again.wait()
    await MemoryLogs.log(logs, FLOW_LOG).append_batch(logs.held)


@pytest.mark.parametrize("leaves", ["in good order", "in silence"])
async def test_a_late_end_of_a_replaced_execution_hides_no_run(
    monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    logs = NoEnd()
    first, new_owner = Process(logs), Process(logs)
    await gives_up_an_end_that_comes_late(monkeypatch, logs, first)
    async with new_owner.driven():
        if leaves == "in good order":
            await first.stop()
        first.kill()
        assert await new_owner.long.handle("r").result(10) == "done"


LATE = pytest.mark.parametrize(
    "late",
    [
        [taken(2), FINISHED],
        [taken(2), PARKED],
        [taken(2), taken(2, "other")],
        [taken(2), taken(3), taken(2), FINISHED],
        [taken(2), START, FINISHED],
        [FINISHED, START, taken(2), FINISHED],
    ],
    ids=[
        "an end of the epoch before",
        "a pause of the epoch before",
        "a takeover of the epoch before",
        "copies of epochs before",
        "a copy of the start",
        "of a run that had the id before",
    ],
)


@LATE
async def test_records_without_effect_hide_no_run(late: list[Entry]) -> None:
    """The open runs of the partition are those whose own records say so."""
    log = MemoryLogs().log(FLOW_LOG)
    await log.append_batch([START, *late])
    partition = OwnedPartition(partition_of("r", PARTITIONS), 0)
    await partition.catch_up(log)
    run = await read_run(log, "r", RunState())
    known = partition.state.runs.get("r")
    if run.finished is not None:
        assert known is None or known.started_at != run.started_at
    else:
        assert known is not None
        assert (known.epoch, known.started_at) == (run.epoch, run.started_at)
        assert (known.phase == Phase.PARKED) == (run.state is State.PARKED)


class Race(HookedLogs):
    """Logs in which a dead executor is faster than the first who takes its run."""

    is_over = False

    async def before_append(self, entries: Sequence[Entry]) -> None:
        records = (run_record(entry.data) for entry in entries)
        if not self.is_over and any(isinstance(record, RunTaken) for record in records):
            self.is_over = True
            await MemoryLogs.log(self, FLOW_LOG).append_batch([taken(2)])


async def test_an_epoch_that_a_dead_executor_begins_before_its_new_owner_is_taken() -> None:
    logs = Race()
    await MemoryLogs.log(logs, FLOW_LOG).append_batch([LIVES, OWNS, START])
    new_owner = Process(logs)
    async with new_owner.driven():
        await new_owner.goes_on()


async def records(log: Log, run: str) -> list[RunRecord]:
    found = (run_record(record.data) for record in await log.read_range(run_tag(run)))
    return [record for record in found if record is not None]


async def test_a_parked_run_is_not_executed_because_of_a_late_copy_of_its_start() -> None:
    """A parked run waits for other code, or for the time of its next attempt."""
    logs = MemoryLogs()
    log, owner = logs.log(FLOW_LOG), Process(logs)
    runner = owner.flow.runner
    await runner.join(logs, range(PARTITIONS))
    while not all(partition.is_loaded for partition in runner.owned.values()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await log.append_batch([START, PARKED])
    copy = await log.append(START.data, tags=[*START.tags, INBOX_TAG])
    async with asyncio.timeout(10):
        while (runner._inbox.end or 0) <= copy or runner.taking.has_work:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
    assert not [record for record in await records(log, "r") if isinstance(record, RunTaken)]
    await owner.stop()


async def test_an_execution_whose_lease_has_ended_begins_no_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may have taken the run; that epoch would come in between."""
    logs, pause = NoEnd(), waiting.pause
    process = Process(logs)
    lease = process.flow.runner.member.lease
    over = asyncio.Event()

    async def briefly(pause_s: float) -> None:
        if pause_s == 1.0:  # between two executions
            lease.lease_s = 0.0
            over.set()
        await pause(min(pause_s, 0.01))

    with monkeypatch.context() as patched:
        patched.setattr(waiting, "pause", briefly)
        await process.long.start(id="r")
        for name in ("beat", "watch"):  # these would see it, too
            process.flow.runner._background[name].cancel()
        await asyncio.wait_for(over.wait(), 5)
        for _ in range(20):
            await asyncio.sleep(0.01)
    log = MemoryLogs.log(logs, FLOW_LOG)
    assert not [record for record in await records(log, "r") if isinstance(record, RunTaken)]
    process.kill()


class FormerOwner(NoEnd):
    """Logs in which a former owner takes the run just before it is executed again."""

    has_taken = False

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await super().before_append(entries)
        records = [run_record(entry.data) for entry in entries]
        if any(isinstance(record, RunTaken) for record in records) and not self.has_taken:
            self.has_taken = True
            await MemoryLogs.log(self, FLOW_LOG).append_batch([taken(2, "former")])


async def test_a_run_that_a_former_owner_has_taken_meanwhile_is_executed_again() -> None:
    logs = FormerOwner()
    process = Process(logs)
    process.may_end.set()
    async with process.driven():
        handle = await process.long.start(id="r")
        assert await handle.result(60) == "done"
        assert logs.has_taken
        assert (await handle.status()).epoch == 3
