"""Keeps the ids of the newest runs in memory, so that runs are found by a prefix of their ids.

The log has no index of prefixes of ids. So the first search in a process reads the list of starts
backwards, as far as the search needs. Later searches read only new starts. `run_lists` searches
here.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from bokiflow.runs import waiting
from bokiflow.runs.backwards import Backwards
from bokiflow.runs.records import run_in, starts_tag, workflow_in
from bokiflow.runs.run_log import seqnum_after_loss
from indilog import DataLossError, Log, Record, TrimmedError
from indilog.sdk import SeqNum

KEPT_MAX: Final = 100_000
"""Largest number of starts in memory, of about 150 bytes each. Older ones are read from the log."""
_PAGE: Final = 1000


class RecentStart(NamedTuple):
    """The start of a run, as the list of starts has it.

    Attributes:
        seqnum: its place in the log.
        time: when it was ordered, seconds since 1970.
        id: id of the run.
        workflow: name of its workflow.
    """

    seqnum: SeqNum
    time: float
    id: str
    workflow: str


def start_in(record: Record) -> RecentStart | None:
    """Return the start in a record of the list of starts; None: the record names no run."""
    id_, workflow = run_in(record.tags), workflow_in(record.tags)
    if id_ is None or workflow is None:
        return None
    return RecentStart(record.seqnum, record.ordered_at, id_, workflow)


class RecentStarts:
    """The newest starts of a flow, as far as they were read.

    Attributes:
        floor: the seqnum below which the list of starts is trimmed, as far as the reads have shown.
    """

    def __init__(self) -> None:
        self.floor: SeqNum = 0
        self._starts: deque[RecentStart] = deque(maxlen=KEPT_MAX)
        """The known starts, newest first."""
        self._end: SeqNum | None = None
        self._has_older = True
        """Whether the log may have starts before the known ones."""
        self._mutex = waiting.Mutex()

    @property
    def is_whole(self) -> bool:
        """Whether all starts in the list are known."""
        return not self._has_older

    @property
    def oldest_start(self) -> RecentStart | None:
        """The oldest known start."""
        return self._starts[-1] if self._starts else None

    @property
    def oldest(self) -> SeqNum:
        """The seqnum from which on all starts in the list are known."""
        return self._starts[-1].seqnum if self._starts else self._end or 0

    async def find(self, log: Log, prefix: str) -> list[RecentStart]:
        """Return the known starts of runs whose id begins with `prefix`, newest first. New starts
        that the session of `log` sees are read first.
        """
        async with self._mutex:
            await self._read_new(log)
            await self._drop_trimmed(log)
            return [start for start in self._starts if start.id.startswith(prefix)]

    async def find_older(self, log: Log, prefix: str) -> list[RecentStart] | None:
        """Read further starts before the known ones, and return those whose id begins with
        `prefix`. None: nothing was read, because there are no older starts, or because `KEPT_MAX`
        starts are in memory already.
        """
        async with self._mutex:
            if not self._has_older or len(self._starts) >= KEPT_MAX:
                return None
            backwards = Backwards(log, starts_tag(None), self.oldest - 1)
            page = await backwards.page(_PAGE)
            self.floor = max(self.floor, backwards.floor)
            self._has_older = bool(page)
            if not page:
                return None
            starts = [start for start in map(start_in, page) if start is not None]
            starts = starts[: KEPT_MAX - len(self._starts)]
            self._starts.extend(starts)
            return [start for start in starts if start.id.startswith(prefix)]

    async def _read_new(self, log: Log) -> None:
        if self._end is None:
            self._end = await log.tail()
        while True:
            try:
                page = await log.read_range(starts_tag(None), self._end, limit=_PAGE)
            except TrimmedError as error:
                self._end = max(self._end, error.first_seqnum)
                continue
            except DataLossError as error:
                self._end = seqnum_after_loss(error, self._end)
                continue
            if not page:
                return
            self._end = page[-1].seqnum + 1
            for start in map(start_in, page):
                if start is not None:
                    self._has_older = self._has_older or len(self._starts) == KEPT_MAX
                    self._starts.appendleft(
                        start
                    )  # the oldest one is dropped if there are too many

    async def _drop_trimmed(self, log: Log) -> None:
        """Forget starts that were trimmed from the list meanwhile."""
        if not self._starts:
            return
        try:
            await log.read_range(starts_tag(None), self._starts[-1].seqnum, limit=1)
        except TrimmedError as error:
            self.floor = max(self.floor, error.first_seqnum)
            while self._starts and self._starts[-1].seqnum < self.floor:
                self._starts.pop()
        except DataLossError:
            pass  # lookups of single runs still find the runs that remain
