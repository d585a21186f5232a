"""The sides of `bench.spark_source` find the same records."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.spark_source import Data, fill, measure, one_process, over_parquet, source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.mark.repeated("tests/spark/test_batch_read.py")
def test_all_sides_find_the_same_records(spark: SparkSession, tmp_path: Path) -> None:
    data = Data(tmp_path / "data", tmp_path / "parquet", tmp_path, 1_500, 20)
    asyncio.run(fill(data))
    sides = {"process": one_process(data), "source": source(spark, data)}
    assert measure(sides, data, 0) == {}  # it compares the rows of the first round, too
    (tmp_path / "spark.parquet").rename(data.parquet)
    assert set(measure({"parquet": over_parquet(spark, data)}, data, 1)) == {
        "parquet: count",
        "parquet: tag",
        "parquet: Parquet",
    }
