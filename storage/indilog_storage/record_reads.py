"""Reads by seqnum (ARCHITECTURE 9): reads that wait until enough metalog entries are applied, and
the page that answers a read.

`StorageNode` owns the one `WaitingReads`, and starts a `RecordPage` in its `BatchReads` for each
read whose conditions are met.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, TypeAlias

from sortedcontainers import SortedList

from indilog.base.ids import Epoch, Instant, LocalId, MetalogPosition, NodeId, SeqNum, ShardId
from indilog.kernel.floors import Mask, Trimmed
from indilog.kernel.records import RecordBatch
from indilog.roles.role import Location
from indilog.wire.messages import (
    STORED_RECORD_OVERHEAD_BYTES,
    ReadRecords,
    RecordsRead,
    StoredRecord,
)
from indilog_storage.batch_reads import BatchTask
from indilog_storage.shard import Shard

_seqnum_of: Final = attrgetter("seqnum")

_Key: TypeAlias = tuple[NodeId, int, ShardId]


class ReadCondition(enum.IntEnum):
    """The conditions of a read, in the order of evaluation."""

    TAIL = 0
    """All seqnums of the read are ordered."""
    TRIMS = 1
    """This node has applied all trims that the reader knows."""
    EPOCH = 2
    """This node has applied an entry of the newest incarnation of the primary that the reader
    knows, or of a later incarnation.
    """


class Unmet(NamedTuple):
    """A condition, and the least value that meets it."""

    condition: ReadCondition
    least: int


def unmet(message: ReadRecords, applied: AppliedEntries) -> Unmet | None:
    """Return the first condition of a read that is not met; None: the read can be answered."""
    if (last := max(message.seqnums)) >= applied.tail:
        return Unmet(ReadCondition.TAIL, last + 1)
    if message.trims > applied.trims:
        return Unmet(ReadCondition.TRIMS, message.trims)
    if message.epoch > applied.last:
        return Unmet(ReadCondition.EPOCH, message.epoch)
    return None


class _Waiting(NamedTuple):
    expires: Instant
    unmet: Unmet
    message: ReadRecords


class WaitingReads:
    """At most `reads_max` reads, each of which needs metalog entries that are not applied yet.

    A read waits for one condition at a time. When this condition is met, all conditions are
    evaluated again, because the primary may have replaced entries that met an earlier condition.
    """

    def __init__(self, *, reads_max: int, timeout_s: float) -> None:
        self._reads_max = reads_max
        self._timeout_s = timeout_s
        self._by_age: dict[_Key, _Waiting] = {}
        self._by_least: dict[ReadCondition, SortedList[tuple[int, _Key]]] = {
            condition: SortedList() for condition in ReadCondition
        }

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, message: ReadRecords, awaited: Unmet, now: Instant) -> bool:
        """Queue a read, unless the same read is queued already; False: the queue is full."""
        key = (message.origin, message.request, message.shard)
        if key in self._by_age:
            return True
        if len(self._by_age) >= self._reads_max:
            return False
        self._by_age[key] = _Waiting(Instant(now + self._timeout_s), awaited, message)
        self._by_least[awaited.condition].add((awaited.least, key))
        return True

    def pop_ready(self, applied: AppliedEntries) -> list[ReadRecords]:
        """Remove and return the reads whose conditions are all met."""
        reached = applied.tail, applied.trims, applied.last
        found: list[ReadRecords] = []
        for condition, value in zip(ReadCondition, reached, strict=True):
            by_least = self._by_least[condition]
            while by_least and by_least[0][0] <= value:
                _, key = by_least.pop(0)
                waiting = self._by_age[key]
                if (awaited := unmet(waiting.message, applied)) is None:
                    found.append(self._by_age.pop(key).message)
                    continue
                assert awaited.condition is not condition, "it is met"
                self._by_age[key] = waiting._replace(unmet=awaited)
                self._by_least[awaited.condition].add((awaited.least, key))
        return found

    def pop_expired(self, now: Instant) -> list[ReadRecords]:
        """Remove and return the reads that have waited `timeout_s`: their callers have given up."""
        found: list[ReadRecords] = []
        while self._by_age:
            key, waiting = next(iter(self._by_age.items()))
            if now < waiting.expires:
                break
            del self._by_age[key]
            condition, least = waiting.unmet
            self._by_least[condition].remove((least, key))
            found.append(waiting.message)
        return found

    def deadline(self) -> Instant | None:
        """When the oldest read has waited too long."""
        return next(iter(self._by_age.values())).expires if self._by_age else None

    def check_invariants(self) -> None:
        """Assert that each read waits for one condition, and that reads are bounded."""
        assert sum(map(len, self._by_least.values())) == len(self._by_age) <= self._reads_max


class AppliedEntries(Protocol):
    """The facts about the applied metalog entries that reads need."""

    @property
    def tail(self) -> SeqNum:
        """The first seqnum that is not ordered."""

    @property
    def trims(self) -> int:
        """Number of applied trims."""

    @property
    def last(self) -> Epoch:
        """The incarnation of the primary that proposed the last entry; 0: there is none."""

    @property
    def floors(self) -> Trimmed:
        """All floors of applied trims."""

    @property
    def trimmed_at(self) -> MetalogPosition:
        """The metalog position after the last applied trim."""

    def ordered_us(self, seqnum: SeqNum) -> int:
        """Return the stamp of the entry that ordered `seqnum`, in microseconds since 1970."""


class RecordPage(BatchTask):
    """Collects the answer to one `ReadRecords`, up to `bytes_max`; further records are left out.

    The reader sees which records are left out, and asks again. The page has at least one record,
    unless all requested records are unknown here.
    """

    def __init__(
        self,
        message: ReadRecords,
        shard: Shard,
        aux: Mapping[SeqNum, bytes],
        applied: AppliedEntries,
        *,
        since: MetalogPosition = -1,
        bytes_max: int,
    ) -> None:
        self._since = since
        self._request = message.request
        self._shard = shard.id
        self._kept = shard
        self._aux = aux
        self._bytes_max = bytes_max
        self._bytes = 0
        self._records: list[StoredRecord] = []
        self._unknown: list[SeqNum] = []
        self._names: list[tuple[SeqNum, bytes]] = []
        self._applied = applied
        self._trimmed: list[SeqNum] = []
        self._away: list[SeqNum] = []
        self._wanted: dict[Location, list[tuple[SeqNum, LocalId]]] = {}
        for seqnum in message.seqnums:
            localid = shard.localid_of(seqnum)
            location = shard.location_of(localid) if localid is not None else None
            if localid is not None and shard.is_gone(localid):
                self._trimmed.append(seqnum)
            elif location is None or localid is None:
                self._unknown.append(seqnum)
            else:
                self._wanted.setdefault(location, []).append((seqnum, localid))
        super().__init__(message.origin, self._wanted)
        self.cold_left_bytes = bytes_max

    @property
    def full(self) -> bool:
        """Whether the page has reached `bytes_max`."""
        return self._bytes >= self._bytes_max

    def miss(self, location: Location) -> None:
        """Mark the requested records of a batch as not readable now."""
        seqnums = [seqnum for seqnum, _ in self._wanted[location]]
        self._unknown += seqnums
        self._away += seqnums

    def take(self, location: Location, batch: RecordBatch | None) -> None:
        """Copy the requested records of a batch."""
        wanted = self._wanted[location]
        if batch is None or batch.header.shard != self._shard:
            for seqnum, localid in wanted:
                # The record may have been discarded while the batch was read.
                gone = self._kept.is_gone(localid)
                (self._trimmed if gone else self._unknown).append(seqnum)
            return
        first, end = batch.header.first, batch.header.end
        dead = self._dead(batch, *wanted[0])
        for seqnum, localid in wanted:
            if not first <= localid < end:
                self._unknown.append(seqnum)
                continue
            if dead is not None and dead[localid - first]:
                self._trimmed.append(seqnum)
                continue
            if localid - first in batch.damaged:
                self._unknown.append(seqnum)
                self._names.append((seqnum, batch.names(localid - first)))
                continue
            if self.full:
                return
            raw = batch.record(localid - first)
            aux = self._aux.get(seqnum)
            ordered_us = self._applied.ordered_us(seqnum)
            self._records.append(
                StoredRecord(seqnum, raw.time_us, ordered_us, raw.names, raw.data, aux)
            )
            size = len(raw.data) + len(raw.names) + len(aux or b"")
            self._bytes += size + STORED_RECORD_OVERHEAD_BYTES

    def _dead(self, batch: RecordBatch, seqnum: SeqNum, localid: LocalId) -> Mask | None:
        """Return which records of a batch are trimmed; None: no record is trimmed. `seqnum` and
        `localid` belong to one record of the batch.
        """
        first_seqnum = seqnum - (localid - batch.header.first)
        floors = self._applied.floors
        if floors.highest <= first_seqnum and 0 not in batch.tag_counts:
            return None
        return floors.dead(first_seqnum, *batch.tag_columns())

    def answer(self) -> RecordsRead:
        """Return the records, ascending, and the seqnums that are unknown or trimmed here."""
        self._records.sort(key=_seqnum_of)
        return RecordsRead(
            self._request,
            self._shard,
            tuple(self._records),
            tuple(self._unknown),
            tuple(self._trimmed),
            self._applied.trimmed_at if self._trimmed else 0,
            tuple(self._names),
            tuple(self._away),
            self._since,
        )
