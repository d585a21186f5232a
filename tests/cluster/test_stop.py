"""Ctrl-C on a platform with calls in flight, as its clients see it (ARCHITECTURE 11)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

import indilog
from tests.cluster.platform_process import PlatformProcess, platform
from tests.support.clients import http_client

pytestmark = pytest.mark.cluster
APP = '''
import asyncio
import indilog

app = indilog.App("slow")

@app.function
async def nap(ctx: indilog.Context) -> None:
    """Say that it runs, then sleep for long."""
    await ctx.log("naps").append(b"begun", tags=["begun"])
    await asyncio.sleep(60)
'''


async def watches(http: httpx.AsyncClient) -> int:
    """Return how many reads wait for a record."""
    count: int = (await http.get("/status")).json()["engine"]["progress"]["watches"]
    return count


async def interrupt(running: PlatformProcess) -> tuple[httpx.Response, httpx.Response, str]:
    """Stop the platform during a call and a read; return both answers and the platform's log."""
    async with http_client(running.url, timeout=150) as http:
        deployed = await http.post("/apps", json={"sources": {"slow.py": APP}})
        assert deployed.status_code == httpx.codes.OK, deployed.text
        call = asyncio.create_task(http.post("/functions/slow/nap", json={}))
        async with indilog.connect(running.url) as client:
            assert await client.log("naps").read_next("begun", wait=100) is not None
        before = await watches(http)
        read = asyncio.create_task(http.get("/logs/naps/records?tag=never&wait=60"))
        while await watches(http) <= before:  # noqa: ASYNC110 - not announced
            await asyncio.sleep(0.05)
        logged = await asyncio.to_thread(running.interrupted)
        return await call, await read, logged


def test_ctrl_c_answers_every_caller_with_problem_details_and_logs_no_traceback(
    tmp_path: Path,
) -> None:
    with platform(tmp_path) as running:
        call, read, logged = asyncio.run(interrupt(running))
    for answer, retryable in ((call, False), (read, True)):
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["retryable"] is retryable
    assert "Traceback" not in logged
    assert "ASGI" not in logged


async def kill(running: PlatformProcess) -> tuple[object, ...]:
    """Kill the platform during a call and a read; return the errors that both clients get."""
    async with indilog.connect(running.url) as client:
        await client.deploy({"slow.py": APP})
        call = asyncio.create_task(client.call("slow.nap"))
        log = client.log("naps")
        assert await log.read_next("begun", wait=100) is not None
        read = asyncio.create_task(log.read_next("never", wait=60))
        await log.tail()  # sent after the read, so the read has arrived
        await asyncio.to_thread(running.kill_everything)
        under_way = await asyncio.gather(call, read, return_exceptions=True)
        later = await asyncio.gather(log.append(b"x"), return_exceptions=True)
        return (*under_way, *later)


@pytest.mark.repeated("tests/unit/link/test_link_messages.py")
def test_when_its_compute_node_dies_a_client_learns_what_it_may_repeat(tmp_path: Path) -> None:
    with platform(tmp_path, "--processes") as running:
        call, read, later = asyncio.run(kill(running))
    assert isinstance(call, indilog.CallOutcomeUnknownError)
    assert not call.retryable
    for nothing_done in (read, later):
        assert isinstance(nothing_done, indilog.NotReadyError)
        assert nothing_done.retryable
