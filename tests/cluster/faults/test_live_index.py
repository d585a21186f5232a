"""`indilog rebuild-index --verify --live` compares what running index nodes hold."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import indilog
from indilog.base.ids import NodeId
from indilog.config import ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_index.index_node import IndexNode
from indilog_index.tag_index import TagIndex
from tests.cluster.platform_process import platform
from tests.support.repeated import repeated

pytestmark = pytest.mark.cluster
RECORDS = 90


def verify(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "indilog", "rebuild-index", str(data), "--verify", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


async def append(url: str, records: int = RECORDS, *, trim: bool = False) -> None:
    async with indilog.connect(url) as client:
        log = client.log("orders")
        for number in range(records):
            await log.append(b"", tags=[f"t{number % 7}"])
        if trim:
            await log.trim(await log.tail())


@pytest.mark.parametrize("arrangement", [(), repeated(("--processes",))])
def test_running_index_nodes_hold_the_rows_of_the_records(
    tmp_path: Path, arrangement: tuple[str, ...]
) -> None:
    data = tmp_path / "data"
    with platform(data, *arrangement) as up:
        for trim in (False, True):
            asyncio.run(append(up.url, trim=trim))
            said = verify(data, "--live", "--url", up.url)
            assert said.returncode == 0, said.stderr
            lines = said.stdout.splitlines()
            assert lines
            assert all("has the rows of the records: " in line for line in lines)


def test_a_row_that_an_index_node_lost_is_found(tmp_path: Path) -> None:
    """One of two index nodes has lost a row of one tag from its memory."""
    config = Config(
        cluster=ClusterConfig(durability="memory"), node=node_config(data_dir=tmp_path / "data")
    )
    said = asyncio.run(_with_lost_row(config))
    assert said.returncode == 1
    assert "index-1-0" in said.stderr
    assert "differs: it has (tag " in said.stderr


async def _with_lost_row(config: Config) -> subprocess.CompletedProcess[str]:
    async with embedded(config) as running:
        log = running.logs.log("orders")
        for number in range(RECORDS):
            await log.append(b"", tags=[f"t{number % 7}"])
        lose_a_row(running)
        running.logs.request_snapshots()
        folder = config.node.data_dir / "snapshots"
        async with asyncio.timeout(200):
            while len([*folder.glob("*/snapshot-*")]) < 2:  # noqa: ASYNC110 a thread writes them
                await asyncio.sleep(0.02)
        return await asyncio.to_thread(verify, config.node.data_dir)


def lose_a_row(running: Platform) -> None:
    role = running.shell.roles[NodeId("index-1-0")]
    assert isinstance(role, IndexNode)
    index = role._store._newest.index
    assert isinstance(index, TagIndex)
    rows = index.rows()
    index.forget(rows.seqnums[rows.tags > 0][:1])
    index.sweep(1 << 20)
