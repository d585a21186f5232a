"""What operations cost in appends, as docs/libs/bokiflow.md says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from bokiflow import Flow, Startable, State, UnknownRunError, Workflow, handle
from bokiflow.operations import signals
from bokiflow.runs.records import run_tag
from bokistore import Store, Transaction
from indilog.base.log import Record, Session
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, Hooks, Read

START_AND_END = 2
RUNS: dict[str, Startable[Any]] = {}


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

    RUNS["nothing"], RUNS["tried"] = nothing, tried
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
@pytest.mark.leaping
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
@pytest.mark.leaping
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


@pytest.mark.asyncio
@pytest.mark.leaping
async def test_a_wait_for_a_signal_without_a_time_limit_is_noted_unless_the_signal_comes_soon() -> (
    None
):
    async def listens(wf: Workflow, _: Store, *, for_s: float) -> None:
        async def send() -> None:
            await asyncio.sleep(for_s)
            await RUNS["tried"].handle(wf.id).signal("x")

        await wf.gather(wf.signal("x"), wf.step(send))

    soon = await cost(partial(listens, for_s=0.5 * signals.NOTED_AFTER_S))
    assert await cost(partial(listens, for_s=2 * signals.NOTED_AFTER_S)) == soon + 1


class CountedReads(Hooks):
    """A view of logs that counts how many records of a run are read through it.

    Attributes:
        read: so far.
    """

    def __init__(self, logs: MemoryLogs) -> None:
        self.read = 0
        self._logs = logs

    def log(self, name: str, session: Session | None = None) -> HookedLog:
        return HookedLog(name, logs=self._logs, session=session, hooks=self)

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        self.read += len(records) * (read.tag == run_tag("r"))
        return records


@pytest.mark.asyncio
@pytest.mark.leaping
async def test_the_first_status_of_a_long_run_reads_its_last_records() -> None:
    """In a process that does not execute it; the whole history would be 1,003 records."""
    logs, flow, reader = MemoryLogs(), Flow("shop"), Flow("shop")
    flow.attach(logs)

    @flow.workflow
    async def many(wf: Workflow) -> None:
        for number in range(1_000):
            await wf.step(lambda: number, name="count")  # noqa: B023 - it runs now
            if number == 5:
                wf.set_status("soon")
        await wf.signal("go")

    watched = CountedReads(logs)
    reader.attach(watched)
    reader.workflow(many.definition.body)
    run = await many.start(id="r")
    async with asyncio.timeout(60):
        while (await run.status()).steps < 1_001:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    status = await reader.handle("many", "r").status()
    assert (status.steps, status.value) == (1_001, "soon")
    assert watched.read <= 5
    await run.signal("go")
    await run.result(10)
    watched.read = 0
    status = await reader.handle("many", "r").status()
    assert (status.state, status.steps, status.value) == (State.DONE, 1_002, "soon")
    assert watched.read <= 5


@pytest.mark.asyncio
@pytest.mark.leaping
async def test_a_further_status_of_a_run_reads_what_is_new_with_any_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If its last records do not suffice, the history is read once."""

    async def never(*_: object) -> None: ...

    monkeypatch.setattr(handle, "brief_status", never)
    logs, flow, reader = MemoryLogs(), Flow("shop"), Flow("shop")
    flow.attach(logs)

    @flow.workflow
    async def many(wf: Workflow) -> None:
        for number in range(50):
            await wf.step(lambda: number, name="count")  # noqa: B023 - it runs now
        await wf.signal("go")
        await wf.signal("go")

    watched = CountedReads(logs)
    reader.attach(watched)
    reader.workflow(many.definition.body)
    await many.start(id="r")
    async with asyncio.timeout(10):
        while (await reader.handle("many", "r").status()).steps < 50:  # noqa: ASYNC110
            await asyncio.sleep(0)
    watched.read = 0
    assert (await reader.handle("many", "r").status()).steps == 50
    assert watched.read == 0
    await many.handle("r").signal("go")
    async with asyncio.timeout(10):
        while (await reader.handle("many", "r").status()).steps < 51:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert 0 < watched.read < 10
    await many.handle("r").signal("go")
    await many.handle("r").result(10)
    assert (await reader.handle("many", "r").status()).state is State.DONE
    watched.read = 0
    assert (await reader.handle("many", "r").status()).state is State.DONE
    assert watched.read == 1, "its end, which may have been trimmed"
    log = logs.log("shop/flow")
    await log.trim(await log.tail(), tag=run_tag("r"))
    with pytest.raises(UnknownRunError):
        await reader.handle("many", "r").status()
