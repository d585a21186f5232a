"""Parts of a data directory as batches and gaps, without Spark."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import ConfigError
from indilog_pipeline.spark.options import ReadOptions, read_options
from indilog_pipeline.spark.reading import Gap
from indilog_pipeline.spark.tasks import reads_of

RECORDS, BATCH, FLOOR = 400, 40, 100


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two logs, whose records alternate; one of them is trimmed."""
    found = tmp_path_factory.mktemp("platform") / "data"

    async def fill() -> None:
        async with indilog.open(found) as client:
            for first in range(0, RECORDS, BATCH):
                await client.log("a").append_batch(
                    [
                        indilog.Entry(b"record %d." % n, ["odd"] if n % 2 else [])
                        for n in range(first, first + BATCH)
                    ]
                )
                await client.log("b").append(b"other")
            await client.log("b").trim(FLOOR)

    asyncio.run(fill())
    return found


def seqnum_of(record: int) -> int:
    """Return where a record of log `a` is: behind one of `b` after each batch."""
    return record + record // BATCH


def damage(directory: Path, data: bytes) -> None:
    for path in directory.rglob("segment-*.log"):
        content = bytearray(path.read_bytes())
        if (at := content.find(data)) >= 0:
            content[at] ^= 1
            path.write_bytes(content)


def options(directory: Path, **more: object) -> ReadOptions:
    return read_options({"path": str(directory)} | {k: str(v) for k, v in more.items()})


def found(read: ReadOptions) -> list[int | tuple[str, int, int]]:
    """Return the seqnums and gaps of a read, through parts that were pickled."""
    reads = reads_of(read)
    parts = reads.parts(read.bounds, *reads.range_of(read.bounds))
    every: list[int | tuple[str, int, int]] = []
    for part in pickle.loads(pickle.dumps(parts)):
        for item in reads.batches(part, read.bounds, ["data", "seqnum"]):
            if isinstance(item, Gap):
                every.append((item.kind, item.start, item.end))
            else:
                every += [int(row["seqnum"]) for row in item.to_pylist()]
    return every


def test_a_log_and_its_tags(directory: Path) -> None:
    assert found(options(directory, log="a")) == [seqnum_of(n) for n in range(RECORDS)]
    odd = [seqnum_of(n) for n in range(1, RECORDS, 2)]
    assert found(options(directory, log="a", tag="odd")) == odd
    inside = options(directory, log="a", seqnum_start=50, seqnum_end=60)
    assert found(inside) == list(range(50, 60))


def test_small_parts_have_the_same_records(directory: Path) -> None:
    read = options(directory, log="a")
    small = reads_of(read)
    small._partition_bytes = 2_000  # type: ignore[attr-defined]
    parts = small.parts(read.bounds, *small.range_of(read.bounds))
    assert len(parts) > 3
    seqnums = [
        seqnum
        for part in parts
        for batch in small.batches(part, read.bounds, ["seqnum"])
        if not isinstance(batch, Gap)
        for seqnum in batch.column("seqnum").to_pylist()
    ]
    assert seqnums == [seqnum_of(n) for n in range(RECORDS)]


def test_what_is_trimmed_is_a_gap_of_its_log_alone(directory: Path) -> None:
    left = [n for n in range(BATCH, RECORDS + 10, BATCH + 1) if n >= FLOOR]
    assert found(options(directory, log="b")) == [("trimmed", 0, FLOOR), *left]
    everything = found(options(directory))
    assert everything == sorted([*(seqnum_of(n) for n in range(RECORDS)), *left])


def test_a_tag_needs_its_log(directory: Path) -> None:
    with pytest.raises(ConfigError, match="A tag is of one log: give option log, too"):
        found(options(directory, tag="odd"))


def test_a_checkpoint_of_another_platform_is_one_sentence(directory: Path) -> None:
    read = options(directory)
    with pytest.raises(ConfigError, match="its checkpoint is of another platform"):
        reads_of(read).parts(read.bounds, 0, 10_000)


def test_a_batch_of_a_stream_is_bounded(directory: Path) -> None:
    read = options(directory, log="a", tag="odd")
    reads, end = reads_of(read), seqnum_of(RECORDS - 1)
    for records_max, bytes_max, wanted in (
        (3, None, 7),
        (None, 30, 7),
        (1, 1, 3),
        (999, None, end),
    ):
        ended = reads.end_of_batch(
            read.bounds, 0, end, records_max=records_max, bytes_max=bytes_max
        )
        assert ended == wanted


def test_damaged_data_is_a_gap_of_one_record(directory: Path, tmp_path: Path) -> None:
    """Batches of other logs before it change nothing."""
    record = 321
    directory = shutil.copytree(directory, tmp_path / "data")
    damage(directory, b"record %d." % record)
    at = seqnum_of(record)
    wanted: list[int | tuple[str, int, int]] = [seqnum_of(n) for n in range(RECORDS)]
    wanted[record] = ("lost", at, at + 1)
    assert found(options(directory, log="a")) == wanted
