"""A4, A5: the primary sequencer of a running platform loses its directory, or a part of its
journal. The log continues after the last acknowledged record, also after a restart of the platform.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import indilog
from indilog.roles.role import FrameKind
from indilog.runtime.journal.segment import segment_numbers, segment_path
from indilog.runtime.journal.segment_scan import Damage, SegmentScan
from tests.cluster.faults.test_wiped_replica import DEADLINE_S, append, check, process_of, wipe
from tests.cluster.platform_process import platform
from tests.support.clients import http_client
from tests.support.repeated import repeated

RECORDS = 60
PRIMARY, BACKUP = "sequencer-0", "sequencer-1"


def spoil(node: str, data: Path) -> None:
    """Make some metalog entries in the middle unreadable, each by several flipped bits."""
    directory = data / node
    number = segment_numbers(directory)[-1]
    path = segment_path(directory, number)
    found = [
        frame
        for frame in SegmentScan(path, number, newest=True)
        if not isinstance(frame, Damage) and frame[0].kind == FrameKind.METALOG
    ]
    assert len(found) > 20
    with path.open("r+b") as file:
        for _, payload, place in found[8:11]:
            file.seek(place.offset)
            file.write(bytes(byte ^ 0x5A for byte in payload))


def spoil_and_kill(node: str, data: Path) -> None:
    pid = process_of(node, data)
    os.kill(pid, signal.SIGSTOP)
    spoil(node, data)
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _three_sequencers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("STORAGE_NODES", "1"),
        ("REPLICAS", "1"),
        ("SEQUENCERS", "3"),
        ("INDEX_SHARDS", "1"),
    ):
        monkeypatch.setenv(f"INDILOG_CLUSTER_{name}", value)
    monkeypatch.setenv("INDILOG_NODE_RECORD_CACHE_BYTES_MAX", "0")


@pytest.mark.repeated("tests/simulation/test_simulation.py")
@pytest.mark.cluster
@pytest.mark.asyncio
@pytest.mark.parametrize("lose", [repeated(wipe), spoil_and_kill])
async def test_a_primary_that_lost_its_disk_or_a_part_of_it_continues_after_what_was_there(
    tmp_path: Path, lose: Callable[[str, Path], None]
) -> None:
    data = tmp_path / "data"
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, RECORDS)
            lose(PRIMARY, data)
            await append(log, RECORDS, 20)
            await check(log, RECORDS + 20)
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), RECORDS + 20)
            await append(client.log("kept"), RECORDS + 20, 5)


async def primary_is_learner(url: str, wanted: int) -> None:
    """Wait until the platform's status shows this value of `learner` for the primary."""
    deadline = time.monotonic() + DEADLINE_S
    async with http_client(url) as http:
        while True:
            status: dict[str, Any] = (await http.get("/status")).json()
            if status["nodes"].get(PRIMARY, {}).get("learner") == wanted:
                return
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.1)


@pytest.mark.repeated("tests/unit/cli/test_cluster_status.py")
@pytest.mark.cluster
@pytest.mark.asyncio
async def test_the_status_shows_that_a_primary_waits_for_a_backup(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, 5)
            running.signal_node(BACKUP, signal.SIGSTOP)
            wipe(PRIMARY, data)
            await primary_is_learner(running.url, 1)
            running.signal_node(BACKUP, signal.SIGCONT)
            await append(log, 5, 5)
            await primary_is_learner(running.url, 0)
            await check(log, 10)


@pytest.mark.repeated("tests/unit/ordering/test_primary.py")
@pytest.mark.cluster
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param((PRIMARY, BACKUP), id="primary"),
        repeated((BACKUP, "sequencer-2"), "backups"),
    ],
)
async def test_a_platform_that_lost_two_of_three_sequencers_says_what_to_do(
    tmp_path: Path, lost: tuple[str, str]
) -> None:
    """One restored copy of a directory is enough (A4). An intact sequencer is ready before it
    knows what the others lost.
    """
    data = tmp_path / "data"
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await append(client.log("kept"), 0, 5)
    first, second = lost
    for node in lost:
        shutil.move(data / node, tmp_path / node)
    said = f"does not start: .* disk of {first}, and on that of {second} too"
    for _ in range(2):
        with (
            pytest.raises(AssertionError, match=said),
            platform(data, "--processes"),
        ):
            raise AssertionError("it has started")
    shutil.rmtree(data / second)
    shutil.move(tmp_path / second, data / second)
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), 5)
