"""What executors leave behind that are gone, however late it comes.

A record that gives a run to an executor may be ordered after everybody has looked what that
executor left: it was on its way meanwhile. So whoever looks trims no further than it has read, and
looks again at the streams of those who are gone, at doubling intervals for a day: for each of them
some twenty times a pair of reads, in each process that drives. So nobody does that for an executor
that went in good order: it says that it has left nothing only if nothing that gives it a run can be
on its way any more, and it says so before others find its lease over (`HeartbeatSender.rest`). What
comes later still, the cleaning finds (`bokiflow.takeover.cleaning`).

What is lost by damage, or of a later version, is passed over: it is a record of one run too, so
that run can be taken by nobody here, and the others can. It is not trimmed, and looked at again.
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
"""How long after an executor went its stream is looked at again first."""
AGE_S_MAX: Final = 86_400.0
NAMES_MAX: Final = 4096
"""More than these are not remembered; those that went first are forgotten first."""
_PAGE: Final = 1000


class Remains(NamedTuple):
    """The runs that an executor has left, as far as its stream was read.

    Attributes:
        end: all of the stream below this seqnum could be read.
    """

    runs: list[str]
    end: SeqNum


class HeldRuns:
    """The runs that somebody may have, as those of their records show that give or take them.

    It follows `bokiflow.runs.fold` without the other records of a run: an epoch is over by nothing
    but what counts in that epoch, which is its end, its being parked, or the next epoch. What
    counts nowhere (an end of an earlier epoch that comes late, the next epoch of somebody who was
    not the first, anything of an earlier run of that id) is of another epoch, and so takes nothing
    away. Hence no run that is held is missing; one that is not may be there, which shows when it is
    read.

    Args:
        executor: whose runs; None: those of all.
    """

    def __init__(self, executor: str | None = None) -> None:
        self._executor = executor
        self._epochs: dict[str, set[int]] = {}
        self._since: dict[str, SeqNum] = {}

    def apply(self, seqnum: SeqNum, run: str, record: RunRecord | None) -> None:
        """Take in a record of a run."""
        match record:
            case RunStarted():
                self._given(seqnum, run, 1)
            case RunTaken(epoch, executor):
                self._over(run, epoch - 1)
                if self._executor in {None, executor}:
                    self._given(seqnum, run, epoch)
            case RunParked(epoch) | RunFinished(epoch):
                self._over(run, epoch)
            case _:
                pass  # what neither gives a run nor takes it

    def _given(self, seqnum: SeqNum, run: str, epoch: int) -> None:
        self._epochs.setdefault(run, set()).add(epoch)
        self._since.setdefault(run, seqnum)

    def _over(self, run: str, epoch: int) -> None:
        epochs = self._epochs.get(run, set())
        epochs.discard(epoch)
        if not epochs:
            self.drop(run)

    def drop(self, run: str) -> SeqNum | None:
        """Pass over a run; return since when it may have been held, if it may."""
        self._epochs.pop(run, None)
        return self._since.pop(run, None)

    @property
    def runs(self) -> list[str]:
        """Those that may be held."""
        return list(self._epochs)


async def read_remains(log: Log, executor: str, bound: SeqNum = 0) -> Remains:
    """Return the runs that an executor began or took, at `bound` or later, and of which its stream
    does not show that it is done with them. None that it has is missing.
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
            # That version's drivers see to the run; nobody else can read it.
            since = held.drop(run)
            unreadable.append(record.seqnum if since is None else since)
    return Remains(held.runs, min([*unreadable, end]))


async def read_readable(
    log: Log, tag: str, bound: SeqNum, unreadable: list[SeqNum]
) -> AsyncIterator[Record]:
    """Yield all records with a tag that are there, from seqnum `bound` on.

    Args:
        log: where they are.
        tag: of all of them.
        bound: where to begin.
        unreadable: gets the place of what is lost and passed over, if anything is.
    """
    async for record in read_surviving_records(log, tag, bound, limit=_PAGE):
        if isinstance(record, DataLossError):
            unreadable.append(bound if record.seqnum is None else record.seqnum)
        else:
            bound = record.seqnum + 1
            yield record


@dataclass(slots=True)
class _Departure:
    since: float
    again_at: float
    end: SeqNum = 0


class DeadExecutors:
    """When to look again at the streams of executors that are gone; times are those of this
    process's steady clock.
    """

    def __init__(self) -> None:
        self._names: dict[str, _Departure] = {}

    def add(self, name: str, now: float) -> None:
        """An executor is gone."""
        if name not in self._names:
            self._names[name] = _Departure(now, now + AGE_S_MIN)
            if len(self._names) > NAMES_MAX:
                del self._names[next(iter(self._names))]

    def __contains__(self, name: str) -> bool:
        """Whether an executor is gone, and its stream is looked at again."""
        return name in self._names

    def discard(self, name: str) -> None:
        """It is back."""
        self._names.pop(name, None)

    def due(self, now: float) -> list[str]:
        """Return those at whose streams somebody should look again at `now`."""
        return [name for name, gone in self._names.items() if gone.again_at <= now]

    def next_due(self) -> float | None:
        """Return when the next one is due."""
        return min((gone.again_at for gone in self._names.values()), default=None)

    def end(self, name: str) -> SeqNum:
        """Return below which seqnum nothing of its stream is open any more."""
        gone = self._names.get(name)
        return 0 if gone is None else gone.end

    def looked(self, name: str, now: float, end: SeqNum) -> None:
        """Nothing is open below `end` of its stream, as of `now`."""
        gone = self._names.get(name)
        if gone is None:
            return
        if now - gone.since >= AGE_S_MAX:
            del self._names[name]
            return
        gone.end = max(gone.end, end)
        gone.again_at = max(gone.again_at, now) + max(AGE_S_MIN, now - gone.since)
