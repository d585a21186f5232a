"""Following a log over a restart of the platform: each record comes once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import structlog

import indilog
from bench.support.servers import free_port
from indilog.link.remote import RemoteLog
from indilog.remote_client import connect
from tests.cluster.platform_process import ROOT, platform

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]


PATIENT = """
from runpy import run_module
from indilog.cli import follow

follow.RESUME_S = 250.0
run_module("indilog", run_name="__main__", alter_sys=True)
"""
"""The command of the first argument; a busy machine starts a platform late."""


async def append(url: str, *datas: bytes) -> None:
    async with connect(url) as client:
        for data in datas:
            await client.log("orders").append(data, tags=["t"])


async def test_a_subscription_and_the_command_continue_after_kill_9_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteLog, "_resume_s", 250.0)
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def subscribe(url: str) -> None:
        async with connect(url) as client:
            async for record in client.log("orders").subscribe("t"):
                seen.put_nowait(record.data)

    async with asyncio.timeout(300):
        # The system gives no connection the port while no platform runs.
        port = str(free_port())
        with platform(tmp_path, "--port", port) as first:
            await append(first.url, b"0", b"1")
            subscribing = asyncio.create_task(subscribe(first.url))
            following = await asyncio.create_subprocess_exec(
                sys.executable, "-c", PATIENT, "log", "read", "orders", "--tag", "t",
                "--follow", "--json", "--url", first.url,
                cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert following.stdout is not None
            assert [await seen.get() for _ in range(2)] == [b"0", b"1"]
            lines = [await following.stdout.readline() for _ in range(2)]
            first.kill_everything()
        with platform(tmp_path, "--port", port) as second:
            assert second.url == first.url
            await append(second.url, b"2", b"3")
            assert [await seen.get() for _ in range(2)] == [b"2", b"3"]
            lines += [await following.stdout.readline() for _ in range(2)]
            assert [b'"data":"%d"' % n in line.replace(b" ", b"") for n, line in enumerate(lines)]
            assert seen.empty()
            subscribing.cancel()
            following.kill()
            _, said = await following.communicate()
            assert said.count(b"is unreachable") == 1


async def test_a_client_that_leaves_its_subscription_logs_nothing(tmp_path: Path) -> None:
    with platform(tmp_path) as running:
        async with connect(running.url) as client:
            with structlog.testing.capture_logs() as said:
                log = client.log("orders")
                await log.append(b"1")
                async for record in log.subscribe():
                    assert record.data == b"1"
                    break
                await client.close()
                with pytest.raises(indilog.ClientClosedError):
                    await log.append(b"2")
                await asyncio.sleep(0)
        assert said == []
