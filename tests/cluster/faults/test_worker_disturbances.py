"""Calls under disturbance: workers killed, paused, blocked, left with stuck threads, redeployed.

Every call gets one outcome, and no call has its effect twice. A call that returned has its effect.
A call that was answered with "nothing was done" has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

import indilog
from indilog.link.link_messages import Failed
from tests.cluster.function_platform import DEMO, Platform, running, until
from tests.support.repeated import repeated

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

SOURCE = (
    DEMO
    + """
@app.function
async def once(ctx: indilog.Context, n: int) -> None:
    await ctx.log("once").append(b"%d" % n)

@app.function
async def nested(ctx: indilog.Context, n: int) -> None:
    await ctx.call(once, n=n)

@app.function(timeout_s=0.5)
async def block() -> None:
    while True: pass

@app.function(timeout_s=0.2)
def stick() -> None:
    while True: time.sleep(0.05)
"""
)
KINDS = ("kill", "pause", "block", "stick", "deploy")
CALLERS = 8


class Callers:
    """Callers that call without a pause, and note each outcome."""

    def __init__(self, platform: Platform) -> None:
        self.reported: dict[int, str] = {}
        self.are_done = False
        self._host = platform.host
        self._next = 0

    async def call(self) -> None:
        """Call without a pause, and record each outcome."""
        while not self.are_done:
            number, self._next = self._next, self._next + 1
            name = "demo.nested" if number % 3 == 0 else "demo.once"
            try:
                outcome = await self._host.call(name, b'{"n":%d}' % number).outcome
                self.reported[number] = outcome.kind if isinstance(outcome, Failed) else "returned"
            except indilog.NotReadyError as error:
                self.reported[number] = type(error).__name__
                await asyncio.sleep(0.01)


async def disturb(platform: Platform, kind: str, chance: random.Random) -> None:
    pids = [worker["pid"] for worker in platform.host.status()["workers"]]
    match kind:
        case "kill" if pids:
            send(chance.choice(pids), signal.SIGKILL)
        case "pause" if pids:
            pid = chance.choice(pids)
            send(pid, signal.SIGSTOP)
            await asyncio.sleep(0.6)  # longer than `worker_silent_s`
            send(pid, signal.SIGCONT)
        case "block" | "stick":
            platform.host.call(f"demo.{kind}", b"")
        case _:
            await platform.deploy("demo", SOURCE)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a worker; it may have ended before the host noticed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.parametrize("seed", [1, repeated(2)])
async def test_every_call_has_one_outcome_and_at_most_one_effect(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.sample(KINDS, len(KINDS))
    impatient = {"worker_silent_s": 0.3, "worker_stop_s": 0.3}
    async with running(tmp_path, workers=2, worker_calls_max=4, **impatient) as platform:
        await platform.deploy("demo", SOURCE)
        callers = Callers(platform)
        tasks = [asyncio.ensure_future(callers.call()) for _ in range(CALLERS)]
        for kind in kinds:
            await until(lambda: len(platform.host.status()["workers"]) == 2)
            await disturb(platform, kind, chance)
            await asyncio.sleep(chance.random() / 2)
        await until(lambda: "returned" in callers.reported.values())
        callers.are_done = True
        await asyncio.gather(*tasks)
        await until(lambda: platform.host.status()["calls_running"] == 0)
        assert platform.host.status()["calls_waiting"] == 0
        async with indilog.connect(platform.url) as client:
            effects = Counter([int(r.data) for r in await read_all(client.log("once"))])
    assert [n for n, times in effects.items() if times > 1] == []
    assert {
        n for n, reported in callers.reported.items() if reported == "returned"
    } <= effects.keys()
    nothing_done = {
        n
        for n, reported in callers.reported.items()
        if reported in ("NotReadyError", "OverloadedError")
    }
    assert nothing_done & effects.keys() == set()


async def test_of_a_killed_worker_only_the_calls_that_it_had_begun_fail(tmp_path: Path) -> None:
    """Calls sent to the worker before its end was noticed, but not begun there, run once
    elsewhere.
    """
    patient = {"worker_silent_s": 600.0, "worker_stop_s": 600.0}
    async with running(tmp_path, workers=3, **patient) as platform:
        await platform.deploy("demo", SOURCE)
        host = platform.host
        async with indilog.connect(platform.url) as client:
            begun = [host.call("demo.wait_for_release", b"") for _ in range(6)]
            await records(client.log("gate"), len(begun))
            victim = host.status()["workers"][1]["pid"]
            hit = [call for call in begun if call.worker and call.worker.pid == victim]
            os.kill(victim, signal.SIGSTOP)
            await until(lambda: "T (stopped)" in Path(f"/proc/{victim}/status").read_text())

            calls = [host.call("demo.once", b'{"n":%d}' % n) for n in range(30)]
            there = [call for call in calls if call.worker and call.worker.pid == victim]
            await asyncio.gather(*(call.outcome for call in calls if call not in there))
            os.kill(victim, signal.SIGKILL)
            calls += [host.call("demo.once", b'{"n":%d}' % n) for n in range(30, 90)]
            late = [call for call in calls[30:] if call.worker and call.worker.pid == victim]
            reported = await asyncio.gather(*(call.outcome for call in calls))
            assert [outcome for outcome in reported if isinstance(outcome, Failed)] == []
            assert (len(hit), len(there)) == (2, 10)
            assert len(late) > 0
            assert host.status()["calls_moved"] == len(there) + len(late)

            await client.log("gate").append(b"released", tags=["release"])
            ended = await asyncio.gather(*(call.outcome for call in begun))
            failed = [
                call for call, end in zip(begun, ended, strict=True) if isinstance(end, Failed)
            ]
            assert failed == hit
            assert host.status()["calls"]["crashed"] == len(hit)
            effects = [int(record.data) for record in await read_all(client.log("once"))]
    assert sorted(effects) == list(range(90))


async def records(log: indilog.Log, count: int) -> None:
    """Wait until a log has `count` records."""
    bound = 0
    for _ in range(count):
        record = await log.read_next(bound=bound, wait=100)
        assert record is not None
        bound = record.seqnum + 1


async def read_all(log: indilog.Log) -> list[indilog.Record]:
    records: list[indilog.Record] = []
    while page := await log.read_range(bound=records[-1].seqnum + 1 if records else 0):
        records += page
    return records
