"""A34: another storage node replaces a lost one, or its shard is finalized. Appends continue, the
copies are restored automatically, and no acknowledged record is lost. The lost node can then
replace others.
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
        ("NODE_STORAGE_LOST_S", "8"),
        ("NODE_HANG_S", "600"),
    ):
        monkeypatch.setenv(f"INDILOG_{name}", value)


async def replicas_are(url: str, wanted: list[str], shard: int = 0) -> dict[str, Any]:
    """Wait until a shard has these replicas; return the status."""
    deadline = time.monotonic() + DEADLINE_S
    async with http_client(url) as http:
        while True:
            status: dict[str, Any] = (await http.get("/status")).json()
            if sorted(status["shards"].get(str(shard), {"replicas": ()})["replicas"]) == wanted:
                return status
            assert time.monotonic() < deadline, status["shards"]
            await asyncio.sleep(0.05)


async def replicas_of(url: str) -> list[str]:
    """Return the replicas of shard 0 when there are two."""
    async with http_client(url) as http:
        while len(found := (await http.get("/status")).json()["shards"]["0"]["replicas"]) != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return list(found)


@pytest.mark.repeated("tests/simulation/test_simulation.py")
@pytest.mark.cluster
@pytest.mark.asyncio
async def test_the_shard_of_a_lost_storage_node_is_finalized_and_its_copies_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14, `finalize_add`: the default. A34: without an operator."""
    monkeypatch.setenv("INDILOG_NODE_STORAGE_REPLACED_S", "12")
    data = tmp_path / "data"
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, APART)
            running.signal_node("storage-0", signal.SIGSTOP)
            await append(log, APART, APART)
            status = await replicas_are(running.url, ["storage-1", "storage-2"], shard=1)
            await replicas_are(running.url, ["storage-1", "storage-2"])
            await check(log, 2 * APART)
            running.signal_node("storage-0", signal.SIGCONT)
    assert status["layout"]["lost_storage_policy"] == "finalize_add"
    assert [status["shards"][shard]["finalized"] for shard in "01"] == [True, False]
    assert [status["shards"][shard]["writer"] for shard in "01"] == ["", "engine-0"]
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), 2 * APART)
            await append(client.log("kept"), 2 * APART, 5)


@pytest.mark.repeated("tests/simulation/test_simulation.py")
@pytest.mark.cluster
@pytest.mark.asyncio
async def test_a_spare_replaces_a_lost_storage_node_and_gets_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14, `remove_replace`."""
    monkeypatch.setenv("INDILOG_CLUSTER_LOST_STORAGE_POLICY", "remove_replace")
    data, count = tmp_path / "data", APART
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, APART)
            for _ in range(2):
                # A node that a busy machine starves may have been replaced, too.
                lost = min(await replicas_of(running.url))
                running.signal_node(lost, signal.SIGSTOP)
                await append(log, count, APART)
                count += APART
                others = {"storage-0", "storage-1", "storage-2"} - {lost}
                await replicas_are(running.url, sorted(others))
                await check(log, count)
                running.signal_node(lost, signal.SIGCONT)
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), count)
            await append(client.log("kept"), count, 5)
