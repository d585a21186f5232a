"""A platform that moves old records to cold storage at once, and checks of its records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from indilog.base.ids import SeqNum
from indilog.base.log import Entry, Log
from indilog.config import KIB, MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import Platform
from indilog_storage.node import StorageNode

ROUNDS, RECORDS, RECORD_BYTES = 30, 50, 2000
TAGS = 7


def configured(
    directory: Path, *, replicas: int = 1, place: Path | str | None = None, **more: object
) -> Config:
    """Records move as soon as a full segment and two checkpoints allow it; no cache is used."""
    given: dict[str, object] = {
        "cold_place": str(place or directory / "cold"),
        "cold_after_s": 0.001,
        "cold_object_bytes": 256 * KIB,
        "cold_bytes_per_s": 1024 * MIB,
        "cold_retry_s": 0.05,
        **more,
    }
    return Config(
        cluster=ClusterConfig(
            storage_nodes=replicas,
            replicas=replicas,
            record_bytes_max=64 * KIB,
            batch_bytes_max=256 * KIB,
        ),
        node=node_config(
            data_dir=directory / "data",
            segment_bytes=MIB,
            checkpoint_frames=20,
            record_cache_bytes_max=0,
            rewrite_bytes_per_s=1024 * MIB,
            **given,
        ),
    )


def figures(platform: Platform, name: str) -> int:
    roles = [role for role in platform.shell.roles.values() if isinstance(role, StorageNode)]
    return sum(role.status().get(name, 0) for role in roles)


def local_bytes(platform: Platform) -> int:
    return figures(platform, "bytes") - figures(platform, "cold_bytes")


async def wait_for(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not done():  # noqa: ASYNC110 figures of other tasks
            await asyncio.sleep(0.01)


async def fill(log: Log, rounds: int = ROUNDS, seed: int = 1) -> dict[SeqNum, Entry]:
    """Append records; return them by seqnum."""
    chance = random.Random(seed)
    found: dict[SeqNum, Entry] = {}
    for _ in range(rounds):
        entries = [
            Entry(chance.randbytes(RECORD_BYTES), tags=[f"tag-{n % TAGS}", n + 1])
            for n in range(RECORDS)
        ]
        found.update(zip(await log.append_batch(entries), entries, strict=True))
    return found


async def move_records(
    platform: Platform, log: Log, bytes_max: int = 2 * MIB
) -> dict[SeqNum, Entry]:
    """Append until most records are on cold storage."""
    records = await fill(log)
    for seed in range(2, 40):
        records.update(await fill(log, 1, seed))
        await asyncio.sleep(0.02)
    await wait_for(lambda: local_bytes(platform) < bytes_max)
    return records


async def check(log: Log, records: dict[SeqNum, Entry], *, some: int = 40) -> None:
    """Check that every kind of read returns the appended records."""
    seqnums = sorted(records)
    for seqnum in random.Random(3).sample(seqnums, some):
        record = await log.read_next(bound=seqnum)
        assert record is not None
        assert (record.seqnum, record.data) == (seqnum, records[seqnum].data)
        assert list(record.tags) == list(records[seqnum].tags)
        before = await log.read_prev("tag-3", bound=seqnum)
        expected = max(
            (s for s in seqnums if s <= seqnum and "tag-3" in records[s].tags), default=None
        )
        assert (before.seqnum if before else None) == expected
    assert await everything(log) == [(seqnum, records[seqnum].data) for seqnum in seqnums]


async def everything(log: Log, start: SeqNum = 0) -> list[tuple[SeqNum, bytes]]:
    """Read the log from `start` on in pages."""
    found: list[tuple[SeqNum, bytes]] = []
    while page := await log.read_range(bound=found[-1][0] + 1 if found else start, limit=100):
        found += [(record.seqnum, record.data) for record in page]
    return found


def objects(directory: Path) -> list[Path]:
    return sorted((directory / "cold").glob("*/shard-*/*.parquet"))
