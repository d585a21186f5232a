"""This process as an executor of a flow: its heartbeats, its lease, and the partitions it owns.

While this process has work, it writes a heartbeat each quarter of its lease, and reads the records
of all executors up to that heartbeat. For 0.8 of the lease after the heartbeat was sent, no other
process can own its partitions. So this process relies on its ownership without a read. If no newer
heartbeat reaches the log in this time, the process must have stopped its runs when it ends.

`owners` derives the owners of partitions from these records. `executor` decides when to write
heartbeats and records of claims.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import structlog

from bokiflow.ownership.lease import Lease
from bokiflow.ownership.owners import EXECUTORS, OwnedBy, Owners, mask, preferred, weight
from bokiflow.ownership.skip_unreadable import catch_up_readable
from bokiflow.runs import waiting
from bokiflow.runs.public_call import Stopped, uncounted
from bokiflow.runs.records import (
    INBOX_TAG,
    Claimed,
    ExecutorLeft,
    ExecutorRecord,
    Heartbeat,
    Released,
    encode,
)
from bokiflow.runs.run_log import append_with_retry
from indilog import DataLossError, Entry, IndilogError, Log, NotReadyError, OutcomeUnknownError
from indilog.replayed import Replica
from indilog.sdk import SeqNum

_JOINS: Final = 3
"""Attempts to get a lease. An attempt fails only if the log takes longer than the lease."""
_UNCLAIMED_LEASES: Final = 2.0
"""Leases after which a driver claims a partition that its preferred owner has not claimed."""


class ExecutorMember:
    """This process as an executor.

    Args:
        lease_s: seconds after the last heartbeat until other processes claim the partitions.
        partitions: number of partitions, if this process is the first user of the flow.

    Attributes:
        name: name of the executor. After it has left, it joins under another name, because records
            with the old name may still be in flight.
        takes: whether the executor claims its share of the partitions.
        is_busy: whether it has open runs, for its heartbeats.
        lease: its lease.
        replica: the records of executors.
    """

    def __init__(self, lease_s: float, partitions: int) -> None:
        self.name = waiting.new_name()
        self.takes = False
        self.is_busy = True
        self.lease = Lease(lease_s)
        self.replica: Replica[Owners, bool] = Replica(EXECUTORS, Owners, Owners.restore)
        self._count = partitions
        self._mutex = waiting.Mutex()
        self._heard: dict[str, tuple[SeqNum, float]] = {}
        """The last record of each executor, and when it was read (monotonic time)."""
        self._seen: dict[str, float] = {}
        """When each executor was first known (monotonic time)."""
        self._free_since: dict[int, float] = {}
        """When each partition without an owner was first known (monotonic time)."""
        self._unsure_until: float | None = None
        self._has_looked = False
        self._has_lost = False
        """Whether records were lost, so that any partition without an owner may have open runs."""
        self._claiming: set[int] = set()
        """Claimed partitions of which this process has not read yet whether the claim took effect.
        """

    @property
    def owners(self) -> Owners:
        """The owners as of the records read so far."""
        return self.replica.state

    @property
    def count(self) -> int:
        """The number of partitions. The caller must have called `look` before."""
        return len(self.owners.owners) or self._count

    # --- reading

    async def look(self, log: Log, own: SeqNum = -1) -> None:
        """Read the records of executors, at least up to `own`, which the session of `log` wrote."""
        if (lost := await catch_up_readable(self.replica, log, own)) is not None:
            self._on_loss(log, lost)
        self._has_looked = True
        self._note(waiting.monotonic_now())  # after the read: leases count from here

    async def look_once(self, log: Log) -> None:
        """Read the records of executors unless that has happened before."""
        if not self._has_looked:
            await self.look(log)

    def _on_loss(self, log: Log, error: DataLossError) -> None:
        """After lost records, count all leases anew, including this process's own lease."""
        structlog.get_logger().error(
            "records of executors are lost by damage; takeovers continue, up to a lease later",
            log=log.name,
            reason=str(error),
        )
        lease_s = self.lease.lease_s
        longest_s = max((lease_s, *(k.lease_s for k in self.owners.executors.values())))
        self._has_lost = True
        self._heard.clear()
        self._free_since.clear()
        self._unsure_until = waiting.monotonic_now() + longest_s
        self.lease.end()

    def _note(self, now: float) -> None:
        state = self.owners
        owning = {owner.executor for owner in state.owners if owner.executor}
        for name in owning.union(state.executors):
            known = state.executors.get(name)
            last_at = -1 if known is None else known.last_at
            if self._heard.get(name, (None, 0.0))[0] != last_at:
                self._heard[name] = (last_at, now)
        for name in [name for name in self._heard if name not in owning]:
            if name not in state.executors:
                del self._heard[name]
        for partition, owner in enumerate(state.owners):
            if owner.executor:
                self._free_since.pop(partition, None)
            else:
                self._free_since.setdefault(partition, now)

    # --- questions

    def owned(self) -> dict[int, SeqNum]:
        """Return the partitions of this executor, each with the seqnum since which it owns the
        partition.
        """
        return self.owners.owned_by(self.name)

    def until(self, name: str) -> float:
        """Return when the lease of an executor ends for this process (monotonic time)."""
        known = self.owners.executors.get(name)
        _, at = self._heard.get(name, (0, waiting.monotonic_now()))
        return at + (self.lease.lease_s if known is None else known.lease_s)

    def is_lapsed(self, name: str) -> bool:
        """Tell whether the lease of another executor has ended for this process."""
        return name != self.name and self.until(name) <= waiting.monotonic_now()

    def takers(self) -> set[str]:
        """Return the live executors that claim partitions, including this one if it does so."""
        others = self.owners.executors.items()
        live = {name for name, known in others if known.takes and not self.is_lapsed(name)}
        return live | {self.name} if self.takes else live

    def is_claimable(self, partition: int) -> bool:
        """Tell whether a partition has no owner, or a dead owner."""
        owners = self.owners.owners
        if not owners:
            return partition < self.count
        name = owners[partition].executor
        return not name or self.is_lapsed(name)

    def due_claims(self, wanted: Collection[int], *, all_free: bool = False) -> list[int]:
        """Return the partitions that this process should claim now.

        Args:
            wanted: partitions to claim even if no run of them is known to be open.
            all_free: whether to claim partitions without open runs, too.
        """
        if self._is_unsure():
            return []
        takers, now = self.takers(), waiting.monotonic_now()
        all_free = all_free or self._has_lost
        owners = self.owners.owners
        if not owners and self._has_lost:
            owners = [OwnedBy() for _ in range(self._count)]
        due = []
        for partition, owner in enumerate(owners):
            if not self.is_claimable(partition):
                continue
            if partition not in wanted:
                is_needed = all_free or owner.is_needed or owner.executor
                if not (self.takes and is_needed):
                    continue
            free_since = self._free_since.get(partition, now)
            if owner.executor:
                free_since = self.until(owner.executor)
            is_late = now - free_since >= _UNCLAIMED_LEASES * self.lease.lease_s
            if not self.takes or is_late or preferred(partition, takers) == self.name:
                due.append(partition)
        if not due and self._unsure_until is None:
            self._has_lost = False
        return due

    def due_releases(self) -> list[int]:
        """Return the partitions of this process for which another executor is preferred. Only
        executors that have been live for a lease are considered.
        """
        now, lease_s = waiting.monotonic_now(), self.lease.lease_s
        for name in [name for name in self._seen if name not in self.owners.executors]:
            del self._seen[name]
        for name in self.owners.executors:
            self._seen.setdefault(name, now)
        takers = {n for n in self.takers() if n == self.name or now - self._seen[n] >= lease_s}
        if not takers:
            return []
        return [p for p in self.owned() if preferred(p, takers) != self.name]

    def collected(self) -> list[int]:
        """Return the partitions whose ended runs this process collects: its own partitions, and its
        share of the partitions without an owner.
        """
        takers = self.takers()
        return [
            partition
            for partition, owner in enumerate(self.owners.owners)
            if owner.executor == self.name
            or (not owner.executor and self.takes and preferred(partition, takers) == self.name)
        ]

    def are_others_busy(self) -> bool:
        """Tell whether another live executor has open runs."""
        others = self.owners.executors.items()
        return any(
            k.is_busy and name != self.name and not self.is_lapsed(name) for name, k in others
        )

    def executors_known(self) -> bool:
        """Tell whether another executor is known whose lease has not ended for this process."""
        names = self.owners.executors
        return any(name != self.name and not self.is_lapsed(name) for name in names)

    def unsure_until(self) -> float | None:
        """Return when this process may claim partitions again after lost records; None: it may
        claim them now.
        """
        return self._unsure_until if self._is_unsure() else None

    def next_lapse(self) -> float | None:
        """Return when the next lease of another owner ends here; None: no other owner exists."""
        names = {o.executor for o in self.owners.owners if o.executor not in {"", self.name}}
        return min((self.until(name) for name in names), default=None)

    # --- writing

    async def join(self, log: Log, claims: Iterable[int] = ()) -> None:
        """Renew the lease, and claim those partitions of `claims` that have no live owner.

        Raises:
            Stopped: the log is unavailable, or slower than the lease.
        """
        claims = list(claims)
        async with self._mutex:
            for _ in range(_JOINS):
                wanted = [p for p in claims if p not in self.owned() and self.is_claimable(p)]
                if self.lease.is_sure() and not wanted:
                    return
                await self._beat(log, wanted)
                if self.lease.is_sure() or self._is_unsure():
                    break
        if not self.lease.is_sure():
            raise Stopped("The log answers more slowly than the lease of this executor.")

    async def renew(self, log: Log) -> None:
        """Write a heartbeat, and renew the lease."""
        async with self._mutex:
            await self._beat(log, [])

    async def _beat(self, log: Log, claims: list[int]) -> None:
        await self.look_once(log)
        sent_at, end = waiting.passed_now(), self.replica.end
        owns = mask(self.owned(), self.count)
        beat = Heartbeat(
            self.name, self.lease.lease_s, self.takes, self.is_busy, self.count, owns, end
        )
        is_first = self.name not in self.owners.executors
        records: list[ExecutorRecord] = [beat]
        if claims:
            records.append(Claimed(self.name, tuple(claims), end))
        entries = [self._entry(record, is_urgent=is_first) for record in records]
        self._claiming.update(claims)
        last = await self._append(log, entries)
        await self.look(log, last)
        self._claiming.difference_update(claims)
        if not self._is_unsure():
            self.lease.renew(sent_at)

    def _is_unsure(self) -> bool:
        """Tell whether records were lost less than a lease ago."""
        until = self._unsure_until
        if until is not None and until <= waiting.monotonic_now():
            self._unsure_until = until = None
        return until is not None

    async def _append(self, log: Log, entries: list[Entry]) -> SeqNum:
        """Append records about this executor. They do not count as a part of the public call that
        needs them.
        """
        try:
            with uncounted():
                return await append_with_retry(log, entries)
        except Stopped as stopped:
            error = stopped.error
            if isinstance(error, OutcomeUnknownError):
                raise Stopped(str(stopped), NotReadyError(str(error))) from stopped
            raise

    def _entry(self, record: ExecutorRecord, *, is_urgent: bool) -> Entry:
        tags = (EXECUTORS.tag, INBOX_TAG) if is_urgent else (EXECUTORS.tag,)
        return Entry(encode(record), tags)

    async def release(self, log: Log, partitions: Collection[int]) -> None:
        """Record that this executor no longer executes runs of these partitions."""
        async with self._mutex:
            released = Released(self.name, tuple(partitions))
            last = await self._append(log, [self._entry(released, is_urgent=True)])
            await self.look(log, last)

    async def leave(self, log: Log, idle: Collection[int]) -> None:
        """Record that this executor no longer owns partitions. Its partitions that are not in
        `idle` may have open runs, also those that it has claimed a moment ago.
        """
        async with self._mutex:
            name, had, claiming = self.name, self.owned(), self._claiming
            is_known = name in self.owners.executors
            self.name, self._claiming = waiting.new_name(), set()
            self.lease.end()
            if not had and not is_known and not claiming:
                return
            busy = sorted(claiming.union(had).difference(idle))
            left = ExecutorLeft(name, tuple(busy))
            last = await self._append(log, [self._entry(left, is_urgent=bool(busy))])
            try:
                await self.look(log, last)
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("executor cannot read", reason=str(error))


def share_of(member: ExecutorMember) -> list[int]:
    """Return the partitions that a process should claim before it starts a run: its share if the
    process has a driver, else a single partition.
    """
    if member.takes and (due := member.due_claims((), all_free=True)):
        return due
    free = [p for p in range(member.count) if member.is_claimable(p)]
    if member.takes and not member.owners.owners:
        return free
    return [max(free, key=lambda partition: weight(member.name, partition))] if free else []
