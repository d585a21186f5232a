"""Backups beside real processes: under load, killed in the middle, and restored."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import indilog
from indilog.base.log_kinds import LogKind
from indilog.config import Config, config_from
from indilog.remote_client import RemoteClient
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


@pytest.mark.repeated("tests/unit/pipeline/test_backup.py")
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


OTHERS: dict[str, LogKind] = {
    "objects": "object-store",
    "chains": "order-first",
    "owned": "owned",
    "switched": "owned",
}


class Appends:
    """Callers that append to logs of several kinds until they are stopped.

    Attributes:
        acknowledged: the data of acknowledged records by seqnum, for each log.
    """

    def __init__(self, client: RemoteClient) -> None:
        self.acknowledged: dict[str, dict[int, bytes]] = {name: {} for name in OTHERS}
        self._client = client
        self._tasks = [asyncio.create_task(self._append(name)) for name in OTHERS]

    async def _append(self, name: str) -> None:
        log, known = self._client.log(name), self.acknowledged[name]
        for n in itertools.count():
            data = b"%s %d" % (name.encode(), n)
            known[await log.append(data, tags=[f"t{n % 3}"])] = data

    async def wait_for(self, count: int) -> None:
        """Wait until each log has so many more acknowledged records."""
        wanted = {name: len(known) + count for name, known in self.acknowledged.items()}
        async with asyncio.timeout(S_MAX):
            while any(len(self.acknowledged[name]) < least for name, least in wanted.items()):
                for task in self._tasks:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def records_of(
    client: RemoteClient, tag: str | None = None
) -> dict[str, dict[int, tuple[bytes, float]]]:
    """Return the data and times of all records by seqnum, for each log."""
    found: dict[str, dict[int, tuple[bytes, float]]] = {}
    for name in OTHERS:
        of_log = found[name] = {}
        bound = 0
        while page := await client.log(name).read_range(tag, bound=bound, fresh=True):
            of_log |= {r.seqnum: (r.data, r.ordered_at) for r in page}
            bound = page[-1].seqnum + 1
    return found


async def load_and_back_up(
    url: str, data: Path, backup: Path
) -> tuple[dict[str, dict[int, bytes]], list[dict[str, dict[int, tuple[bytes, float]]]]]:
    """Make a backup under load. Return what was acknowledged before, and finally all records and
    those with a tag.
    """
    async with indilog.connect(url) as client:
        for name, kind in OTHERS.items():
            if name != "switched":
                await client.create_log(name, kind)
        appends = Appends(client)
        await appends.wait_for(20)
        for kind in ("object-store", "order-first", OTHERS["switched"]):
            await client.switch_log("switched", kind)
            await appends.wait_for(10)
        before = {name: dict(known) for name, known in appends.acknowledged.items()}
        await asyncio.to_thread(create, data, backup, part_bytes=32 * 1024)
        await appends.wait_for(20)
        await client.switch_log("owned", "shared")
        await appends.wait_for(5)
        await appends.stop()
        return before, [await records_of(client), await records_of(client, "t1")]


@pytest.mark.repeated("tests/unit/pipeline/test_backup_of_kinds.py")
def test_logs_of_all_kinds_are_backed_up_under_load_and_restored_on_other_nodes(
    tmp_path: Path,
) -> None:
    data, backup, new = tmp_path / "data", tmp_path / "backup", tmp_path / "new"
    with platform(data, "--nodes", "3") as running:
        before, expected = asyncio.run(load_and_back_up(running.url, data, backup))
    assert "logs of other kinds" in command("backup", "verify", str(backup))
    command("backup", "restore", str(backup), str(new), "--nodes", "2")

    async def check(url: str) -> None:
        async with indilog.connect(url) as client:
            assert {each.log: each.kind for each in await client.logs()} == OTHERS
            found = [await records_of(client), await records_of(client, "t1")]
            for name in OTHERS:
                log = client.log(name)
                tail = await log.tail()
                for of, wanted in zip(found, expected, strict=True):
                    assert of[name] == {s: d for s, d in wanted[name].items() if s < tail}, name
                assert {s: d for s, (d, _) in found[0][name].items() if s in before[name]} == (
                    before[name]
                )
                assert await log.append(b"new", tags=["t1"]) == tail
                assert [r.data for r in await log.read_range("t1", bound=tail)] == [b"new"]

    with platform(new, "--nodes", "2") as running:
        asyncio.run(check(running.url))


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
