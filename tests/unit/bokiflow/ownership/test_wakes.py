"""Runs that wait are woken by each record for them, whatever it comes before or after."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Workflow
from bokiflow.ownership.partition_state import OpenRun, PartitionState
from bokiflow.runs.records import (
    PARTITIONS,
    RunRecord,
    RunStarted,
    RunWaits,
    Signalled,
    encode,
    partition_of,
    partition_tag,
    run_tag,
)
from indilog.base.log import Entry
from indilog.testing import MemoryLogs
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

TAGS = (run_tag("r"), partition_tag(partition_of("r", PARTITIONS)))


def entry(record: RunRecord) -> Entry:
    return Entry(encode(record), TAGS)


async def folded(records: Sequence[RunRecord]) -> OpenRun:
    """Return the run `r` after these records, of which the first one has seqnum 0."""
    log, state = MemoryLogs().log("shop/flow"), PartitionState()
    await log.append_batch([entry(record) for record in records])
    for record in await log.read_range():
        state.apply(record)
    return state.runs["r"]


@pytest.mark.parametrize(("end", "is_notified"), [(1, True), (2, False)])
async def test_a_signal_that_came_before_the_record_of_the_wait_wakes_the_run_unless_it_was_read(
    end: int, *, is_notified: bool
) -> None:
    run = await folded(
        [
            RunStarted("waits", b"{}", "executor", "version"),
            Signalled("go", b"1", "key"),
            RunWaits(1, None, "signal 'go'", end),
        ]
    )
    assert run.is_notified is is_notified


async def test_an_owner_takes_a_run_that_its_own_start_left_to_the_owner_before() -> None:
    """The start still has exclusive access when the partition is loaded."""
    logs = MemoryLogs()
    process = ShopProcess(logs, 5.0)

    @process.flow.workflow
    async def waits(wf: Workflow) -> None:
        await wf.signal("go")

    await logs.log("shop/flow").append_batch([entry(RunStarted("waits", b"{}", "", "version"))])
    runner = process.flow.runner
    async with asyncio.timeout(20):
        async with runner.exclusive("r"):
            await runner.join(logs, range(PARTITIONS))
            while not all(partition.is_loaded for partition in runner.owned.values()):  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert "r" not in runner.running
        while "r" not in runner.running:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)
    await process.stop()
