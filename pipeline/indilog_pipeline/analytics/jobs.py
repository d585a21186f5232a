"""The jobs of `indilog analyse`. Each runs a Spark query, and makes a table and a picture of its
result. The command calls `analyse`; `JOBS` has all jobs.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from indilog.base.errors import ConfigError, IndilogError
from indilog.base.ids import SeqNum
from indilog_pipeline.analytics.chart import bar_chart
from indilog_pipeline.analytics.objects import objects
from indilog_pipeline.analytics.workflows import runs
from indilog_pipeline.spark_errors import sentence_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class JobError(IndilogError):
    """A job failed; the message is the error of the failed task."""


class Source(NamedTuple):
    """The records to analyse.

    Attributes:
        path: data directory to read; empty: read through `url`.
        url: platform to read through; empty: read `path`.
        log: name of the log; None: all logs of the directory.
        at: seqnum of the last record that counts, only for the job `objects`; None: the end.
        skips_gaps: skip trimmed, lost and corrupt records instead of failing.
    """

    path: str = ""
    url: str = ""
    log: str | None = None
    at: SeqNum | None = None
    skips_gaps: bool = False


class Chart(NamedTuple):
    """The picture of a job: a bar for each row of the table.

    Attributes:
        labels: columns whose values, joined, are the name of the bar.
        value: column with the length of the bar.
        unit: the unit of the value, in words.
    """

    labels: Sequence[str]
    value: str
    unit: str


class Job(NamedTuple):
    """One job.

    Attributes:
        title: title of the table and the picture.
        result: function that returns the rows, beginning with the most important rows.
        chart: the picture of the rows.
    """

    title: str
    result: Callable[[SparkSession, Source], DataFrame]
    chart: Chart


class JobReport(NamedTuple):
    """The result of a job.

    Attributes:
        title: title of the table.
        columns, rows: the table, with at most the requested number of rows.
        has_more: whether there are more rows.
        svg: the picture of these rows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    has_more: bool
    svg: str


VOLUME: Final = """
    SELECT timestampadd(HOUR, hours, TIMESTAMP_NTZ'1970-01-01 00:00:00') AS hour, log, tag,
           count(*) AS records, sum(bytes) AS bytes
    FROM (SELECT unix_seconds(ordered_at) DIV 3600 AS hours, log, length(data) AS bytes,
                 explode_outer(tag_names) AS tag
          FROM {records})
    GROUP BY ALL ORDER BY bytes DESC, hour, log, tag"""
TAGS: Final = """
    SELECT log, tag, records, bytes, records / sum(records) OVER (PARTITION BY log) AS share,
           records / avg(records) OVER (PARTITION BY log) AS skew
    FROM (SELECT log, tag, count(*) AS records, sum(bytes) AS bytes
          FROM (SELECT log, length(data) AS bytes, explode(tag_names) AS tag FROM {records})
          GROUP BY log, tag)
    ORDER BY records DESC, log, tag"""
LAG: Final = """
    SELECT log, count(*) AS records, count_if(lag_ms < 0) AS negative,
           percentile(lag_ms, 0.5) AS p50_ms, percentile(lag_ms, 0.95) AS p95_ms,
           percentile(lag_ms, 0.99) AS p99_ms, max(lag_ms) AS max_ms
    FROM (SELECT log, (unix_micros(ordered_at) - unix_micros(time)) / 1000 AS lag_ms
          FROM {records})
    GROUP BY log ORDER BY p99_ms DESC, log"""
WORKFLOWS: Final = """
    SELECT log, workflow, count(*) AS runs, count_if(ended_us IS NULL) AS open,
           count_if(state = 'failed') AS failed, count_if(state = 'cancelled') AS cancelled,
           count_if(state = 'failed') / nullif(count(ended_us), 0) AS failure_rate,
           sum(retries) AS retries, sum(failed_steps) AS failed_steps,
           percentile(seconds, 0.5) AS p50_s, percentile(seconds, 0.95) AS p95_s,
           max(seconds) AS max_s
    FROM (SELECT *, (ended_us - began_us) / 1000000 AS seconds FROM {runs})
    GROUP BY log, workflow ORDER BY runs DESC, log, workflow"""
OBJECTS: Final = """
    SELECT log, name, version, length(encode(value, 'UTF-8')) AS bytes, tags,
           if(length(value) > 60, concat(substr(value, 1, 59), '…'), value) AS value
    FROM {objects} ORDER BY bytes DESC, log, name"""


def records_of(session: SparkSession, source: Source, columns: str) -> DataFrame:
    """Return the records of a source. `columns` names the columns, as a schema in Spark's DDL."""
    reader = session.read.format("indilog").schema(columns)
    given = {"path": source.path, "url": source.url, "log": source.log or ""}
    for option, value in given.items():
        if value:
            reader = reader.option(option, value)
    return reader.option("on_loss", "skip" if source.skips_gaps else "error").load()


def _by_sql(sql: str, columns: str) -> Callable[[SparkSession, Source], DataFrame]:
    def result(session: SparkSession, source: Source) -> DataFrame:
        return session.sql(sql, records=records_of(session, source, columns))

    return result


def _workflows(session: SparkSession, source: Source) -> DataFrame:
    columns = (
        "log string, tag_names array<string>, seqnum bigint, ordered_at timestamp, data binary"
    )
    return session.sql(WORKFLOWS, runs=runs(records_of(session, source, columns)))


def _objects(session: SparkSession, source: Source) -> DataFrame:
    found = objects(session, source.path, url=source.url, log=source.log, at=source.at)
    return session.sql(OBJECTS, objects=found)


_WITH_DATA: Final = "ordered_at timestamp, log string, tag_names array<string>, data binary"
JOBS: Final[dict[str, Job]] = {
    "volume": Job(
        "Records and bytes by hour (UTC), log and tag",
        _by_sql(VOLUME, _WITH_DATA),
        Chart(["hour", "log", "tag"], "bytes", "bytes of data"),
    ),
    "tags": Job(
        "Hottest tags; skew: a tag's records, divided by the average of its log's tags",
        _by_sql(TAGS, _WITH_DATA),
        Chart(["log", "tag"], "records", "records"),
    ),
    "lag": Job(
        "Time from the writer's clock to ordering, by log",
        _by_sql(LAG, "log string, ordered_at timestamp, time timestamp"),
        Chart(["log"], "p99_ms", "milliseconds, 99th percentile"),
    ),
    "workflows": Job(
        "Runs of BokiFlow by workflow",
        _workflows,
        Chart(["log", "workflow"], "p95_s", "seconds from start to end, 95th percentile"),
    ),
    "objects": Job(
        "Objects of BokiStore, the largest first",
        _objects,
        Chart(["log", "name"], "bytes", "bytes of JSON"),
    ),
}


def check_job(name: str, source: Source) -> None:
    """Refuse an impossible job, before Spark starts.

    Raises:
        ConfigError: there is no job of that name, or the job cannot read this source.
    """
    if name not in JOBS:
        raise ConfigError(f"There is no job {name!r}; the jobs are {', '.join(JOBS)}.")
    if source.at is not None and name != "objects":
        raise ConfigError("Only `objects` are as of a seqnum (--at).")
    if name == "objects" and source.skips_gaps:
        raise ConfigError("Objects are not known where records are lost: leave --skip-gaps out.")
    if source.url and source.log is None:
        raise ConfigError("A read through a platform is of one log: give --log.")


def analyse(session: SparkSession, name: str, source: Source, *, rows_max: int = 20) -> JobReport:
    """Run a job.

    Raises:
        ConfigError: there is no job of that name, or the job cannot read this source.
        IndilogError, ValueError: as reads of logs and of objects.
    """
    check_job(name, source)
    from pyspark.errors import PySparkException

    job = JOBS[name]
    try:
        frame = job.result(session, source)
        found = [tuple(row) for row in frame.limit(rows_max + 1).collect()]
    except PySparkException as error:
        raise JobError(sentence_of(error)) from error
    columns, rows = list(frame.columns), found[:rows_max]
    bars = [(_label(job.chart, columns, row), _number(job.chart, columns, row)) for row in rows]
    svg = bar_chart(job.title, job.chart.unit, bars)
    return JobReport(job.title, columns, rows, len(found) > rows_max, svg)


def _label(chart: Chart, columns: Sequence[str], row: Sequence[object]) -> str:
    values = [row[columns.index(name)] for name in chart.labels]
    return " · ".join(map(_text, values))


def _text(value: object) -> str:
    if isinstance(value, datetime.datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    return "-" if value is None else str(value)


def _number(chart: Chart, columns: Sequence[str], row: Sequence[object]) -> float:
    value = row[columns.index(chart.value)]
    return float(value) if isinstance(value, int | float) else 0.0
