"""A35: a full disk makes the platform read-only, and once freed it resumes by itself
(PITFALLS 18).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import indilog.client
from indilog.base.errors import DiskFullError
from indilog.base.log import Log
from indilog.base.log_kinds import LogKind
from indilog.config import KIB, ClusterConfig, Config, node_config
from tests.cluster.faults.small_disk import MIB, SmallDisk, small_disk
from tests.cluster.platform_process import platform
from tests.support.clients import token_headers

pytestmark = pytest.mark.cluster
CONFIG = Config(
    cluster=ClusterConfig(record_bytes_max=64 * KIB, batch_bytes_max=256 * KIB),
    node=node_config(segment_bytes=2 * MIB, disk_retry_s=0.1, append_timeout_s=100.0),
)
DATA = bytes(32 * KIB)
DEADLINE_S = 120.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 96 * MIB) as mounted:
        yield mounted


async def appended_until_full(log: Log, start: int) -> int:
    """Append numbered records, several at once, until each caller is refused; return how many."""
    done = 0
    while True:
        numbers = [start + done + ahead for ahead in range(4)]
        calls = (log.append(b"%d " % number + DATA) for number in numbers)
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, DiskFullError) for error in refused), refused
        assert all("no disk space left on" in str(error) for error in refused)
        done += len(results) - len(refused)
        if len(refused) == len(results):
            return done


async def appended_again(log: Log) -> int:
    """Append as soon as the log accepts a record."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return await log.append(b"again")
        except DiskFullError:
            assert time.monotonic() < deadline, "the log does not recover by itself"
            await asyncio.sleep(0.05)


@pytest.mark.asyncio
async def test_a_full_disk_makes_the_log_read_only_until_there_is_room(disk: SmallDisk) -> None:
    directory = disk.directory / "data"
    async with indilog.client.open(directory, CONFIG) as client:
        log = client.log("load")
        await log.append(b"first")
        disk.fill(leave_bytes=MIB)
        count = 1 + await appended_until_full(log, 1)
        assert await log.read(0) is not None
        assert await log.tail() == count
    async with indilog.client.open(directory, CONFIG) as client:
        log = client.log("load")
        assert await log.tail() == count, "the platform starts on a full disk"
        last = await log.read_prev()
        assert last is not None
        assert last.seqnum == count - 1
        count += await appended_until_full(log, count)
        disk.free()
        assert await appended_again(log) == count
        for _ in range(100):
            count = await log.append(DATA)
    async with indilog.client.open(directory, CONFIG) as client:
        assert await client.log("load").tail() == count + 1


@pytest.mark.parametrize("kind", ["order-first", "owned", "object-store"])
@pytest.mark.asyncio
async def test_a_log_of_another_kind_is_read_only_until_a_trim_has_made_room(
    disk: SmallDisk, kind: LogKind
) -> None:
    """A shared log on the same disk is read-only too, if the cells are in files of its nodes."""
    settings = CONFIG.node.journal
    journal = dataclasses.replace(settings, disk_reserve_bytes=MIB)
    config = dataclasses.replace(CONFIG, node=dataclasses.replace(CONFIG.node, journal=journal))
    async with indilog.client.open(disk.directory / "data", config) as client:
        await client.create_log("load", kind=kind)
        log = client.log("load")
        last = -1
        for _ in range(1_100):  # a closed part of the index, whose records a trim frees at once
            last = await log.append(bytes(4 * KIB))
        disk.fill(leave_bytes=MIB)
        last += await appended_until_full(log, last + 1)
        assert await log.tail() == last + 1, "nothing refused was appended"
        kept = await log.read_prev()
        assert kept is not None
        assert kept.seqnum == last
        await log.trim(last)
        assert await appended_again(log) == last + 1
        assert (await log.read_range(bound=last))[0].data == kept.data
        disk.free()
    async with indilog.client.open(disk.directory / "data", config) as client:
        assert await client.log("load").tail() == last + 2


def post(url: str, body: bytes) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/octet-stream", **token_headers(url)}
    request = urllib.request.Request(f"{url}/logs/load/records", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def get(url: str, path: str) -> bytes:
    request = urllib.request.Request(url + path, headers=token_headers(url))
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        found: bytes = answer.read()
        return found


def is_read_only(url: str, node: str) -> bool:
    status = msgspec.json.decode(get(url, "/status"))
    assert node in status["elsewhere"]
    return bool(status["nodes"][node]["read_only"])


@pytest.mark.repeated("tests/cluster/faults/test_disk_full.py")
def test_processes_on_a_full_disk_answer_507_and_come_back(disk: SmallDisk) -> None:
    with platform(disk.directory / "data", "--processes") as running:
        assert post(running.url, b"first")[0] < 300
        disk.fill(leave_bytes=MIB)
        answers = (post(running.url, DATA) for _ in range(2000))
        status, body = next(answer for answer in answers if answer[0] >= 300)
        assert status == 507
        problem = msgspec.json.decode(body)
        assert problem["title"] == "DiskFullError"
        assert problem["retryable"] is True
        assert "no disk space left on storage-0" in problem["detail"]
        assert get(running.url, "/logs/load/records/0")
        deadline = time.monotonic() + DEADLINE_S
        while not is_read_only(running.url, "storage-0"):
            assert time.monotonic() < deadline, "the gateway gets no disk-full notification"
            time.sleep(0.1)
        assert msgspec.json.decode(get(running.url, "/readyz")) == {"status": "read-only"}
        figure = b'indilog_node{figure="read_only",part="storage-0"} 1.0'
        assert figure in get(running.url, "/metrics")
        disk.free()
        deadline = time.monotonic() + DEADLINE_S
        while (status := post(running.url, b"again")[0]) == 507 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert status < 300
