"""A batch read through a platform returns what its client reads."""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

import indilog
from indilog.base.ids import tag_hash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
OnLog: TypeAlias = Callable[[Callable[[indilog.Log], Awaitable[Any]], str], Any]
BATCHES, BATCH = 6, 50


async def fill(log: indilog.Log) -> list[indilog.Record]:
    """Append 300 records in batches; return them as the client reads them."""
    for batch in range(BATCHES):
        numbers = range(batch * BATCH, (batch + 1) * BATCH)
        await log.append_batch(
            [
                indilog.Entry(b"record %d" % n, ["even" if n % 2 == 0 else "odd", n + 1])
                for n in numbers
            ]
        )
    return await log.read_range(limit=10_000)


async def all_records(log: indilog.Log) -> list[indilog.Record]:
    found: list[indilog.Record] = []
    while page := await log.read_range(bound=found[-1].seqnum + 1 if found else 0):
        found += page
    return found


def reader(spark: SparkSession, url: str, log: str) -> DataFrameReader:
    return spark.read.format("indilog").option("url", url).option("log", log)


def seqnums(frame: DataFrame) -> list[int]:
    return sorted(row.seqnum for row in frame.select("seqnum").collect())


def test_all_columns_are_those_of_the_client_and_of_the_directory(
    spark: SparkSession, url: str, directory: Path, on_log: OnLog
) -> None:
    on_log(fill, "another log between")
    wanted = on_log(fill, "columns")
    rows = reader(spark, url, "columns").load().orderBy("seqnum").collect()
    assert [(row.seqnum, bytes(row.data)) for row in rows] == [(r.seqnum, r.data) for r in wanted]
    for row, record in zip(rows, wanted, strict=True):
        assert row.log == "columns"
        assert row.tag_names == [str(tag) for tag in record.tags]
        hashes = [tag_hash("columns", tag) for tag in record.tags]
        assert [tag % 2**64 for tag in row.tags] == hashes
        assert micros(row.ordered_at) == round(record.ordered_at * 1e6)
        assert micros(row.time) == round(record.time * 1e6)
    stored = spark.read.format("indilog").option("path", str(directory)).option("log", "columns")
    assert rows == stored.load().orderBy("seqnum").collect()
    assert len({(row.shard, row.localid) for row in rows}) == len(rows)
    assert len({row.position for row in rows}) > 1


def micros(time: datetime.datetime) -> int:
    return round(time.astimezone(datetime.UTC).timestamp() * 1e6)


def test_a_schema_chooses_and_orders_columns(spark: SparkSession, url: str, on_log: OnLog) -> None:
    wanted = on_log(fill, "schema")
    frame = reader(spark, url, "schema").schema("data binary, seqnum bigint").load()
    assert frame.columns == ["data", "seqnum"]
    assert sorted((row.seqnum, bytes(row.data)) for row in frame.collect()) == [
        (record.seqnum, record.data) for record in wanted
    ]


def test_a_tag_is_an_option(spark: SparkSession, url: str, on_log: OnLog) -> None:
    wanted = on_log(fill, "tags")
    even = reader(spark, url, "tags").option("tag", "even").load()
    assert seqnums(even) == [r.seqnum for r in wanted if "even" in r.tags]
    seventh = reader(spark, url, "tags").option("tag_int", "7").load()
    assert seqnums(seventh) == [wanted[6].seqnum]
    assert seqnums(reader(spark, url, "tags").option("tag", "7").load()) == []


@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_filters_return_the_same_with_and_without_pushdown(
    spark: SparkSession, url: str, on_log: OnLog, pushdown: str
) -> None:
    wanted = on_log(fill, f"filters-{pushdown}")
    frame = reader(spark, url, f"filters-{pushdown}").load()
    low, high = wanted[40].seqnum, wanted[200].seqnum
    at = datetime.datetime.fromtimestamp(wanted[120].ordered_at, datetime.UTC)
    before = spark.conf.get("spark.sql.python.filterPushdown.enabled")
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)
    try:
        between = seqnums(frame.filter(f"seqnum > {low} and seqnum <= {high}"))
        ordered = seqnums(frame.filter(f"ordered_at >= timestamp'{at.isoformat()}'"))
        other = seqnums(frame.filter("log = 'another'"))
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", before)
    assert between == [r.seqnum for r in wanted if low < r.seqnum <= high]
    assert ordered == [r.seqnum for r in wanted if r.ordered_at >= wanted[120].ordered_at]
    assert other == []


def test_pushed_filters_narrow_what_is_read(spark: SparkSession, url: str, on_log: OnLog) -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan

    from indilog_pipeline.spark.source import IndilogSource

    wanted = on_log(fill, "narrow")
    source = IndilogSource({"url": url})
    read = source.reader(reader(spark, url, "narrow").load().schema)
    filters = [
        In(("log",), ("narrow",)),
        GreaterThanOrEqual(("seqnum",), wanted[10].seqnum),
        LessThan(("seqnum",), wanted[20].seqnum),
        EqualTo(("shard",), 0),
    ]
    assert read.pushFilters(filters) == filters
    (partition,) = read.partitions()
    found = [seqnum for batch in read.read(partition) for seqnum in batch["seqnum"].to_pylist()]
    assert found == [record.seqnum for record in wanted[10:20]]


def test_ranges_are_options_too(spark: SparkSession, url: str, on_log: OnLog) -> None:
    wanted = on_log(fill, "ranges")
    ranged = (
        reader(spark, url, "ranges")
        .option("seqnum_start", wanted[10].seqnum)
        .option("seqnum_end", wanted[20].seqnum)
    )
    assert seqnums(ranged.load()) == [r.seqnum for r in wanted[10:20]]
    at = wanted[150].ordered_at
    timed = reader(spark, url, "ranges").option("ordered_end", f"{at:.6f}")
    assert seqnums(timed.load()) == [r.seqnum for r in wanted if r.ordered_at < at]


def test_a_large_log_is_read_in_several_partitions(
    spark: SparkSession, url: str, on_log: OnLog
) -> None:
    async def fill_much(log: indilog.Log) -> list[indilog.Record]:
        for number in range(18):
            await log.append_batch([indilog.Entry(bytes([number]) * 100_000)] * 2)
        return await all_records(log)

    wanted = on_log(fill_much, "large")
    frame = reader(spark, url, "large").option("partition_bytes", str(1024 * 1024)).load()
    assert frame.rdd.getNumPartitions() >= 3
    rows = sorted((row.seqnum, bytes(row.data)[:1]) for row in frame.collect())
    assert rows == [(record.seqnum, record.data[:1]) for record in wanted]


def test_trimmed_records_are_an_error_or_counted(
    spark: SparkSession, url: str, on_log: OnLog
) -> None:
    wanted = on_log(fill, "trimmed")
    floor = wanted[100].seqnum
    on_log(lambda log: log.trim(floor), "trimmed")
    trimmed = reader(spark, url, "trimmed")
    with pytest.raises(Exception, match=f"are trimmed; start at option seqnum_start={floor}"):
        trimmed.load().count()
    from_floor = reader(spark, url, "trimmed").option("seqnum_start", floor)
    assert seqnums(from_floor.load()) == [r.seqnum for r in wanted[100:]]
    skipping = reader(spark, url, "trimmed").option("on_loss", "skip")
    assert seqnums(skipping.load()) == [r.seqnum for r in wanted[100:]]
    gaps = reader(spark, url, "trimmed").option("rows", "gaps").load().collect()
    assert {row.kind for row in gaps} == {"trimmed"}
    assert sum(row.end - row.start for row in gaps) == floor


def test_an_empty_log_has_no_rows(spark: SparkSession, url: str) -> None:
    assert reader(spark, url, "nothing").load().count() == 0


@pytest.mark.repeated("tests/unit/pipeline/test_spark_options.py")
def test_a_mistake_is_one_sentence(spark: SparkSession, url: str) -> None:
    with pytest.raises(Exception, match="There is no option logs; the options are"):
        spark.read.format("indilog").option("url", url).option("logs", "x").load()
    with pytest.raises(Exception, match="give option log"):
        spark.read.format("indilog").option("url", url).load().count()
    with pytest.raises(Exception, match="Column seqnum is bigint, not string"):
        reader(spark, url, "x").schema("seqnum string").load().count()
    with pytest.raises(Exception, match="No platform answers at http"):
        reader(spark, "http://127.0.0.1:1", "x").load().count()
