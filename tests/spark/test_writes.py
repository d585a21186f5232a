"""DataFrames and streams as records: each one once, with its tags."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

import indilog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
OnLog: TypeAlias = Callable[[Callable[[indilog.Log], Awaitable[Any]], str], Any]


def write(frame: DataFrame, url: str, log: str, batch: int) -> None:
    (
        frame.write.format("indilog")
        .option("url", url)
        .option("log", log)
        .option("writer_id", "nightly")
        .option("batch", batch)
        .mode("append")
        .save()
    )


async def records(log: indilog.Log) -> list[indilog.Record]:
    return await log.read_range(limit=10_000)


def test_a_batch_is_written_once(spark: SparkSession, url: str, on_log: OnLog) -> None:
    frame = spark.range(0, 2500, 1, 2).selectExpr(
        "concat('row ', id) as data", "array(if(id % 2 = 0, 'even', 'odd')) as tag_names"
    )
    write(frame, url, "once", 0)
    write(frame, url, "once", 0)
    found = on_log(records, "once")
    assert [record.data for record in found] == [b"row %d" % n for n in range(2500)]
    assert [record.tags[0] for record in found[:2]] == ["even", "odd"]
    write(spark.sql("select binary('more') as data"), url, "once", 1)
    assert on_log(records, "once")[-1].data == b"more"
    copied = (
        spark.read.format("indilog").option("url", url).option("log", "once").load()
        .select("data", "tag_names")
    )  # fmt: skip
    with pytest.raises(Exception, match="Tags that start with 'written:nightly' are reserved"):
        write(copied, url, "copy", 0)


@pytest.mark.repeated("tests/spark/test_kill_streams.py")
def test_a_stream_writes_its_batches_once(
    spark: SparkSession, url: str, on_log: OnLog, tmp_path: Path
) -> None:
    async def fill(log: indilog.Log) -> None:
        await log.append_batch([indilog.Entry(b"%d" % n, ["in"]) for n in range(30)])

    def run() -> None:
        frame = (
            spark.readStream.format("indilog").option("url", url).option("log", "in")
            .option("batch_records_max", "20").schema("data binary, tag_names array<string>").load()
        )  # fmt: skip
        query = (
            frame.writeStream.format("indilog").option("url", url).option("log", "out")
            .option("writer_id", "copy").option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        try:
            assert query.awaitTermination(500)
        finally:
            query.stop()

    on_log(fill, "in")
    run()
    on_log(fill, "in")
    run()
    found = on_log(records, "out")
    assert [record.data for record in found] == [b"%d" % n for n in range(30)] * 2
    assert {record.tags[0] for record in found} == {"in"}


def test_a_mistake_is_one_sentence(spark: SparkSession, url: str) -> None:
    frame = spark.sql("select binary('x') as data")
    with pytest.raises(Exception, match="Give option writer_id"):
        frame.write.format("indilog").option("url", url).option("log", "x").mode("append").save()
    with pytest.raises(Exception, match="There is no column id to write"):
        write(spark.range(1), url, "x", 0)
    for tag, sentence in (("null", "A tag in column tag_names of a row is null"), ("''", "empty")):
        tagged = spark.sql(f"select 'x' as data, array(cast({tag} as string)) as tag_names")
        with pytest.raises(Exception, match=sentence):
            write(tagged, url, "x", 0)
    with pytest.raises(Exception, match=r'A log only grows: write with mode\("append"\)'):
        (
            frame.write.format("indilog").option("url", url).option("log", "x")
            .option("writer_id", "w").option("batch", "0").mode("overwrite").save()
        )  # fmt: skip
