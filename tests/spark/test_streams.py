"""A log as a stream: bounded batches, continuation from a checkpoint, and the end of the log."""

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


class Sink:
    """Collects micro-batches; a later run continues where an earlier one ended."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = str(folder / "checkpoint")
        self.batches: list[list[tuple[int, bytes]]] = []

    def run(self, frame: DataFrame) -> None:
        """Run until the end of the log."""

        def collect(batch: DataFrame, _id: int) -> None:
            self.batches.append(sorted((r.seqnum, bytes(r.data)) for r in batch.collect()))

        self.batches = []
        query = (
            frame.writeStream.foreachBatch(collect)
            .option("checkpointLocation", self._checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(500)
        finally:
            query.stop()


def stream(spark: SparkSession, url: str, log: str, **options: object) -> DataFrame:
    reader = spark.readStream.format("indilog").option("url", url).option("log", log)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.schema("seqnum bigint, data binary").load()


def append(count: int, size: int = 10) -> Callable[[indilog.Log], Awaitable[list[Any]]]:
    async def appended(log: indilog.Log) -> list[tuple[int, bytes]]:
        entries = [indilog.Entry(b"%d" % n * size) for n in range(count)]
        seqnums = await log.append_batch(entries)
        return [(s, e.data) for s, e in zip(seqnums, entries, strict=True)]

    return appended


def test_batches_are_bounded_in_records_and_a_later_run_continues(
    spark: SparkSession, url: str, on_log: OnLog, tmp_path: Path
) -> None:
    first = on_log(append(25), "bounded")
    sink = Sink(tmp_path)
    sink.run(stream(spark, url, "bounded", batch_records_max=10))
    assert sink.batches == [first[:10], first[10:20], first[20:]]
    second = on_log(append(3), "bounded")
    sink.run(stream(spark, url, "bounded", batch_records_max=10))
    assert sink.batches == [second]


def test_a_query_that_was_killed_while_it_wrote_its_first_offset_starts_again(
    spark: SparkSession, url: str, on_log: OnLog, tmp_path: Path
) -> None:
    appended = on_log(append(5), "first-offset")
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    # Spark writes a file of this name and renames it to `0`.
    (offsets / ".0.7e48fc26-841b-4aa5-910c-c267af65ee31.tmp").write_text("v1\n")
    sink = Sink(tmp_path)
    sink.run(stream(spark, url, "first-offset"))
    assert sink.batches == [appended]


@pytest.mark.repeated("tests/unit/pipeline/test_directory_reads.py")
def test_batches_are_bounded_in_bytes(
    spark: SparkSession, url: str, on_log: OnLog, tmp_path: Path
) -> None:
    appended = on_log(append(5, 100), "bytes")
    sink = Sink(tmp_path)
    sink.run(stream(spark, url, "bytes", batch_bytes_max=250))
    assert sink.batches == [appended[:2], appended[2:4], appended[4:]]


def test_a_new_stream_may_begin_at_the_end(
    spark: SparkSession, url: str, on_log: OnLog, tmp_path: Path
) -> None:
    on_log(append(3), "tail")
    sink = Sink(tmp_path)
    sink.run(stream(spark, url, "tail", start="tail"))
    assert not any(sink.batches)  # Spark begins with an empty one
    later = on_log(append(2), "tail")
    sink.run(stream(spark, url, "tail", start="tail"))
    assert sink.batches == [later]
