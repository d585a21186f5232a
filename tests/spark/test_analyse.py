"""Each job of `indilog analyse` returns what plain Python counts in the records of a client."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bokiflow
import indilog
from bokistore import Store
from indilog_pipeline.analytics.jobs import LAG, JobError, JobReport, Source, analyse
from indilog_pipeline.analytics.objects import objects
from tests.spark.test_directory_read import damage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
Records = dict[str, list[indilog.Record]]
RUNS = 5


async def fill(directory: Path) -> Records:
    """Fill two logs at random, one with objects and one with runs; return what a client reads."""
    chance = random.Random(7)
    known: list[str | int] = ["hot", "hot", "hot", "mild", "cold", 7]
    async with indilog.open(directory) as client:
        for _ in range(30):
            tags = chance.choices(known, k=2)
            entries = [
                indilog.Entry(chance.randbytes(chance.randrange(50)), tags[: chance.randrange(3)])
                for _ in range(chance.randrange(1, 5))
            ]
            await client.log(chance.choice("ab")).append_batch(entries)
        store = Store(client.log("shop"))
        await store.put("tea", {"price": 3}, tags=["drink"])
        await store.put("cake", {"price": 5})
        await store.put("tea", {"price": 4}, tags=["drink"])
        await run_workflows(client)
        names = ("a", "b", "shop", "flows/flow")
        return {name: await client.log(name).read_range(limit=10_000) for name in names}


async def run_workflows(client: indilog.Client) -> None:
    flow = bokiflow.Flow("flows")
    flow.attach(client)

    async def halved(number: int) -> int:
        if number % 2:
            raise ValueError("odd")
        return number // 2

    @flow.workflow
    async def half(wf: bokiflow.Workflow, number: int) -> int:
        return await wf.step(halved, number, retries=0)

    for number in range(RUNS):
        handle = await half.start(number)
        try:
            await handle.result(timeout=200)
        except bokiflow.RunFailedError:
            assert number % 2


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Records]:
    directory = tmp_path_factory.mktemp("platform") / "data"
    return directory, asyncio.run(fill(directory))


def rows_of(report: JobReport) -> list[dict[str, object]]:
    assert not report.has_more
    assert report.svg.startswith("<svg")
    return [dict(zip(report.columns, row, strict=True)) for row in report.rows]


def run(spark: SparkSession, name: str, directory: Path, log: str | None = None) -> JobReport:
    return analyse(spark, name, Source(str(directory), log=log), rows_max=1000)


def test_volume_is_counted_by_hour_log_and_tag(
    spark: SparkSession, filled: tuple[Path, Records]
) -> None:
    directory, records = filled
    wanted: defaultdict[tuple[object, ...], list[int]] = defaultdict(lambda: [0, 0])
    for log, of_log in records.items():
        for record in of_log:
            hour = datetime.fromtimestamp(record.ordered_at, UTC).replace(
                minute=0, second=0, microsecond=0, tzinfo=None
            )
            for tag in record.tags or [None]:
                counted = wanted[hour, log, tag if tag is None else str(tag)]
                counted[0] += 1
                counted[1] += len(record.data)
    rows = rows_of(run(spark, "volume", directory))
    found = {(r["hour"], r["log"], r["tag"]): [r["records"], r["bytes"]] for r in rows}
    assert found == wanted


def test_hot_tags_come_first_with_their_share_and_skew(
    spark: SparkSession, filled: tuple[Path, Records]
) -> None:
    directory, records = filled
    for log in ("a", "b"):
        counts = Counter(str(tag) for record in records[log] for tag in record.tags)
        total, mean = sum(counts.values()), sum(counts.values()) / len(counts)
        rows = rows_of(run(spark, "tags", directory, log))
        assert {row["tag"]: row["records"] for row in rows} == counts
        assert [row["records"] for row in rows] == sorted(counts.values(), reverse=True)
        for row in rows:
            count = counts[str(row["tag"])]
            assert row["share"] == pytest.approx(count / total)
            assert row["skew"] == pytest.approx(count / mean)


def test_lag_is_from_the_writers_time_to_the_order(
    spark: SparkSession, filled: tuple[Path, Records]
) -> None:
    directory, records = filled
    rows = {row["log"]: row for row in rows_of(run(spark, "lag", directory))}
    assert rows.keys() == records.keys()
    for log, of_log in records.items():
        lags = sorted(1000 * (record.ordered_at - record.time) for record in of_log)
        assert rows[log]["records"] == len(lags)
        assert rows[log]["max_ms"] == pytest.approx(lags[-1], abs=0.01)
        assert rows[log]["p50_ms"] == pytest.approx(
            (lags[(len(lags) - 1) // 2] + lags[len(lags) // 2]) / 2, abs=0.01
        )


def test_lag_has_percentiles_and_counts_negative_values(spark: SparkSession) -> None:
    lags = [-2.0, 1.0, 2.0, 4.0, 100.0]
    frame = spark.createDataFrame(
        [("a", 1_000_000 + round(lag * 1_000), 1_000_000) for lag in lags],
        "log string, o long, t long",
    ).selectExpr("log", "timestamp_micros(o) AS ordered_at", "timestamp_micros(t) AS time")
    (row,) = spark.sql(LAG, records=frame).collect()
    assert (row.records, row.negative, row.p50_ms, row.max_ms) == (5, 1, 2.0, 100.0)
    assert row.p95_ms == pytest.approx(4 + 0.8 * 96)


def test_hours_are_of_utc_and_long_values_are_cut(spark: SparkSession, tmp_path: Path) -> None:
    async def fill_one() -> None:
        async with indilog.open(tmp_path / "data") as client:
            await Store(client.log("shop")).put("tea", {"text": "x" * 500})

    asyncio.run(fill_one())
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")  # 05:45 east
    try:
        hours = {row["hour"] for row in rows_of(run(spark, "volume", tmp_path / "data"))}
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0, tzinfo=None)
    assert hours <= {now, now - timedelta(hours=1)}
    (row,) = rows_of(run(spark, "objects", tmp_path / "data"))
    assert (row["bytes"], len(str(row["value"])), str(row["value"])[-1]) == (511, 60, "…")


def test_workflows_have_durations_and_failure_rates(
    spark: SparkSession, filled: tuple[Path, Records]
) -> None:
    directory, records = filled
    spans: defaultdict[str, list[float]] = defaultdict(list)
    for record in records["flows/flow"]:
        for tag in record.tags:
            if str(tag).startswith("flow:"):
                spans[str(tag)].append(record.ordered_at)
    (row,) = rows_of(run(spark, "workflows", directory))
    assert (row["workflow"], row["runs"], row["open"]) == ("half", RUNS, 0)
    assert (row["failed"], row["cancelled"], row["retries"]) == (RUNS // 2, 0, 0)
    assert row["failed_steps"] == RUNS // 2
    assert row["failure_rate"] == pytest.approx((RUNS // 2) / RUNS)
    longest = max(times[-1] - times[0] for times in spans.values())
    assert row["max_s"] == pytest.approx(longest, abs=1e-5)


def test_spark_queries_objects_at_a_seqnum(
    spark: SparkSession, filled: tuple[Path, Records]
) -> None:
    directory, records = filled
    second = records["shop"][1].seqnum
    price = "SELECT name, CAST(get_json_object(value, '$.price') AS int) AS price FROM {shop}"
    for at, wanted in ((second, {"tea": 3, "cake": 5}), (None, {"tea": 4, "cake": 5})):
        frame = spark.sql(price, shop=objects(spark, str(directory), log="shop", at=at))
        assert {row.name: row.price for row in frame.collect()} == wanted
    assert {row["name"] for row in rows_of(run(spark, "objects", directory))} == {"tea", "cake"}


def test_jobs_read_through_a_platform_too(spark: SparkSession, url: str, on_log: object) -> None:
    async def fill_shared() -> None:
        async with indilog.connect(url) as client:
            log = client.log("analysed")
            await Store(log).put("tea", {"price": 3})
            await log.append(b"12345", tags=["hot"])

    asyncio.run(fill_shared())
    source = Source(url=url, log="analysed")
    (row,) = rows_of(analyse(spark, "objects", source))
    assert (row["name"], row["value"]) == ("tea", '{"price":3}')
    hot = [row for row in rows_of(analyse(spark, "tags", source)) if row["tag"] == "hot"]
    assert [(row["records"], row["bytes"]) for row in hot] == [(1, 5)]


def test_damage_is_one_sentence_or_skipped(spark: SparkSession, tmp_path: Path) -> None:
    async def fill_one() -> None:
        async with indilog.open(tmp_path / "data") as client:
            await client.log("a").append_batch([indilog.Entry(b"record %d." % n) for n in range(3)])

    asyncio.run(fill_one())
    damage(tmp_path / "data", b"record 1.")
    with pytest.raises(JobError, match=r"^Records at seqnums \[1, 2\) are lost: [^\n]*$"):
        run(spark, "volume", tmp_path / "data")
    source = Source(str(tmp_path / "data"), skips_gaps=True)
    (row,) = rows_of(analyse(spark, "volume", source))
    assert row["records"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(
            ["{data}", "--master", "nonsense"],
            "Spark does not start with master 'nonsense': ",
            marks=pytest.mark.repeated,
        ),
        (["http://", "--log", "a"], "A platform's URL has the form http://127.0.0.1:8080"),
        (["{data}", "--out", "/proc/none"], "/proc/none/tags.svg cannot be written: "),
    ],
)
def test_a_command_that_cannot_run_ends_with_one_sentence(
    filled: tuple[Path, Records], arguments: list[str], sentence: str
) -> None:
    given = [argument.format(data=filled[0]) for argument in arguments]
    command = [sys.executable, "-m", "indilog", "analyse", "tags", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr.partition("most recent call last")[2]
    assert done.stderr.splitlines()[-1].startswith(sentence)
