"""Who executes runs, as the executors' records leave it: a pure fold, alike in every process.

An executor says that it lives, before its lease ends and while it executes anything; nobody touches
its runs meanwhile. When its lease has ended, an heir is chosen by the order of the log, who takes
its runs over one by one. A name is never used again once its bearer was dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from bokiflow.departed import Departed
from bokiflow.records import Alive, Dead, ExecutorRecord, Left
from indilog.ids import SeqNum


@dataclass(slots=True)
class Executor:
    """One that may have left runs.

    Attributes:
        until: when its lease ends, seconds since 1970.
        seqnum: its last sign of life.
        heir: who takes over its runs; None: it counts as living.
        has_said_so: it said that it stops.
    """

    until: float
    seqnum: SeqNum
    heir: str | None = None
    has_said_so: bool = False


class Executors:
    """Applies the records of executors in order.

    Attributes:
        end: records below this seqnum are applied.
        clock: the latest time of an applied record, seconds since 1970.
        known: by name, those that live and those that have an heir who is not done.
        departed: those that were known and are not any more.
    """

    def __init__(self) -> None:
        self.end: SeqNum = 0
        self.clock = 0.0
        self.known: dict[str, Executor] = {}
        self.departed = Departed()

    def apply(self, seqnum: SeqNum, time: float, record: ExecutorRecord | None) -> None:
        """Take in the record at `seqnum`."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        self.clock = max(self.clock, time)
        match record:
            case None:
                return
            case Alive(name, lease_s):
                known = self.known.get(name)
                if known is None or known.heir is None:
                    self.known[name] = Executor(self.clock + lease_s, seqnum)
                    self.departed.discard(name)
            case Dead(name, heir):
                known = self.known.get(name)
                if known is not None and known.heir is None and known.until <= self.clock:
                    self._inherit(name, heir)
            case Left(name, is_idle):
                if is_idle:
                    self._gone(name)
                elif (known := self.known.get(name)) is not None:
                    known.until, known.has_said_so = min(known.until, self.clock), True
            case unreachable:
                assert_never(unreachable)

    def _gone(self, name: str) -> None:
        """It has left nothing; what was left to it, if it did not come to that, is open again."""
        self.forget(name)
        for known in self.known.values():
            if known.heir == name:
                known.heir, known.until = None, min(known.until, self.clock)

    def _inherit(self, name: str, heir: str) -> None:
        for other, known in self.known.items():
            if name in {other, known.heir}:
                known.heir = heir

    def has_heir(self, name: str) -> bool:
        """Whether an executor was dead: what it decides from then on counts nowhere."""
        known = self.known.get(name)
        return known is not None and known.heir is not None

    def lives(self, name: str, now: float) -> bool:
        """Whether nobody may touch the runs of an executor at `now`."""
        known = self.known.get(name)
        return known is not None and known.heir is None and known.until > now

    def lapsed(self, now: float) -> list[str]:
        """Return those whose lease has ended at `now` and who have no heir yet."""
        return [n for n, known in self.known.items() if known.heir is None and known.until <= now]

    def next_lapse(self) -> float | None:
        """Return when the next lease ends."""
        untils = (known.until for known in self.known.values() if known.heir is None)
        return min(untils, default=None)

    def left_to(self, heir: str) -> list[str]:
        """Return whose runs `heir` takes over."""
        return [name for name, known in self.known.items() if known.heir == heir]

    def forget(self, name: str) -> None:
        """An executor has left nothing; if it lives after all, it says so again."""
        self.known.pop(name, None)
        self.departed.add(name, self.clock)

    @property
    def needed_from(self) -> SeqNum:
        """The first record that somebody who begins now must read."""
        return min((known.seqnum for known in self.known.values()), default=self.end)
