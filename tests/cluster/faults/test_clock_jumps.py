"""A platform that starts once with its clock a year ahead (decision 0025).

Every lease, delay, key, schedule and lock holds, and ends, as if the clock had been right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import httpx
import pytest

import indilog
from bokiflow import Lock
from bokiflow.runs.errors import LockTimeoutError
from bokiqueue import Delivery, Queue
from indilog.link.access import reach
from indilog.remote_client import RemoteClient
from tests.cluster.platform_process import PlatformProcess, platform

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

YEAR_S = 366 * 86_400.0
SOURCE = """
import indilog

app = indilog.App("demo")

@app.function
async def count(ctx: indilog.Context) -> int:
    await ctx.log("runs").append(b"")
    return len(await ctx.log("runs").read_range(fresh=True))

@app.function
async def later(ctx: indilog.Context, name: str) -> None:
    await ctx.log("later").append(name.encode())

@app.schedule("* * * * *")
@app.function
async def tick(ctx: indilog.Context) -> None:
    await ctx.log("ticks").append(ctx.invocation_id.encode())
"""


@contextmanager
def started(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, ahead_s: float
) -> Iterator[PlatformProcess]:
    """Run the platform with a wall clock that is ahead."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "clock_ahead"))
    monkeypatch.setenv("TESTS_CLOCK_AHEAD_S", str(ahead_s))
    with platform(directory) as running:
        yield running


class Story:
    """Operations on a running platform, over an own connection."""

    def __init__(self, client: RemoteClient) -> None:
        self._client = client
        self.work = client.log("work")
        self.queue = Queue(self.work, "mail", shards=1)

    async def counts_once(self) -> None:
        assert await self._client.call("demo.count", idempotency_key="k") == 1

    async def take(self, *, wait: float, lease: float) -> Delivery | None:
        return await self.queue.take(wait=wait, lease=lease)

    def lock(self, name: str, *, lease: float, wait: float) -> Lock:
        return Lock(self.work, name, lease=lease, wait=wait)

    async def ticked_in_a_year(self) -> None:
        log, bound = self._client.log("ticks"), 0
        while True:  # due times that the schedule counts as missed run at once
            record = await log.read_next(bound=bound, wait=150)
            assert record is not None
            if int(record.data.decode().partition("-")[2], 16) > time.time() + YEAR_S / 2:
                return
            bound = record.seqnum + 1

    async def next_tick(self) -> float:
        """Return the next due time of the schedule, from the platform's answer."""
        endpoint = reach(self._client.url)
        async with httpx.AsyncClient(headers=endpoint.headers, timeout=120) as http:
            status = (await http.get(f"{endpoint.url}/status")).json()
        [schedule] = status["functions"]["schedules"]
        return datetime.fromisoformat(schedule["next"]).timestamp()

    async def ran_later(self, count: int) -> list[str]:
        log, found, bound = self._client.log("later"), list[str](), 0
        while len(found) < count:
            record = await log.read_next(bound=bound, wait=150)
            assert record is not None
            found.append(record.data.decode())
            bound = record.seqnum + 1
        return found


async def before(url: str) -> None:
    async with indilog.connect(url) as client:
        await client.deploy({"demo.py": SOURCE}, name="demo")
        story = Story(client)
        await story.counts_once()
        await client.log("kept").set_retention(age_s=3600.0)
        await client.log("kept").append(b"kept")
        await client.send("demo.later", delay=3600, name="in an hour")
        await story.queue.push(b"held")
        held = await story.take(wait=0, lease=600.0)
        assert held is not None
        await story.lock("long", lease=600.0, wait=5.0).acquire()
        await story.lock("short", lease=2.0, wait=5.0).acquire()


async def with_the_clock_a_year_ahead(url: str) -> None:
    async with indilog.connect(url) as client:
        story = Story(client)
        await story.counts_once()
        assert await story.take(wait=1, lease=2.0) is None, "the lease of ten minutes holds"
        await story.queue.push(b"delayed", delay=2.0)
        delayed = await story.take(wait=30, lease=2.0)
        assert delayed is not None
        assert delayed.data == b"delayed"
        again = await story.take(wait=30, lease=600.0)
        assert again is not None
        assert (again.data, again.tries) == (b"delayed", 2), "the lease of two seconds ended"
        with pytest.raises(LockTimeoutError):
            await story.lock("long", lease=5.0, wait=1.0).acquire()
        freed = await story.lock("short", lease=2.0, wait=30.0).acquire()
        assert freed.token > 0
        await client.send("demo.later", delay=1, name="in a second")
        assert await story.ran_later(1) == ["in a second"]
        await story.ticked_in_a_year()


async def afterwards(url: str) -> None:
    async with indilog.connect(url) as client:
        story = Story(client)
        await story.counts_once()
        assert len(await client.log("runs").read_range(fresh=True)) == 1
        assert await story.take(wait=1, lease=5.0) is None, "both leases of ten minutes hold"
        await story.queue.push(b"delayed again", delay=2.0)
        found = await story.take(wait=30, lease=5.0)
        assert found is not None
        assert found.data == b"delayed again"
        with pytest.raises(LockTimeoutError):
            await story.lock("long", lease=5.0, wait=1.0).acquire()
        await story.lock("short", lease=2.0, wait=30.0).acquire()
        await client.send("demo.later", delay=1, name="again")
        assert await story.ran_later(2) == ["in a second", "again"]
        [kept] = await client.log("kept").read_range()
        assert kept.data == b"kept"
        times = [record.ordered_at for record in await story.work.read_range()]
        assert times == sorted(times)
        assert abs(await story.work.now() - time.time()) < 600.0
        assert time.time() - 60.0 < await story.next_tick() <= time.time() + 60.0


@pytest.mark.repeated("tests/simulation/test_simulation.py")
async def test_a_start_with_the_clock_a_year_ahead_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch, ahead_s=0.0) as running:
        await before(running.url)
        running.interrupted()
    to_minute_s = -(time.time() + 20.0) % 60  # the next due time comes soon after the start
    with started(tmp_path, monkeypatch, ahead_s=YEAR_S + to_minute_s) as running:
        await with_the_clock_a_year_ahead(running.url)
        assert "wall clock not believed" in running.interrupted()
    with started(tmp_path, monkeypatch, ahead_s=0.0) as running:
        await afterwards(running.url)
        running.interrupted()
