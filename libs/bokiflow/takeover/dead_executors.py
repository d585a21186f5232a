"""Finds the orphaned runs of dead executors, including runs whose assignment arrives late.

An executor's stream is the records with its tag. A record that assigns a run to a dead executor may
be in flight, and be ordered after all drivers have read that executor's stream. So a driver trims
only records that it has read, and re-reads the streams of dead executors at doubling intervals for
a day. Each driver makes about twenty pairs of reads for each dead executor.

The stream of an executor that stopped normally need not be re-read. An executor that stops normally
records that it has no runs left, before its lease ends for other processes
(`HeartbeatSender.leave_if_idle`). The executor does so only if no record in flight can assign it a
run. Garbage collection finds later assignments (`bokiflow.takeover.cleaning`).

Lost records, and records of a later version, are skipped. Each belongs to one run, so this process
cannot take over that run. Such a record is not trimmed, and is read again later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import (
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    executor_tag,
    run_in,
    run_record,
)
from indilog import DataLossError, Log, Record
from indilog.sdk import SeqNum, read_surviving_records

AGE_S_MIN: Final = 1.0
"""Seconds after an executor was found dead until its stream is re-read for the first time."""
AGE_S_MAX: Final = 86_400.0
NAMES_MAX: Final = 4096
"""Largest number of dead executors that are kept; the oldest are dropped first."""
_PAGE: Final = 1000


class OrphanedRuns(NamedTuple):
    """The runs of a dead executor, as of the part of its stream that was read.

    Attributes:
        end: seqnum below which the stream was read completely.
    """

    runs: list[str]
    end: SeqNum


class HeldRuns:
    """The runs that an executor may own, derived from the records that assign or end runs.

    It applies the rules of `bokiflow.runs.run_state` to these records only. An epoch ends only by a
    record that takes effect in it: the run's end, its parking, or the next epoch. A record without
    effect belongs to another epoch, so it removes no run here. Examples are a late end of an
    earlier epoch, a second takeover, and any record of an earlier run with that id. Hence no owned
    run is missing here. Runs that the executor does not own may be included; the records of such a
    run show its owner.

    Args:
        executor: name of the owner; None: runs of all executors.
    """

    def __init__(self, executor: str | None = None) -> None:
        self._executor = executor
        self._epochs: dict[str, set[int]] = {}
        self._since: dict[str, SeqNum] = {}

    def apply(self, seqnum: SeqNum, run: str, record: RunRecord | None) -> None:
        """Apply a record of a run."""
        match record:
            case RunStarted():
                self._assign(seqnum, run, 1)
            case RunTaken(epoch, executor):
                self._unassign(run, epoch - 1)
                if self._executor in {None, executor}:
                    self._assign(seqnum, run, epoch)
            case RunParked(epoch) | RunFinished(epoch):
                self._unassign(run, epoch)
            case _:
                pass  # the record neither assigns a run nor ends an epoch

    def _assign(self, seqnum: SeqNum, run: str, epoch: int) -> None:
        self._epochs.setdefault(run, set()).add(epoch)
        self._since.setdefault(run, seqnum)

    def _unassign(self, run: str, epoch: int) -> None:
        epochs = self._epochs.get(run, set())
        epochs.discard(epoch)
        if not epochs:
            self.drop(run)

    def drop(self, run: str) -> SeqNum | None:
        """Remove a run. Return the seqnum since which it may be owned; None if it is not."""
        self._epochs.pop(run, None)
        return self._since.pop(run, None)

    @property
    def runs(self) -> list[str]:
        """The runs that may be owned."""
        return list(self._epochs)


async def read_orphaned_runs(log: Log, executor: str, bound: SeqNum = 0) -> OrphanedRuns:
    """Return the runs that an executor started or took over at seqnum `bound` or later, and that
    its stream does not show as ended. No run that it owns is missing.
    """
    held = HeldRuns(executor)
    unreadable: list[SeqNum] = []
    end = bound
    async for record in read_readable(log, executor_tag(executor), bound, unreadable):
        end = record.seqnum + 1
        run = run_in(record.tags)
        if run is None:
            continue
        try:
            held.apply(record.seqnum, run, run_record(record.data))
        except FlowVersionError:
            # Only drivers of the later version can read the run and take it over.
            since = held.drop(run)
            unreadable.append(record.seqnum if since is None else since)
    return OrphanedRuns(held.runs, min([*unreadable, end]))


async def read_readable(
    log: Log, tag: str, bound: SeqNum, unreadable: list[SeqNum]
) -> AsyncIterator[Record]:
    """Yield all readable records with a tag, from seqnum `bound` on.

    Args:
        log: log of the runs.
        tag: tag of the records.
        bound: first seqnum to read.
        unreadable: list to which the seqnum of each skipped record is appended.
    """
    async for record in read_surviving_records(log, tag, bound, limit=_PAGE):
        if isinstance(record, DataLossError):
            unreadable.append(bound if record.seqnum is None else record.seqnum)
        else:
            bound = record.seqnum + 1
            yield record


@dataclass(slots=True)
class _Death:
    since: float
    again_at: float
    end: SeqNum = 0


class DeadExecutors:
    """The dead executors whose streams are re-read, and when (monotonic time of this process)."""

    def __init__(self) -> None:
        self._names: dict[str, _Death] = {}

    def add(self, name: str, now: float) -> None:
        """Add a dead executor."""
        if name not in self._names:
            self._names[name] = _Death(now, now + AGE_S_MIN)
            if len(self._names) > NAMES_MAX:
                del self._names[next(iter(self._names))]
        assert len(self._names) <= NAMES_MAX, "the oldest was dropped"

    def __contains__(self, name: str) -> bool:
        """Tell whether an executor is dead and its stream is still re-read."""
        return name in self._names

    def discard(self, name: str) -> None:
        """Remove an executor that has sent a heartbeat."""
        self._names.pop(name, None)

    def due(self, now: float) -> list[str]:
        """Return the executors whose streams are due to be re-read at `now`."""
        return [name for name, dead in self._names.items() if dead.again_at <= now]

    def next_due(self) -> float | None:
        """Return when the next stream is due."""
        return min((dead.again_at for dead in self._names.values()), default=None)

    def end(self, name: str) -> SeqNum:
        """Return the seqnum below which the executor's stream assigns no open run."""
        dead = self._names.get(name)
        return 0 if dead is None else dead.end

    def note_read(self, name: str, now: float, end: SeqNum) -> None:
        """Note that, as of `now`, the stream assigns no open run below `end`. Schedule the next
        read.
        """
        dead = self._names.get(name)
        if dead is None:
            return
        if now - dead.since >= AGE_S_MAX:
            del self._names[name]
            return
        dead.end = max(dead.end, end)
        dead.again_at = max(dead.again_at, now) + max(AGE_S_MIN, now - dead.since)
