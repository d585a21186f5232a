"""One flipped bit anywhere on the disk of a platform with one copy (D11).

No acknowledged seqnum is assigned again, and each record is there or known to be lost.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import DataLossError, IndilogError
from indilog.config import KIB, MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded, status_of
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.segment import segment_path
from indilog.runtime.journal.segment_use import newest_noted
from tests.cluster.platform_process import platform

FLIPS = 16
RECORDS = 60
_RECENT_BYTES = 3000
"""Half of the flips are in the last bytes written: no later frame shows that they are synced."""


def config_in(directory: Path) -> Config:
    return Config(
        cluster=ClusterConfig(batch_bytes_max=256 * KIB, record_bytes_max=64 * KIB),
        node=node_config(data_dir=directory, segment_bytes=MIB, journal_idle_s=0.01),
    )


async def write_and_copy(
    directory: Path, killed: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> dict[int, bytes]:
    """Append records, copy the idle platform's files to `killed` as a kill leaves them, and stop
    it.
    """
    acknowledged = {}
    settled, loop = asyncio.Event(), asyncio.get_running_loop()
    record_synced_end = Journal.record_synced_end

    def reported(journal: Journal) -> None:
        record_synced_end(journal)
        loop.call_soon_threadsafe(settled.set)

    monkeypatch.setattr(Journal, "record_synced_end", reported)
    async with embedded(config_in(directory)) as platform:
        log = platform.logs.log("orders")
        for number in range(RECORDS):
            data = b"%d " % number * rng.choice((1, 20, 400, 4000))
            acknowledged[await log.append(data, tags=[f"t{number % 3}"])] = data
        async with asyncio.timeout(200):
            while not is_settled(directory):
                settled.clear()
                await settled.wait()
        shutil.copytree(directory, killed)
        monkeypatch.undo()
    return acknowledged


def is_settled(directory: Path) -> bool:
    """Return whether each journal has noted all its bytes as synced."""
    journals = [path.parent for path in directory.rglob("NEWEST")]
    return bool(journals) and all(map(says_all, journals))


def says_all(journal: Path) -> bool:
    noted = newest_noted(journal)
    if noted is None:
        return False
    segment = segment_path(journal, noted.number).read_bytes()
    return not any(segment[noted.synced :])


def flip_one(directory: Path, rng: random.Random) -> str:
    """Flip a bit of a written byte; return its place."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    recent = rng.random() < 0.5
    if recent:
        path = max(path for path in files if any(path.read_bytes()) and path.suffix == ".log")
    content = bytearray(path.read_bytes())
    end = len(content.rstrip(b"\0")) or len(content)
    offset = rng.randrange(max(0, end - _RECENT_BYTES) if recent else 0, end)
    content[offset] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{path.relative_to(directory)} at {offset} of {end}"


async def is_there(platform: Platform, seqnum: int, data: bytes) -> bool:
    """Return whether a record can be read; False: it is known to be lost."""
    try:
        record = await platform.logs.log("orders").read(seqnum)
    except DataLossError:
        return False
    assert record is not None, f"{seqnum} was acknowledged"
    assert record.data == data
    return True


async def restart_and_check(directory: Path, acknowledged: dict[int, bytes]) -> None:
    """Restart twice, and check the acknowledged records."""
    known = dict(acknowledged)
    for _ in range(2):
        async with embedded(config_in(directory)) as platform:
            seqnum = await platform.logs.log("orders").append(b"next")
            assert seqnum > max(known), "each seqnum is assigned once"
            known[seqnum] = b"next"
            lost = [s for s, data in known.items() if not await is_there(platform, s, data)]
            reported = status_of(platform.shell, platform.logs)["lost_records"]
            assert reported == len(lost), "the status has the number of lost records"


def damaged(
    tmp_path: Path, flips: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, dict[int, bytes], str]]:
    """Yield copies of a platform's directory with one flipped bit each."""
    rng = random.Random(flips)
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    acknowledged = asyncio.run(write_and_copy(stopped, killed, rng, monkeypatch))
    for number in range(flips):
        source = (stopped, killed)[number % 2]
        directory = tmp_path / "flipped"
        shutil.copytree(source, directory)
        yield directory, acknowledged, f"{source.name}, {flip_one(directory, rng)}"
        shutil.rmtree(directory)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_after_any_flipped_bit_no_acknowledged_seqnum_is_assigned_again(
    tmp_path: Path, seeds_wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory, acknowledged, where in damaged(tmp_path, seeds_wanted or FLIPS, monkeypatch):
        try:
            asyncio.run(restart_and_check(directory, acknowledged))
        except (AssertionError, IndilogError) as error:
            raise AssertionError(f"{where}: {error}") from error


@pytest.mark.cluster
@pytest.mark.repeated("tests/cluster/faults/test_flipped_bits.py")
@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_with_processes_no_acknowledged_seqnum_is_given_again(
    tmp_path: Path, seeds_wanted: int | None
) -> None:
    rng = random.Random(11)
    data, killed, stopped = (tmp_path / name for name in ("data", "killed", "stopped"))
    acknowledged: dict[int, bytes] = {}
    with platform(data, "--processes") as running:
        asyncio.run(append_until_synced(running.url, data, acknowledged))
        running.kill_everything()
    copied(data, killed)
    known = dict(acknowledged)
    with platform(data, "--processes") as running:
        asyncio.run(append_until_synced(running.url, data, acknowledged))
        running.interrupted()
    copied(data, stopped)
    for number in range(min(seeds_wanted or 2, 40)):
        source, wanted = ((killed, known), (stopped, acknowledged))[number % 2]
        directory = tmp_path / "flipped"
        copied(source, directory)
        where = f"{source.name}, {flip_one(directory, rng)}"
        with platform(directory, "--processes") as running:
            asyncio.run(seen_again(running.url, wanted, where))
            running.interrupted()
        shutil.rmtree(directory)


async def append_until_synced(url: str, directory: Path, acknowledged: dict[int, bytes]) -> None:
    """Append records, and wait until all journals have noted what they synced."""
    async with indilog.connect(url) as client:
        log = client.log("orders")
        for number in range(20):
            data = b"%d " % number * 20
            acknowledged[await log.append(data, tags=[f"t{number % 3}"])] = data
    async with asyncio.timeout(200):
        while True:
            if is_settled(directory):
                return
            await asyncio.sleep(0.1)


async def seen_again(url: str, acknowledged: dict[int, bytes], where: str) -> None:
    async with indilog.connect(url) as client:
        log = client.log("orders")
        assert await log.append(b"next") > max(acknowledged), where
        for seqnum, data in acknowledged.items():
            try:
                record = await log.read(seqnum)
            except DataLossError:
                continue
            assert record is not None, where
            assert record.data == data, where


def copied(source: Path, target: Path) -> None:
    """Copy the files of the directory, without sockets."""
    for path in source.rglob("*"):
        if path.is_file():
            to = target / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
