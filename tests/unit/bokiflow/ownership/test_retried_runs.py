"""A parked run is retried, also if the log fails when the request arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import State, Workflow
from bokiflow.runs.records import (
    PARTITIONS,
    RetryAsked,
    RunFinished,
    RunRecord,
    partition_of,
    partition_tag,
    run_in,
    run_record,
    run_tag,
)
from bokiflow.runs.run_log import PATIENCE_TRIES
from indilog import NotReadyError
from indilog.base.log import Entry
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
LEASE_S = 0.4


class Failing(HookedLogs):
    """Logs whose first `count` reads of `tag` after a record of type `after` fail.

    Attributes:
        left: number of reads that still fail.
    """

    def __init__(self, tag: str, count: int, after: type[RunRecord]) -> None:
        super().__init__()
        self._tag, self._count, self._after = tag, count, after
        self.left = 0

    async def after_append(self, entries: Sequence[Entry]) -> None:
        said = [run_record(one.data) for one in entries if run_in(tuple(one.tags)) is not None]
        if self._count and any(isinstance(one, self._after) for one in said):
            self.left, self._count = self._count, 0

    async def before_read(self, read: Read) -> None:
        if read.tag == self._tag and self.left:
            self.left -= 1
            raise NotReadyError("away")


class Process(ShopProcess):
    """Its workflow does the step `step`, and then waits for a signal.

    Attributes:
        step: name of the step; another name than the decided one parks the run.
    """

    def __init__(self, logs: HookedLogs, step: str, concurrency: int | None) -> None:
        super().__init__(logs, LEASE_S)
        self.step = step
        self.work = self.flow.workflow(concurrency=concurrency)(self._work)

    async def _work(self, wf: Workflow) -> str:
        await wf.step(asyncio.sleep, 0, name=self.step)
        await wf.signal("go")
        return self.step

    _work.__name__ = "work"


async def parked(logs: Failing, concurrency: int | None = None) -> Process:
    """Return a process whose code does not match the run `r`."""
    dying, other = Process(logs, "old", concurrency), Process(logs, "new", concurrency)
    await dying.work.start(id="r")
    while not (await dying.work.handle("r").status()).steps:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    dying.kill()
    return other


async def until_parked(process: Process) -> None:
    while (await process.work.handle("r").status()).state != State.PARKED:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("concurrency", [None, 1])
async def test_a_run_is_retried_although_its_first_reads_fail(concurrency: int | None) -> None:
    """With a limit, the run also kept its place in the limit, and no other run began."""
    logs = Failing(run_tag("r"), 2 * PATIENCE_TRIES, RetryAsked)
    process = await parked(logs, concurrency)
    handle = process.work.handle("r")
    async with asyncio.timeout(300), process.driven():
        await until_parked(process)
        process.step = "old"
        await handle.retry()
        while logs.left:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await handle.signal("go")
        assert await handle.result() == "old"


async def test_a_run_gets_its_turn_again_although_its_partition_was_not_read() -> None:
    logs = Failing(partition_tag(partition_of("r", PARTITIONS)), 1, RunFinished)
    process = await parked(logs, concurrency=1)
    async with asyncio.timeout(300), process.driven():
        await until_parked(process)
        await process.work.start(id="other")  # it takes the place that the parked run has left
        await process.work.handle("r").retry()
        while not process.flow.runner.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(LEASE_S)
        process.step = "old"
        for run in ("other", "r"):
            await process.work.handle(run).signal("go")
            assert await process.work.handle(run).result() == "old"
            while logs.left:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
