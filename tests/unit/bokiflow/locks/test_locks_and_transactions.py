"""Locks and transactions in workflows."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from bokiflow import (
    Flow,
    Handle,
    Lock,
    LockLostError,
    LockTimeoutError,
    NestedLockError,
    RunCancelledError,
    RunFailedError,
    Workflow,
)
from bokiflow.locks.lock_records import ExtendLease, encode
from bokistore import Store, Transaction
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.flow_executions import FLOW_LOG as LOG
from tests.support.flow_executions import begin, execute, take


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
async def test_a_run_that_lost_its_lock_gets_an_error(flow: Flow, logs: MemoryLogs) -> None:
    @flow.workflow
    async def guarded(wf: Workflow) -> list[str]:
        reported = []
        try:
            async with wf.lock("hotel:7", lease=30) as lock:
                await lock.check()
                await wf.step(steal, lock.token)
                try:
                    await lock.check()
                except LockLostError:
                    reported.append("asked")
        except LockLostError:
            reported.append("left")
        return reported

    async def steal(token: int) -> None:
        lock = Lock(logs.log(LOG), "hotel:7")
        await lock._replica.append(logs.log(LOG), encode(ExtendLease(token, 0.0)))
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
        while len(held._replica.state) < 2:
            await logs.log(LOG).read_next("lock:hotel:7", held._replica.end, wait=10)
            await held._replica.catch_up(logs.log(LOG))
        await handle.cancel()
        with pytest.raises(RunCancelledError):
            await handle.result(10)
    assert await (await guarded.start(0)).result(10) == "got it"


@pytest.mark.asyncio
async def test_a_lock_nested_in_itself_is_refused_alike_in_every_execution(
    logs: MemoryLogs,
) -> None:
    log = logs.log(LOG)
    await begin(log, "r")
    reported: asyncio.Queue[str] = asyncio.Queue()

    async def inner(wf: Workflow) -> None:
        try:
            async with wf.lock("hotel:7"):
                reported.put_nowait("got it")
        except NestedLockError as error:
            reported.put_nowait(str(error))

    async def nested(wf: Workflow) -> None:
        async with wf.lock("hotel:7"):
            await inner(wf)
            await wf.gather(inner(wf), wf.sleep(0))
            await wf.signal("go")

    first = asyncio.create_task(execute(log, "r", nested))
    words = [await asyncio.wait_for(reported.get(), 10) for _ in range(2)]
    first.cancel()
    await asyncio.wait([first])
    await take(log, "r", "second")
    second = asyncio.create_task(execute(log, "r", nested))
    words += [await asyncio.wait_for(reported.get(), 10) for _ in range(2)]
    second.cancel()
    await asyncio.wait([second])
    assert words == words[:1] * 4
    assert "is held by an enclosing block" in words[0]


@pytest.mark.asyncio
async def test_a_block_that_does_not_wait_for_itself_may_use_the_same_lock(flow: Flow) -> None:
    @flow.workflow
    async def inside(wf: Workflow) -> str:
        async with wf.lock("hotel:7"):
            return "inside"

    @flow.workflow
    async def several(wf: Workflow) -> list[object]:
        async def one(n: int) -> int:
            async with wf.lock("hotel:7"):
                await wf.sleep(0.01)
            async with wf.lock("hotel:7") as held:  # the block before is over
                await held.release()
                with suppress(LockLostError):  # released twice
                    async with wf.lock("hotel:7"), wf.lock("hotel:7", log="elsewhere"):
                        return n
                return -n

        both = await wf.gather(one(1), one(2))  # each waits for the other's block only
        async with wf.lock("hotel:7"):
            child = await wf.start_child(inside)  # another run, that waits for this block
        return [*both, await child.result()]

    assert await asyncio.wait_for((await several.start()).result(), 10) == [1, 2, "inside"]


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
async def test_a_transaction_that_raises_changes_nothing_in_later_executions(
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
        await (handle := await paying.start(id="r")).result(10)

    async def late(txn: Transaction) -> None:
        txn.increment("ann", "balance", 5)

    await store.transact(late, id=f"{LOG}/r@{(await handle.status()).place}/1")
    assert await store.get("ann", type=dict) is None
