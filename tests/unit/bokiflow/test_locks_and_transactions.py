"""Locks and transactions in workflows."""

from __future__ import annotations

import asyncio

import pytest

from bokiflow import (
    Flow,
    Handle,
    Lock,
    LockLostError,
    LockTimeoutError,
    RunCancelledError,
    RunFailedError,
    Workflow,
)
from bokiflow.lock_records import Extend
from bokistore import Store, Transaction
from indilog.testing import MemoryLog, MemoryLogs
from tests.flow_executions import FLOW_LOG as LOG
from tests.flow_executions import begin, execute, take


@pytest.mark.asyncio
async def test_a_run_holds_its_lock_over_executors(logs: MemoryLogs) -> None:
    log = logs.log(LOG)
    await begin(log, "r")
    entered = asyncio.Event()
    tokens: list[int] = []

    async def guarded(wf: Workflow) -> None:
        async with wf.lock("hotel:7") as lock:
            tokens.append(lock.token)
            entered.set()
            await wf.signal("go")

    first = asyncio.create_task(execute(log, "r", guarded))
    await entered.wait()
    first.cancel()
    await asyncio.wait([first])
    with pytest.raises(LockTimeoutError):
        await Lock(MemoryLog(LOG, logs=logs), "hotel:7", wait=0).acquire()
    await take(log, "r", "second")
    entered.clear()
    second = asyncio.create_task(execute(log, "r", guarded))
    await entered.wait()
    assert tokens[0] == tokens[1]
    second.cancel()
    await asyncio.wait([second])


@pytest.mark.asyncio
async def test_a_run_that_lost_its_lock_is_told(flow: Flow, logs: MemoryLogs) -> None:
    @flow.workflow
    async def guarded(wf: Workflow) -> list[str]:
        told = []
        try:
            async with wf.lock("hotel:7", lease=30) as lock:
                await lock.check()
                await wf.step(steal, lock.token)
                try:
                    await lock.check()
                except LockLostError:
                    told.append("asked")
        except LockLostError:
            told.append("left")
        return told

    async def steal(token: int) -> None:
        lock = Lock(logs.log(LOG), "hotel:7")
        await lock._replica.tell(logs.log(LOG), Extend(token, 0.0))
        await lock.acquire()

    assert await (await guarded.start()).result(10) == ["asked", "left"]


@pytest.mark.asyncio
async def test_waiting_for_a_lock_ends_by_time_or_by_cancellation(
    flow: Flow, logs: MemoryLogs
) -> None:
    @flow.workflow
    async def guarded(wf: Workflow, wait: float | None) -> str:
        try:
            async with wf.lock("hotel:7", wait=wait):
                return "got it"
        except LockTimeoutError:
            return "too late"

    async with Lock(logs.log(LOG), "hotel:7", renew=False) as held:
        assert await (await guarded.start(0.01)).result(10) == "too late"
        handle: Handle[str] = await guarded.start(None)
        while len(held._replica.fold) < 2:
            await logs.log(LOG).read_next("lock:hotel:7", held._replica.fold.end, wait=10)
            await held._replica.catch_up(logs.log(LOG))
        await handle.cancel()
        with pytest.raises(RunCancelledError):
            await handle.result(10)
    assert await (await guarded.start(0)).result(10) == "got it"


@pytest.mark.asyncio
async def test_a_transaction_takes_effect_once(logs: MemoryLogs) -> None:
    log = logs.log(LOG)
    await begin(log, "r")
    store = Store(logs.log("accounts"))
    reached = asyncio.Event()

    async def pay(txn: Transaction) -> int:
        account = await txn.get("ann")
        account.increment("balance", 5)
        return int(account["balance"])

    async def paying(wf: Workflow, stop: bool) -> list[int]:
        first = await wf.transact(store, pay)
        if stop:
            reached.set()
            await asyncio.sleep(60)
        return [first, await wf.transact(store, pay)]

    first = asyncio.create_task(execute(log, "r", lambda wf: paying(wf, stop=True)))
    await reached.wait()
    first.cancel()
    await asyncio.wait([first])
    await take(log, "r", "second")
    finished = await execute(log, "r", lambda wf: paying(wf, stop=False))
    assert finished.result == b"[5,10]"
    assert (await store.get("ann"))["balance"] == 10


@pytest.mark.asyncio
async def test_a_transaction_that_raises_changes_nothing_whoever_comes_later(
    flow: Flow, logs: MemoryLogs
) -> None:
    store = Store(logs.log("accounts"))

    async def pay(txn: Transaction) -> None:
        txn.increment("ann", "balance", 5)
        raise ValueError("too poor")

    @flow.workflow
    async def paying(wf: Workflow) -> None:
        await wf.transact(store, pay)

    with pytest.raises(RunFailedError, match="ValueError: too poor"):
        await (await paying.start(id="r")).result(10)

    async def late(txn: Transaction) -> None:
        txn.increment("ann", "balance", 5)

    await store.transact(late, id=f"{LOG}/r/1")
    assert await store.get("ann", type=dict) is None
