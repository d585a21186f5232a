"""The executors of a flow, a fold of their records.

A busy executor writes a heartbeat before its lease ends, and no other executor takes its runs
meanwhile. When its lease has ended, the order of the log chooses a new owner, which takes its runs
over one by one. The name of a dead executor is never used again.

**Clocks.** Correctness does not depend on clocks of other machines. Each process counts a lease by
its own monotonic clock from when it read the heartbeat. The executor itself counts from before it
sent the heartbeat, so its own lease always ends first. A process that finds a lease ended records
up to which seqnum it has read. The claim takes effect if no record at or after that seqnum is about
the executor. So its effect follows from the records alone, in every process.

**Unreadable records** are skipped: a lost one may have been any record, which `Executors.lost`
compensates for; one of a later version is left to that version (`Executors.skip_later_version`).
docs/decisions/0021-lost-heartbeats.md explains why that is safe for each kind of record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, assert_never

from bokiflow.runs.records import ExecutorDead, ExecutorLeft, ExecutorRecord, Heartbeat
from bokiflow.takeover.dead_executors import DeadExecutors
from indilog.sdk import SeqNum

NEW_OWNER_S: Final = 600.0
"""Seconds after which a second new owner is chosen, if the first has not taken all runs (it has no
room, or takes crash-looping runs in groups). Each skips runs that the other has taken."""


@dataclass(slots=True)
class KnownExecutor:
    """An executor that may own runs.

    Attributes:
        lease_s: of its last heartbeat, seconds.
        until: when a new owner may be chosen, by this process's monotonic clock.
        seqnum: of its last heartbeat.
        last_record_at: seqnum of the last record about it.
        new_owner: which takes over its runs; None: it counts as alive.
        has_left: it recorded that it stops.
        was_dead: it was in `dead_executors` before, in this process.
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

    Times are those of this process's monotonic clock (`waiting.monotonic_now`).

    Attributes:
        end: records below this seqnum are applied or skipped.
        known: by name: the live ones, and those whose new owner has not finished.
        dead_executors: executors that were known and are not any more.
        lost_at: when lost records were last skipped. None: none were, or executors known only by
            lost records have been looked for since.
    """

    def __init__(self) -> None:
        self.end: SeqNum = 0
        self.known: dict[str, KnownExecutor] = {}
        self.dead_executors = DeadExecutors()
        self.lost_at: float | None = None
        self._lost_to: SeqNum = 0
        self._later_from: SeqNum | None = None

    def apply(self, seqnum: SeqNum, now: float, record: ExecutorRecord | None) -> None:
        """Apply the record at `seqnum`, which was read at `now` or before."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        match record:
            case None:
                return
            case Heartbeat(name, lease_s):
                self._on_heartbeat(seqnum, now, name, lease_s)
            case ExecutorDead(name, new_owner, end):
                if self.is_silent(name, end):
                    self._assign_new_owner(name, new_owner, now)
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
            assert seqnum >= known.last_record_at, "records are applied in order"
            known.last_record_at = seqnum

    def _on_left(self, name: str, now: float) -> None:
        """Remove an executor that has left no run. Executors whose new owner it was need another
        one.

        An executor that records this of itself knows that no assignment is in flight. A new owner
        that records it of another does not, so that one stays in `dead_executors`.
        """
        left = self.known.pop(name, None)
        if left is None or left.new_owner is not None or left.was_dead or self._lost_to:
            self.dead_executors.add(name, now)
        for known in self.known.values():
            if known.new_owner == name:
                known.new_owner, known.until = None, now

    def _assign_new_owner(self, name: str, new_owner: str, now: float) -> None:
        for other, known in self.known.items():
            if name in {other, known.new_owner}:
                known.new_owner, known.until = new_owner, now + NEW_OWNER_S

    # --- unreadable records

    def lost(self, end: SeqNum, now: float) -> None:
        """Skip lost records before `end`, as of `now`, which may have been any of these.

        - a heartbeat: so all leases count anew from now;
        - a death: so a repeated claim must have read at least up to here;
        - the end of a takeover: so the runs of that new owner are open again, one lease from now;
        - the first heartbeat of an unknown executor: see `lost_at`.
        """
        assert end > self.end, "reading goes on"
        self.end = self._lost_to = end
        self.lost_at = now
        for known in self.known.values():
            known.until = now + known.lease_s

    def skip_later_version(self, seqnum: SeqNum) -> None:
        """Skip a record that a later version wrote.

        A later version leaves an unreadable record in each run that it touches, so this version
        cannot take that run. Its records of executors are not trimmed (`needed_from`).
        """
        self.apply(seqnum, 0.0, None)
        if self._later_from is None:
            self._later_from = seqnum

    @property
    def has_later(self) -> bool:
        """Whether a later version has written records of executors."""
        return self._later_from is not None

    def unknown_until(self, lease_s: float) -> float:
        """Return when unknown executors are dead, if leases are `lease_s`: a live one whose
        heartbeats are all lost sends another one before.
        """
        longest_s = max((lease_s, *(known.lease_s for known in self.known.values())))
        return -math.inf if self.lost_at is None else self.lost_at + longest_s

    # --- questions

    def is_silent(self, name: str, end: SeqNum) -> bool:
        """Whether an executor is known and no record at `end` or later can be about it."""
        known = self.known.get(name)
        return known is not None and max(known.last_record_at + 1, self._lost_to) <= end

    def has_new_owner(self, name: str) -> bool:
        """Whether an executor has a new owner: its later decisions have no effect."""
        known = self.known.get(name)
        return known is not None and known.new_owner is not None

    def lapsed(self, now: float) -> list[str]:
        """Return the executors whose lease has ended at `now`, or whose new owner is late."""
        return [name for name, known in self.known.items() if known.until <= now]

    def next_lapse(self) -> float | None:
        """Return when the next lease ends, None if none is known."""
        return min((known.until for known in self.known.values()), default=None)

    def left_to(self, new_owner: str) -> list[str]:
        """Return the executors whose runs `new_owner` takes over."""
        return [name for name, known in self.known.items() if known.new_owner == new_owner]

    def forget(self, name: str, now: float) -> None:
        """Remove an executor that has left no run; if it is alive, it sends another heartbeat."""
        self.known.pop(name, None)
        self.dead_executors.add(name, now)

    @property
    def needed_from(self) -> SeqNum:
        """The first record that a process starting now must read."""
        least = min((known.seqnum for known in self.known.values()), default=self.end)
        return least if self._later_from is None else min(least, self._later_from)
