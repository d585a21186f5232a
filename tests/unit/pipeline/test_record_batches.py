"""Records are read while a platform replaces files, and from the better replica."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from indilog.base.errors import DataLossError
from indilog.base.log import Entry, Log
from indilog.config import KIB, MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.journal.segment_files import segment_files
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import Filter, ReadCounts, parts_of, read_records
from tests.unit.runtime.journals import spoil

TAGS, RECORDS = 10, 1500


def configured(directory: Path, replicas: int = 1) -> Config:
    return Config(
        cluster=ClusterConfig(
            storage_nodes=replicas,
            replicas=replicas,
            durability="memory",
            record_bytes_max=8 * KIB,
            batch_bytes_max=100 * KIB,
        ),
        node=node_config(
            data_dir=directory,
            segment_bytes=200 * KIB,
            reclaim_bytes_per_s=1024 * MIB,
            reclaim_rest_s_min=0.05,
            rewrite_bytes_per_s=1024 * MIB,
        ),
    )


async def fill(log: Log) -> None:
    chance = random.Random(1)
    for first in range(0, RECORDS, 50):
        numbers = range(first, first + 50)
        await log.append_batch([Entry(chance.randbytes(700), [f"t{n % TAGS}"]) for n in numbers])


async def wait_for(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 the threads of a journal set no event
            await asyncio.sleep(0.05)


def seqnums(image: LogImage, **options: object) -> list[int]:
    columns = ("data", "seqnum")
    batches = read_records(image, columns=columns, **options)  # type: ignore[arg-type]
    return [row["seqnum"] for batch in batches for row in batch.to_pylist()]


@pytest.mark.asyncio
async def test_records_are_read_while_segments_are_rewritten(tmp_path: Path) -> None:
    """An image taken before reads them as well as one taken afterwards, and after a restart."""
    config = configured(tmp_path)
    async with embedded(config) as platform:
        log = platform.logs.log("orders")
        await fill(log)
        before = LogImage.read(tmp_path)
        assert seqnums(before) == list(range(RECORDS))
        for tag in range(TAGS - 1):
            await log.trim(RECORDS, tag=f"t{tag}")
        journal = tmp_path / "journal"
        left = list(range(TAGS - 1, RECORDS, TAGS))

        def is_rewritten() -> bool:
            # Trimmed records are there until their bytes are overwritten.
            assert [seqnum for seqnum in seqnums(before) if seqnum % TAGS == TAGS - 1] == left
            return any(file.first != file.last for file in segment_files(journal))

        await wait_for(is_rewritten)
        assert is_rewritten()
        assert seqnums(LogImage.read(tmp_path)) == left
    after = LogImage.read(tmp_path)
    assert seqnums(after) == left
    assert after.position >= before.position


@pytest.mark.asyncio
async def test_a_damaged_batch_is_read_from_another_replica(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path, replicas=2)) as platform:
        await fill(platform.logs.log("orders"))
    image = LogImage.read(tmp_path)
    batches = image.batches
    assert batches.files.shape[1] == 2
    for row, replica in ((3, 0), (5, 1), (7, 0), (7, 1)):
        path = image.files[batches.files[row, replica]]
        spoil(path, int(batches.offsets[row, replica] + batches.lengths[row, replica]) - 80, 10)
    counts = ReadCounts()
    found = seqnums(image, skip_lost=True, counts=counts)
    [lost] = set(range(RECORDS)) - set(found)
    assert counts == ReadCounts(records=RECORDS - 1, lost=0, damaged=1)
    with pytest.raises(DataLossError) as error:
        seqnums(image)
    assert (error.value.seqnum, error.value.next_seqnum) == (lost, lost + 1)
    assert seqnums(image, end=lost) == list(range(lost))
    names = read_records(image, columns=("seqnum", "tag_names"))
    assert sum(batch.num_rows for batch in names) == RECORDS


@pytest.mark.asyncio
async def test_parts_filters_and_columns_give_the_same_records(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path)) as platform:
        await fill(platform.logs.log("orders"))
        await platform.logs.log("other").append(b"", tags=["t1"])
    image = LogImage.read(tmp_path)
    parts = parts_of(image, part_bytes=64 * KIB)
    assert len(parts) > 10
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert (parts[0].start, parts[-1].end) == (0, image.tail)
    found = [s for part in parts for s in seqnums(image, start=part.start, end=part.end)]
    assert found == list(range(RECORDS + 1))
    assert seqnums(image, wanted=Filter("orders", "t1")) == list(range(1, RECORDS, TAGS))
    assert seqnums(image, wanted=Filter("other")) == [RECORDS]
    assert seqnums(image, wanted=Filter("nothing")) == []
    assert seqnums(image, start=7, end=9) == [7, 8]


@pytest.mark.asyncio
async def test_a_directory_whose_checkpoints_are_all_damaged_is_read_from_its_frames(
    tmp_path: Path,
) -> None:
    config = Config(
        cluster=ClusterConfig(durability="memory"),
        node=node_config(data_dir=tmp_path, segment_bytes=8 * MIB, checkpoint_frames=20),
    )
    async with embedded(config) as platform:
        await fill(platform.logs.log("a"))
    intact = seqnums(LogImage.read(tmp_path))
    assert len(intact) == RECORDS
    damaged = [*(tmp_path / "journal").glob("checkpoint-*")]
    assert damaged
    for file in damaged:
        content = bytearray(file.read_bytes())
        content[4] ^= 1
        file.write_bytes(content)
    assert seqnums(LogImage.read(tmp_path)) == intact
