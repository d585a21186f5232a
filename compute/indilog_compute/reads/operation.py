"""The state of one read of one caller while it is in flight (ARCHITECTURE 9)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import EMPTY_TAG, Instant, MetalogPosition, NodeId, SeqNum, ShardId, TagHash
from indilog.base.log import Record
from indilog.roles.role import Answer
from indilog.wire.messages import (
    STORED_RECORD_OVERHEAD_BYTES,
    Direction,
    LookupResult,
    RecordsRead,
)
from indilog_compute.reads.lookup_routes import LookupRoute


class Pending:
    """The type of `PENDING`."""


PENDING: Final = Pending()
"""The result of a read that is not answered at once: its waiter gets the answer later."""


class Answered(NamedTuple):
    """The value of a read, and the metalog position that it reflects."""

    value: object
    position: MetalogPosition


class Tail(NamedTuple):
    """The primary's answer: the tail of the log, and its time in microseconds since 1970."""

    seqnum: SeqNum
    time_us: int


class Stage(enum.Enum):
    """The condition for which an operation waits."""

    POSITION = enum.auto()
    """The metalog and the index data, up to the session's position."""
    LOOKUP = enum.auto()
    """The answer of the index tier, which storage may send on its behalf."""
    PROBE = enum.auto()
    """The record at the bound, which may be of another log."""
    RECORDS = enum.auto()
    """Records at known seqnums."""
    TAIL = enum.auto()
    """The tail of the log, from the primary."""


class Asked(NamedTuple):
    """The records that were requested of one replica of a shard, or of two after a hedge."""

    replicas: tuple[NodeId, ...]
    seqnums: tuple[SeqNum, ...]


class Operation:
    """One read by one caller, with all its attempts.

    Attributes:
        fresh: whether the read must see all records committed at its start: it asks the primary
            first.
        page: whether a list of up to `count` records is wanted; else one record (`count` 1).
        log_names: for a read of every record of a log (`tag=None`), the prefix of their names.
        limit: of a lookup in flight, the seqnum below which it searches.
        route: of a lookup in flight, the nodes that it asks.
        trims: of a lookup in flight, `LocalIndex.trims` when it was sent.
        seqnums, shards: the records to fetch, in the order of the answer, once they are known.
        asked: for each shard that has not answered, the records requested in this attempt, and from
            which replicas.
        asked_at: when this attempt was sent to storage.
        log: the tag of the log that is read; 0: the read is not about one log.
        floor_awaited: a floor that a lookup reported, and the position of its trim, which this read
            waits for; None: no lookup reported one.
        trimmed: those of `seqnums` that turned out to be trimmed.
        rotation: selects the replica that is asked next; None: none was asked yet.
        denied: pairs of a replica and a seqnum that the replica reported as unknown.
        names: the names of records whose data is damaged at a replica that sent their names.
        away: seqnums of records on cold storage that a replica could not read in time.
    """

    __slots__ = (
        "asked", "asked_at", "away", "bound", "count", "created", "denied", "direction",
        "floor_awaited", "fresh", "limit", "log", "log_names", "names", "page", "position",
        "probed", "records", "reflects", "rotation", "route", "seqnums", "shards", "stage",
        "started", "tag", "trimmed", "trims", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        direction: Direction,
        tag: TagHash,
        bound: SeqNum,
        position: MetalogPosition,
        waiter: object,
        *,
        count: int = 1,
        page: bool = False,
        fresh: bool = False,
        log: TagHash = 0,
        log_names: bytes | None = None,
    ) -> None:
        assert count >= 1, "a read asks for a record"
        assert page or count == 1, "only a page has several records"
        self.log = log
        self.trimmed: set[SeqNum] = set()
        self.floor_awaited: tuple[SeqNum, MetalogPosition] | None = None
        self.direction = direction
        self.tag = tag
        self.bound = bound
        self.position = position
        self.waiter = waiter
        self.count = count
        self.page = page
        self.log_names = log_names
        self.created = self.started = Instant(0.0)
        self.rotation: int | None = None
        self.fresh = fresh
        self.stage = Stage.TAIL if fresh else Stage.POSITION
        self.probed = False
        self.reflects: MetalogPosition = 0
        self.seqnums: Sequence[SeqNum] = ()
        self.shards: Sequence[ShardId] = ()
        self.records: dict[SeqNum, Record] = {}
        self.limit: SeqNum = 0
        self.route: LookupRoute | None = None
        self.asked: dict[ShardId, Asked] = {}
        self.asked_at = Instant(0.0)
        self.trims = 0
        self.denied: set[tuple[NodeId, SeqNum]] = set()
        self.away: set[SeqNum] = set()
        self.names: dict[SeqNum, bytes] = {}

    def answer(self, value: object) -> Answer:
        """Answer the caller, as of the reflected position."""
        return Answer(self.waiter, Answered(value, self.reflects))

    @property
    def whole(self) -> bool:
        """Whether the operation reads all records of a log or of the logspace, not those of a
        tag.
        """
        return self.tag in (EMPTY_TAG, self.log)

    @property
    def at_seqnum(self) -> bool:
        """Whether the operation reads exactly the record at its bound, in a log, without a tag."""
        return self.tag == EMPTY_TAG and self.log != 0

    def bound_is_trimmed(self, seqnum: SeqNum) -> bool:
        """Whether the record at the bound must be trimmed, because the lookup found `seqnum`
        instead.

        Seqnums are dense: if there are later records, there was a record at the bound.
        """
        return self.at_seqnum and seqnum != self.bound

    def skip_dead(self, seqnum: SeqNum) -> bool:
        """Continue after a record whose tags are all trimmed; False: no record follows."""
        self.bound = seqnum + (1 if self.direction is Direction.NEXT else -1)
        self.restart()
        return self.bound >= 0

    def restart(self) -> None:
        """Forget the records found, and the replicas that did not have them."""
        self.records.clear()
        self.trimmed.clear()
        self.denied.clear()
        self.away.clear()
        self.asked = {}

    def leave_out_trimmed(self) -> None:
        """Forget the seqnums that turned out to be trimmed."""
        kept = [
            (seqnum, shard)
            for seqnum, shard in zip(self.seqnums, self.shards, strict=True)
            if seqnum not in self.trimmed
        ]
        self.seqnums = [seqnum for seqnum, _ in kept]
        self.shards = [shard for _, shard in kept]

    def value_of_nothing(self, floor: SeqNum) -> object:
        """Return the answer when a lookup found nothing at or above `floor`."""
        if self.bound < floor or (self.direction is Direction.PREV and floor > 0):
            return TrimmedError(floor)
        if self.at_seqnum and self.bound < self.limit:
            # Seqnums are dense: there was a record.
            return TrimmedError(self.bound + 1)
        return [] if self.page else None

    def trimmed_error(self, error: TrimmedError, position: MetalogPosition) -> TrimmedError | None:
        """Return the error for the caller, because a lookup reported a floor.

        Returns None if the floor's trim, which is in the first `position` metalog entries, is
        not applied here; the read then waits for it first. It waits only once for a floor, because
        `position` may be that of a later trim.
        """
        floor = error.first_seqnum
        if self.reflects >= position:
            return error
        if self.floor_awaited is not None and self.reflects >= self.floor_awaited[1]:
            known = self.floor_awaited[0]
            if known == floor or (self.direction is Direction.NEXT and self.bound < known):
                return TrimmedError(known)
        self.floor_awaited = floor, position
        self.position = max(self.position, position)
        return None

    def contradicted_by(self, message: RecordsRead) -> str | None:
        """Return why an answer from storage does not fit the question; None: it fits."""
        seqnums = [record.seqnum for record in message.records]
        seqnums += message.unknown
        seqnums += message.trimmed
        if not seqnums:
            return "an answer about no record"
        if self.stage is Stage.LOOKUP:
            if self.count > 1 or len(seqnums) > 1:
                return "records of a page that storage was not asked for"
            return (
                None if self._may_match(seqnums[0]) else "a match outside the range of the lookup"
            )
        asked = self.asked.get(message.shard)
        if asked is None:
            return "records of a shard that was not asked"
        if len(set(seqnums)) < len(seqnums) or not set(seqnums).issubset(asked.seqnums):
            return "records that were not asked for"
        return None

    def may_still_answer(self, shard: ShardId) -> bool:
        """Whether a replica of `shard` was asked and may still answer with records."""
        asked = self.asked.get(shard)
        return asked is not None and any(
            all((replica, seqnum) not in self.denied for seqnum in asked.seqnums)
            for replica in asked.replicas
        )

    @property
    def has_first(self) -> bool:
        """Whether the first record that was found is here."""
        return bool(self.seqnums) and self.seqnums[0] in self.records

    def gathered(self, bytes_max: int) -> Record | list[Record]:
        """Return the record read, or the page: up to the first gap, and bounded in bytes."""
        page: list[Record] = []
        size_bytes = 0
        for seqnum in self.seqnums:
            record = self.records.get(seqnum)
            if record is None:
                break
            size_bytes += (
                len(record.data)
                + len(record.names)
                + len(record.aux or b"")
                + STORED_RECORD_OVERHEAD_BYTES
            )
            if page and size_bytes > bytes_max:
                break
            page.append(record)
        return page if self.page else page[0]

    @staticmethod
    def match_in(message: RecordsRead) -> SeqNum:
        """Return the only match, which storage sent on behalf of the index tier.

        `contradicted_by` must have found nothing.
        """
        return (
            message.records[0].seqnum
            if message.records
            else (message.unknown or message.trimmed)[0]
        )

    def lost_by(self, message: LookupResult) -> DataLossError | None:
        """Return the error if a lookup crossed lost records before it found anything; else None.

        Lost records after the bound do not matter to a read of the record at its bound.
        """
        lost = message.lost
        if lost is None or (self.at_seqnum and lost.start > self.bound):
            return None
        return lost.error()

    def lookup_contradicted_by(self, message: LookupResult) -> bool:
        """Whether a result does not fit the lookup that was sent."""
        seqnums, shards, lost = message.seqnums, message.shards, message.lost
        if lost is not None and not all(map(self._may_match, (lost.start, lost.end - 1))):
            return True
        if len(seqnums) != len(shards) or len(seqnums) > self.count:
            return True
        return not all(map(self._may_match, seqnums)) or any(
            before >= after for before, after in pairwise(seqnums)
        )

    def _may_match(self, seqnum: SeqNum) -> bool:
        if self.direction is Direction.NEXT:
            return self.bound <= seqnum < self.limit
        return 0 <= seqnum <= self.bound and seqnum < self.limit
