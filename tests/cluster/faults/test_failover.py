"""A24: another sequencer takes over from a primary that hangs. When that one continues, it changes
nothing; nothing acknowledged is lost.
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

SEQUENCERS = ("sequencer-0", "sequencer-1", "sequencer-2")


@pytest.fixture(autouse=True)
def _three_sequencers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("CLUSTER_STORAGE_NODES", "1"),
        ("CLUSTER_REPLICAS", "1"),
        ("CLUSTER_SEQUENCERS", "3"),
        ("CLUSTER_INDEX_SHARDS", "1"),
        ("NODE_RECORD_CACHE_BYTES_MAX", "0"),
        ("NODE_HANG_S", "600"),
    ):
        monkeypatch.setenv(f"INDILOG_{name}", value)


async def primary_of(url: str, *, above: int = 0) -> tuple[str, int]:
    """Wait for a primary of a term above `above`; return it and its term."""
    deadline = time.monotonic() + DEADLINE_S
    async with http_client(url) as http:
        while True:
            status: dict[str, Any] = (await http.get("/status")).json()
            figures = {n: status["nodes"].get(n, {}) for n in SEQUENCERS}
            leading = {f["term"]: n for n, f in figures.items() if "tail" in f}
            if leading and max(leading) > above:
                return leading[max(leading)], max(leading)
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.05)


@pytest.mark.cluster
@pytest.mark.asyncio
async def test_another_sequencer_takes_over_from_a_primary_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STORAGE_NODES", "REPLICAS", "INDEX_SHARDS"):
        monkeypatch.setenv(f"INDILOG_CLUSTER_{name}", "1")
    data = tmp_path / "data"
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            await append(log, 0, 20)
            first, term = await primary_of(running.url)
            running.signal_node(first, signal.SIGSTOP)
            await append(log, 20, 20)
            second, term = await primary_of(running.url, above=term)
            assert second != first
            running.signal_node(first, signal.SIGCONT)
            await append(log, 40, 20)
            running.signal_node(second, signal.SIGSTOP)
            await append(log, 60, 20)
            third, _ = await primary_of(running.url, above=term)
            assert third != second
            running.signal_node(second, signal.SIGCONT)
            await check(log, 80)
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            await check(client.log("kept"), 80)
            await append(client.log("kept"), 80, 5)
