"""A trim of 90 % of a log frees most of its disk space and of the index tier's memory (PITFALLS 7,
A22). This also holds for processes that start after the trim.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from indilog.base.errors import TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Entry
from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog.runtime.journal.segment import segment_path
from indilog_index.index_node import IndexNode
from indilog_storage.node import StorageNode

BATCHES, RECORDS, RECORD_BYTES = 40, 100, 2000
KEPT = 4
"""Number of batches, of which the last ones are kept."""


def configured(directory: Path, replicas: int) -> Config:
    return Config(
        cluster=ClusterConfig(storage_nodes=replicas, replicas=replicas),
        node=node_config(
            data_dir=directory,
            segment_bytes=8 * MIB,
            record_cache_bytes_max=0,
            reclaim_bytes_per_s=1024 * MIB,
        ),
    )


def figure(platform: Platform, kind: type[StorageNode | IndexNode], name: str) -> int:
    roles = [role for role in platform.shell.roles.values() if isinstance(role, kind)]
    return sum(role.status()[name] for role in roles)


def room(directory: Path) -> int:
    """Return the bytes of the first segment, which is full; later ones are preallocated zeros."""
    return segment_path(directory / "journal", 1).stat().st_blocks * 512


async def fill(platform: Platform) -> list[SeqNum]:
    log, chance = platform.logs.log("orders"), random.Random(1)
    seqnums: list[SeqNum] = []
    for _ in range(BATCHES):
        data = [chance.randbytes(RECORD_BYTES) for _ in range(RECORDS)]
        entries = [Entry(d, tags=[f"t{chance.randrange(20)}", "all"]) for d in data]
        seqnums += await log.append_batch(entries)
    return seqnums


async def wait_for(done: Callable[[], bool]) -> None:
    """Wait for `done`: space is freed in the background."""
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 - roles announce no end of it
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_trim_frees_disk_and_memory_and_survives_restarts(
    tmp_path: Path, replicas: int
) -> None:
    config = configured(tmp_path, replicas)
    async with embedded(config) as platform:
        seqnums = await fill(platform)
        until = seqnums[-KEPT * RECORDS]
        before, index = room(tmp_path), figure(platform, IndexNode, "bytes")
        await platform.logs.log("orders").trim(until)
        trimmed = (BATCHES - KEPT) * replicas
        await wait_for(
            lambda: (
                figure(platform, StorageNode, "discarded_batches") == trimmed
                and not figure(platform, IndexNode, "sweeping")
            )
        )
        await wait_for(lambda: room(tmp_path) < before * 0.4)
        assert figure(platform, IndexNode, "bytes") < index * 0.2
    for _ in range(2):
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            for seqnum in (seqnums[0], until - 1):
                with pytest.raises(TrimmedError):
                    await log.read(seqnum)
            with pytest.raises(TrimmedError):
                await log.read_next("all", 0)
            left = [record.seqnum for record in await log.read_range("all", until)]
            assert left == seqnums[-KEPT * RECORDS :]
            first = await log.read_prev("t3")
            assert first is not None
            assert figure(platform, IndexNode, "entries") == 3 * KEPT * RECORDS


@pytest.mark.asyncio
async def test_a_trim_survives_a_change_of_view(tmp_path: Path) -> None:
    """Each start has other index shards: trimmed records are trimmed for later shards too."""
    seqnums: list[SeqNum] = []
    node = node_config(data_dir=tmp_path, segment_bytes=8 * MIB)
    for index_shards in (2, 3, 1):
        config = Config(cluster=ClusterConfig(index_shards=index_shards), node=node)
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            if seqnums:
                for read in (log.read_next("a", 0), log.read_prev("a", seqnums[-4])):
                    with pytest.raises(TrimmedError, match=f"below seqnum {seqnums[-3]} "):
                        await read
                for other in (log.read(seqnums[0]), log.read_range("b", seqnums[-7])):
                    with pytest.raises(TrimmedError, match=f"below seqnum {seqnums[-6]} "):
                        await other
            seqnums += [await log.append(b"x", tags=["a", "b"]) for _ in range(10)]
            await log.trim(seqnums[-3], tag="a")
            await log.trim(seqnums[-6])
