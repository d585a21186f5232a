"""Derives the state of a flow's executors from their records alone.

A busy executor writes a heartbeat before its lease ends, and no other executor takes over its runs
meanwhile. When its lease has ended, the order of the log chooses a new owner, which takes over its
runs. The name of a dead executor is never used again.

**Clocks.** Correctness does not depend on clocks of other machines. Each process counts a lease by
its own monotonic clock, from when it read the heartbeat. The executor itself counts from before it
sent the heartbeat, so it considers its lease ended first. A process that finds a lease ended
appends a claim (`ExecutorDead`), which says up to which seqnum the process has read. The claim
takes effect if the log has no record about the executor between that seqnum and the claim. So its
effect follows from the records alone, and every process agrees.

**Unreadable records** are skipped. A lost record may have been any record, which `Executors.lost`
takes into account. A record of a later version is left to that version
(`Executors.skip_later_version`). docs/decisions/0021-lost-heartbeats.md explains why skipping is
safe for each kind of record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, assert_never

from bokiflow.runs.records import ExecutorDead, ExecutorLeft, ExecutorRecord, Heartbeat
from bokiflow.takeover.dead_executors import DeadExecutors
from indilog.sdk import SeqNum

NEW_OWNER_S: Final = 600.0
"""Seconds after which a second new owner is chosen, if the first one has not taken over all runs:
it may have no room, or take crash-looping runs in groups. Each new owner skips the runs that the
other one has taken over.
"""


@dataclass(slots=True)
class KnownExecutor:
    """An executor that may own runs.

    Attributes:
        lease_s: length of the lease in its last heartbeat, in seconds.
        until: when a new owner may be chosen, by this process's monotonic clock.
        seqnum: seqnum of its last heartbeat.
        last_record_at: seqnum of the last record about it.
        new_owner: name of the executor that takes over its runs; None: it is not dead.
        has_left: whether it has recorded that it stops.
        was_dead: whether it was in `dead_executors` of this process before.
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
        known: live executors by name, and dead ones whose new owner has not finished.
        dead_executors: executors that were in `known`, and whose takeover has finished.
        lost_at: when lost records were last skipped; None if that never happened, or if unknown
            executors were searched afterwards.
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
        """Remove an executor that has no runs left. Executors whose new owner it was need another
        new owner.

        An executor that records this about itself knows that no assignment is in flight. A new
        owner that records it about another executor does not know that, so the other stays in
        `dead_executors`.
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
        """Skip lost records before `end`, read at `now`.

        A lost record may have been one of these:

        - a heartbeat, so all leases count anew from `now`;
        - a claim that an executor is dead, so a repeated claim must have read at least up to
          `end`;
        - the end of a takeover, so the new owner's runs are open again one lease from now;
        - the first heartbeat of an unknown executor, see `lost_at`.
        """
        assert end > self.end, "reads make progress"
        self.end = self._lost_to = end
        self.lost_at = now
        for known in self.known.values():
            known.until = now + known.lease_s

    def skip_later_version(self, seqnum: SeqNum) -> None:
        """Skip a record that a later version wrote.

        A later version leaves an unreadable record in each run that it executes, so this version
        cannot take over such a run. Records of executors by the later version are not trimmed
        (`needed_from`).
        """
        self.apply(seqnum, 0.0, None)
        if self._later_from is None:
            self._later_from = seqnum

    @property
    def has_later(self) -> bool:
        """Whether a later version has written records of executors."""
        return self._later_from is not None

    def unknown_until(self, lease_s: float) -> float:
        """Return when unknown executors count as dead, if leases are `lease_s` seconds. By then, a
        live executor whose heartbeats are all lost has sent another one.
        """
        longest_s = max((lease_s, *(known.lease_s for known in self.known.values())))
        return -math.inf if self.lost_at is None else self.lost_at + longest_s

    # --- questions

    def is_silent(self, name: str, end: SeqNum) -> bool:
        """Tell whether an executor is known and no record at `end` or later can be about it."""
        known = self.known.get(name)
        return known is not None and max(known.last_record_at + 1, self._lost_to) <= end

    def has_new_owner(self, name: str) -> bool:
        """Tell whether an executor has a new owner, so that its later decisions may have no
        effect.
        """
        known = self.known.get(name)
        return known is not None and known.new_owner is not None

    def lapsed(self, now: float) -> list[str]:
        """Return the executors whose lease has ended at `now`, or whose new owner is late."""
        return [name for name, known in self.known.items() if known.until <= now]

    def next_lapse(self) -> float | None:
        """Return when the next lease ends; None if no executor is known."""
        return min((known.until for known in self.known.values()), default=None)

    def left_to(self, new_owner: str) -> list[str]:
        """Return the executors whose runs `new_owner` takes over."""
        return [name for name, known in self.known.items() if known.new_owner == new_owner]

    def forget(self, name: str, now: float) -> None:
        """Remove an executor that has no runs left. If it is running, it will send another
        heartbeat.
        """
        self.known.pop(name, None)
        self.dead_executors.add(name, now)

    @property
    def needed_from(self) -> SeqNum:
        """The seqnum of the first record that a process starting now must read."""
        least = min((known.seqnum for known in self.known.values()), default=self.end)
        return least if self._later_from is None else min(least, self._later_from)
