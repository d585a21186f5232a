"""Backups beside real processes: under load, killed in the middle, and restored."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import indilog
from indilog.config import Config, config_from
from indilog_pipeline.backup.create import create
from indilog_pipeline.backup.restore import restore
from indilog_pipeline.log_image import LogImage
from tests.cluster.append_load import CONFIG
from tests.cluster.faults.test_log_image import Acknowledged, records_in
from tests.cluster.platform_process import ROOT, platform

pytestmark = pytest.mark.cluster
S_MAX = 200.0
KILLS = 2
APP = """
import indilog

app = indilog.App("shop")

@app.function
async def buy(ctx: indilog.Context, what: str) -> int:
    return await ctx.log("orders").append(what.encode(), tags=["sold"])
"""


@contextmanager
def load(data: Path) -> Iterator[Acknowledged]:
    """Append to a platform in another process; it is killed at the end."""
    command = [sys.executable, "-m", "tests.cluster.append_load", str(data), "a", "8"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = Acknowledged(process.stdout.fileno())
    try:
        yield said
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(S_MAX)
        said.drain()
        process.stdout.close()


def wait_for(said: Acknowledged, count: int) -> None:
    end = time.monotonic() + S_MAX
    while said.drain() < count:
        assert time.monotonic() < end, f"there are only {said.drain()} records"
        time.sleep(0.02)


def config_in(directory: Path) -> Config:
    """Another layout than that of the load."""
    cluster = {"storage_nodes": 2, "replicas": 2, "index_shards": 3}
    sizes = {"record_bytes_max": CONFIG.cluster.record_bytes_max, "batch_bytes_max": 128 * 1024}
    node = {"data_dir": directory, "segment_bytes": 256 * 1024}
    return config_from(overrides={"cluster": {**cluster, **sizes}, "node": node})


async def append_under_load(config: Config) -> int:
    async with indilog.open(config.node.data_dir, config) as client:
        return await client.log("load").append(b"new")


def test_a_backup_under_load_has_exactly_the_records_below_its_tail(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with load(data) as said:
        wait_for(said, 500)
        before = said.drain()
        made = create(data, tmp_path / "backup", part_bytes=32 * 1024)
        wait_for(said, max(before + 200, made.tail + 1))  # so one is beyond the backup
    config = config_in(tmp_path / "new")
    restored = restore(tmp_path / "backup", config, "embedded")
    assert restored.kept == made.tail, "nothing was trimmed"
    found = records_in(LogImage.read(tmp_path / "new"), "load")
    expected = {s: d for s, d in records_in(LogImage.read(data), "load").items() if s < made.tail}
    assert found == expected
    acknowledged = {s: d for s, d in said.records.items() if s < made.tail}
    assert len(acknowledged) >= before, "all acknowledged before the backup are in it"
    assert all(found[seqnum].strip() == data for seqnum, data in acknowledged.items())
    beyond = max(said.records)
    assert beyond >= made.tail, "the platform continued"
    assert asyncio.run(append_under_load(config)) == restored.next_seqnum > beyond


def test_a_backup_that_is_killed_continues(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with load(data) as said:
        wait_for(said, 2000)
        command = [sys.executable, "-c", SLOW_BACKUP, str(data), str(backup)]
        killed = 0
        while not (backup / "manifest").exists():
            parts = len(list(backup.glob("records-????????")))
            waits_at = parts + 4 if killed < KILLS else -1
            process = subprocess.Popen([*command, str(waits_at)], cwd=ROOT)
            end = time.monotonic() + S_MAX
            while process.poll() is None and len(list(backup.glob("records-*"))) < parts + 3:
                assert time.monotonic() < end
                time.sleep(0.005)
            if killed < KILLS:
                process.send_signal(signal.SIGKILL)
                killed += process.wait(S_MAX) == -signal.SIGKILL
                refused = subprocess.run(
                    [sys.executable, "-m", "indilog", "backup", "verify", str(backup)],
                    cwd=ROOT, capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert refused.returncode == 2
                assert "is not whole; run `indilog backup`" in refused.stderr
            else:
                assert process.wait(S_MAX) == 0
    assert killed == KILLS
    config = config_in(tmp_path / "new")
    restored = restore(backup, config, "embedded")
    found = records_in(LogImage.read(tmp_path / "new"), "load")
    expected = records_in(LogImage.read(data), "load")
    assert found == {s: d for s, d in expected.items() if s < restored.tail}


SLOW_BACKUP = """
import sys, time
from pathlib import Path
from indilog_pipeline.backup.create import create

def progress(part, _):
    time.sleep(600 if part == int(sys.argv[3]) else 0.05)

create(Path(sys.argv[1]), Path(sys.argv[2]), part_bytes=16384, progress=progress)
"""
"""The third argument: before which part it waits to be killed; -1: before none."""


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "indilog", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


async def buy(url: str, things: list[str], deployed: str = "") -> list[int]:
    """Deploy the application if it is given, then call it; return the seqnums of its records."""
    async with indilog.connect(url) as client:
        if deployed:
            await client.deploy({"shop.py": deployed})
        return [await client.call("shop.buy", what=what) for what in things]


async def sold(url: str) -> dict[int, bytes]:
    async with indilog.connect(url) as client:
        return {r.seqnum: r.data for r in await client.log("orders").read_range("sold")}


def test_a_platform_of_processes_is_restored_with_its_applications_and_other_nodes(
    tmp_path: Path,
) -> None:
    """Three sequencers and two storage nodes become one and three, by the commands."""
    data, backup, new = (str(tmp_path / name) for name in ("data", "backup", "new"))
    settings = tmp_path / "new.toml"
    settings.write_text(
        "[cluster]\nsequencers = 1\nstorage_nodes = 3\nreplicas = 2\nindex_shards = 1\n"
        f"[node.journal]\nsegment_bytes = {8 << 20}\n"
    )
    with platform(Path(data), "--processes") as running:
        bought = asyncio.run(buy(running.url, ["0", "1", "2"], APP))
        said = command("backup", data, backup)
        assert "Backed up" in said
        [beyond] = asyncio.run(buy(running.url, ["late"]))
    assert "The backup is whole" in command("backup", "verify", backup)
    command("backup", "restore", backup, new, "--processes", "--config", str(settings))
    with platform(Path(new), "--processes", "--config", str(settings)) as running:
        assert asyncio.run(sold(running.url)) == dict(zip(bought, (b"0", b"1", b"2"), strict=True))
        [later] = asyncio.run(buy(running.url, ["new"]))
        assert later > beyond
