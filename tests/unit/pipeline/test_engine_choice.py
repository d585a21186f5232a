"""The engine that rebuilds an index is the faster one, and a sentence says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from indilog_pipeline.rebuild.choice import Choice, choose, local_s, spark_s

GUIDE = Path(__file__).parents[3] / "docs" / "SPARK.md"
MANY = 10_000_000_000


def chosen(records: int, cores: int, missing: str = "") -> Choice:
    return choose(None, None, records, index_shards=8, cores=cores, missing=lambda: missing)


def test_the_faster_engine_is_chosen() -> None:
    assert chosen(1_000_000, 16).engine == "local"
    assert chosen(MANY, 16).engine == "spark"
    assert chosen(MANY, 1).engine == "local"
    for records in (10**6, 10**7, 10**8, 10**9):
        faster = spark_s(records, cores=16, index_shards=8) < local_s(records)
        assert (chosen(records, 16).engine == "spark") == faster


def test_a_sentence_says_why() -> None:
    assert chosen(2_000_000, 2).sentence.startswith(
        "Engine local: 2,000,000 records take one process about "
    )
    without = chosen(MANY, 16, "PySpark is not installed.")
    assert without.engine == "local"
    assert without.sentence.endswith(": PySpark is not installed.")


def test_who_asks_for_an_engine_gets_it() -> None:
    assert choose("spark", None, 1, index_shards=1).engine == "spark"
    assert choose("local", None, MANY, index_shards=1, cores=64).engine == "local"
    assert choose(None, "spark://host:7077", 1, index_shards=1).engine == "spark"


def test_the_guide_has_the_arithmetic_of_the_choice() -> None:
    """docs/SPARK.md, "Rebuild an index": cores, index shards, seconds, and faster from where."""
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d\.\d+) \| ([\d.]+) \S 10\^(\d+)", GUIDE.read_text(), re.MULTILINE
    )
    assert len(rows) == 4
    for cores, shards, each, mantissa, exponent in rows:
        where = {"cores": int(cores), "index_shards": int(shards)}
        million = spark_s(1_000_000, **where) - spark_s(0, **where)
        assert million == pytest.approx(float(each), abs=0.006)
        faster_from = spark_s(0, **where) / (local_s(1_000_000) - million) * 1_000_000
        assert faster_from == pytest.approx(float(mantissa) * 10 ** int(exponent), rel=0.05)
