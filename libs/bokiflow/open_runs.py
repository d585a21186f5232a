"""Who has the runs that go on, by the runs themselves: for when signs of life are lost by damage.

It reads the list of all runs that are kept, and each that goes on; so it is asked for after a loss
only.
"""

from __future__ import annotations

from contextlib import suppress

import structlog

from bokiflow.departed import Held, stream
from bokiflow.errors import FlowVersionError
from bokiflow.fold import Run
from bokiflow.records import RUNS_TAG, run_in, run_record
from bokiflow.run_log import is_passing, read_run
from indilog.errors import IndilogError, TrimmedError
from indilog.log import Log


async def executors_of_open_runs(log: Log) -> set[str]:
    """Return the executors of the runs that go on; runs that cannot be read are passed over."""
    found: set[str] = set()
    for id_ in await _open_runs(log):
        try:
            run = await read_run(log, id_, Run(), is_reused=True)
        except TrimmedError:
            continue
        except IndilogError as error:
            if is_passing(error):
                raise
            structlog.get_logger().error("run cannot be read", run=id_, reason=str(error))
            continue
        if run.started is not None and run.finished is None and run.parked is None:
            found.add(run.executor)
    return found


async def _open_runs(log: Log) -> list[str]:
    """Return the runs that began and have not ended, as far as the list of runs can be read."""
    held = Held()
    async for record in stream(log, RUNS_TAG, 0, []):
        if (run := run_in(record.tags)) is not None:
            with suppress(FlowVersionError):
                held.apply(record.seqnum, run, run_record(record.data))
    return held.runs
