"""Derives which executor owns each partition, from the records of executors alone.

A busy executor writes a heartbeat before its lease ends, and no other executor claims its
partitions meanwhile. When its lease has ended, other executors claim these partitions. The order of
the log decides which claim takes effect.

**Clocks.** Correctness does not depend on clocks of other machines. Each process counts a lease by
its own monotonic clock, from when it read the heartbeat. The executor itself counts from before it
sent the heartbeat, so the lease ends first for the executor.

**Claims.** A claim has the seqnum below which its author has read all records. For a partition of
another executor, the claim takes effect only if that executor has no record at or after this
seqnum. So the effect of a claim follows from the records alone, and every process agrees.

**Lost records** are skipped. Each heartbeat lists the partitions of its executor. So a process that
has lost a claim or a release learns the owner from the owner's next heartbeat. Until then the
process claims nothing: all leases count anew from the loss. A record of a later version is refused,
because its rules may differ.

`member` keeps a replica of `Owners`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec
from xxhash import xxh3_64_intdigest

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import (
    VERSION,
    Claimed,
    ExecutorLeft,
    Heartbeat,
    Released,
    executor_record,
)
from indilog import Record
from indilog.replayed import State, SubStream
from indilog.sdk import RecordFormat, SeqNum

EXECUTORS: Final = SubStream(
    "flow-executors",
    "flow-executors-state",
    RecordFormat(b"\xb0O", VERSION, of="BokiFlow", error=FlowVersionError),
    "The executors of the flow",
)
_DEAD_MAX: Final = 1024
"""Largest number of dead executors whose last heartbeat is kept; the oldest are dropped first."""
_FORGOTTEN_LEASES: Final = 4.0
"""Leases of log time without a record, after which an executor that owns no partition is forgotten.
"""


@dataclass(slots=True)
class KnownExecutor:
    """An executor.

    Attributes:
        lease_s: length of its lease in seconds.
        takes: whether it has a driver.
        is_busy: whether it has open runs.
        beat_at: seqnum of its last heartbeat.
        last_at: seqnum of its last record.
        time: `ordered_at` of its last record.
    """

    lease_s: float
    takes: bool
    is_busy: bool
    beat_at: SeqNum
    last_at: SeqNum
    time: float


class OwnedBy(msgspec.Struct, array_like=True):
    """The owner of a partition.

    Attributes:
        executor: its name; empty: there is no owner.
        since: seqnum of the record that last changed the owner.
        is_needed: whether the partition may have open runs although it has no owner.
    """

    executor: str = ""
    since: SeqNum = 0
    is_needed: bool = False


class _OwnersSnapshot(msgspec.Struct, array_like=True):
    owners: list[OwnedBy]
    executors: dict[str, tuple[float, bool, bool, SeqNum, SeqNum, float]]
    dead: dict[str, SeqNum]


class Owners(State[bool]):
    """The executors and the owners of partitions, as of the records read so far.

    Attributes:
        owners: the owner of each partition; empty before the first record.
        executors: live executors, and dead ones that own partitions, by name.
        dead: the dead executors whose partitions were claimed, by name, each with the seqnum of its
            last heartbeat.
    """

    def __init__(self) -> None:
        self.owners: list[OwnedBy] = []
        self.executors: dict[str, KnownExecutor] = {}
        self.dead: dict[str, SeqNum] = {}
        self._changes = 0

    @property
    def size(self) -> int:
        """See `State.size`."""
        return len(self.owners) + len(self.executors) + len(self.dead)

    def snapshot(self) -> _OwnersSnapshot:
        """See `State.snapshot`."""
        return _OwnersSnapshot(
            [OwnedBy(o.executor, o.since, o.is_needed) for o in self.owners],
            {
                name: (k.lease_s, k.takes, k.is_busy, k.beat_at, k.last_at, k.time)
                for name, k in self.executors.items()
            },
            dict(self.dead),
        )

    @classmethod
    def restore(cls, content: bytes) -> Owners:
        """Return the state of an encoded snapshot."""
        kept, state = msgspec.msgpack.decode(content, type=_OwnersSnapshot), cls()
        state.owners, state.dead = kept.owners, kept.dead
        state.executors = {name: KnownExecutor(*known) for name, known in kept.executors.items()}
        return state

    def apply(self, record: Record) -> bool:
        """Apply a record; return whether it changes an owner.

        Raises:
            FlowVersionError: another version wrote the record.
        """
        said = executor_record(record.data)
        if said is None:
            return False
        seqnum, before = record.seqnum, self._changes
        match said:
            case Heartbeat():
                self._on_heartbeat(seqnum, said)
            case Claimed(name, partitions, end):
                for owner in self._known(partitions):
                    self._claim(seqnum, name, owner, end)
            case Released(name, partitions):
                for owner in self._known(partitions):
                    self._free(seqnum, name, owner, is_needed=True)
            case ExecutorLeft(name, busy):
                for partition, owner in enumerate(self.owners):
                    self._free(seqnum, name, owner, is_needed=partition in busy)
                self.executors.pop(name, None)
            case unreachable:
                assert_never(unreachable)
        known = self.executors.get(said.executor)
        if known is not None:
            known.last_at, known.time = seqnum, record.ordered_at
        self._forget_silent(record.ordered_at)
        return self._changes > before

    def _known(self, partitions: Iterable[int]) -> list[OwnedBy]:
        return [self.owners[number] for number in partitions if number < len(self.owners)]

    def _on_heartbeat(self, seqnum: SeqNum, said: Heartbeat) -> None:
        name = said.executor
        if not self.owners:
            self.owners = [OwnedBy() for _ in range(said.count)]
        self.executors[name] = KnownExecutor(
            said.lease_s, said.takes, said.is_busy, seqnum, seqnum, 0.0
        )
        self.dead.pop(name, None)
        for partition, owner in enumerate(self.owners):
            # A disagreement about records below `end` shows that records were lost.
            if said.end > owner.since and (owner.executor == name) != has(said.owns, partition):
                if owner.executor == name:
                    self._free(seqnum, name, owner, is_needed=True)
                else:
                    self._assign(seqnum, name, owner)

    def _claim(self, seqnum: SeqNum, name: str, owner: OwnedBy, end: SeqNum) -> None:
        if owner.executor == name:
            return
        if owner.executor:
            known = self.executors.get(owner.executor)
            if (owner.since if known is None else known.last_at) >= end:
                return
            self.dead[owner.executor] = owner.since if known is None else known.beat_at
            if len(self.dead) > _DEAD_MAX:
                del self.dead[next(iter(self.dead))]
        self._assign(seqnum, name, owner)

    def _assign(self, seqnum: SeqNum, name: str, owner: OwnedBy) -> None:
        owner.executor, owner.since, owner.is_needed = name, seqnum, False
        self._changes += 1

    def _free(self, seqnum: SeqNum, name: str, owner: OwnedBy, *, is_needed: bool) -> None:
        if owner.executor == name:
            owner.executor, owner.since, owner.is_needed = "", seqnum, is_needed
            self._changes += 1

    def _forget_silent(self, now: float) -> None:
        """Forget executors that own nothing and have written no record for some leases."""
        silent = [
            name
            for name, known in self.executors.items()
            if now - known.time > _FORGOTTEN_LEASES * known.lease_s
        ]
        if silent:
            owning = {owner.executor for owner in self.owners}
            for name in silent:
                if name not in owning:
                    del self.executors[name]

    # --- questions

    def owned_by(self, name: str) -> dict[int, SeqNum]:
        """Return the partitions of an executor, each with the seqnum since which it owns the
        partition.
        """
        return {p: owner.since for p, owner in enumerate(self.owners) if owner.executor == name}


def mask(partitions: Iterable[int], count: int) -> bytes:
    """Return a set of partitions as bytes, with one bit for each partition."""
    bits = 0
    for partition in partitions:
        bits |= 1 << partition
    return bits.to_bytes((count + 7) // 8, "little")


def has(owns: bytes, partition: int) -> bool:
    """Tell whether a partition is in a mask."""
    place, bit = divmod(partition, 8)
    return place < len(owns) and bool(owns[place] >> bit & 1)


def preferred(partition: int, executors: Iterable[str]) -> str:
    """Return the executor of `executors` that should own a partition (rendezvous hashing)."""
    return max(executors, key=lambda name: weight(name, partition))


def weight(name: str, partition: int) -> int:
    """Return the weight of an executor for a partition; the largest weight is preferred."""
    return xxh3_64_intdigest(f"{name}/{partition}".encode())
