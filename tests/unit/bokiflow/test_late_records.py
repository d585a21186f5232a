"""Late records without effect hide no run from the drivers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Startable, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    PARKED_TAG,
    RUNS_TAG,
    Heartbeat,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    encode,
    executor_tag,
    run_record,
    run_tag,
)
from bokiflow.takeover import dead_executors
from bokiflow.takeover.dead_executors import read_orphaned_runs
from bokiflow.takeover.open_runs import find_executors_of_open_runs
from indilog.base.errors import AppendOutcomeUnknownError
from indilog.base.log import Entry, Log
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio

LEASE_S = 0.3
START = Entry(
    encode(RunStarted("waits", b"{}", "dead", "version")),
    (run_tag("r"), RUNS_TAG, executor_tag("dead")),
)
LIVES = Entry(encode(Heartbeat("dead", LEASE_S)), (EXECUTORS_TAG,))
FINISHED = Entry(encode(RunFinished(1, b'"old"')), (run_tag("r"), executor_tag("dead"), RUNS_TAG))
PARKED = Entry(
    encode(RunParked(1, "version", "for a test")), (run_tag("r"), executor_tag("dead"), PARKED_TAG)
)


def taken(epoch: int, executor: str = "dead") -> Entry:
    tags = (run_tag("r"), executor_tag(executor), executor_tag("dead"))
    return Entry(encode(RunTaken(epoch, executor)), tags)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_executors, "AGE_S_MIN", 0.05)


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


async def test_a_search_of_all_runs_finds_one_whose_superseded_end_came_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = NoEnd()
    log, first, new_owner = logs.log(FLOW_LOG), Process(logs), Process(logs)
    await gives_up_an_end_that_comes_late(monkeypatch, logs, first)
    assert await find_executors_of_open_runs(log) == {first.name}
    first.kill()
    async with new_owner.driven():
        assert await new_owner.long.handle("r").result(10) == "done"
    logs.reads = 0
    assert await find_executors_of_open_runs(log) == set()
    assert logs.reads <= 2, "runs that ended are not read, though others took them over"


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
async def test_records_without_effect_take_no_run_from_its_executor(late: list[Entry]) -> None:
    log = MemoryLogs().log(FLOW_LOG)
    await log.append_batch([START, *late])
    assert (await read_orphaned_runs(log, "dead")).runs == ["r"]


async def test_a_record_that_ends_an_epoch_takes_the_run_from_its_executor() -> None:
    log = MemoryLogs().log(FLOW_LOG)
    for end in ([FINISHED], [PARKED], [taken(2, "other")]):
        for start in ([START], [START, START], [START, FINISHED, START]):
            await log.append_batch([*start, *end])
            assert (await read_orphaned_runs(log, "dead")).runs == []


async def test_other_records_neither_assign_runs_nor_end_assignments() -> None:
    log = MemoryLogs().log(FLOW_LOG)
    await log.append_batch([START, Entry(b"whatever", (run_tag("r"), executor_tag("dead")))])
    assert (await read_orphaned_runs(log, "dead")).runs == ["r"]


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
    await MemoryLogs.log(logs, FLOW_LOG).append_batch([LIVES, START])
    new_owner = Process(logs)
    async with new_owner.driven():
        await new_owner.goes_on()


async def records(log: Log, run: str) -> list[RunRecord]:
    found = (run_record(record.data) for record in await log.read_range(run_tag(run)))
    return [record for record in found if record is not None]


async def test_a_parked_run_is_not_taken_for_a_late_copy_of_its_start() -> None:
    """A parked run waits for other code, or for the time of its next attempt."""
    logs = MemoryLogs()
    log, new_owner = logs.log(FLOW_LOG), Process(logs)
    async with new_owner.driven():
        await log.read_next(EXECUTORS_TAG, 0, wait=0.01)  # those parked before it are tried
        await log.append_batch([LIVES, START, PARKED, START])
        while "dead" not in new_owner.flow.runner.executors.known:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        while "dead" in new_owner.flow.runner.executors.known:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
    assert not [record for record in await records(log, "r") if isinstance(record, RunTaken)]


async def test_an_execution_whose_lease_has_ended_begins_no_epoch_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may have taken the run; that epoch would come in between."""
    logs, pause = NoEnd(), waiting.pause
    process = Process(logs)
    lease = process.flow.runner.lease

    async def briefly(pause_s: float) -> None:
        if pause_s == 1.0:  # between two executions
            lease._lease_s = 0.0
        await pause(min(pause_s, 0.01))

    with monkeypatch.context() as patched:
        patched.setattr(waiting, "pause", briefly)
        await process.long.start(id="r")
        task, beating = process.flow.runner.running["r"].task, process.flow.runner._beating
        assert task is not None
        assert beating is not None
        beating.cancel()  # it would see it, too
        await asyncio.wait([task], timeout=5)
    log = MemoryLogs.log(logs, FLOW_LOG)
    assert not [record for record in await records(log, "r") if isinstance(record, RunTaken)]
    assert process.name != lease.name
    process.kill()
