"""Operations of workflows other than steps, while their workers are killed at random.

The evidence is in a store and a log: each transaction, child and compensation of a cancelled run
once, never two holders of a lock.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.function_platform import Platform, running

RUNS = 24
KILLS = 6
INSIST_S = 300.0
pytestmark = [pytest.mark.cluster, pytest.mark.asyncio, pytest.mark.timeout(900)]
APP = """
import indilog
from bokiflow import Cancelled, Flow, Workflow
from bokistore import Store, Transaction

app = indilog.App("shop")
flow = Flow(app, lease=1.0)

def added(name: str, by: int):
    async def add(txn: Transaction) -> int:
        account = await txn.get(name)
        account.increment("balance", by)
        return account["balance"]
    return add

@app.function
async def ship(ctx: indilog.Context, number: int, key: str) -> str:
    await Store(ctx.log("stock")).transact(added(f"shipped:{number}", 1), id=key)
    return f"parcel {number}"

@flow.workflow
async def pack(wf: Workflow, number: int) -> int:
    await wf.sleep(0.05)
    return await wf.transact(Store(wf.log("stock")), added(f"packed:{number}", 1))

async def mark(ctx: indilog.Context, what: str, token: int) -> None:
    await ctx.log("till").append(f"{what} {token}".encode())

@flow.workflow
async def order(wf: Workflow, number: int) -> list[object]:
    store = Store(wf.log("stock"))

    async def book(ctx: indilog.Context, part: str) -> str:
        await Store(ctx.log("stock")).transact(added(part, 1), id=wf.key)
        return part

    async def release(ctx: indilog.Context, part: str) -> None:
        await Store(ctx.log("stock")).transact(added(part, -1), id=wf.key)

    await wf.gather(*(
        wf.step(book, f"{part}:{number}", retries=100, compensate=release)
        for part in ("room", "seat")
    ))
    packed = await wf.run(pack, number)
    async with wf.lock("till", lease=100) as till:
        await wf.step(mark, "enter", till.token, retries=100)
        await wf.sleep(0.02)
        await wf.step(mark, "leave", till.token, retries=100)
    if not await wf.signal("paid", timeout=0 if number % 3 == 2 else 60):
        raise Cancelled("not paid")
    return [packed, await wf.call(ship, number, f"ship-{wf.id}")]

@app.function
async def start(ctx: indilog.Context, number: int) -> str:
    handle = await order.start(number, id=f"order-{number}")
    if number % 3 != 2:
        await handle.signal("paid", key="only")
    return handle.id

@app.function
async def end(ctx: indilog.Context, number: int) -> list[object]:
    handle = order.handle(f"order-{number}")
    try:
        return await handle.result(20)
    except Exception as error:
        if type(error).__name__ != "RunCancelledError":
            raise
        return ["cancelled"]

@app.function
async def balances(ctx: indilog.Context, number: int) -> dict[str, int]:
    store = Store(ctx.log("stock"))
    names = ["room", "seat", "packed", "shipped"]
    return {name: (await store.get(f"{name}:{number}")).get("balance", 0) for name in names}

@app.function
async def epoch(ctx: indilog.Context, number: int) -> int:
    return (await order.handle(f"order-{number}").status()).epoch

@app.function
async def till(ctx: indilog.Context) -> list[str]:
    return [record.data.decode() for record in await ctx.log("till").read_range()]
"""


async def insist(platform: Platform, name: str, **arguments: object) -> Any:  # noqa: ANN401
    """Call a function that is harmless to repeat until it answers; fail after `INSIST_S`."""
    end = time.monotonic() + INSIST_S
    while True:
        answer = await platform.call(f"shop.{name}", **arguments)
        if answer.status_code == httpx.codes.OK:
            return answer.json()
        assert time.monotonic() < end, f"{name}: {answer.status_code}: {answer.text:.200}"
        await asyncio.sleep(0.1)


async def kill(platform: Platform, dice: random.Random) -> None:
    """Repeatedly kill a worker."""
    killed = 0
    while killed < KILLS:
        await asyncio.sleep(dice.uniform(0.1, 0.5))
        if pids := [worker["pid"] for worker in platform.host.status()["workers"]]:
            os.kill(dice.choice(pids), signal.SIGKILL)
            killed += 1


@pytest.mark.repeated("tests/properties/libs/test_workflow_operations.py")
async def test_operations_happen_once_while_workers_are_killed(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as platform:
        assert (await platform.deploy("shop", APP)).status_code == 200
        dice = random.Random(7)

        async def order(number: int) -> object:
            await insist(platform, "start", number=number)
            return await insist(platform, "end", number=number)

        ends: list[object] = []
        epochs = [1]
        while max(epochs) == 1:  # the workers may be killed before they run anything
            numbers = range(len(ends), len(ends) + RUNS)
            killing = asyncio.create_task(kill(platform, dice))
            ends += await asyncio.gather(*map(order, numbers))
            await killing
            epochs = [await insist(platform, "epoch", number=number) for number in numbers]
        for number, end in enumerate(ends):
            is_paid = number % 3 != 2
            assert end == ([1, f"parcel {number}"] if is_paid else ["cancelled"])
            assert await insist(platform, "balances", number=number) == {
                "room": int(is_paid), "seat": int(is_paid), "packed": 1, "shipped": int(is_paid),
            }  # fmt: skip
        check_till(await insist(platform, "till"), len(ends))


def check_till(marks: list[str], runs: int) -> None:
    """Each token's marks come together, and tokens grow: no two holders overlapped."""
    tokens = [int(mark.split()[1]) for mark in marks]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == runs
