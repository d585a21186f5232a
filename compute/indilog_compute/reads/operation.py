"""The state of one caller's read while the read is in flight (ARCHITECTURE 9).

`Reads` changes the state; the parts of `indilog_compute.reads` fill single fields. `Operation` also
decides whether an answer fits its question.
"""

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
"""The result of a read that is not answered at once; the waiter gets the answer later."""


class Answered(NamedTuple):
    """The value of a read, and the metalog position that it reflects."""

    value: object
    position: MetalogPosition


class Tail(NamedTuple):
    """The primary's answer: the tail of the log, and the log's time in microseconds since 1970."""

    seqnum: SeqNum
    time_us: int


class Stage(enum.Enum):
    """The condition for which an operation waits."""

    POSITION = enum.auto()
    """The metalog and its index data are applied up to the session's position."""
    LOOKUP = enum.auto()
    """The index tier has answered, or storage on its behalf."""
    PROBE = enum.auto()
    """Storage has sent the record at the bound, which may be a record of another log."""
    RECORDS = enum.auto()
    """Storage has sent the records at known seqnums."""
    TAIL = enum.auto()
    """The primary has answered the tail of the log."""


class Asked(NamedTuple):
    """The records of one shard that were requested, and the replicas that were asked for them: one
    replica, or two after a hedge.
    """

    replicas: tuple[NodeId, ...]
    seqnums: tuple[SeqNum, ...]


class Operation:
    """One read by one caller, with all its attempts.

    Attributes:
        fresh: whether the read must see all records that were committed when it began. Such a read
            asks the primary first.
        page: whether the result is a list of up to `count` records; else it is one record, and
            `count` is 1.
        log_names: if the read is about every record of a log (`tag=None`), the name of the log,
            with which the names of its records begin.
        limit: the seqnum below which the lookup in flight searches.
        route: the nodes that the lookup in flight asks.
        trims: `LocalIndex.trims` when the lookup in flight was sent.
        seqnums, shards: the records to fetch, in the order of the result; empty until they are
            known.
        asked: for each shard that has not answered this attempt, the requested records and the
            asked replicas.
        asked_at: when this attempt was sent to storage.
        log: the tag of the log that is read; 0: the read is not about one log.
        floor_awaited: a floor that a lookup reported, and the position of its trim; the read waits
            until this position is applied. None: no lookup reported a floor.
        trimmed: the elements of `seqnums` that storage reported as trimmed.
        rotation: selects the replica that is asked next; None: no replica was asked yet.
        denied: pairs of a replica and a seqnum that the replica reported as unknown.
        names: by seqnum, the names of a record whose data is damaged at the replica that answered.
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
        """Answer the caller with `value`, as of the position `reflects`."""
        return Answer(self.waiter, Answered(value, self.reflects))

    @property
    def whole(self) -> bool:
        """Whether the operation reads all records of a log or of the logspace, and not only the
        records with a tag of the caller.
        """
        return self.tag in (EMPTY_TAG, self.log)

    @property
    def at_seqnum(self) -> bool:
        """Whether the operation reads only the record at its bound (`Log.read`)."""
        return self.tag == EMPTY_TAG and self.log != 0

    def bound_is_trimmed(self, seqnum: SeqNum) -> bool:
        """Whether the record at the bound must be trimmed, because the lookup found `seqnum`
        instead.

        Seqnums are dense. So if there are later records, there was a record at the bound.
        """
        return self.at_seqnum and seqnum != self.bound

    def skip_dead(self, seqnum: SeqNum) -> bool:
        """Set the bound so that the read continues after `seqnum`, whose record is dead. Return
        whether a record can follow.
        """
        self.bound = seqnum + (1 if self.direction is Direction.NEXT else -1)
        self.restart()
        return self.bound >= 0

    def restart(self) -> None:
        """Forget the records that were found, and the replicas that lacked some of them."""
        self.records.clear()
        self.trimmed.clear()
        self.denied.clear()
        self.away.clear()
        self.asked = {}

    def leave_out_trimmed(self) -> None:
        """Forget the seqnums that storage reported as trimmed."""
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
            # Seqnums are dense, so there was a record at the bound.
            return TrimmedError(self.bound + 1)
        return [] if self.page else None

    def trimmed_error(self, error: TrimmedError, position: MetalogPosition) -> TrimmedError | None:
        """Return the error for the caller after a lookup reported a floor (`error`).

        The trim of this floor is in the first `position` metalog entries. If these are not applied
        here, the result is None: the read waits for `position` first. It waits only once for the
        same floor, because `position` may be that of a later trim.
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
        """Whether an asked replica of `shard` may still answer with all requested records."""
        asked = self.asked.get(shard)
        return asked is not None and any(
            all((replica, seqnum) not in self.denied for seqnum in asked.seqnums)
            for replica in asked.replicas
        )

    @property
    def has_first(self) -> bool:
        """Whether the first record of the result was fetched."""
        return bool(self.seqnums) and self.seqnums[0] in self.records

    def gathered(self, bytes_max: int) -> Record | list[Record]:
        """Return the record, or the page of records up to the first gap and up to `bytes_max`."""
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
        """Return the seqnum of the only match, which storage answered on behalf of the index tier.

        Before, `contradicted_by` must have returned None for `message`.
        """
        return (
            message.records[0].seqnum
            if message.records
            else (message.unknown or message.trimmed)[0]
        )

    def lost_by(self, message: LookupResult) -> DataLossError | None:
        """Return the error if a lookup without a match reported lost records; else None.

        A read of the record at its bound ignores lost records after the bound.
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
