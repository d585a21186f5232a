"""A log and a stream are mirrored to another platform while everything is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

import indilog
from bench.support.servers import free_port
from bokistream import Streams
from indilog.base.errors import IndilogError
from indilog.mirror import MARK_TAG
from tests.cluster.platform_process import ROOT, PlatformProcess, platform

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RECORDS = 400


class Mirror:
    """A command that copies, in a process that is killed and started again."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *self.words],
            cwd=ROOT,
            env=os.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill_and_start(self) -> None:
        self.stop()
        self.process = self._started()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(60)


class Place:
    """A platform that is killed, and started again at the same address."""

    def __init__(self, directory: Path, until_end: ExitStack) -> None:
        self.directory = directory
        self.until_end = until_end
        # The system gives no connection the port while no platform runs.
        self.port = str(free_port())
        self.running = self._started()
        self.url = self.running.url

    def _started(self) -> PlatformProcess:
        return self.until_end.enter_context(platform(self.directory, "--port", self.port))

    def kill_and_start(self) -> None:
        self.running.kill_everything()
        self.running = self._started()


@asynccontextmanager
async def streams_at(url: str) -> AsyncIterator[tuple[indilog.Log, Streams]]:
    async with indilog.connect(url) as client:
        yield client.log("orders"), Streams(client.log("events"))


async def append(url: str, start: int) -> None:
    async with streams_at(url) as (log, streams):
        await streams.create("s", exist_ok=True)
        async with streams.writer("s") as writer:
            for number in range(start, start + RECORDS // 4):
                await log.append(b"%d" % number, tags=[f"t{number % 3}"])
                await writer.append(b"%d" % number, txid=number)


async def read(
    url: str,
) -> tuple[list[tuple[bytes, tuple[str | int, ...]]], list[tuple[int, int, bytes]]]:
    async with streams_at(url) as (log, streams):
        records = [
            (r.data, r.tags)
            for start in range(0, 10_000, 1_000)
            for r in await log.read_range(bound=start, fresh=True)
            if r.seqnum < start + 1_000 and MARK_TAG not in r.tags
        ]
        try:
            copied = [(r.offset, r.txid, r.data) async for r in streams.read("s")]
        except IndilogError:
            copied = []
        return records, copied


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < ends, what
        time.sleep(0.2)


@pytest.mark.repeated("tests/unit/bokistream/test_mirror.py")
def test_each_record_is_copied_once_whatever_is_killed(tmp_path: Path) -> None:
    with ExitStack() as until_end:
        source, target = (Place(tmp_path / name, until_end) for name in ("source", "target"))
        asyncio.run(append(source.url, 0))
        mirrors = [
            Mirror("indilog", "mirror", source.url, target.url, "--log", "orders"),
            Mirror("bokistream", "mirror", source.url, target.url, "events", "s"),
        ]
        for mirror in mirrors:
            until_end.callback(mirror.stop)
        kills = [target.kill_and_start, source.kill_and_start]
        for round_ in range(1, 4):
            wait_until(
                lambda: len(asyncio.run(read(target.url))[0]) > 0, "the mirror copies nothing"
            )
            asyncio.run(append(source.url, round_ * RECORDS // 4))
            if kills:
                kills.pop()()
            for mirror in mirrors:
                mirror.kill_and_start()
        expected = asyncio.run(read(source.url))
        assert [len(part) for part in expected] == [RECORDS, RECORDS]
        wait_until(
            lambda: [len(part) for part in asyncio.run(read(target.url))] == [RECORDS, RECORDS],
            "the copies are not complete",
        )
        assert asyncio.run(read(target.url)) == expected
