"""What drivers read grows with the processes, not with their square, and nothing is read for what
is over. The clock is the loop's, which leaps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from bokiflow import Startable, Workflow
from bokiflow.public_call import Stopped
from bokiflow.records import EXECUTORS_TAG, Left, executor_record
from indilog.log import Entry
from tests import leaping_loop
from tests.flow_executions import FLOW_LOG
from tests.hooked_log import HookedLogs, Read
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


def test_nothing_is_read_of_executors_that_ended_all_they_had() -> None:
    async def main() -> None:
        logs = CountedLogs()
        async with driving(logs, 10) as processes:
            for process in processes:
                await process.quick.start()
                await asyncio.sleep(LEASE_S / 40)
            await asyncio.sleep(2 * LEASE_S)
            assert await read_in(logs, 50) == 0, "before anybody cleans"

    leaping_loop.run(main())


def test_an_executor_that_may_get_a_run_yet_does_not_say_that_it_left_nothing() -> None:
    async def main() -> None:
        logs = CountedLogs()
        async with driving(logs, 2) as (process, other):
            runner = process.flow.runner
            await process.quick.start()
            name = process.name
            with suppress(Stopped):
                async with runner.given(logs, "r"):
                    raise Stopped("no answer")  # what gives it the run is on its way
            while "r" in runner._unclear:
                runner._leave_to_others(runner._unclear.look_again("r"))
            await asyncio.sleep(2 * LEASE_S)
            assert process.name != name
            assert name in other.flow.runner.executors.departed
        page = await logs.log(FLOW_LOG).read_range(EXECUTORS_TAG)
        assert Left(name, is_idle=False) in [executor_record(record.data) for record in page]

    leaping_loop.run(main())
