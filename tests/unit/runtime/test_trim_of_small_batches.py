"""A trim frees disk space for all batch sizes (PITFALLS 7, A22, decision 0016). Punching holes
frees nothing for small batches, and others are partly live.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from indilog.base.errors import TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Entry, Log
from indilog.config import KIB, MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.journal.segment_files import segment_files
from tests.unit.runtime.test_trim_frees_space import wait_for

RECORDS, RECORD_BYTES, TAGS = 3000, 700, 10
SEGMENT_BYTES = 200 * KIB

pytestmark = pytest.mark.asyncio


def configured(directory: Path) -> Config:
    return Config(
        cluster=ClusterConfig(record_bytes_max=8 * KIB, batch_bytes_max=100 * KIB),
        node=node_config(
            data_dir=directory,
            segment_bytes=SEGMENT_BYTES,
            record_cache_bytes_max=0,
            reclaim_bytes_per_s=1024 * MIB,
            reclaim_rest_s_min=0.05,
            rewrite_bytes_per_s=1024 * MIB,
        ),
    )


def room(directory: Path) -> int:
    """Return the bytes of all segments except the active one and the next one."""
    old = segment_files(directory / "journal")[:-2]
    return sum(file.path.stat().st_blocks * 512 for file in old)


async def fill(log: Log, batch: int) -> list[SeqNum]:
    chance = random.Random(1)
    seqnums: list[SeqNum] = []
    while len(seqnums) < RECORDS:
        entries = [
            Entry(chance.randbytes(RECORD_BYTES), tags=[f"t{(len(seqnums) + n) % TAGS}"])
            for n in range(batch)
        ]
        seqnums += await log.append_batch(entries)
    return seqnums


async def trimmed_as_a_whole(log: Log, seqnums: list[SeqNum]) -> list[SeqNum]:
    until = seqnums[len(seqnums) * 9 // 10]
    await log.trim(until)
    return [seqnum for seqnum in seqnums if seqnum >= until]


async def trimmed_by_tags(log: Log, seqnums: list[SeqNum]) -> list[SeqNum]:
    for tag in range(TAGS - 1):
        await log.trim(seqnums[-1] + 1, tag=f"t{tag}")
    return seqnums[TAGS - 1 :: TAGS]


async def read_through(log: Log, bound: SeqNum) -> list[SeqNum]:
    """Return all seqnums from `bound` on; an empty page is the end.

    A page may be short: reads skip records that are trimmed in their tags only, which the index
    still has.
    """
    seqnums: list[SeqNum] = []
    while page := await log.read_range(None, bound):
        seqnums += [record.seqnum for record in page]
        bound = seqnums[-1] + 1
    return seqnums


@pytest.mark.parametrize(
    ("batch", "trim"), [(2, trimmed_as_a_whole), (40, trimmed_by_tags)], ids=["small", "partly"]
)
async def test_a_trim_frees_the_disk_space_of_small_batches(
    tmp_path: Path, batch: int, trim: Callable[[Log, list[SeqNum]], object]
) -> None:
    config = configured(tmp_path)
    async with embedded(config) as platform:
        log = platform.logs.log("orders")
        seqnums = await fill(log, batch)
        before = room(tmp_path)
        assert before > 2 * MIB * 0.9
        left = await trim(log, seqnums)  # type: ignore[misc]
        await wait_for(
            lambda: room(tmp_path) < before * 0.25 and len(segment_files(tmp_path / "journal")) < 8
        )
        assert platform.shell.metrics.rewritten_bytes < before
    for _ in range(2):
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            assert await read_through(log, left[0]) == left
            record = await log.read(left[0])
            assert record is not None
            assert record.data == data_of(seqnums.index(left[0]))
            for seqnum in (seqnums[0], seqnums[1]):
                with pytest.raises(TrimmedError):
                    await log.read(seqnum)
            first = await log.read_next(f"t{TAGS - 1}", left[0])
            assert first is not None


def data_of(place: int) -> bytes:
    chance = random.Random(1)
    return [chance.randbytes(RECORD_BYTES) for _ in range(place + 1)][-1]
