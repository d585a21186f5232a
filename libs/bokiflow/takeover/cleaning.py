"""Garbage-collects ended runs: trims their sub-streams, and the list of runs up to the first run
that is kept.

Every driver does this periodically. Floors only grow, so concurrent collections are safe; the later
one finds nothing to trim.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import Final

import structlog

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import RUNS_TAG, RunStarted, run_in, run_record, run_tag
from bokiflow.runs.run_log import is_transient, read_run, seqnum_after_loss
from bokiflow.runs.run_state import Run
from indilog import DataLossError, IndilogError, Log, Record, TrimmedError
from indilog.sdk import SeqNum

_PAGE: Final = 500
INTERVAL_S_MIN: Final = 1.0
INTERVAL_S_MAX: Final = 600.0


class Cleaner:
    """Trims the ended runs of one log.

    It keeps state only for runs that began before the retention period and are still open or ended
    within it. It does not read runs that began later.

    Args:
        retention_s: seconds for which an ended run is kept after its last record.

    Attributes:
        open: running runs that began before the retention period, as of the last round, with their
            executors.
    """

    def __init__(self, retention_s: float) -> None:
        self._retention_s = retention_s
        self._cursor: SeqNum = 0
        self._floor: SeqNum = 0
        self._kept: dict[str, SeqNum] = {}
        self.open: dict[str, str] = {}

    @property
    def interval_s(self) -> float:
        """Seconds between two rounds (1 to 600)."""
        return min(max(self._retention_s / 10, INTERVAL_S_MIN), INTERVAL_S_MAX)

    async def clean(self, log: Log, now: float) -> int:
        """Trim runs that ended more than the retention period before `now` (time of the log);
        return how many.
        """
        before = now - self._retention_s
        forgotten = 0
        self.open = {}
        for run_id in list(self._kept):
            forgotten += await self._look(log, run_id, before)
        while page := await self._page(log):
            old = bisect_right(page, before, key=attrgetter("ordered_at"))
            for record in page[:old]:
                if _may_begin(record):
                    forgotten += await self._on_start(log, record, before)
                self._cursor = record.seqnum + 1
            if old < len(page):
                break
        floor = min((*self._kept.values(), self._cursor))
        if floor > self._floor:
            await log.trim(floor, tag=RUNS_TAG)
            self._floor = floor
        return forgotten

    async def _page(self, log: Log) -> list[Record]:
        """Return the next page of the list of runs, and skip lost records.

        The time of a lost record is unknown. The list is trimmed beyond it when the record after it
        is old.
        """
        bound = self._cursor
        while True:
            try:
                return await log.read_range(RUNS_TAG, bound, limit=_PAGE)
            except TrimmedError as error:
                bound = self._cursor = self._floor = max(bound, error.first_seqnum)
            except DataLossError as error:
                bound = seqnum_after_loss(error, bound)

    async def _on_start(self, log: Log, record: Record, before: float) -> int:
        run_id = run_in(record.tags)
        if run_id is None:
            return 0
        self._kept.setdefault(run_id, record.seqnum)
        return await self._look(log, run_id, before)

    async def _look(self, log: Log, run_id: str, before: float) -> int:
        """Trim a run if it ended before `before`; return how many runs were trimmed (0 or 1). A run
        that cannot be read is kept.
        """
        try:
            return await self._look_at(log, run_id, before)
        except IndilogError as error:
            if is_transient(error):
                raise
            structlog.get_logger().error("run cannot be read", run=run_id, reason=str(error))
            return 0

    async def _look_at(self, log: Log, run_id: str, before: float) -> int:
        run = await read_run(log, run_id, Run(), is_reused=True)
        if run.started is not None:
            if run.finished is None:
                if run.parked is None:
                    self.open[run_id] = run.executor
                return 0
            if run.clock > before:
                return 0
            parent = run.started.parent
            if parent is not None and not await _has_ended(log, parent.run):
                return 0  # an executor of the parent must still see the child's end
        del self._kept[run_id]
        if run.started is None:
            return 0
        await log.trim(run.end, tag=run_tag(run_id))
        return 1


def _may_begin(record: Record) -> bool:
    """Tell whether a record starts a run, as far as this version can read it."""
    try:
        return isinstance(run_record(record.data), RunStarted)
    except FlowVersionError:
        return True  # its run cannot be read either, so it is kept


async def _has_ended(log: Log, run_id: str) -> bool:
    run = await read_run(log, run_id, Run(), is_reused=True)
    return run.started is None or run.finished is not None
