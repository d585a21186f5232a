"""Appends continue while a storage node hangs, if the ack quorum is smaller than the replicas.

The node fetches what it missed.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

import indilog
from tests.cluster.faults.test_wiped_replica import DEADLINE_S, append, check, records_on_disk
from tests.cluster.platform_process import platform

NODES = ("storage-0", "storage-1", "storage-2")
APART = 20


@pytest.mark.repeated("tests/simulation/test_simulation.py")
@pytest.mark.cluster
@pytest.mark.asyncio
async def test_appends_continue_while_any_one_storage_node_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("CLUSTER_STORAGE_NODES", "3"),
        ("CLUSTER_REPLICAS", "3"),
        ("CLUSTER_ACK_QUORUM", "2"),
        ("CLUSTER_SEQUENCERS", "3"),
        ("CLUSTER_INDEX_SHARDS", "1"),
        ("NODE_RECORD_CACHE_BYTES_MAX", "0"),
        ("NODE_HANG_S", "600"),
    ):
        monkeypatch.setenv(f"INDILOG_{name}", value)
    data, count = tmp_path / "data", APART
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, APART)
            for node in NODES:
                running.signal_node(node, signal.SIGSTOP)
                await append(log, count, APART)
                count += APART
                await check(log, count)
                running.signal_node(node, signal.SIGCONT)
                deadline = time.monotonic() + DEADLINE_S
                while not records_on_disk(data / node) >= set(range(count)):
                    assert time.monotonic() < deadline, "the replica has not fetched the records"
                    await asyncio.sleep(0.05)
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), count)
            await append(client.log("kept"), count, 5)
