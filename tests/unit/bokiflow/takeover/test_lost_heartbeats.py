"""Takeovers continue after unreadable records of executors (decision 0021)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import structlog.testing

from bokiflow import Startable, Workflow
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    PARKED_TAG,
    RUNS_TAG,
    CancelAsked,
    ExecutorDead,
    ExecutorLeft,
    Heartbeat,
    RunRecord,
    RunStarted,
    encode,
    executor_record,
    executor_tag,
    run_record,
    run_tag,
)
from bokiflow.takeover import dead_executors
from bokiflow.takeover.cleaning import Cleaner
from indilog.base.errors import TrimmedError
from indilog.base.ids import SeqNum
from indilog.testing import MemoryLogs
from tests.support.damaged_log import DamagedView
from tests.support.flow_executions import FLOW_LOG
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio

LEASE_S = 0.5
LATER = b"\xb0F\x7fwhatever"


class Process(ShopProcess):
    """A process with a workflow `waits` that waits for a signal, and what it sees of the logs."""

    def __init__(self, logs: MemoryLogs, lease_s: float = LEASE_S) -> None:
        self.view = DamagedView(logs)
        super().__init__(self.view, lease_s)
        self.waits: Startable[str] = self.flow.workflow(self._waits)

    async def _waits(self, wf: Workflow) -> str:
        return str(await wf.signal("go"))

    _waits.__name__ = "waits"

    async def begins(self, run: str) -> str:
        """Begin a run, and return under which name."""
        await self.waits.start(id=run)
        return self.name

    async def goes_on(self, run: str, epoch: int = 2) -> None:
        handle = self.waits.handle(run)
        await handle.signal("go", "on")
        assert await handle.result(10) == "on"
        assert (await handle.status()).epoch == epoch


async def said(logs: MemoryLogs, tag: str, what: Callable[[object], bool]) -> list[SeqNum]:
    """Return the places of records that say something."""
    return [
        record.seqnum
        for record in await logs.log(FLOW_LOG).read_range(tag)
        if what(executor_record(record.data) or run_record(record.data) or record.data)
    ]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_executors, "AGE_S_MIN", 0.05)


async def lose_a_heartbeat(logs: MemoryLogs, name: str) -> SeqNum:
    """The only one that there is."""

    def is_it(record: object) -> bool:
        return isinstance(record, Heartbeat) and record.executor == name

    (place,) = await said(logs, EXECUTORS_TAG, is_it)
    return place


async def lose_a_new_owner(logs: MemoryLogs, name: str) -> SeqNum:
    """Lose the record of a new owner that is dead too and left no other record."""
    log = logs.log(FLOW_LOG)
    return await log.append(
        encode(ExecutorDead(name, "gone", await log.tail())), tags=[EXECUTORS_TAG]
    )


async def lose_a_stop(logs: MemoryLogs, name: str) -> SeqNum:
    stopped = encode(ExecutorLeft(name, is_idle=False))
    return await logs.log(FLOW_LOG).append(stopped, tags=[EXECUTORS_TAG])


async def lose_that_nothing_is_left(logs: MemoryLogs, name: str) -> SeqNum:
    """Of another one."""
    log = logs.log(FLOW_LOG)
    await log.append(encode(Heartbeat("other", LEASE_S)), tags=[EXECUTORS_TAG])
    return await log.append(encode(ExecutorLeft("other", is_idle=True)), tags=[EXECUTORS_TAG])


async def lose_a_cancellation(logs: MemoryLogs, name: str) -> SeqNum:
    tags = [run_tag("another"), EXECUTORS_TAG]
    return await logs.log(FLOW_LOG).append(encode(CancelAsked()), tags=tags)


async def lose_what_others_wrote(logs: MemoryLogs, name: str) -> SeqNum:
    return await logs.log(FLOW_LOG).append(b"of whomever", tags=[EXECUTORS_TAG])


Loses = Callable[[MemoryLogs, str], "asyncio.Future[SeqNum]"]
LOSSES = pytest.mark.parametrize(
    "loses",
    [
        lose_a_heartbeat, lose_a_new_owner, lose_a_stop, lose_that_nothing_is_left,
        lose_a_cancellation, lose_what_others_wrote,
    ],
)  # fmt: skip


@LOSSES
@pytest.mark.parametrize("when", ["before it begins", "while it drives"])
async def test_orphaned_runs_are_taken_over_for_any_lost_record(
    logs: MemoryLogs, loses: Loses, when: str
) -> None:
    dead, also_dead, new_owner = Process(logs), Process(logs), Process(logs)
    name = await dead.begins("r")
    dead.kill()
    if when == "before it begins":
        new_owner.view.lost.add(await loses(logs, name))
    async with new_owner.driven():
        await also_dead.begins("other")
        also_dead.kill()
        if when == "while it drives":
            new_owner.view.lost.add(await loses(logs, name))
        await new_owner.goes_on("r")
        await new_owner.goes_on("other")


@LOSSES
async def test_one_executor_runs_and_all_runs_are_taken_for_any_records_that_only_some_read(
    logs: MemoryLogs, loses: Loses
) -> None:
    dead, sees, sees_not = Process(logs), Process(logs), Process(logs)
    name = await dead.begins("r")
    dead.kill()
    sees_not.view.lost.add(await loses(logs, name))
    async with sees.driven(), sees_not.driven():
        await sees.goes_on("r")
        dead_too = Process(logs)
        await dead_too.begins("other")
        dead_too.kill()
        await sees_not.goes_on("other")


async def test_a_live_executor_keeps_its_runs_though_its_heartbeats_are_lost(
    logs: MemoryLogs,
) -> None:
    """All of them up to now, for another driver; and for itself."""
    lives, other = Process(logs, 2.0), Process(logs, 2.0)  # a busy machine does not lose it
    async with lives.driven():
        name = await lives.begins("r")
        places = await said(logs, EXECUTORS_TAG, lambda record: isinstance(record, Heartbeat))
        other.view.lost.update(places)
        lives.view.lost.update(places)
        async with other.driven():
            log, bound, beats = logs.log(FLOW_LOG), 0, 0
            while beats < 7:
                record = await log.read_next(EXECUTORS_TAG, bound, wait=10)
                assert record is not None
                bound, beats = record.seqnum + 1, beats + 1
            assert lives.name == name, "it could renew its lease"
            await lives.goes_on("r", epoch=1)


async def test_records_of_a_later_version_delay_no_run_and_are_left_to_it(
    logs: MemoryLogs,
) -> None:
    log, dead, new_owner = logs.log(FLOW_LOG), Process(logs), Process(logs)
    await log.append(LATER, tags=[EXECUTORS_TAG])
    name = await dead.begins("r")
    await dead.begins("later")
    dead.kill()
    start = logs.position - 1
    await log.append(LATER, tags=[run_tag("later"), executor_tag(name)])
    with structlog.testing.capture_logs() as logged:
        async with new_owner.driven():
            await new_owner.goes_on("r")
            await log.append(LATER, tags=[EXECUTORS_TAG])
            await new_owner.begins("mine")
            await new_owner.goes_on("mine", epoch=1)
    runner = new_owner.flow.runner
    assert runner.executors.needed_from == 0, "what the later version said is kept for it"
    with pytest.raises(TrimmedError) as trimmed:
        await log.read_range(executor_tag(name))
    assert trimmed.value.first_seqnum == start, "nor is the run trimmed that it touched"
    reported = [line for line in logged if "later version of BokiFlow" in line["event"]]
    assert len(reported) == 1, "it is said once"
    assert "has format 127; this program reads up to 1" in reported[0]["reason"]


async def test_one_run_that_is_lost_keeps_no_other_of_its_executor_from_being_taken(
    logs: MemoryLogs,
) -> None:
    """The lost start of the run has the executor's tag, too, and is repaired later."""
    dead, new_owner = Process(logs), Process(logs)
    name = await dead.begins("first")
    await dead.begins("bad")
    await dead.begins("last")
    dead.kill()
    starts = await said(logs, executor_tag(name), lambda record: isinstance(record, RunStarted))
    new_owner.view.lost.add(starts[1])
    async with new_owner.driven():
        await new_owner.goes_on("first")
        await new_owner.goes_on("last")
        while name in new_owner.flow.runner.executors.known:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        new_owner.view.lost.clear()
        await new_owner.goes_on("bad")


async def test_a_damaged_list_of_parked_runs_is_kept_and_delays_no_run(logs: MemoryLogs) -> None:
    log, dead, new_owner = logs.log(FLOW_LOG), Process(logs), Process(logs)
    lost = await log.append(b"", tags=[PARKED_TAG, run_tag("bad")])
    await log.append(b"", tags=[PARKED_TAG, run_tag("parked no more")])
    new_owner.view.lost.add(lost)
    await dead.begins("r")
    dead.kill()
    async with new_owner.driven():
        await new_owner.goes_on("r")
    assert [r.seqnum for r in await log.read_range(PARKED_TAG, lost)][:1] == [lost], "it is kept"


async def ended(logs: MemoryLogs, run: str) -> SeqNum:
    process = Process(logs)
    await process.begins(run)
    await process.goes_on(run, epoch=1)
    await process.flow.runner.stop(logs.log(FLOW_LOG))

    def begins(record: object) -> bool:
        return isinstance(record, RunRecord)

    return (await said(logs, run_tag(run), begins))[0]


async def test_the_cleaning_continues_after_unreadable_records_and_keeps_them_as_long(
    logs: MemoryLogs,
) -> None:
    lossy, log = DamagedView(logs), logs.log(FLOW_LOG)
    lossy.lost.add(await ended(logs, "lost"))
    later = await log.append(LATER, tags=[run_tag("later"), RUNS_TAG])
    cleaner = Cleaner(0)
    await ended(logs, "good")
    assert await cleaner.clean(lossy.log(FLOW_LOG), 1e12) == 1
    with pytest.raises(TrimmedError):
        await log.read_range(run_tag("good"))
    with pytest.raises(TrimmedError) as trimmed:
        await log.read_range(RUNS_TAG)
    assert trimmed.value.first_seqnum == later, "the list is kept from the later version's run on"


async def test_lost_places_of_the_list_are_kept_until_a_later_record_is_old(
    logs: MemoryLogs,
) -> None:
    lossy, log = DamagedView(logs), logs.log(FLOW_LOG)
    lost = await ended(logs, "lost")
    lossy.lost.add(lost)
    young = Cleaner(1e12)
    assert await young.clean(lossy.log(FLOW_LOG), 0.0) == 0
    assert (await log.read_range(RUNS_TAG))[0].seqnum == lost
