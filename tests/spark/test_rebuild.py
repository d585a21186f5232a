"""Spark rebuilds the same index as one process does, and as a live platform has."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import indilog
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.index_snapshot import snapshot_files
from indilog_pipeline.rebuild.local import LocalEngine
from indilog_pipeline.rebuild.plan import Engine
from indilog_pipeline.rebuild.run import Sharding, rebuild_index
from indilog_pipeline.rebuild.spark_engine import SparkEngine, SparkFailedError
from tests.properties.pipeline.test_rebuild import check_rebuilt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
CONFIG = Config(
    cluster=ClusterConfig(durability="memory", index_shards=2),
    node=node_config(segment_bytes=8 << 20),
)


@pytest.mark.repeated("tests/spark/test_rebuild.py")
@pytest.mark.parametrize(
    ("seed", "replicas", "killed", "damaged", "sharding"),
    [
        (2, 2, True, 0, Sharding(3)),
        pytest.param(1, 1, False, 2, None, marks=pytest.mark.repeated),
        pytest.param(3, 1, False, 0, Sharding(4, True), marks=pytest.mark.repeated),
    ],
)
def test_a_rebuilt_index_finds_what_a_live_one_finds(
    spark: SparkSession,
    seed: int,
    replicas: int,
    killed: bool,
    damaged: int,
    sharding: Sharding | None,
) -> None:
    engine = SparkEngine(spark, part_bytes=20_000, range_rows=200)
    asyncio.run(check_rebuilt(seed, replicas, killed, damaged, engine, sharding))


async def append(directory: Path, first: int, end: int) -> None:
    async with indilog.open(directory, CONFIG) as client:
        for start in range(first, end, 100):
            numbers = range(start, start + 100)
            entries = [indilog.Entry(b"", [f"t{n % 7}", f"u{n}"]) for n in numbers]
            await client.log("orders").append_batch(entries)


def rebuilt(directory: Path, engine: Engine) -> dict[str, bytes]:
    """Return the snapshots that an engine writes."""
    rebuild_index(directory, engine)
    folders = (directory / "snapshots").iterdir()
    return {folder.name: snapshot_files(folder)[0][1].read_bytes() for folder in folders}


def test_both_engines_write_the_same_bytes(spark: SparkSession, tmp_path: Path) -> None:
    """Both when they rebuild everything, and when they extend the snapshots of a shorter log."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    asyncio.run(append(data, 0, 6000))
    many = SparkEngine(spark, part_bytes=100_000, range_rows=1000)
    for _ in range(2):
        shutil.copytree(data, copy)
        for directory in (data, copy):
            shutil.rmtree(directory / "snapshots", ignore_errors=True)
        assert rebuilt(data, many) == rebuilt(copy, LocalEngine(memory_bytes_max=10_000))
        shutil.rmtree(copy)
    asyncio.run(append(data, 6000, 8000))
    shutil.copytree(data, copy)
    assert rebuilt(data, many) == rebuilt(copy, LocalEngine())
    assert not [*data.glob("rebuild-*")]


def test_an_error_of_a_task_is_one_sentence(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    asyncio.run(append(data, 0, 300))
    monkeypatch.setattr(SparkEngine, "_write_parts", lambda *_: 1)  # no part is there
    with pytest.raises(SparkFailedError, match=r"^Spark could not .* No such file .*part-0.npz'$"):
        rebuild_index(data, SparkEngine(spark))
    assert not [*data.glob("rebuild-*")]
