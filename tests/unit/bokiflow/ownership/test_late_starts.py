"""A start by the owner of a partition wakes no other executor, and is not lost with its author."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Startable, Workflow
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    INBOX_TAG,
    PARTITIONS,
    Claimed,
    Heartbeat,
    RunStarted,
    encode,
    partition_of,
    partition_tag,
    run_record,
    run_tag,
    starts_tag,
)
from indilog.base.errors import AppendOutcomeUnknownError, DataLossError
from indilog.base.log import Entry, Record
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 0.3
THERE = partition_of("r", PARTITIONS)


def entry_of_start(executor: str) -> Entry:
    tags = (run_tag("r"), starts_tag(None), starts_tag("quick"), partition_tag(THERE))
    return Entry(encode(RunStarted("quick", b"{}", executor, "version")), tags)


class Process(ShopProcess):
    """A process with a workflow that returns at once."""

    def __init__(self, logs: MemoryLogs, lease_s: float = LEASE_S) -> None:
        super().__init__(logs, lease_s)
        self.quick: Startable[str] = self.flow.workflow(self._quick)

    async def _quick(self, wf: Workflow) -> str:
        return wf.id

    _quick.__name__ = "quick"

    async def owns_all(self) -> None:
        runner = self.flow.runner
        await runner.join(self.logs, range(PARTITIONS))
        while not all(partition.is_loaded for partition in runner.owned.values()):  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)


class Inbox(HookedLogs):
    """Logs that count the runs whose records executors found in the inbox."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if read.tag == INBOX_TAG:
            self.found += sum(run_record(record.data) is not None for record in records)
        return records


async def test_a_start_by_the_owner_wakes_no_executor() -> None:
    logs = Inbox()
    process = Process(logs, 5.0)
    for number in range(10):
        id_ = f"r{number}" if number % 2 else None
        await (await process.quick.start(id=id_)).result(10)
    assert logs.found == 0
    await process.stop()


async def test_a_start_in_a_partition_of_another_executor_wakes_its_owner() -> None:
    logs = Inbox()
    owner, other = Process(logs, 5.0), Process(logs, 5.0)
    await owner.owns_all()
    assert await (await other.quick.start(id="r")).result(10) == "r"
    assert logs.found > 0
    for process in (owner, other):
        await process.stop()


class Lost(HookedLogs):
    """Logs whose first reads of the inbox find lost records, and do not say how many."""

    left = 3

    async def before_read(self, read: Read) -> None:
        if read.tag == INBOX_TAG and self.left:
            self.left -= 1
            raise DataLossError("a part of the log is damaged")


async def test_an_executor_reads_its_inbox_again_after_damage_without_a_known_end() -> None:
    logs = Lost()
    owner, other = Process(logs, 5.0), Process(logs, 5.0)
    await owner.owns_all()
    async with asyncio.timeout(60):
        while logs.left:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(1)
        assert await (await other.quick.start(id="r")).result(10) == "r"
    for process in (owner, other):
        await process.stop()


async def test_a_new_owner_executes_a_start_that_comes_after_it_has_read_the_partition() -> None:
    """The append was in flight when its author lost the partition, and nothing else tells of it."""
    logs = MemoryLogs()
    log = logs.log(FLOW_LOG)
    beat = Heartbeat("dead", LEASE_S, False, True, PARTITIONS, b"", 0)
    claimed = Claimed("dead", (THERE,), 0)
    await log.append_batch([Entry(encode(one), (EXECUTORS_TAG,)) for one in (beat, claimed)])
    owner = Process(logs)
    async with asyncio.timeout(20), owner.driven():
        runner = owner.flow.runner
        while not (THERE in runner.owned and runner.owned[THERE].is_loaded):  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        await log.append_batch([entry_of_start("dead")])
        assert await owner.quick.handle("r").result(10) == "r"


async def test_a_late_start_in_a_partition_without_an_owner_is_executed() -> None:
    """All executors have left, because nothing was open."""
    logs = MemoryLogs()
    owner = Process(logs)
    async with asyncio.timeout(20), owner.driven():
        await (await owner.quick.start()).result(10)
        while owner.flow.runner.owned:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        await logs.log(FLOW_LOG).append_batch([entry_of_start("dead")])
        assert await owner.quick.handle("r").result(10) == "r"


async def test_an_executor_that_would_leave_reads_the_last_starts_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the record that it has left would say that its partitions have no open runs."""
    logs = MemoryLogs()
    owner = Process(logs)
    runner = owner.flow.runner
    await owner.owns_all()
    runner._background["starts"].cancel()
    leave, has_left = runner._leave, asyncio.Event()

    async def note(log: object) -> None:
        has_left.set()
        await leave(log)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_leave", note)
    await logs.log(FLOW_LOG).append_batch([entry_of_start("dead")])
    assert await owner.quick.handle("r").result(10) == "r"
    assert not has_left.is_set()
    await owner.stop()


class Held(HookedLogs):
    """Logs that hold back a start, and say nothing of it."""

    held: Sequence[Entry] = ()

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if any(isinstance(run_record(entry.data), RunStarted) for entry in entries):
            self.held = entries
            raise AppendOutcomeUnknownError("It has no answer yet.")


async def test_an_executor_executes_its_own_start_that_comes_after_it_has_stopped_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says in its records that the partition may get an open run; so it follows the list."""
    logs = Held()
    monkeypatch.setattr("bokiflow.taking._UNCERTAIN_MAX", 0)
    monkeypatch.setattr("bokiflow.runs.run_log.PATIENCE_TRIES", 1)
    process = Process(logs, 60.0)  # it does not leave meanwhile
    await process.owns_all()
    with pytest.raises(AppendOutcomeUnknownError):
        await process.quick.start(id="r")
    assert process.flow.runner.taking.lost_sight_of == {THERE}
    assert logs.held
    assert logs.held[0].tags == entry_of_start("").tags, "it is not in the inbox"
    await MemoryLogs.log(logs, FLOW_LOG).append_batch(list(logs.held))
    assert await process.quick.handle("r").result(10) == "r"
    await process.stop()
