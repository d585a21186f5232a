"""A4: the directory of one storage node is wiped under a running platform. No shard becomes
shorter, appends continue, and the repaired node can then replace the other one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

import indilog
from indilog.base.log import Log
from indilog.kernel.records import batch_header
from indilog.roles.role import FrameKind
from indilog.runtime.journal.segment import segment_numbers, segment_path
from indilog.runtime.journal.segment_scan import Damage, SegmentScan
from tests.cluster.platform_process import platform

RECORDS = 200
DEADLINE_S = 200.0


def process_of(node: str, data: Path) -> int:
    """Return the process that runs `node` of the platform in `data`, from the process table."""
    lock = (data / node / "LOCK").stat().st_ino
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and lock in open_inodes(entry / "fd"):
            return int(entry.name)
    raise AssertionError(f"no process has {node}")


def open_inodes(descriptors: Path) -> set[int]:
    """Return what a process has open; it may end, or close some, meanwhile."""
    found: set[int] = set()
    with suppress(OSError):
        for descriptor in descriptors.iterdir():
            with suppress(OSError):
                found.add(descriptor.stat().st_ino)
    return found


def wipe(node: str, data: Path) -> None:
    """Remove a node's directory and kill its process; its supervisor starts another one."""
    pid = process_of(node, data)
    os.kill(pid, signal.SIGSTOP)
    shutil.rmtree(data / node)
    os.kill(pid, signal.SIGKILL)


def records_on_disk(directory: Path) -> set[int]:
    """Return the localids that a journal has, by reading its files beside the process."""
    found: set[int] = set()
    for number in segment_numbers(directory) if directory.exists() else ():
        for frame in SegmentScan(segment_path(directory, number), number, newest=True):
            if not isinstance(frame, Damage):
                header, payload, _ = frame
                if header.kind in (FrameKind.RECORDS, FrameKind.REPAIRED):
                    batch = batch_header(payload)
                    found.update(range(batch.first, batch.end))
    return found


async def append(log: Log, start: int, count: int) -> None:
    """Append numbered records, and repeat appends that time out or are refused."""
    for number in range(start, start + count):
        assert await log.append(b"%d" % number) == number


async def check(log: Log, count: int) -> None:
    found: list[bytes] = []
    while page := await log.read_range(bound=len(found), limit=1000):
        found += [record.data for record in page]
    assert found == [b"%d" % number for number in range(count)]


@pytest.mark.repeated("tests/simulation/test_simulation.py")
@pytest.mark.cluster
@pytest.mark.asyncio
async def test_a_wiped_replica_shortens_nothing_and_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDILOG_CLUSTER_STORAGE_NODES", "2")
    monkeypatch.setenv("INDILOG_CLUSTER_REPLICAS", "2")
    monkeypatch.setenv("INDILOG_CLUSTER_SEQUENCERS", "1")
    monkeypatch.setenv("INDILOG_NODE_RECORD_CACHE_BYTES_MAX", "0")
    data = tmp_path / "data"
    count = RECORDS
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, count)
            for node in ("storage-1", "storage-0"):
                wipe(node, data)
                await append(log, count, 20)
                count += 20
                deadline = time.monotonic() + DEADLINE_S
                while not records_on_disk(data / node) >= set(range(count)):
                    assert time.monotonic() < deadline, "the replica is not repaired"
                    await asyncio.sleep(0.05)
                await check(log, count)
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), count)
