"""Measures rows and bytes per second of three readers of the same data. They are the Spark data
source over a data directory, one Python process that reads its segments, and Spark over Parquet
files.

    python -m bench.spark_source [--records 1000000] [--record-bytes 100 1024] [--rounds 3]
                                 [--master local[2]]

Queries: `count` of all records (with all columns), `tag` (the records of one tag of 100), and
`Parquet` (all columns written as Parquet). The sides run interleaved; medians over the rounds are
shown. Seconds are wall time, including planning and the start of tasks; the query `nothing`, over
an empty range, measures these alone. Bytes are those of the records' data.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import pyarrow.parquet as pq

import indilog
from bench.support.harness import Report, command, table_of
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import SCHEMA, Filter, read_records
from indilog_pipeline.session import start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

LOG: Final = "bench"
TAGS: Final = 100
TAG: Final = "tag-7"
_BATCH: Final = 1_000
_MB: Final = 1e6
Query: TypeAlias = Callable[[], int]
"""Returns how many rows it found or wrote."""


class Data(NamedTuple):
    """A data directory, Parquet files of its records, and a folder for results."""

    directory: Path
    parquet: Path
    results: Path
    records: int
    record_bytes: int


async def fill(data: Data) -> None:
    """Append the records to a new data directory."""
    async with indilog.open(data.directory) as client:
        log = client.log(LOG)
        body = bytes(range(256)) * (data.record_bytes // 256 + 1)
        for first in range(0, data.records, _BATCH):
            numbers = range(first, min(first + _BATCH, data.records))
            await log.append_batch(
                [
                    indilog.Entry(body[: data.record_bytes], [f"tag-{number % TAGS}"])
                    for number in numbers
                ]
            )


def one_process(data: Data) -> dict[str, Query]:
    """Return the queries of one Python process."""

    def rows(wanted: Filter) -> int:
        image = LogImage.read(data.directory)
        return sum(b.num_rows for b in read_records(image, columns=["seqnum"], wanted=wanted))

    def to_parquet() -> int:
        image, written = LogImage.read(data.directory), 0
        with pq.ParquetWriter(data.results / "one.parquet", SCHEMA) as writer:
            for batch in read_records(image, wanted=Filter(LOG)):
                writer.write_batch(batch)
                written += batch.num_rows
        return written

    return {
        "count": lambda: rows(Filter(LOG)),
        "tag": lambda: rows(Filter(LOG, TAG)),
        "Parquet": to_parquet,
    }


def source(spark: SparkSession, data: Data) -> dict[str, Query]:
    """Return the queries of Spark with the data source."""

    def reader() -> DataFrameReader:
        return spark.read.format("indilog").option("path", str(data.directory)).option("log", LOG)

    def one_column() -> DataFrameReader:
        return reader().schema("seqnum bigint")

    return {
        "nothing": lambda: one_column().option("seqnum_end", "0").load().count(),
        "count": lambda: reader().load().count(),
        "count of one column": lambda: one_column().load().count(),
        "tag": lambda: one_column().option("tag", TAG).load().count(),
        "Parquet": lambda: written(reader().load(), data),
    }


def over_parquet(spark: SparkSession, data: Data) -> dict[str, Query]:
    """Return the queries of Spark over Parquet of the same records."""

    def read() -> DataFrame:
        return spark.read.parquet(str(data.parquet))

    return {
        "count": lambda: read().count(),
        "tag": lambda: read().filter(f"array_contains(tag_names, '{TAG}')").count(),
        "Parquet": lambda: written(read(), data),
    }


def written(frame: DataFrame, data: Data) -> int:
    """Write a DataFrame as Parquet; return how many rows it has."""
    frame.write.mode("overwrite").parquet(str(data.results / "spark.parquet"))
    return data.records


def measure(sides: dict[str, dict[str, Query]], data: Data, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each query of each side, in each round."""
    wanted = {"nothing": 0, "count": data.records, "tag": -(-(data.records - 7) // TAGS)}
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for side, queries in sides.items():
            for name, query in queries.items():
                begun = time.perf_counter()
                rows = query()
                seconds = time.perf_counter() - begun
                assert rows == wanted.get(name, data.records), f"{side}, {name}: {rows} rows"
                if number:  # the first round warms everything up
                    found.setdefault(f"{side}: {name}", []).append(seconds)
    return found


async def main(asked: argparse.Namespace) -> None:
    """Measure, and print a table for each size of records."""
    report = Report("The Spark data source", asked)
    spark = start("bench", master=asked.master, memory="1g")
    try:
        for record_bytes in asked.record_bytes:
            with tempfile.TemporaryDirectory() as folder:
                data = Data(
                    Path(folder, "data"),
                    Path(folder, "parquet"),
                    Path(folder, "results"),
                    asked.records,
                    record_bytes,
                )
                data.results.mkdir()
                await fill(data)
                sides = {
                    "one Python process": one_process(data),
                    "Spark, data source": source(spark, data),
                }
                sides["Spark, data source"]["Parquet"]()
                shutil.move(data.results / "spark.parquet", data.parquet)
                sides["Spark, Parquet"] = over_parquet(spark, data)
                show(report, data, await asyncio.to_thread(measure, sides, data, asked.rounds))
    finally:
        spark.stop()
    report.write()


def show(report: Report, data: Data, found: dict[str, list[float]]) -> None:
    """Print the medians."""
    table = table_of(
        f"{data.records:,} records of {data.record_bytes} bytes",
        "side: query", "s", "rows/s", "MB/s",
    )  # fmt: skip
    for name, seconds in found.items():
        middle = median(seconds)
        rows = 0 if name.endswith("nothing") else data.records
        rate = rows / middle
        table.add_row(
            name, f"{middle:.2f}", f"{rate:,.0f}", f"{rate * data.record_bytes / _MB:,.0f}"
        )
    report.show(table)
    report.keep(f"{data.record_bytes} bytes", found)


if __name__ == "__main__":
    command(
        main,
        __doc__,
        records={"type": int, "default": 1_000_000},
        record_bytes={"type": int, "nargs": "+", "default": [100, 1024]},
        rounds={"type": int, "default": 3, "help": "rounds of each side"},
        master={"default": "local[2]"},
    )
