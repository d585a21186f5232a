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

**What cannot be read** is passed over: a record that is lost may have said anything, which is made
up for (`Executors.lost`); one of a later version is for its like (`Executors.skip_later_version`).
Why that is safe, for each kind of record: docs/decisions/0021-lost-heartbeats.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, assert_never

from bokiflow.runs.records import ExecutorDead, ExecutorLeft, ExecutorRecord, Heartbeat
from bokiflow.takeover.dead_executors import DeadExecutors
from indilog.sdk import SeqNum

NEW_OWNER_S: Final = 600.0
"""An heir that has not taken everything by then (it has no room, it takes it with care) is not left
alone with it: somebody else becomes heir too. What one has taken, the other passes over."""


@dataclass(slots=True)
class KnownExecutor:
    """One that may have left runs.

    Attributes:
        lease_s: of its last sign of life.
        until: when somebody may become its heir, by this process's steady clock.
        seqnum: its last sign of life.
        said_at: the last record about it.
        heir: who takes over its runs; None: it counts as living.
        has_said_so: it said that it stops.
        was_gone: it was departed before, as far as this process knew.
    """

    lease_s: float
    until: float
    seqnum: SeqNum
    last_record_at: SeqNum
    new_owner: str | None = None
    has_left: bool = False
    was_dead: bool = False


class Executors:
    """Applies the records of executors in order.

    Times are those of this process's steady clock (`waiting.steady_now`).

    Attributes:
        end: records below this seqnum are applied, or passed over.
        known: by name, those that live and those that have an heir who is not done.
        departed: those that were known and are not any more.
        lost_at: when lost records were passed over; None: nobody is to be looked for any more who
            may have been known by them only.
    """

    def __init__(self) -> None:
        self.end: SeqNum = 0
        self.known: dict[str, KnownExecutor] = {}
        self.dead_executors = DeadExecutors()
        self.lost_at: float | None = None
        self._lost_to: SeqNum = 0
        self._later_from: SeqNum | None = None

    def apply(self, seqnum: SeqNum, now: float, record: ExecutorRecord | None) -> None:
        """Take in the record at `seqnum`, which was read by `now`."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        match record:
            case None:
                return
            case Heartbeat(name, lease_s):
                self._on_heartbeat(seqnum, now, name, lease_s)
            case ExecutorDead(name, heir, end):
                if self.is_silent(name, end):
                    self._assign_new_owner(name, heir, now)
                self._note_record(name, seqnum)
            case ExecutorLeft(name, is_idle):
                if is_idle:
                    self._on_left(name, now)
                elif (known := self.known.get(name)) is not None:
                    known.until, known.has_left = now, True
                self._note_record(name, seqnum)
            case unreachable:
                assert_never(unreachable)

    def _on_heartbeat(self, seqnum: SeqNum, now: float, name: str, lease_s: float) -> None:
        known = self.known.get(name)
        if known is None or known.new_owner is None:
            was_gone = name in self.dead_executors or (known is not None and known.was_dead)
            self.known[name] = KnownExecutor(
                lease_s, now + lease_s, seqnum, seqnum, was_dead=was_gone
            )
            self.dead_executors.discard(name)
        self._note_record(name, seqnum)

    def _note_record(self, name: str, seqnum: SeqNum) -> None:
        if (known := self.known.get(name)) is not None:
            known.last_record_at = seqnum

    def _on_left(self, name: str, now: float) -> None:
        """It has left nothing; what was left to it, if it did not come to that, is open again.

        Who says so of itself knows that nothing is on its way to it either. An heir does not.
        """
        gone = self.known.pop(name, None)
        if gone is None or gone.new_owner is not None or gone.was_dead or self._lost_to:
            self.dead_executors.add(name, now)
        for known in self.known.values():
            if known.new_owner == name:
                known.new_owner, known.until = None, now

    def _assign_new_owner(self, name: str, heir: str, now: float) -> None:
        for other, known in self.known.items():
            if name in {other, known.new_owner}:
                known.new_owner, known.until = heir, now + NEW_OWNER_S

    # --- what cannot be read

    def lost(self, end: SeqNum, now: float) -> None:
        """Pass over what is lost before `end`, as of `now`; it may have said anything.

        That somebody lives: so all leases count anew. That somebody is dead: so whoever says it
        again must have read on from here. That somebody is done with what an heir left: so that
        heir's runs are anybody's a lease from now. The first of anybody: see `lost_at`.
        """
        assert end > self.end, "reading goes on"
        self.end = self._lost_to = end
        self.lost_at = now
        for known in self.known.values():
            known.until = now + known.lease_s

    def skip_later_version(self, seqnum: SeqNum) -> None:
        """Pass over a record that a later version wrote.

        That one has its mark in each run that it touches, which keeps others from taking it; what
        it says of executors stays for its like (`needed_from`).
        """
        self.apply(seqnum, 0.0, None)
        if self._later_from is None:
            self._later_from = seqnum

    @property
    def has_later(self) -> bool:
        """Whether a later version has written here."""
        return self._later_from is not None

    def unknown_until(self, lease_s: float) -> float:
        """Return when whoever is not known is gone, if leases are `lease_s`: one of whom all signs
        of life are lost says again that it lives before, if it does.
        """
        longest_s = max((lease_s, *(known.lease_s for known in self.known.values())))
        return -math.inf if self.lost_at is None else self.lost_at + longest_s

    # --- questions

    def is_silent(self, name: str, end: SeqNum) -> bool:
        """Whether no record at `end` or later can have said anything of one that is known."""
        known = self.known.get(name)
        return known is not None and max(known.last_record_at + 1, self._lost_to) <= end

    def has_new_owner(self, name: str) -> bool:
        """Whether an executor was dead: what it decides from then on counts nowhere."""
        known = self.known.get(name)
        return known is not None and known.new_owner is not None

    def lapsed(self, now: float) -> list[str]:
        """Return those whose lease has ended at `now`, and those whose heir is late."""
        return [name for name, known in self.known.items() if known.until <= now]

    def next_lapse(self) -> float | None:
        """Return when the next one lapses."""
        return min((known.until for known in self.known.values()), default=None)

    def left_to(self, heir: str) -> list[str]:
        """Return whose runs `heir` takes over."""
        return [name for name, known in self.known.items() if known.new_owner == heir]

    def forget(self, name: str, now: float) -> None:
        """An executor has left nothing; if it lives after all, it says so again."""
        self.known.pop(name, None)
        self.dead_executors.add(name, now)

    @property
    def needed_from(self) -> SeqNum:
        """The first record that somebody who begins now must read."""
        least = min((known.seqnum for known in self.known.values()), default=self.end)
        return least if self._later_from is None else min(least, self._later_from)
