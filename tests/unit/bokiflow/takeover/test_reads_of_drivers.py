"""The reads of all drivers grow linearly with the number of processes, and ended runs cost no
reads. The loop's clock jumps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from bokiflow import RunCancelledError, Startable, State, Workflow
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import EXECUTORS_TAG, ExecutorLeft, executor_record, run_tag
from indilog.base.log import Entry
from tests.support import leaping_loop
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

LEASE_S = 8.0
CALL_S = 0.002


class CountedLogs(HookedLogs):
    """Counts what is read; each call takes a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(CALL_S)

    async def before_read(self, read: Read) -> None:
        self.reads += 1
        await asyncio.sleep(CALL_S)


class Process(ShopProcess):
    """A process with workflows that wait for a signal, and that return at once."""

    def __init__(self, logs: CountedLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.waits: Startable[str] = self.flow.workflow(self._waits)
        self.quick: Startable[str] = self.flow.workflow(self._quick)

    async def _waits(self, wf: Workflow) -> str:
        return str(await wf.signal("go"))

    _waits.__name__ = "waits"

    async def _quick(self, wf: Workflow) -> str:
        return "done"

    _quick.__name__ = "quick"


@asynccontextmanager
async def driving(logs: CountedLogs, count: int) -> AsyncIterator[list[Process]]:
    processes = [Process(logs) for _ in range(count)]
    async with AsyncExitStack() as stack:
        for process in processes:
            await stack.enter_async_context(process.driven())
        yield processes


async def read_in(logs: CountedLogs, leases: int) -> int:
    """Return how often was read in so many leases from now on."""
    logs.reads = 0
    await asyncio.sleep(leases * LEASE_S)
    return logs.reads


def test_executors_whose_runs_all_ended_are_not_read() -> None:
    async def main() -> None:
        logs = CountedLogs()
        async with driving(logs, 10) as processes:
            for process in processes:
                await process.quick.start()
                await asyncio.sleep(LEASE_S / 40)
            await asyncio.sleep(2 * LEASE_S)
            assert await read_in(logs, 50) == 0, "before any driver cleans"

    leaping_loop.run(main())


def test_an_executor_with_an_assignment_in_flight_does_not_record_that_it_is_idle() -> None:
    async def main() -> None:
        logs = CountedLogs()
        async with driving(logs, 2) as (process, other):
            runner = process.flow.runner
            await process.quick.start()
            name = process.name
            with suppress(Stopped):
                async with runner.assigning(logs, "r"):
                    raise Stopped("no answer")  # what gives it the run is on its way
            while "r" in runner._pending:
                runner._leave_to_new_owner(runner._pending.look_again("r"))
            await asyncio.sleep(2 * LEASE_S)
            assert process.name != name
            assert name in other.flow.runner.executors.dead_executors
        page = await logs.log(FLOW_LOG).read_range(EXECUTORS_TAG)
        assert ExecutorLeft(name, is_idle=False) in [
            executor_record(record.data) for record in page
        ]

    leaping_loop.run(main())


def test_a_run_that_starts_and_ends_while_another_is_looked_up_is_not_read_again() -> None:
    class Logs(CountedLogs):
        """When `pending` is looked up, `assigned` runs; later reads of `assigned` are counted."""

        assigned_reads: int | None = None

        async def before_read(self, read: Read) -> None:
            if read.tag == run_tag("pending") and self.assigned_reads is None:
                assert (await process.quick.start(id="assigned")).id == "assigned"
                assert await process.quick.handle("assigned").result(LEASE_S) == "done"
                self.assigned_reads = 0
            if read.tag == run_tag("assigned") and self.assigned_reads is not None:
                self.assigned_reads += 1
            await super().before_read(read)

    logs = Logs()
    process = Process(logs)

    async def main() -> None:
        async with process.driven():
            await process.waits.start()  # so that it sends heartbeats
            for run in ("pending", "assigned"):
                process.flow.runner._pending.note(run, 0)
            await asyncio.sleep(2 * LEASE_S)
            assert "assigned" not in process.flow.runner._pending
            assert logs.assigned_reads == 0

    leaping_loop.run(main())


async def begun_by_all(processes: list[Process]) -> None:
    """Each executes a run that waits, at other moments than the others."""
    for number, process in enumerate(processes):
        await process.waits.start(id=f"run-{number}")
        await asyncio.sleep(LEASE_S / 4 / len(processes))


def test_reads_while_runs_wait_grow_only_with_the_processes() -> None:
    async def main(count: int) -> float:
        logs = CountedLogs()
        async with driving(logs, count) as processes:
            await begun_by_all(processes)
            return await read_in(logs, 20) / (20 * count)

    of_a_turn, of_a_beat = 2, 1
    for count in (2, 20):
        assert leaping_loop.run(main(count)) <= 8 * of_a_turn + 4 * of_a_beat


async def taken_after(process: Process, run: str, *, lasts_s: float) -> float:
    """Return after how many seconds a process has taken a run over."""
    began, log = asyncio.get_running_loop().time(), process.logs.log(FLOW_LOG)
    async with asyncio.timeout(lasts_s):
        while (await process.waits.handle(run).status()).epoch == 1:
            await log.read_next(run_tag(run), await log.tail(), wait=CALL_S)
    return asyncio.get_running_loop().time() - began


def test_drivers_that_poll_seldom_take_over_at_once_from_one_that_stops() -> None:
    async def main() -> None:
        logs = CountedLogs()
        async with driving(logs, 6) as processes:
            await begun_by_all(processes)
            await processes[0].stop()
            assert await taken_after(processes[1], "run-0", lasts_s=LEASE_S) <= 40 * CALL_S

    leaping_loop.run(main())


def test_drivers_that_poll_seldom_take_over_an_eighth_of_a_lease_late_at_most() -> None:
    """Whenever the dead one spoke last, between two turns."""

    async def main(since_turn_s: float) -> None:
        logs = CountedLogs()
        async with driving(logs, 1) as processes:
            await begun_by_all(processes)
            await asyncio.sleep(since_turn_s)
            dying = Process(logs)
            await dying.waits.start(id="r")
            dying.kill()
            late_s = await taken_after(processes[0], "r", lasts_s=2 * LEASE_S)
            assert LEASE_S - CALL_S <= late_s <= LEASE_S * (1 + 1 / 8) + 40 * CALL_S

    for part in range(8):
        leaping_loop.run(main(LEASE_S / 8 * part / 8))


def test_drivers_that_poll_seldom_end_a_cancelled_parked_run_at_once() -> None:
    async def main() -> None:
        logs = CountedLogs()
        async with driving(logs, 4) as processes:
            await begun_by_all(processes)
            old = Process(logs)

            @old.flow.workflow
            async def gone(wf: Workflow) -> None:
                await wf.signal("never")

            handle = await gone.start(id="r")
            await old.stop()
            while (await handle.status()).state is not State.PARKED:
                await logs.log(FLOW_LOG).read_next(run_tag("r"), logs.position, wait=CALL_S)
            began = asyncio.get_running_loop().time()
            await handle.cancel()
            with pytest.raises(RunCancelledError, match="The deployed code has no workflow"):
                await handle.result()
            assert asyncio.get_running_loop().time() - began <= 40 * CALL_S

    leaping_loop.run(main())
