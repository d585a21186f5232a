"""Spark reads a directory whose old records are on cold storage, and the objects themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from indilog.base.ids import SeqNum
from indilog.base.log import Entry
from indilog.runtime.cluster.assembly import embedded
from tests.support.cold_storage import configured, moved, objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


async def filled(directory: Path) -> dict[SeqNum, Entry]:
    async with embedded(configured(directory)) as platform:
        return await moved(platform, platform.logs.log("orders"))


def test_local_and_moved_records_are_one_log(spark: SparkSession, tmp_path: Path) -> None:
    records = asyncio.run(filled(tmp_path))
    reader = spark.read.format("indilog").option("path", str(tmp_path / "data"))
    rows = reader.option("log", "orders").load().orderBy("seqnum").collect()
    assert [(row.seqnum, bytes(row.data)) for row in rows] == [
        (seqnum, records[seqnum].data) for seqnum in sorted(records)
    ]
    tagged = reader.option("log", "orders").option("tag", "tag-3").load()
    assert tagged.count() == sum("tag-3" in entry.tags for entry in records.values())
    plain = spark.read.parquet(*map(str, objects(tmp_path))).where("log = 'orders'")
    moved_rows = {row.seqnum: bytes(row.data) for row in plain.collect()}
    assert moved_rows
    assert all(records[seqnum].data == data for seqnum, data in moved_rows.items())
