"""Finds the executors of open runs by reading the runs, if heartbeats are lost.

It reads the list of all runs and each open run, so it is used only after a loss.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import structlog

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import RUNS_TAG, run_in, run_record
from bokiflow.runs.run_log import read_run, retry_while_unavailable
from bokiflow.runs.run_state import Run
from bokiflow.takeover.dead_executors import HeldRuns, read_readable
from indilog import IndilogError, Log, TrimmedError


async def find_executors_of_open_runs(log: Log) -> set[str]:
    """Return the executors of the open runs; runs that cannot be read are skipped.

    Transient errors of the log are retried.

    Raises:
        Stopped: the log was unavailable for too long.
    """
    found: set[str] = set()
    for id_ in await _open_runs(log):
        try:
            run = await retry_while_unavailable(partial(_run, log, id_))
        except TrimmedError:
            continue
        except IndilogError as error:
            structlog.get_logger().error("run cannot be read", run=id_, reason=str(error))
            continue
        if run.started is not None and run.finished is None and run.parked is None:
            found.add(run.executor)
    return found


async def _run(log: Log, id_: str) -> Run:
    return await read_run(log, id_, Run(), is_reused=True)


async def _open_runs(log: Log) -> list[str]:
    """Return the runs that have begun and not ended, as far as the list of runs can be read."""
    held, bound = HeldRuns(), 0

    async def read_on() -> None:
        nonlocal bound
        async for record in read_readable(log, RUNS_TAG, bound, []):
            bound = record.seqnum + 1
            if (run := run_in(record.tags)) is not None:
                with suppress(FlowVersionError):
                    held.apply(record.seqnum, run, run_record(record.data))

    await retry_while_unavailable(read_on)
    return held.runs
