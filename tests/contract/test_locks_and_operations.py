"""Locks and workflows on every kind of log: waiting, handover, notification."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from bokiflow import Flow, Lock, LockLostError, RunCancelledError, Workflow
from bokistore import Store, Transaction
from indilog.base.log import Log
from tests.support.flow_executions import OneLog

pytestmark = pytest.mark.asyncio


async def test_a_lock_is_handed_over_in_order_and_its_loss_is_reported(
    session_of: Callable[[], Log],
) -> None:
    tokens: list[int] = []

    async def want(log: Log) -> None:
        async with Lock(log, "hotel:7", wait=100) as held:
            tokens.append(held.token)

    gone = await Lock(session_of(), "hotel:7", lease=0.2).acquire()
    tokens.append(gone.token)
    await asyncio.gather(*(want(session_of()) for _ in range(5)))
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 6
    with pytest.raises(LockLostError):
        await gone.release()


async def test_a_workflow_waits_branches_locks_and_starts_others(
    session_of: Callable[[], Log],
) -> None:
    log = session_of()
    flow = Flow("shop", log=log.name)
    flow.attach(OneLog(log))
    store = Store(log)
    undone: list[str] = []
    booked = threading.Event()

    async def pay(txn: Transaction) -> int:
        account = await txn.get("ann")
        account.increment("balance", 5)
        return int(str(account["balance"]))

    async def part(wf: Workflow, name: str) -> str:
        await wf.sleep(0.01)
        return str(await wf.signal(name))

    @flow.workflow
    async def child(wf: Workflow, n: int) -> int:
        async with wf.lock("hotel:7"):
            return n * await wf.transact(store, pay)

    @flow.workflow
    async def parent(wf: Workflow) -> list[object]:
        parts = await wf.gather(part(wf, "a"), part(wf, "b"))
        later = await wf.start_child(child, 100)
        return [*parts, await wf.run(child, 1) + await later.result()]

    @flow.workflow
    async def patient(wf: Workflow) -> None:
        await wf.step(lambda: "room", name="book", compensate=undone.append)
        await wf.step(booked.set, name="tell")
        await wf.sleep(timedelta(days=1))

    handle = await parent.start(id="p")
    await handle.signal("b", 2)
    await handle.signal("a", 1)
    assert await handle.result(60) in (["1", "2", 100 * 5 + 10], ["1", "2", 100 * 10 + 5])
    cancelled = await patient.start(id="c")
    await asyncio.to_thread(booked.wait, 100)
    await cancelled.cancel()
    with pytest.raises(RunCancelledError):
        await cancelled.result(60)
    assert undone == ["room"]
