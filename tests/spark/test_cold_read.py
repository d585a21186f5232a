"""Spark reads a directory whose old records are on cold storage, and the objects themselves."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from indilog.base.ids import SeqNum
from indilog.base.log import Entry
from indilog.runtime.cluster.assembly import embedded
from indilog_pipeline.analytics.jobs import Source, analyse
from tests.cluster.platform_process import platform
from tests.support.cold_storage import configured, move_records, objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


async def fill(directory: Path) -> dict[SeqNum, Entry]:
    async with embedded(configured(directory)) as platform:
        return await move_records(platform, platform.logs.log("orders"))


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[SeqNum, Entry]]:
    directory = tmp_path_factory.mktemp("cold")
    return directory, asyncio.run(fill(directory))


@pytest.mark.repeated("tests/spark/test_cold_read.py")
def test_volume_counts_local_and_moved_records(
    spark: SparkSession, cold: tuple[Path, dict[SeqNum, Entry]]
) -> None:
    directory, records = cold
    report = analyse(
        spark, "volume", Source(str(directory / "data"), log="orders"), rows_max=100_000
    )
    counted: Counter[str] = Counter()
    for row in report.rows:
        of_row = dict(zip(report.columns, row, strict=True))
        counted[str(of_row["tag"])] += int(str(of_row["records"]))
    assert counted == Counter(str(tag) for entry in records.values() for tag in entry.tags)


@pytest.mark.repeated("tests/spark/test_cold_read.py")
def test_spark_reads_moved_records_through_the_platform(
    spark: SparkSession, cold: tuple[Path, dict[SeqNum, Entry]], tmp_path: Path
) -> None:
    directory, records = cold
    shutil.copytree(directory / "data", tmp_path / "data")
    with platform(tmp_path / "data") as running:  # the file COLD names the place
        reader = spark.read.format("indilog").option("url", running.url)
        rows = reader.option("log", "orders").load().select("seqnum", "data").collect()
        tagged = reader.option("log", "orders").option("tag", "tag-3").load().count()
    assert sorted((row.seqnum, bytes(row.data)) for row in rows) == [
        (seqnum, records[seqnum].data) for seqnum in sorted(records)
    ]
    assert tagged == sum("tag-3" in entry.tags for entry in records.values())


def test_local_and_moved_records_are_one_log(
    spark: SparkSession, cold: tuple[Path, dict[SeqNum, Entry]]
) -> None:
    directory, records = cold
    reader = spark.read.format("indilog").option("path", str(directory / "data"))
    rows = reader.option("log", "orders").load().orderBy("seqnum").collect()
    assert [(row.seqnum, bytes(row.data)) for row in rows] == [
        (seqnum, records[seqnum].data) for seqnum in sorted(records)
    ]
    tagged = reader.option("log", "orders").option("tag", "tag-3").load()
    assert tagged.count() == sum("tag-3" in entry.tags for entry in records.values())
    plain = spark.read.parquet(*map(str, objects(directory))).where("log = 'orders'")
    moved_rows = {row.seqnum: bytes(row.data) for row in plain.collect()}
    assert moved_rows
    assert all(records[seqnum].data == data for seqnum, data in moved_rows.items())
