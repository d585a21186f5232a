"""The public interface of a log (API.md, "The log"), which libraries and functions await.

`Log` is the specification. Its implementations (in the platform's process, over a socket, and in
memory in `indilog.testing`) pass the same contract suite (`tests/contract`). Each guarantee is
stated once, in a docstring of this module. The `check_...` functions reject invalid arguments; all
implementations call them, so their errors are the same.
"""

from __future__ import annotations

import abc
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import ClassVar, Final, NamedTuple, Protocol

import msgspec

from indilog.base.errors import InvalidTagError, TooLargeError
from indilog.base.ids import (
    MAX_SEQNUM,
    LocalId,
    MetalogPosition,
    SeqNum,
    ShardId,
    UserTag,
    decode_names,
    log_tag,
    names_match,
    tag_columns,
    tag_hash,
)
from indilog.base.retention import Retention
from indilog.base.subscription import pages

_TIME_S_MAX: Final = 1e12
_WAIT_S_MAX: Final = 366 * 86_400.0
READ_RANGE_LIMIT_MAX: Final = 10_000
"""Largest number of records that one `Log.read_range` returns."""
RECORD_TAGS_LIMIT: Final = 254
"""Largest value of the setting `record_tags_max`, the limit of tags per record."""
BATCH_RECORDS_LIMIT: Final = 100_000
"""Largest value of the setting `batch_records_max`, the limit of records per `append_batch`."""
BATCH_TAGS_LIMIT: Final = 1_000_000
"""Largest number of tags of all records in a batch."""
RESERVED: Final = "$"
"""First character of the names of the platform's own logs."""


class Entry(msgspec.Struct, frozen=True):
    """A record for `append_batch`: its data, and the tags of its sub-streams."""

    data: bytes
    tags: Sequence[UserTag] = ()


class After(msgspec.Struct, frozen=True):
    """The condition of an append: no record with `tag` has a seqnum greater than `seqnum`.

    Attributes:
        seqnum: seqnum of the last known record with `tag`; None: the caller knows no such record.
    """

    tag: UserTag
    seqnum: SeqNum | None = None


class PlacedSpan(NamedTuple):
    """Consecutive records of one shard, whose seqnums and localids grow together.

    Attributes:
        first, end: range of their seqnums (half-open).
        shard: the shard that stores them.
        localid: localid of the first record.
        position: position of the metalog entry that ordered them.
    """

    first: SeqNum
    end: SeqNum
    shard: ShardId
    localid: LocalId
    position: MetalogPosition


class Record:
    """A record of a log, and its position.

    Attributes:
        seqnum: position in the total order; dense from 0 over the whole logspace.
        data: bytes of the record.
        aux: bytes cached with the record (`set_aux`), or None; they may vanish.
        time: when its writer accepted it, seconds since 1970 by the writer's wall clock. It is for
            display only: no decision may depend on it, because a writer's clock may be wrong by any
            amount. Leases, delays, expiry and retention use `ordered_at`.
        ordered_at: when the log ordered it, seconds since 1970 by the clock of the primary
            sequencer, in microsecond resolution. An earlier record in the log never has a greater
            `ordered_at`. Every reader gets the same value. `Log.find_time` searches by it.
    """

    __slots__ = ("_names", "aux", "data", "ordered_at", "seqnum", "time")

    def __init__(
        self,
        seqnum: SeqNum,
        names: bytes,
        data: bytes,
        time: float,
        ordered_at: float,
        aux: bytes | None = None,
    ) -> None:
        self.seqnum = seqnum
        self._names = names
        self.data = data
        self.time = time
        self.ordered_at = ordered_at
        self.aux = aux

    @property
    def tags(self) -> tuple[UserTag, ...]:
        """The tags with which the record was appended, without repetitions."""
        return decode_names(self._names)[1]

    @property
    def names(self) -> bytes:
        """The texts of the record's log and tags, as stored (`indilog.base.ids.tag_columns`)."""
        return self._names

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return (self.seqnum, self._names, self.data) == (other.seqnum, other._names, other.data)

    def __hash__(self) -> int:
        return hash((self.seqnum, self._names))

    def __repr__(self) -> str:
        data = self.data if len(self.data) <= 32 else self.data[:32] + b"..."
        return f"Record(seqnum={self.seqnum}, tags={self.tags}, data={data!r})"


class Session:
    """A session: the metalog position up to which one chain of calls has read. The position only
    grows.

    A read is answered at the session's position or a later one. Every answer raises the session to
    the position of the answer. A nested call begins at its caller's position, and its result raises
    the caller's position (PITFALLS 5).
    """

    __slots__ = ("position",)

    def __init__(self, position: MetalogPosition = 0) -> None:
        self.position = position

    def saw(self, position: MetalogPosition) -> None:
        """Raise the session to `position`, if that is later."""
        self.position = max(self.position, position)


class LogSource(Protocol):
    """A source of logs by name, each in the session of its caller: a node, a link, `MemoryLogs`."""

    def log(self, name: str, session: Session) -> Log:
        """Return the log `name` for reads and appends within `session`. The log need not exist."""


class Logs(Protocol):
    """A source of logs by name in one session: a function's `Context`, a client, `MemoryLogs`."""

    def log(self, name: str, /) -> Log:
        """Return the log `name`. The log need not exist."""


class Log(abc.ABC):
    """A named log: records in one total order, found by tag.

    **Session.** All calls through one client or context, and through the `Log`s that it created,
    form a session. A session reads its own writes and never goes back in time. A read sees at least
    every record that an earlier call of the session returned.

    A read with `fresh=True` is linearizable over all sessions: it sees every record whose append
    returned in any session before the read was called. It costs a round trip to the primary
    sequencer.

    **Bounds** are inclusive. `tag=None` means every record of this log. An answer of `None` proves
    that, at the metalog position of the read, there is no such record.

    **Trim.** A log has a floor (trim point), and each of its tags has one. Floors only grow
    (`trim`). A read below the floor of the log, or of the requested tag, raises
    `TrimmedError(floor)`. `read_next`, `read_range` and `subscribe` raise this error for a bound
    below the floor, and `read` for a seqnum below the floor. `read_prev` raises it if the floor is
    greater than 0 and no record at or above the floor fits. A trimmed record is never reported as
    absent. A record is *dead* if it is below the floor of its log. A record with tags is also dead
    if it is below the floors of all its tags. The bytes of a dead record may be freed, reads of the
    whole log skip it, and `read` of its seqnum raises `TrimmedError`.

    **Loss.** If the answer of a read is, or may be, a record that no replica has any more, the read
    raises `DataLossError`. Continue at the error's `next_seqnum`. If a record's tags are lost too,
    the record may have belonged to any log and tag. So every read that would skip this record
    raises `DataLossError`, unless the floor is above the record. A lost record is never reported as
    absent.

    Every call may raise `NotReadyError` or `QuorumUnavailableError` (both retryable) when the
    platform cannot serve.
    """

    name: str
    _resume_s: ClassVar[float] = 0.0
    """Seconds for which a subscription retries after retryable errors."""

    @property
    def scope(self) -> object:
        """An object that all `Log`s of one platform share in this process.

        Libraries use it as a weak key for state that they derive from records, so that the state
        outlives the `Log` of one call. By default each `Log` has its own scope. An implementation
        may return any hashable object that lives as long as its connection and supports weak
        references.
        """
        return self

    @abc.abstractmethod
    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """Append a record and return its seqnum.

        When this returns, the record is durable on the ack quorum of its shard, and every later
        read of this session sees it.

        Raises:
            AppendOutcomeUnknownError: the record may or may not be in the log; retry with a tag
                that makes a second copy harmless.
            TooLargeError: more than `record_bytes_max` bytes or `record_tags_max` tags; nothing was
                appended.
            InvalidTagError: a tag is empty, zero or of a wrong type; nothing was appended.
            OverloadedError: too many appends are waiting to be ordered; nothing was appended.
        """

    @abc.abstractmethod
    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """Append at most `batch_records_max` records atomically, at consecutive seqnums. Guarantees
        and errors are those of `append`.

        With `after`, the records are appended only if no record with the condition's tag has a
        seqnum greater than the condition's. At least one of the appended records must have that
        tag. So of several appends with the same condition at most one succeeds, regardless of their
        sessions and compute nodes. This guarantee covers only appends with a condition. An append
        without a condition may be ordered between the check and the conditional append.

        Raises:
            ConditionFailedError: the condition does not hold; nothing was appended.
            TrimmedError: records with the tag above the condition's seqnum may have been trimmed;
                nothing was appended.
            DataLossError: the last record with the tag is lost; nothing was appended.
            AppendOutcomeUnknownError: a repetition with the same condition never appends twice. If
                the repetition raises `ConditionFailedError`, the first attempt may have succeeded.
            ValueError: no record has the tag of the condition; nothing was appended.
        """

    @abc.abstractmethod
    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """Return the record at `seqnum`. None: there is no record yet, or the record belongs to
        another log.
        """

    @abc.abstractmethod
    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """Return the first record with `tag` and seqnum >= `bound`.

        With `wait`, the call waits up to that many seconds for such a record (`math.inf`: without
        limit).
        """

    @abc.abstractmethod
    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """Return the last record with `tag` and seqnum <= `bound`."""

    @abc.abstractmethod
    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        """Return the first records with `tag` from `bound` on, ascending, at most `limit` (1 to
        10,000). With `wait`, the call waits up to that many seconds for the first record.

        The result may have fewer than `limit` records although there are more, because a page is
        also bounded in bytes. An empty list proves that there is no such record. Continue at the
        last seqnum + 1.
        """

    @abc.abstractmethod
    async def tail(self) -> SeqNum:
        """Return the first seqnum not yet written; linearizable over all sessions."""

    @abc.abstractmethod
    async def now(self) -> float:
        """Return the time of the log: seconds since 1970 by the clock of the primary sequencer.

        A record whose append returned before this call was ordered at the returned time or earlier
        (`Record.ordered_at`). A record that is appended after this call has returned is ordered at
        the returned time or later. So the call is linearizable over all sessions, unlike any wall
        clock. It costs a round trip to the primary sequencer.
        """

    @abc.abstractmethod
    async def find_time(self, time: float) -> SeqNum:
        """Return the first seqnum that was ordered at `time` (seconds since 1970) or later; if
        there is none, the tail.

        `time` is compared with `Record.ordered_at`, not with `Record.time`. `ordered_at` comes from
        the clock of the primary sequencer and never decreases along the log. So every record whose
        append returned before `time` on that clock has a smaller seqnum than the returned one.
        Every record appended after `time` has the returned seqnum or a greater one.
        """

    @abc.abstractmethod
    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """Trim the records below `until`: of the whole log, or of the sub-stream of `tag`.

        When this returns, these records are trimmed for every read of this session, even after a
        restart. For other sessions they are trimmed soon afterwards. A floor that is already higher
        does not change. Memory and disk are freed later, in the background.

        Raises:
            ValueError: `until` is beyond the tail; nothing was trimmed.
            QuorumUnavailableError: the trim was not confirmed in time, and may still take effect;
                trimming again is harmless.
        """

    @abc.abstractmethod
    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """Set which records of this log the platform trims: records ordered more than `age_s`
        seconds ago, and records older than the newest `size_bytes` bytes (data and names).

        The call replaces the whole policy. None means no bound, so without arguments all records
        are kept. When this returns, the policy is as durable as an append, and every later
        `retention` of this session returns it. Trims of this log do not remove the policy. The
        platform enforces it every `retention_interval_s` seconds, with the guarantees of `trim`.

        Raises:
            ValueError: `age_s` is below 1, or `size_bytes` is below 1; nothing was changed.
            AppendOutcomeUnknownError: the policy may be in force; set it again. Other errors are
                those of `append`.
        """

    @abc.abstractmethod
    async def retention(self) -> Retention:
        """Return the policy of this log that was set last; `Retention()` if none was set."""

    @abc.abstractmethod
    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Cache `aux` with the record at `seqnum`. Aux data may vanish, and the last writer
        wins.
        """

    async def subscribe(
        self, tag: UserTag | None = None, bound: SeqNum = 0
    ) -> AsyncIterator[Record]:
        """Yield every record with `tag` from `bound` on, in order: first existing records, then new
        records as they are appended. The iteration does not end.

        At most one page is read ahead, and a page is bounded in records and bytes. So a slow
        consumer needs bounded memory. While there are no new records, no messages are sent. Over a
        connection, the iteration continues at the next seqnum if the platform is reachable again
        within a minute.
        """
        async with aclosing(pages(self, tag, bound, resume_s=self._resume_s)) as found:
            async for page in found:
                for record in page:
                    yield record


def check_log_name(name: str) -> str:
    """Return `name` if users may read and write that log.

    Raises:
        InvalidTagError: the name is not text, is empty, is too long, or is reserved for the
            platform.
    """
    if not isinstance(name, str):
        raise InvalidTagError(f"A log's name must be text, not {type(name).__name__}: {name!r}.")
    if name.startswith(RESERVED):
        raise InvalidTagError(
            f"Names of logs that start with {RESERVED} are reserved for the platform; choose "
            f"another name than {name!r}."
        )
    log_tag(name)  # refuses an invalid name
    return name


def check_record(data: bytes, tags: Sequence[UserTag], *, bytes_max: int, tags_max: int) -> None:
    """Raise for an invalid record.

    Raises:
        TooLargeError: too many bytes or tags.
        InvalidTagError: `tags` is text instead of a list of tags.
        TypeError: the data is not bytes.
    """
    if not isinstance(data, bytes):
        raise TypeError(
            f"A record's data must be bytes, not {type(data).__name__}; encode it first."
        )
    check_tags(tags)
    if len(data) > bytes_max:
        raise TooLargeError("The record's size in bytes", size=len(data), limit=bytes_max)
    if len(tags) > tags_max:
        raise TooLargeError("The record's number of tags", size=len(tags), limit=tags_max)


def check_batch(entries: Sequence[Entry], *, records_max: int) -> None:
    """Raise if a batch has more records than one append may have.

    Raises:
        TooLargeError: more than `records_max`.
    """
    if len(entries) > records_max:
        raise TooLargeError("The batch's number of records", size=len(entries), limit=records_max)


def check_after(log: str, after: After, entries: Sequence[Entry]) -> After:
    """Return the condition of an append to `log`, with its seqnum limited as by `check_bound`. The
    tags of `entries` must be valid.

    Raises:
        ValueError: no record has the condition's tag, or its seqnum is invalid.
        InvalidTagError: the condition's tag is empty, zero, too long or of a wrong type.
    """
    tag_hash(log, after.tag)  # refuses an invalid tag
    names = (tag_columns(log, tuple(entry.tags)).names for entry in entries)
    if not any(names_match(each, log, after.tag) for each in names):
        raise ValueError(
            f"No record of the batch has the condition's tag {after.tag!r}; add it to a record."
        )
    return After(after.tag, None if after.seqnum is None else check_bound(after.seqnum))


def check_tags(tags: Iterable[UserTag]) -> None:
    """Raise if `tags` is a text instead of a list of tags.

    Raises:
        InvalidTagError: `tags` is text.
    """
    if isinstance(tags, str):
        raise InvalidTagError(f"tags must be a list of tags; write tags=[{tags!r}].")


def check_bound(bound: SeqNum) -> SeqNum:
    """Return `bound`, limited to the greatest possible seqnum.

    Raises:
        ValueError: the bound is negative or not an integer.
    """
    if type(bound) is not int or bound < 0:
        raise ValueError(f"A bound must be a seqnum, 0 or greater, not {bound!r}.")
    return min(bound, MAX_SEQNUM)


def check_until(until: SeqNum, tail: SeqNum) -> None:
    """Raise for a trim beyond the tail.

    Raises:
        ValueError: `until` is beyond the tail.
    """
    if until > tail:
        raise ValueError(
            f"until is {until}, but the log ends at {tail}; trim at most up to its tail."
        )


def check_limit(limit: int) -> int:
    """Return `limit` if it is a valid number of records of a page.

    Raises:
        ValueError: the limit is below 1 or above `READ_RANGE_LIMIT_MAX`.
    """
    if type(limit) is not int or not 1 <= limit <= READ_RANGE_LIMIT_MAX:
        raise ValueError(f"limit must be 1 to {READ_RANGE_LIMIT_MAX:,}, not {limit!r}.")
    return limit


def check_wait(wait: float | None) -> float:
    """Return how many seconds a read waits; infinite for more than 366 days. None and 0: the read
    does not wait.

    Raises:
        ValueError: the wait is negative or not a number.
    """
    if wait is None:
        return 0.0
    if type(wait) not in {int, float} or not wait >= 0:
        raise ValueError(f"wait must be a number of seconds, 0 or greater, not {wait!r}.")
    return float(wait) if wait < _WAIT_S_MAX else math.inf


def check_time(time: float) -> int:
    """Return a time as microseconds since 1970.

    Raises:
        ValueError: the time is negative or not a number.
    """
    if type(time) not in {int, float} or not 0 <= time < _TIME_S_MAX:
        raise ValueError(f"A time must be a number of seconds since 1970, not {time!r}.")
    return round(time * 1e6)
