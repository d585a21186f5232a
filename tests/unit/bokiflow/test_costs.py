"""What operations cost in appends, as docs/libs/bokiflow.md says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from bokiflow import Flow, Startable, Workflow
from bokistore import Store, Transaction
from indilog.testing import MemoryLogs

START_AND_END = 2
RUNS: dict[str, Startable[int]] = {}


class Counted(MemoryLogs):
    """Counts appends; a batch is one.

    Attributes:
        appends: so far.
    """

    appends = 0

    def append_all(self, entries: list[tuple[bytes, bytes]]) -> list[int]:  # type: ignore[override]
        self.appends += 1
        return super().append_all(entries)


async def cost(use: Callable[[Workflow, Store], Awaitable[object]]) -> int:
    """Return the appends of a run that calls `use`, without those of its start and end."""
    logs = Counted()
    flow = Flow("shop")
    flow.attach(logs)
    store = Store(logs.log("accounts"))

    @flow.workflow
    async def nothing(wf: Workflow) -> int:
        return 1

    @flow.workflow
    async def tried(wf: Workflow) -> None:
        await use(wf, store)

    RUNS["nothing"] = nothing
    await (await nothing.start()).result(10)  # includes the executor's first heartbeat
    before = logs.appends
    await (await nothing.start()).result(10)
    assert logs.appends - before == START_AND_END
    before = logs.appends
    handle = await tried.start()
    await handle.result(10)
    return logs.appends - before - START_AND_END


async def one(txn: Transaction) -> int:
    (await txn.get("ann")).increment("n")
    return 1


@pytest.mark.asyncio
async def test_operations_cost_the_documented_appends() -> None:
    async def steps(wf: Workflow, _: Store) -> None:
        for n in range(3):
            await wf.step(lambda n=n: n, name="step")

    async def sleeps(wf: Workflow, _: Store) -> None:
        await wf.sleep(0)

    async def waits(wf: Workflow, _: Store) -> None:
        await wf.signal("x", timeout=0)

    async def locks(wf: Workflow, _: Store) -> None:
        async with wf.lock("x"):
            pass

    async def transacts(wf: Workflow, store: Store) -> None:
        await wf.transact(store, one)

    async def gathers(wf: Workflow, _: Store) -> None:
        await wf.gather(*(wf.step(lambda n=n: n, name="step") for n in range(3)))

    async def starts(wf: Workflow, _: Store) -> None:
        await wf.run(RUNS["nothing"])

    # Each last decision is in one append with what comes next, here the end of the run.
    assert await cost(steps) == 3 - 1
    assert await cost(sleeps) == 2 - 1
    assert await cost(waits) == 2 - 1
    assert await cost(locks) == 4 - 1
    assert await cost(transacts) == 2 - 1
    assert await cost(gathers) == 3
    assert await cost(starts) == 2 + START_AND_END - 1


@pytest.mark.asyncio
async def test_attempts_that_fail_soon_cost_nothing() -> None:
    failed: list[int] = []

    async def fails_twice() -> None:
        if len(failed) < 2:
            failed.append(1)
            raise ValueError("not yet")

    async def retries(wf: Workflow, _: Store) -> None:
        await wf.step(fails_twice, backoff=0.001)

    assert await cost(retries) == 1 - 1
    assert len(failed) == 2
