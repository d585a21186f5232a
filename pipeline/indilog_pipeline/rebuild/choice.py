"""Chooses the faster engine for a rebuild, by figures that `bench.pipeline.rebuild` measured. The
command `indilog rebuild-index` calls `choose`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from indilog_pipeline.session import why_not

EngineName: TypeAlias = Literal["local", "spark"]

LOCAL_S: Final = 1.0
"""CPU seconds per million records of the engine `local` (measured: 10^7 records, 4 rows each)."""
SPARK_S: Final = 0.9
"""CPU seconds per million records of Spark, in tasks that all cores share."""
SPARK_WRITE_S: Final = 0.4
"""CPU seconds in which Spark writes a million records. Each index shard is written by one task."""
SPARK_START_S: Final = 9.5
"""Seconds in which a local session starts, runs an empty task, and ends."""
_MILLION: Final = 1_000_000


class Choice(NamedTuple):
    """An engine, and one sentence that says why."""

    engine: EngineName
    sentence: str


def local_s(records: int) -> float:
    """Estimate the seconds in which one process rebuilds this many records."""
    return LOCAL_S * records / _MILLION


def spark_s(records: int, *, cores: int, index_shards: int) -> float:
    """Estimate the seconds that a local Spark session takes, including its start."""
    each = SPARK_S / cores + SPARK_WRITE_S / max(1, min(cores, index_shards))
    return SPARK_START_S + each * records / _MILLION


def choose(
    asked: EngineName | None,
    master: str | None,
    records: int,
    *,
    index_shards: int,
    cores: int = os.cpu_count() or 1,
    missing: Callable[[], str] = why_not,
) -> Choice:
    """Choose the engine.

    Args:
        asked: the engine that the caller wants; None: the faster engine.
        master: where Spark runs; None: on this machine.
        records: number of records to read.
        index_shards: number of index shards to write.
        cores: number of cores of this machine.
        missing: returns a sentence that says why Spark cannot start here; empty: it can start.
    """
    if asked is not None:
        return Choice(asked, f"Engine {asked}, as asked.")
    if master is not None:
        return Choice("spark", "Engine spark, because --master says where Spark runs.")
    alone, spark = local_s(records), spark_s(records, cores=cores, index_shards=index_shards)
    times = (
        f"{records:,} records take one process about {alone:,.0f} s, "
        f"and Spark on {cores} cores about {spark:,.0f} s"
    )
    if alone <= spark:
        return Choice("local", f"Engine local: {times}.")
    if reason := missing():
        return Choice("local", f"Engine local, although {times}: {reason}")
    return Choice("spark", f"Engine spark: {times}.")
