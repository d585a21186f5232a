"""Workflows while workers, engines, gateways and any other process of the platform are killed.

The bodies of the steps are not idempotent: each execution returns another random value and records
it with its argument in a log. Every run must end, and its result must be a chain of values that
bodies returned, each computed from the one before. So a value that was used but not decided shows.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.servers import free_ports
from tests.cluster.platform_process import PlatformProcess, platform
from tests.support.clients import http_client
from tests.support.repeated import repeated

RUNS = 20
PARTS = 4
KILL_EVERY_S = 1.0
WORKERS_SHARE = 0.7
WORKERS_KILLED_MIN = 4
AT_ONCE = 16
LEASE_S = 1.0
DEADLINE_S = 900.0
INSIST_S = 300.0
"""Longest time in which a call is repeated; longer than any fault of a test lasts."""
APP = f"""
import asyncio
import secrets

import bokiflow
import indilog

app = indilog.App("orders")
flow = bokiflow.Flow(app, lease={LEASE_S})

@flow.workflow
async def order(wf: bokiflow.Workflow, number: int) -> list[int]:
    async def book(ctx: indilog.Context, part: int, before: int) -> int:
        value = secrets.randbits(48)
        line = f"{{wf.id}} {{part}} {{before}} {{value}}"
        await ctx.log("bodies").append(line.encode(), tags=[wf.id])
        await asyncio.sleep(0.02)  # so a kill hits a run more often
        return value

    values = [0]
    for part in range({PARTS}):
        values.append(await wf.step(book, part, values[-1], retries=100))
    return values[1:]

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
async def bodies(ctx: indilog.Context, number: int) -> list[str]:
    found = await ctx.log("bodies").read_range(f"order-{{number}}")
    return [record.data.decode() for record in found]
"""


async def insist(
    http: httpx.AsyncClient, name: str, number: int, *, within_s: float = INSIST_S
) -> object:
    """Call a function that is harmless to repeat until it answers.

    Raises:
        AssertionError: it did not answer with 200 within `within_s`; the message has the last
            answer.
    """
    end, last = time.monotonic() + within_s, "no answer"
    while time.monotonic() < end:
        try:
            answer = await http.post(f"/functions/orders/{name}", json={"number": number})
        except httpx.HTTPError as error:
            last = repr(error)
        else:
            if answer.status_code == httpx.codes.OK:
                return answer.json()
            last = f"{answer.status_code}: {answer.text:.200}"
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} of order {number} did not answer within {within_s:g} s: {last}")


@pytest.mark.asyncio
async def test_a_call_that_is_never_answered_ends_with_the_last_answer() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(404, text="There is no function orders.end.")

    transport = httpx.MockTransport(refuse)
    async with httpx.AsyncClient(transport=transport, base_url="http://platform") as http:
        with pytest.raises(AssertionError, match=r"404: There is no function orders\.end"):
            await insist(http, "end", 1, within_s=0.3)


def check(number: int, result: Any, bodies: Any) -> None:  # noqa: ANN401 - JSON
    """Check that a result is a chain of values that bodies returned."""
    assert len(result) == PARTS
    for part, value in enumerate(result):
        before = result[part - 1] if part else 0
        assert f"order-{number} {part} {before} {value}" in bodies, f"order {number}, part {part}"


class Killer:
    """Kills processes of a platform at random, mostly function workers.

    Attributes:
        workers: how many workers it killed.
        has_moved_run: to be set when another executor has taken over a run.
        progress: to be set when a run has ended. A run ends between any two kills, so that a slow
            machine also makes progress.
    """

    def __init__(self, running: PlatformProcess, dice: random.Random) -> None:
        self.workers = 0
        self.has_moved_run = False
        self.progress = asyncio.Event()
        self._running = running
        self._dice = dice

    @property
    def has_done_enough(self) -> bool:
        """Whether enough workers were killed, and another executor took over a run."""
        return self.workers >= WORKERS_KILLED_MIN and self.has_moved_run

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
    results: dict[int, Any] = {}

    async def order(http: httpx.AsyncClient) -> None:
        """Place orders one after the other, until there were enough runs and enough kills."""
        while (number := next(numbers)) < runs or not killer.has_done_enough:
            await insist(http, "start", number)
            results[number] = await insist(http, "result", number)
            if await insist(http, "epoch", number) != 1:
                killer.has_moved_run = True
            killer.progress.set()

    async with http_client(running.url, timeout=60) as http:
        answer = await http.post("/apps", json={"sources": {"orders.py": APP}})
        assert answer.status_code == httpx.codes.OK, answer.text
        killing = asyncio.create_task(killer.kill())
        async with asyncio.timeout(DEADLINE_S + runs / 4):
            await asyncio.gather(*(order(http) for _ in range(AT_ONCE)))
            killing.cancel()
            ended = range(next(numbers) - AT_ONCE)
            for number in ended:
                check(number, results[number], await insist(http, "bodies", number))


@pytest.mark.cluster
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "options",
    [
        repeated((), "embedded"),
        pytest.param(("--processes",), id="processes"),
        repeated(("--nodes", "3"), "nodes"),
    ],
)
def test_every_workflow_ends_with_what_its_bodies_returned_after_kills_of_any_process(
    tmp_path: Path, options: tuple[str, ...], runs_wanted: int | None
) -> None:
    port = str(free_ports(3))  # a restarted gateway must have the same address
    with platform(tmp_path, *options, "--port", port) as running:
        asyncio.run(orders_amid_kills(running, runs_wanted or RUNS, random.Random(7)))
