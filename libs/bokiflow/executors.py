"""Who executes runs, as the executors' records leave it.

An executor says that it lives, before its lease ends and while it executes anything; nobody touches
its runs meanwhile. When its lease has ended, an heir is chosen by the order of the log, who takes
its runs over one by one. A name is never used again once its bearer was dead.

**Clocks.** No time of another machine decides anything. Each process counts a lease from when it
has read the sign of life, by its own steady clock, so never shorter than its bearer does, who
counts from before it was sent. Who thinks that a lease is over says up to which place of the log it
has looked, and that counts if nothing was said of that executor from there on. So whether it counts
follows from the records alone, alike in every process; what a process had read before, and when,
has no say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, assert_never

from bokiflow.departed import Departed
from bokiflow.records import Alive, Dead, ExecutorRecord, Left
from indilog.ids import SeqNum

HEIR_S: Final = 600.0
"""An heir that has not taken everything by then (it has no room, it takes it with care) is not left
alone with it: somebody else becomes heir too. What one has taken, the other passes over."""


@dataclass(slots=True)
class Executor:
    """One that may have left runs.

    Attributes:
        lease_s: of its last sign of life.
        until: when somebody may become its heir, by this process's steady clock.
        seqnum: its last sign of life.
        said_at: the last record about it.
        heir: who takes over its runs; None: it counts as living.
        has_said_so: it said that it stops.
    """

    lease_s: float
    until: float
    seqnum: SeqNum
    said_at: SeqNum
    heir: str | None = None
    has_said_so: bool = False


class Executors:
    """Applies the records of executors in order.

    Times are those of this process's steady clock (`waiting.steady_now`).

    Attributes:
        end: records below this seqnum are applied.
        known: by name, those that live and those that have an heir who is not done.
        departed: those that were known and are not any more.
    """

    def __init__(self) -> None:
        self.end: SeqNum = 0
        self.known: dict[str, Executor] = {}
        self.departed = Departed()

    def apply(self, seqnum: SeqNum, now: float, record: ExecutorRecord | None) -> None:
        """Take in the record at `seqnum`, which was read by `now`."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        match record:
            case None:
                return
            case Alive(name, lease_s):
                self._lives(seqnum, now, name, lease_s)
            case Dead(name, heir, end):
                if self.is_silent(name, end):
                    self._inherit(name, heir, now)
                self._said(name, seqnum)
            case Left(name, is_idle):
                if is_idle:
                    self._gone(name, now)
                elif (known := self.known.get(name)) is not None:
                    known.until, known.has_said_so = now, True
                self._said(name, seqnum)
            case unreachable:
                assert_never(unreachable)

    def _lives(self, seqnum: SeqNum, now: float, name: str, lease_s: float) -> None:
        known = self.known.get(name)
        if known is None or known.heir is None:
            self.known[name] = Executor(lease_s, now + lease_s, seqnum, seqnum)
            self.departed.discard(name)
        self._said(name, seqnum)

    def _said(self, name: str, seqnum: SeqNum) -> None:
        if (known := self.known.get(name)) is not None:
            known.said_at = seqnum

    def _gone(self, name: str, now: float) -> None:
        """It has left nothing; what was left to it, if it did not come to that, is open again."""
        self.forget(name, now)
        for known in self.known.values():
            if known.heir == name:
                known.heir, known.until = None, now

    def _inherit(self, name: str, heir: str, now: float) -> None:
        for other, known in self.known.items():
            if name in {other, known.heir}:
                known.heir, known.until = heir, now + HEIR_S

    def is_silent(self, name: str, end: SeqNum) -> bool:
        """Whether no record at `end` or later says anything of an executor that is known."""
        known = self.known.get(name)
        return known is not None and known.said_at < end

    def has_heir(self, name: str) -> bool:
        """Whether an executor was dead: what it decides from then on counts nowhere."""
        known = self.known.get(name)
        return known is not None and known.heir is not None

    def lapsed(self, now: float) -> list[str]:
        """Return those whose lease has ended at `now`, and those whose heir is late."""
        return [name for name, known in self.known.items() if known.until <= now]

    def next_lapse(self) -> float | None:
        """Return when the next one lapses."""
        return min((known.until for known in self.known.values()), default=None)

    def left_to(self, heir: str) -> list[str]:
        """Return whose runs `heir` takes over."""
        return [name for name, known in self.known.items() if known.heir == heir]

    def forget(self, name: str, now: float) -> None:
        """An executor has left nothing; if it lives after all, it says so again."""
        self.known.pop(name, None)
        self.departed.add(name, now)

    @property
    def needed_from(self) -> SeqNum:
        """The first record that somebody who begins now must read."""
        return min((known.seqnum for known in self.known.values()), default=self.end)
