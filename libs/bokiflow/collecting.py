"""Garbage-collects ended runs: trims their histories, and the lists that name them. Also releases
the outcomes of calls that are held for such runs.

A driver (`driver`) does this for the partitions that its process owns, and for its share of the
partitions without an owner. It reads the ends of runs that are older than the retention period.
Open runs are not read, however old they are. Trims only advance, so several processes may collect
the same runs.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - trims of several runs are concurrent
from collections.abc import Sequence
from typing import Final

import structlog

from bokiflow.ownership.partition import OwnedPartition
from bokiflow.runner import Runner
from bokiflow.runs.records import (
    RUNS_TAG,
    RunContinued,
    RunKept,
    RunStarted,
    encode,
    ended_run_in,
    ended_tag,
    lists_in,
    partition_of,
    run_record,
    run_tag,
    starts_tag,
    workflow_in,
)
from bokiflow.runs.run_log import append_with_retry, is_transient, seqnum_after_loss
from indilog import Context, DataLossError, Entry, IndilogError, Log, Record, TrimmedError
from indilog.sdk import SeqNum
from indilog.sdk.runs import holder_of

_PAGE: Final = 500
_AT_ONCE: Final = 32
"""Runs that are read and trimmed concurrently. Their trims then share entries of the metalog."""
_RELISTED_TOGETHER: Final = 100
_ENTRIES_PER_KEPT: Final = 8
"""See `_PINNED_MAX`."""
_PINNED_MAX: Final = 256
"""Kept runs are listed anew if a cursor has passed more entries than this since the last time, plus
`_ENTRIES_PER_KEPT` for each kept run. Until then their old entries prevent the trim of the others.
"""
INTERVAL_S_MIN: Final = 1.0
INTERVAL_S_MAX: Final = 600.0


class Collector:
    """Trims ended runs of one flow.

    Args:
        runner: executor of this process.
        retention_s: seconds for which an ended run is kept after its last record.
    """

    def __init__(self, runner: Runner, retention_s: float) -> None:
        self._runner = runner
        self._retention_s = retention_s
        self._cursors: dict[int, SeqNum] = {}
        self._kept: dict[int, dict[str, SeqNum]] = {}
        """Ended runs that a cursor has passed and that are still kept, by partition, with the
        seqnum of their entry. These are children of open runs, and runs with late records.
        """
        self._pinned: dict[int, int] = {}
        """Number of entries that a cursor has passed while there were kept runs, by partition."""
        self._floors: dict[str, SeqNum] = {}

    @property
    def interval_s(self) -> float:
        """Seconds between two rounds (1 to 600)."""
        return min(max(self._retention_s / 10, INTERVAL_S_MIN), INTERVAL_S_MAX)

    async def collect(self, log: Log, now: float) -> int:
        """Trim the runs that ended more than the retention period before `now` (log time). Return
        the number of trimmed runs.
        """
        before, collected = now - self._retention_s, 0
        await self._runner.member.look_once(log)
        mine = self._runner.member.collected()
        lists = dict[str, SeqNum]()
        for number in mine:
            collected += await self._collect_partition(log, number, before, lists)
        for tag, floor in lists.items():
            await self._trim(log, tag, floor)
        for number in mine:  # the lists are trimmed first, because these records name the lists
            kept = self._kept[number].values()
            await self._trim(log, ended_tag(number), min((*kept, self._cursors.get(number, 0))))
        if 0 in mine:
            await self._trim_starts(log, before)
        return collected

    async def release_calls(self, ctx: Context) -> int:
        """Release the outcomes of calls that are held for runs that are not open. The executor of
        such a run crashed after the end of the run. Return the number of these runs.

        The holders are read before the partitions. So if a run holds a call and is open, the later
        read finds the run in its partition.
        """
        runner, prefix = self._runner, holder_of(self._runner.log_name, "")
        holders = dict[int, list[str]]()
        async for holder in ctx.holders(prefix):
            number = partition_of(holder.removeprefix(prefix), runner.member.count)
            holders.setdefault(number, []).append(holder)
        log, released = ctx.log(runner.log_name), 0
        for number in holders.keys() & set(runner.member.collected()):
            partition = await self._partition(log, number)
            for holder in holders[number]:
                if holder.removeprefix(prefix) not in partition.state.runs:
                    await ctx.release_calls(holder)
                    released += 1
        return released

    async def _collect_partition(
        self, log: Log, number: int, before: float, lists: dict[str, SeqNum]
    ) -> int:
        """Trim ended runs of a partition. Add to `lists` the lists that name these runs. The value
        is the seqnum below which all records of the list are old.
        """
        kept = self._kept.setdefault(number, {})
        collected = await self._look_again(log, number, kept, before)
        tag = ended_tag(number)
        while page := await self._page(log, tag, self._cursors.get(number, 0)):
            old = [record for record in page if record.ordered_at <= before]
            if not old:
                break
            partition = await self._partition(log, number)
            runs: dict[str, None] = {}
            for record in old:
                if (run := ended_run_in(record)) is not None:
                    kept.setdefault(run, record.seqnum)
                    runs[run] = None
                for name in lists_in(record.tags):
                    lists[name] = max(lists.get(name, 0), record.seqnum + 1)
            collected += await self._look_at(log, list(runs), partition, kept, before)
            self._cursors[number] = old[-1].seqnum + 1
            self._pinned[number] = self._pinned.get(number, 0) + len(old)
            if len(old) < len(page):
                break
        await self._relist_if_due(log, number, kept)
        return collected

    async def _relist_if_due(self, log: Log, number: int, kept: dict[str, SeqNum]) -> None:
        """List the kept runs anew, if their old entries prevent the trim of many other entries."""
        if not kept:
            self._pinned[number] = 0
        if self._pinned.get(number, 0) <= _PINNED_MAX + _ENTRIES_PER_KEPT * len(kept):
            return
        runs = list(kept)
        for first in range(0, len(runs), _RELISTED_TOGETHER):
            some = runs[first : first + _RELISTED_TOGETHER]
            entries = [Entry(encode(RunKept(run)), (ended_tag(number),)) for run in some]
            last = await append_with_retry(log, entries)
            kept.update(dict.fromkeys(some, last - len(some) + 1))
        self._pinned[number] = 0

    async def _look_again(
        self, log: Log, number: int, kept: dict[str, SeqNum], before: float
    ) -> int:
        if not kept:
            return 0
        partition = await self._partition(log, number)
        return await self._look_at(log, list(kept), partition, kept, before)

    async def _look_at(
        self,
        log: Log,
        runs: Sequence[str],
        partition: OwnedPartition,
        kept: dict[str, SeqNum],
        before: float,
    ) -> int:
        """Trim the runs that need not be kept, in groups; return the number of trimmed runs."""
        trimmed = 0
        for first in range(0, len(runs), _AT_ONCE):
            some = runs[first : first + _AT_ONCE]
            trimmed += sum(
                await asyncio.gather(
                    *(self._look(log, run, partition, kept, before) for run in some)
                )
            )
        return trimmed

    async def _partition(self, log: Log, number: int) -> OwnedPartition:
        partition = self._runner.owned.get(number) or OwnedPartition(number, 0)
        await partition.catch_up(log)
        return partition

    async def _look(
        self,
        log: Log,
        run: str,
        partition: OwnedPartition,
        kept: dict[str, SeqNum],
        before: float,
    ) -> int:
        """Trim a run unless it must be kept; return the number of trimmed runs (0 or 1). A run that
        cannot be read is kept.
        """
        try:
            end = await _forgettable_end(log, run, partition, before)
        except IndilogError as error:
            if is_transient(error):
                raise
            structlog.get_logger().error("run cannot be read", run=run, reason=str(error))
            return 0
        if end is None:
            return 0
        if end:
            await log.trim(end, tag=run_tag(run))
        kept.pop(run, None)
        return int(end > 0)

    async def _trim_starts(self, log: Log, before: float) -> None:
        """Trim the lists of starts by age. A run that has been open for longer is listed by its
        partition while it is open, and by the record of its end afterwards.
        """
        floor, workflows = self._floors.get(RUNS_TAG, 0), set[str]()
        while page := await self._page(log, RUNS_TAG, floor):
            old = [record for record in page if record.ordered_at <= before]
            if old:
                floor = old[-1].seqnum + 1
                workflows.update(filter(None, (workflow_in(record.tags) for record in old)))
            if len(old) < len(page):
                break
        for workflow in sorted(workflows):
            await self._trim(log, starts_tag(workflow), floor)
        await self._trim(log, RUNS_TAG, floor)

    async def _page(self, log: Log, tag: str, bound: SeqNum) -> list[Record]:
        """Return the next page of a list, and skip lost records."""
        while True:
            try:
                return await log.read_range(tag, bound, limit=_PAGE)
            except TrimmedError as error:
                bound = max(bound, error.first_seqnum)
            except DataLossError as error:
                bound = seqnum_after_loss(error, bound)

    async def _trim(self, log: Log, tag: str, floor: SeqNum) -> None:
        if floor > self._floors.get(tag, 0):
            await log.trim(floor, tag=tag)
            self._floors[tag] = floor


async def _forgettable_end(
    log: Log, run: str, partition: OwnedPartition, before: float
) -> SeqNum | None:
    """Return the seqnum below which an ended run can be trimmed, which is the one after its last
    record. None: the run must be kept; 0: the run is already trimmed.
    """
    if run in partition.state.runs:
        return None
    try:
        last = await log.read_prev(run_tag(run))
    except TrimmedError:
        return 0
    if last is None:
        return 0
    if last.ordered_at > before or await _has_open_parent(log, run, partition):
        return None
    return last.seqnum + 1


async def _has_open_parent(log: Log, run: str, partition: OwnedPartition) -> bool:
    """Tell whether a run is a child that the current round of an open run started. The executor of
    the parent may still have to read the child's end.
    """
    if "/" not in run:
        return False
    bound: SeqNum = 0
    while True:
        try:
            first = await log.read_next(run_tag(run), bound)
        except TrimmedError as error:
            bound = error.first_seqnum
            continue
        started = None if first is None else run_record(first.data)
        parent = started.parent if isinstance(started, RunStarted | RunContinued) else None
        if parent is None or (open_ := partition.state.runs.get(parent.run)) is None:
            return False
        began = run.removeprefix(parent.run).partition("/")[0]  # see `Execution.child_id`
        is_first = open_.round_at == open_.started_at
        return open_.round_at < 0 or began == f"@{open_.round_at}" or (is_first and not began)
