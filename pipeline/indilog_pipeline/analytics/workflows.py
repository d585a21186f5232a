"""Runs of BokiFlow as a DataFrame: one row for each run, which BokiFlow's own code derives from the
run's records. The job `workflows` of `jobs` calls `runs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from bokiflow.runs.records import RunFinished, run_record
from bokiflow.runs.run_state import RunState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class RunRow(NamedTuple):
    """The row of a run.

    Attributes:
        workflow: name of the workflow.
        state: `running`, `parked`, `done`, `failed` or `cancelled`.
        began_us, ended_us: microseconds since 1970, by the log's clock; an open run has not ended.
        steps: number of decided operations.
        failed_steps: number of decided operations whose outcome is an error.
        retries: number of takeovers of the run.
    """

    workflow: str
    state: str
    began_us: int
    ended_us: int | None
    steps: int
    failed_steps: int
    retries: int


_ROW: Final = (
    "workflow string, state string, began_us bigint, ended_us bigint, steps bigint, "
    "failed_steps bigint, retries bigint"
)
_RUN_PREFIX: Final = "flow:"


def runs(records: DataFrame) -> DataFrame:
    """Return a row for each run in `records` of the data source: its log, its id (`run`) and the
    columns of `RunRow`. Runs whose start was trimmed are left out.

    Spark groups the records by run, so the records of a run are in one task's memory.
    """
    from pyspark.sql.functions import udf

    tag = f"get(filter(tag_names, tag -> startswith(tag, '{_RUN_PREFIX}')), 0)"
    named = records.selectExpr(
        "log",
        f"substring({tag}, {len(_RUN_PREFIX) + 1}) AS run",
        "struct(seqnum, unix_micros(ordered_at) AS ordered_us, data) AS record",
    )
    grouped = named.filter("run IS NOT NULL").groupBy("log", "run")
    # Arrow (applyInArrow, too) would need pandas.
    derived = udf(run_row, _ROW, useArrow=False)("records").alias("row")
    gathered = grouped.agg({"record": "collect_list"}).toDF("log", "run", "records")
    return (
        gathered.select("log", "run", derived)
        .filter("row IS NOT NULL")
        .select("log", "run", "row.*")
    )


def run_row(records: Iterable[tuple[int, int, bytes]]) -> RunRow | None:
    """Return the row of a run; None: its start is missing.

    Args:
        records: records of one run in any order: seqnum, time of the log (\u00b5s since 1970),
            data.

    Raises:
        FlowVersionError: a later version of BokiFlow wrote a record.
    """
    run = RunState()
    began_us, ended_us = 0, None
    for seqnum, ordered_us, data in sorted(records):
        record = run_record(bytes(data))
        if not run.apply(seqnum, ordered_us / 1e6, record):
            continue
        if run.started_at == seqnum:
            began_us = ordered_us
        if isinstance(record, RunFinished):
            ended_us = ordered_us
    if run.started is None or run.state is None:
        return None
    return RunRow(
        run.started.workflow,
        run.state.value,
        began_us,
        ended_us,
        len(run.steps),
        sum(step.failure is not None for step in run.steps.values()),
        run.epoch - 1,
    )
