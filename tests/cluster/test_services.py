"""Services in real workers: each worker runs one, also after a kill, until the next version."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import indilog
from indilog.base.log import Session
from indilog.remote_client import RemoteClient
from indilog.runtime.cluster.assembly import embedded
from tests.cluster.function_platform import Platform, config_in, running, served, until

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

SOURCE = """
import asyncio, os
import indilog

app = indilog.App("demo")

@app.function
async def version() -> int:
    return VERSION

@app.function
async def fail_now(ctx: indilog.Context) -> None:
    await ctx.log("fail").append(b"now")

@app.service
async def drive(ctx: indilog.Context) -> None:
    await ctx.log("drive").append(b"%d" % os.getpid(), tags=[f"began {VERSION}"])
    try:
        if await ctx.log("fail").read_next(wait=600):
            raise RuntimeError("planted")
    finally:
        await asyncio.shield(ctx.log("drive").append(b"", tags=[f"ended {VERSION}"]))

VERSION = 1
"""


@pytest_asyncio.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    async with running(tmp_path, workers=2) as there:
        assert (await there.deploy("demo", SOURCE)).status_code == 200
        yield there


async def began(client: RemoteClient, version: int, count: int) -> list[int]:
    """Wait until a service began `count` times; return the processes."""
    log, found, bound = client.log("drive"), list[int](), 0
    while len(found) < count:
        record = await log.read_next(f"began {version}", bound, wait=100)
        assert record is not None
        found.append(int(record.data))
        bound = record.seqnum + 1
    return found


async def test_each_worker_runs_a_service_and_a_killed_one_is_replaced(
    platform: Platform,
) -> None:
    async with indilog.connect(platform.url) as client:
        first = await began(client, 1, 2)
        assert len(set(first)) == 2
        os.kill(first[0], signal.SIGKILL)
        third = (await began(client, 1, 3))[2]
        assert third not in first
    services = platform.host.status()["services"]
    await until(lambda: platform.host.status()["services"]["demo.drive"]["running"] == 2)
    assert services["demo.drive"]["failures"] == 0
    assert platform.host.status()["calls_running"] == 0


@pytest.mark.repeated("tests/unit/compute/workers/test_services.py")
async def test_a_new_version_ends_the_services_of_the_one_before(platform: Platform) -> None:
    async with indilog.connect(platform.url) as client:
        await began(client, 1, 2)
        redeployed = await platform.deploy("demo", SOURCE.replace("VERSION = 1", "VERSION = 2"))
        assert redeployed.status_code == 200
        await began(client, 2, 2)
        ended = await client.log("drive").read_next("ended 1", wait=100)
        assert ended is not None
        assert await client.log("drive").read_next("ended 1", ended.seqnum + 1, wait=100)
    assert (await platform.http.get("/apps/demo")).json()["services"] == ["drive"]


@pytest.mark.repeated("tests/unit/compute/workers/test_services.py")
async def test_a_service_that_fails_is_seen_in_the_status(platform: Platform) -> None:
    async with indilog.connect(platform.url) as client:
        await began(client, 1, 2)
        await platform.call("demo.fail_now")
        await began(client, 1, 5)

    def reported() -> dict[str, object]:
        services: dict[str, dict[str, object]] = platform.host.status()["services"]
        return services["demo.drive"]

    await until(lambda: reported()["failures"] != 0)
    assert reported()["problem"] == "demo.py, line 20: RuntimeError: planted."
    assert (await asyncio.wait_for(platform.call("demo.version"), 120)).json() == 1


async def test_a_platform_that_stops_cancels_its_services_without_complaint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, workers=1) as there:
        assert (await there.deploy("demo", SOURCE)).status_code == 200
        async with indilog.connect(there.url) as client:
            await began(client, 1, 1)
    assert "service failed" not in capsys.readouterr().out


LEAVES = """
import asyncio
import indilog

app = indilog.App("demo")

@app.function
async def nothing() -> None: ...

@app.service
async def drive(ctx: indilog.Context) -> None:
    await ctx.log("drive").append(b"", tags=["began"])
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.2)
        await ctx.log("drive").append(b"", tags=["left"])
"""


async def test_a_service_writes_its_last_record_before_its_platform_stops(tmp_path: Path) -> None:
    """A driver of workflows records that it leaves. Otherwise other nodes wait for its lease."""
    config = config_in(tmp_path, workers=2)
    async with embedded(config) as there:
        log = there.logs.log("drive", Session())
        async with served(config, there.logs) as platform:
            assert (await platform.deploy("demo", LEAVES)).status_code == 200
            while len(await log.read_range("began")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(await log.read_range("left")) == 2


async def test_a_service_writes_its_last_record_before_its_worker_is_replaced(
    tmp_path: Path,
) -> None:
    """A driver of workflows that does not leave looks as if its runs had crashed their worker."""
    async with running(tmp_path, workers=1) as platform:
        assert (await platform.deploy("demo", LEAVES)).status_code == 200
        async with indilog.connect(platform.url) as client:
            log = client.log("drive")
            assert await log.read_next("began", wait=100) is not None
            [worker] = platform.host._pool.workers
            platform.host._pool._replace(worker, "a test replaces it")
            assert await log.read_next("left", wait=100) is not None
            assert platform.host.status()["worker_restarts"] <= 1
