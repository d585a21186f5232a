"""Data directories of real processes are read while they append, after kill -9, and rebuilt."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import indilog
from indilog.link.access import reach
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.rebuild.verify import verify_index
from indilog_pipeline.record_batches import Filter, read_records
from indilog_pipeline.session import why_not
from tests.cluster.platform_process import ROOT, platform

pytestmark = pytest.mark.cluster
READS = 6
RECORDS, TAGS = 120, 4


def records_in(image: LogImage, log: str) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for batch in read_records(image, columns=("seqnum", "data"), wanted=Filter(log)):
        found |= {row["seqnum"]: row["data"] for row in batch.to_pylist()}
    return found


class Acknowledged:
    """The output of `tests.cluster.append_load`: each line's record was acknowledged before."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._rest = b""
        self.records: dict[int, bytes] = {}

    def drain(self) -> int:
        """Read all lines printed so far; return how many records they name."""
        while True:
            try:
                read = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                break
            if not read:
                break
            *lines, self._rest = (self._rest + read).split(b"\n")
            for line in lines:
                seqnum, data = line.split(b" ", 1)
                self.records[int(seqnum)] = data
        return len(self.records)

    def check(self, image: LogImage) -> None:
        found = records_in(image, "load")
        missing = {s for s, data in self.records.items() if found.get(s, b"").strip() != data}
        assert not missing


def test_an_image_has_all_acknowledged_records_of_a_busy_and_of_a_killed_platform(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.cluster.append_load", str(tmp_path / "data"), "a", "8"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = Acknowledged(process.stdout.fileno())
    try:
        asyncio.run(_more_than(said, 0))
        for _ in range(READS):
            count = said.drain()
            said.check(LogImage.read(tmp_path / "data"))
            asyncio.run(_more_than(said, count + 50))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    said.drain()
    said.check(LogImage.read(tmp_path / "data"))
    process.stdout.close()


async def _more_than(said: Acknowledged, count: int) -> None:
    async with asyncio.timeout(200):
        while said.drain() <= count:  # noqa: ASYNC110 a pipe of another process
            await asyncio.sleep(0.02)


async def _append(url: str) -> list[int]:
    async with indilog.connect(url) as client:
        log = client.log("orders")
        seqnums: list[int] = []
        for first in range(0, RECORDS, TAGS):  # in turn, so that there are many metalog entries
            numbers = range(first, first + TAGS)
            appends = [log.append(b"%d" % n, tags=[f"t{n % TAGS}"]) for n in numbers]
            seqnums += await asyncio.gather(*appends)
        return seqnums


async def _started_from_snapshots(url: str, index_nodes: int) -> None:
    """Wait until all index nodes report a snapshot. They have too few entries to write one, so it
    is the rebuilt one.
    """
    endpoint = reach(url)
    async with httpx.AsyncClient(**endpoint.for_httpx, timeout=120) as client:
        found: list[int] = []
        async with asyncio.timeout(200):
            while len(found) < index_nodes or not all(found):
                figures = (await client.get(f"{url}/status")).json()["nodes"]
                found = [f["snapshot_position"] for name, f in figures.items() if "index-" in name]
                await asyncio.sleep(0.1)


async def _tagged(url: str, tag: str) -> list[bytes]:
    async with indilog.connect(url) as client:
        return [r.data for r in await client.log("orders").read_range(tag, bound=0, limit=1000)]


@pytest.mark.repeated("tests/unit/cli/test_rebuild_index.py")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "engine", ["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.repeated])]
)
def test_index_nodes_that_lost_their_disks_start_from_rebuilt_snapshots(
    tmp_path: Path, engine: str
) -> None:
    """Three sequencers, two replicas, two index shards, each in a process of its own."""
    if engine == "spark" and (reason := why_not()):
        pytest.skip(reason)
    data = tmp_path / "data"
    with platform(data, "--processes") as up:
        seqnums = asyncio.run(_append(up.url))
        live = records_in(LogImage.read(data), "orders")
        assert set(live) == set(seqnums)
        up.kill_everything()
    image = LogImage.read(data)
    assert len(image.view.storage_nodes) > 1
    assert records_in(image, "orders") == live
    nodes = [data / node for node in image.view.index_nodes]
    assert len(nodes) > 1
    for folder in (*nodes, data / "snapshots"):
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "indilog", "rebuild-index", str(data), "--engine", engine]
    command += ["--master", "local[2]"] if engine == "spark" else []
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    first, *shards = said.splitlines()
    assert first == f"Engine {engine}, as asked."
    assert sum(int(line.split()[3]) for line in shards) >= 3 * RECORDS
    compared, difference, *_ = verify_index(data)
    assert (len(compared), difference) == (len(nodes), None)
    with platform(data, "--processes") as up:
        asyncio.run(_started_from_snapshots(up.url, len(nodes)))
        for tag in range(TAGS):
            found = asyncio.run(_tagged(up.url, f"t{tag}"))
            assert {int(data) for data in found} == set(range(tag, RECORDS, TAGS))
