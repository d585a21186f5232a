"""Workflows while workers, engines, gateways and any other process of the platform are killed.

The steps write into the store: each part of each order must be there exactly once, and every run
must end with the results of its steps.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from bench.support.servers import free_port
from tests.cluster.platform_process import PlatformProcess, platform
from tests.support.clients import http_client

RUNS = 40
PARTS = 4
KILL_EVERY_S = 1.0
WORKERS_SHARE = 0.7
WORKERS_KILLED_MIN = 4
AT_ONCE = 16
LEASE_S = 1.0
DEADLINE_S = 240.0
APP = f"""
import indilog
import bokiflow
from bokistore import Store

app = indilog.App("orders")
flow = bokiflow.Flow(app, lease={LEASE_S})

@flow.workflow
async def order(wf: bokiflow.Workflow, number: int) -> list[int]:
    async def book(ctx: indilog.Context, part: int) -> int:
        async def once(txn) -> int:
            sold = await txn.get(f"order:{{number}}")
            sold.increment(f"part{{part}}")
            return part * number
        return await Store(ctx.log("stock")).transact(once, id=wf.key)

    return [await wf.step(book, part, retries=100) for part in range({PARTS})]

@app.function
async def start(ctx: indilog.Context, number: int) -> str:
    return (await order.start(number, id=f"order-{{number}}")).id

@app.function
async def result(ctx: indilog.Context, number: int) -> list[int]:
    return await order.handle(f"order-{{number}}").result(20)

@app.function
async def epoch(ctx: indilog.Context, number: int) -> int:
    return (await order.handle(f"order-{{number}}").status()).epoch

@app.function
async def booked(ctx: indilog.Context, number: int) -> dict[str, int]:
    return dict((await Store(ctx.log("stock")).get(f"order:{{number}}")).value)
"""


async def insist(http: httpx.AsyncClient, name: str, number: int) -> object:
    """Call a function that is harmless to repeat until it answers."""
    while True:
        try:
            answer = await http.post(f"/functions/orders/{name}", json={"number": number})
        except httpx.HTTPError:
            answer = None
        if answer is not None and answer.status_code == httpx.codes.OK:
            return answer.json()
        await asyncio.sleep(0.1)


class Killer:
    """Kills processes of a platform at random, mostly function workers.

    Attributes:
        workers: how many workers it killed.
        progress: to be set when a run has ended. A run ends between any two kills, so that a slow
            machine also makes progress.
    """

    def __init__(self, running: PlatformProcess, dice: random.Random) -> None:
        self.workers = 0
        self.progress = asyncio.Event()
        self._running = running
        self._dice = dice

    async def kill(self) -> None:
        while True:
            await asyncio.sleep(KILL_EVERY_S * self._dice.random() * 2)
            await self.progress.wait()
            self.progress.clear()
            pids = self._running.started()
            if self._dice.random() < WORKERS_SHARE:
                pids = [pid for pid in pids if is_worker(pid)]
            if pids:
                self._end(self._dice.choice(pids))

    def _end(self, pid: int) -> None:
        self.workers += is_worker(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_worker(pid: int) -> bool:
    with suppress(OSError):
        return b"indilog_compute.workers" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def orders_amid_kills(running: PlatformProcess, runs: int, dice: random.Random) -> None:
    killer, numbers = Killer(running, dice), itertools.count()

    async def order(http: httpx.AsyncClient) -> None:
        """Place orders one after the other, until there were enough runs and enough kills."""
        while (number := next(numbers)) < runs or killer.workers < WORKERS_KILLED_MIN:
            await insist(http, "start", number)
            assert await insist(http, "result", number) == [part * number for part in range(PARTS)]
            killer.progress.set()

    async with http_client(running.url, timeout=30) as http:
        answer = await http.post("/apps", json={"sources": {"orders.py": APP}})
        assert answer.status_code == httpx.codes.OK, answer.text
        killing = asyncio.create_task(killer.kill())
        async with asyncio.timeout(DEADLINE_S + runs / 4):
            await asyncio.gather(*(order(http) for _ in range(AT_ONCE)))
            killing.cancel()
            ended = range(next(numbers) - AT_ONCE)
            for number in ended:
                parts = await insist(http, "booked", number)
                assert parts == {f"part{part}": 1 for part in range(PARTS)}, f"order {number}"
            epochs = [await insist(http, "epoch", number) for number in ended]
    assert any(epoch != 1 for epoch in epochs), "some runs were taken over"


@pytest.mark.cluster
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("options", [(), ("--processes",)], ids=["embedded", "processes"])
def test_every_workflow_ends_and_has_each_effect_once_after_kills_of_any_process(
    tmp_path: Path, options: tuple[str, ...], runs_wanted: int | None
) -> None:
    port = str(free_port())  # a restarted gateway must have the same address
    with platform(tmp_path, *options, "--port", port) as running:
        asyncio.run(orders_amid_kills(running, runs_wanted or RUNS, random.Random(7)))
