"""A read of a data directory returns what a client of its platform reads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import indilog
from indilog_pipeline.first_query import records_by_log
from indilog_pipeline.spark_errors import sentence_in
from tests.spark.test_streams import Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
RECORDS = 400
FLOOR = 100
DAMAGED = 321


async def fill(directory: Path) -> tuple[list[indilog.Record], list[indilog.Record]]:
    """Fill two logs, and trim one; return what its clients read of `a` and of its tag `odd`."""
    async with indilog.open(directory) as client:
        log, other = client.log("a"), client.log("b")
        for first in range(0, RECORDS, 40):
            numbers = range(first, first + 40)
            await log.append_batch(
                [indilog.Entry(b"record %d." % n, ["odd", n] if n % 2 else []) for n in numbers]
            )
            await other.append(b"other")
        await other.trim(FLOOR)
        return await log.read_range(limit=10_000), await log.read_range("odd", limit=10_000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


def reader(spark: SparkSession, directory: Path, **options: object) -> DataFrameReader:
    found = spark.read.format("indilog").option("path", str(directory))
    for name, value in options.items():
        found = found.option(name, str(value))
    return found


def test_logs_tags_and_places_are_those_of_the_platform(
    spark: SparkSession, directory: Path
) -> None:
    records, odd = asyncio.run(fill(directory))
    rows = reader(spark, directory, log="a").load().orderBy("seqnum").collect()
    assert [(row.seqnum, bytes(row.data)) for row in rows] == [(r.seqnum, r.data) for r in records]
    assert [row.tag_names for row in rows] == [[str(t) for t in r.tags] for r in records]
    assert [round(row.ordered_at.timestamp() * 1e6) for row in rows] == [
        round(record.ordered_at * 1e6) for record in records
    ]
    assert all(row.log == "a" and row.shard is not None for row in rows)
    assert len({(row.shard, row.localid) for row in rows}) == RECORDS
    tagged = reader(spark, directory, log="a", tag="odd").schema("seqnum bigint").load()
    assert sorted(row.seqnum for row in tagged.collect()) == [record.seqnum for record in odd]
    every = reader(spark, directory).schema("log string, seqnum bigint").load()
    filtered = every.filter(f"seqnum >= {FLOOR}").groupBy("log").count().collect()
    assert {row.log: row["count"] for row in filtered} == {
        "a": sum(record.seqnum >= FLOOR for record in records),
        "b": RECORDS // 40 - FLOOR // 41,
    }


def test_the_first_query_counts_the_records_of_each_log(
    spark: SparkSession, directory: Path
) -> None:
    asyncio.run(fill(directory))
    rows = records_by_log(spark, str(directory))
    assert [(log, records) for log, records, _, _ in rows] == [
        ("a", RECORDS),
        ("b", RECORDS // 40 - FLOOR // 41),
    ]


@pytest.mark.repeated("tests/unit/pipeline/test_directory_reads.py")
def test_trimmed_and_damaged_records_are_errors_or_counted(
    spark: SparkSession, directory: Path
) -> None:
    records, _ = asyncio.run(fill(directory))
    damage(directory, b"record %d." % DAMAGED)
    lost = records[DAMAGED].seqnum
    with pytest.raises(Exception, match=f"are trimmed; start at option seqnum_start={FLOOR}"):
        reader(spark, directory, log="b").load().count()
    with pytest.raises(Exception, match=rf"Records at seqnums \[{lost}, {lost + 1}\) are lost"):
        reader(spark, directory, log="a").load().count()
    left = reader(spark, directory, log="a", on_loss="skip").load().select("seqnum").collect()
    assert sorted(row.seqnum for row in left) == [r.seqnum for r in records if r.seqnum != lost]
    gaps = reader(spark, directory, log="a", rows="gaps").load().collect()
    assert [(row.kind, row.start, row.end) for row in gaps] == [("lost", lost, lost + 1)]


def damage(directory: Path, data: bytes) -> None:
    """Flip a bit of a record's data, in every segment that has it."""
    for path in directory.rglob("segment-*.log"):
        content = bytearray(path.read_bytes())
        if (at := content.find(data)) >= 0:
            content[at] ^= 1
            path.write_bytes(content)


def test_an_error_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is not the data directory") as error:
        records_by_log(spark, str(tmp_path))
    assert (sentence_in(str(error.value)) or "").startswith(f"{tmp_path} is not the data directory")
    assert sentence_in("java.lang.OutOfMemoryError: Java heap space") is None


@pytest.mark.repeated("tests/spark/test_streams.py")
def test_a_directory_is_a_stream_too(spark: SparkSession, directory: Path, tmp_path: Path) -> None:
    records, _ = asyncio.run(fill(directory))
    sink = Sink(tmp_path)
    stream = spark.readStream.format("indilog").option("path", str(directory)).option("log", "a")
    frame = stream.option("batch_records_max", "300").schema("seqnum bigint, data binary").load()
    sink.run(frame)
    wanted = [(record.seqnum, record.data) for record in records]
    assert sink.batches == [wanted[:300], wanted[300:]]
