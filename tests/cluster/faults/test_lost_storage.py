"""A34: another storage node replaces a lost one. Appends continue, the copies are restored
automatically, and no acknowledged record is lost. The lost node can then replace others.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import indilog
from tests.cluster.faults.test_wiped_replica import DEADLINE_S, append, check
from tests.cluster.platform_process import platform
from tests.support.clients import http_client

APART = 20


@pytest.fixture(autouse=True)
def _a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("CLUSTER_STORAGE_NODES", "3"),
        ("CLUSTER_REPLICAS", "2"),
        ("CLUSTER_SEQUENCERS", "3"),
        ("CLUSTER_INDEX_SHARDS", "1"),
        ("NODE_RECORD_CACHE_BYTES_MAX", "0"),
        ("NODE_STORAGE_LOST_S", "1"),
        ("NODE_HANG_S", "600"),
    ):
        monkeypatch.setenv(f"INDILOG_{name}", value)


async def replicas_are(url: str, wanted: list[str]) -> None:
    """Wait until the one shard has these replicas."""
    deadline = time.monotonic() + DEADLINE_S
    async with http_client(url) as http:
        while True:
            status: dict[str, Any] = (await http.get("/status")).json()
            if sorted(status["shards"]["0"]["replicas"]) == wanted:
                return
            assert time.monotonic() < deadline, status["shards"]
            await asyncio.sleep(0.05)


@pytest.mark.cluster
@pytest.mark.asyncio
async def test_a_spare_replaces_a_lost_storage_node_and_gets_its_records(tmp_path: Path) -> None:
    data, count = tmp_path / "data", APART
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, APART)
            await replicas_are(running.url, ["storage-0", "storage-1"])
            for lost, others in (
                ("storage-0", ["storage-1", "storage-2"]),
                ("storage-1", ["storage-0", "storage-2"]),
                ("storage-2", ["storage-0", "storage-1"]),
            ):
                running.signal_node(lost, signal.SIGSTOP)
                await append(log, count, APART)
                count += APART
                await replicas_are(running.url, others)
                await check(log, count)
                running.signal_node(lost, signal.SIGCONT)
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), count)
            await append(client.log("kept"), count, 5)
