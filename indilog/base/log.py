"""The public interface of a log (API.md, "The log"), which libraries and functions await.

`Log` is the specification. Its implementations (in the platform's process, over a socket, in memory
in `indilog.testing`) pass one contract suite (`tests/contract`). The docstrings here state each
guarantee once.
"""

from __future__ import annotations

import abc
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import ClassVar, Final, Protocol

import msgspec

from indilog.base.errors import InvalidTagError, TooLargeError
from indilog.base.ids import (
    MAX_SEQNUM,
    MetalogPosition,
    SeqNum,
    UserTag,
    log_tag,
    names_decoded,
    names_match,
    tag_columns,
    tag_hash,
)
from indilog.base.retention import Retention
from indilog.base.subscription import pages

_TIME_S_MAX: Final = 1e12
_WAIT_S_MAX: Final = 366 * 86_400.0
READ_RANGE_LIMIT_MAX: Final = 10_000
"""Upper bound of the records that one `Log.read_range` returns."""
RECORD_TAGS_LIMIT: Final = 254
"""Upper bound of the setting `record_tags_max`, tags of a record."""
BATCH_RECORDS_LIMIT: Final = 100_000
"""Upper bound of the setting `batch_records_max`, records of an `append_batch`."""
BATCH_TAGS_LIMIT: Final = 1_000_000
"""Tags of all records in a batch."""
RESERVED: Final = "$"
"""First character of the names of the platform's own logs."""


class Entry(msgspec.Struct, frozen=True):
    """A record for `append_batch`: its data, and the tags of its sub-streams."""

    data: bytes
    tags: Sequence[UserTag] = ()


class After(msgspec.Struct, frozen=True):
    """The condition of an append: no record with `tag` has a seqnum greater than `seqnum`.

    Attributes:
        seqnum: of the last record with the tag, as the caller knows it; None: there is none.
    """

    tag: UserTag
    seqnum: SeqNum | None = None


class Record:
    """A record of a log, and its place.

    Attributes:
        seqnum: place in the total order; dense from 0 over the whole logspace.
        data: the bytes.
        aux: cached bytes beside the record (`set_aux`), or None; may vanish.
        time: when its writer accepted it, seconds since 1970 by the writer's own wall clock. For
            display only: a writer's clock may be wrong by any amount, so no decision may depend on
            it. Leases, delays, expiry and retention use `ordered_at`.
        ordered_at: when the log ordered it, seconds since 1970 by the clock of the primary
            sequencer, to the microsecond. Never smaller than that of a record before it in the
            log, and the same value for every reader. `Log.find_time` searches by it.
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
        """The tags it was appended with, without repetitions."""
        return names_decoded(self._names)[1]

    @property
    def names(self) -> bytes:
        """The texts of its log and tags, as stored (`indilog.base.ids.tag_columns`)."""
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
    """A session: the metalog position up to which one chain of calls has read; it only grows.

    Reads are answered at this position or a later one, and every answer raises it. Child calls
    begin with it and return it with their results (PITFALLS 5).
    """

    __slots__ = ("position",)

    def __init__(self, position: MetalogPosition = 0) -> None:
        self.position = position

    def saw(self, position: MetalogPosition) -> None:
        """Raise the session to `position`, if that is later."""
        self.position = max(self.position, position)


class LogSource(Protocol):
    """A source of logs by name: a client, a function's context, or `MemoryLogs`."""

    def log(self, name: str, session: Session) -> Log:
        """Return the log `name`, read and written within `session`; it need not exist before."""


class Log(abc.ABC):
    """One named log: records in one total order, found by tag.

    **Session.** All calls through one `Log` (and through the client or context it came from) read
    their own writes, and never go back in time: a read reflects at least every record that an
    earlier call of the session returned.

    A read with `fresh=True` is linearizable over all sessions: it sees every record whose append
    returned, to any session, before the read was called. It costs a question to the primary
    sequencer.

    **Bounds** are inclusive. `tag=None` means every record of this log. An answer of `None` is
    certain: there is no such record below the position of the read.

    **Trim.** A log has a floor, and so has each of its tags; floors only grow (`trim`). A read
    below the floor of the log, or of the requested tag, raises `TrimmedError(floor)`. For
    `read_next`, `read_range` and `subscribe` that means a bound below the floor, for `read` a
    seqnum below it. `read_prev` raises it if it finds nothing at or above a floor greater than 0. A
    trimmed record is never reported as absent. A record is *dead* if it is below the floor of its
    log, or has tags and is below the floors of all of them. Its bytes may be freed, reads of the
    whole log skip it, and `read` raises `TrimmedError`, from any log.

    **Loss.** A read whose answer is, or may be, a record that no replica has any more raises
    `DataLossError`; continue at its `next_seqnum`. A record whose tags are lost, too, may have been
    of any log and tag. So every read that would skip it raises, unless the floor is above it. A
    lost record is never reported as absent.

    Every call may raise `NotReadyError` or `QuorumUnavailableError` (both retryable) when the
    platform cannot serve.
    """

    name: str
    _resume_s: ClassVar[float] = 0.0
    """Seconds for which a subscription retries after retryable errors."""

    @property
    def scope(self) -> object:
        """An object that all `Log`s of one platform share within this process.

        Libraries use it as a weak key of the state that they derive from records, so that the state
        outlives the `Log` of one call. The default shares nothing. An implementation may return any
        hashable object that lives as long as its connection and to which a weak reference can be
        made.
        """
        return self

    @abc.abstractmethod
    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """Append a record and return its place in the total order.

        When this returns, the record is durable on the ack quorum of its shard, and every later
        read of this session sees it.

        Raises:
            AppendOutcomeUnknownError: the record may or may not be in the log; retry with a tag
                that makes the second copy harmless.
            TooLargeError: more than `record_bytes_max` bytes or `record_tags_max` tags; nothing was
                appended.
            InvalidTagError: a tag is empty, zero or of a wrong type; nothing was appended.
            OverloadedError: too many appends are waiting to be ordered; nothing was appended.
        """

    @abc.abstractmethod
    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """Append at most `batch_records_max` records, all or none, at consecutive seqnums;
        guarantees and errors as `append`.

        With `after` they are appended only if no record with its tag has a greater seqnum than it
        names. At least one of the records must have that tag. So of several appends with the same
        condition at most one succeeds, whichever sessions and compute nodes they go through. This
        holds among appends with a condition. An append without one may get between the check and
        the append.

        Raises:
            ConditionFailedError: the condition does not hold; nothing was appended.
            TrimmedError: records with the tag may have been trimmed after the seqnum of the
                condition; nothing was appended.
            DataLossError: the last record with the tag is lost; nothing was appended.
            AppendOutcomeUnknownError: repeating it with the same condition never appends twice.
                A `ConditionFailedError` may then be due to the first try.
            ValueError: no record has the tag of the condition; nothing was appended.
        """

    @abc.abstractmethod
    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """Return the record at `seqnum`, or None if it is not (yet) there or belongs to another
        log.
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

        With `wait`, the call waits up to that many seconds (`math.inf`: as long as it takes) for
        one to appear.
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
        10,000). With `wait`, the call waits up to that many seconds for the first of them.

        Fewer than `limit` may come back although there are more (a page is also bounded in bytes).
        An empty list is certain: there is no such record. Continue at the last seqnum + 1.
        """

    @abc.abstractmethod
    async def tail(self) -> SeqNum:
        """Return the first seqnum not yet written; linearizable over all sessions."""

    @abc.abstractmethod
    async def now(self) -> float:
        """Return the time of the log: seconds since 1970 by the clock of the primary sequencer.

        No record whose append has returned was ordered later (`Record.ordered_at`), and none whose
        append is called after this returned is ordered earlier. Linearizable over all sessions,
        unlike any wall clock. It costs a question to the primary sequencer.
        """

    @abc.abstractmethod
    async def find_time(self, time: float) -> SeqNum:
        """Return the first seqnum that was ordered at `time` or later, seconds since 1970; the tail
        if there is none.

        `time` is compared with the clock of the primary sequencer, which never goes back along the
        log. So every record whose append returned before `time` on that clock has a smaller seqnum.
        Every record appended after `time` has this seqnum or a greater one. It searches by
        `Record.ordered_at`, not `Record.time`.
        """

    @abc.abstractmethod
    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """Trim the records below `until`: of the whole log, or of the sub-stream of `tag`.

        When this returns, every read of this session finds them trimmed, also after a restart.
        Other sessions do so soon after. A floor that is already higher does not change. Memory and
        disk are freed later, in the background.

        Raises:
            ValueError: `until` is beyond the tail; nothing was trimmed.
            QuorumUnavailableError: the trim was not confirmed in time, and may still take effect;
                trimming again is harmless.
        """

    @abc.abstractmethod
    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """Have the platform trim this log: records ordered longer than `age_s` ago, and records
        below its newest `size_bytes` (data and names).

        The arguments are the whole policy: None is no bound, and without arguments everything is
        kept. When this returns, the policy is as durable as an append, and every later `retention`
        of this session returns it. Trims of this log do not remove it. The platform enforces it
        every `retention_interval_s` seconds, with the guarantees of `trim`.

        Raises:
            ValueError: a bound is not greater than 0; nothing was changed.
            AppendOutcomeUnknownError: the policy may be in force; set it again. Other errors are
                those of `append`.
        """

    @abc.abstractmethod
    async def retention(self) -> Retention:
        """Return the policy of this log that was set last; `Retention()` if none was."""

    @abc.abstractmethod
    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Cache `aux` with an immutable record: it may vanish, and the last writer wins."""

    async def subscribe(
        self, tag: UserTag | None = None, bound: SeqNum = 0
    ) -> AsyncIterator[Record]:
        """Yield every record with `tag` from `bound` on, in order: history first, then live,
        without end.

        It reads at most one page ahead, which is bounded in records and bytes. So a slow consumer
        needs bounded memory, and an idle one needs no messages. Over a connection it continues at
        the next seqnum if the platform is back within a minute.
        """
        async with aclosing(pages(self, tag, bound, resume_s=self._resume_s)) as found:
            async for page in found:
                for record in page:
                    yield record


def check_log_name(name: str) -> str:
    """Return `name` if users may read and write that log; all kinds of log use these messages.

    Raises:
        InvalidTagError: the name is not text, empty, too long, or reserved for the platform.
    """
    if not isinstance(name, str):
        raise InvalidTagError(f"A log's name is text, not {type(name).__name__}: {name!r}.")
    if name.startswith(RESERVED):
        raise InvalidTagError(
            f"Names of logs that start with {RESERVED} are the platform's own; choose another "
            f"name than {name!r}."
        )
    log_tag(name)  # refuses an invalid name
    return name


def check_record(data: bytes, tags: Sequence[UserTag], *, bytes_max: int, tags_max: int) -> None:
    """Refuse an invalid record; all kinds of log use these messages.

    Raises:
        TooLargeError: too many bytes or tags.
        InvalidTagError: `tags` is text instead of a list of tags.
        TypeError: the data is not bytes.
    """
    if not isinstance(data, bytes):
        raise TypeError(f"A record's data is bytes, not {type(data).__name__}; encode it first.")
    check_tags(tags)
    if len(data) > bytes_max:
        raise TooLargeError("The record's size in bytes", size=len(data), limit=bytes_max)
    if len(tags) > tags_max:
        raise TooLargeError("The record's number of tags", size=len(tags), limit=tags_max)


def check_batch(entries: Sequence[Entry], *, records_max: int) -> None:
    """Refuse more records than may be appended together.

    Raises:
        TooLargeError: more than `records_max`.
    """
    if len(entries) > records_max:
        raise TooLargeError("The batch's number of records", size=len(entries), limit=records_max)


def check_after(log: str, after: After, entries: Sequence[Entry]) -> After:
    """Return the condition of an append to `log`, if the checked `entries` fit it.

    Raises:
        ValueError: no record has its tag, or the seqnum is none.
        InvalidTagError: its tag is empty, zero, too long or of a wrong type.
    """
    tag_hash(log, after.tag)  # refuses an invalid tag
    names = (tag_columns(log, tuple(entry.tags)).names for entry in entries)
    if not any(names_match(each, log, after.tag) for each in names):
        raise ValueError(
            f"No record of the batch has tag {after.tag!r} of its condition; give it to one."
        )
    return After(after.tag, None if after.seqnum is None else check_bound(after.seqnum))


def check_tags(tags: Iterable[UserTag]) -> None:
    """Refuse a text where a list of tags is meant.

    Raises:
        InvalidTagError: `tags` is text.
    """
    if isinstance(tags, str):
        raise InvalidTagError(f"tags is a list of tags; write tags=[{tags!r}].")


def check_bound(bound: SeqNum) -> SeqNum:
    """Return `bound`, limited to the greatest possible seqnum.

    Raises:
        ValueError: the bound is negative or not an integer.
    """
    if type(bound) is not int or bound < 0:
        raise ValueError(f"A bound is a seqnum, 0 or greater, not {bound!r}.")
    return min(bound, MAX_SEQNUM)


def check_until(until: SeqNum, tail: SeqNum) -> None:
    """Refuse to trim above the tail; all kinds of log use these messages.

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
        raise ValueError(f"limit is 1 to {READ_RANGE_LIMIT_MAX:,}, not {limit!r}.")
    return limit


def check_wait(wait: float | None) -> float:
    """Return how many seconds a read waits; 0: not at all; more than a year: without end.

    Raises:
        ValueError: the wait is negative, or no number.
    """
    if wait is None:
        return 0.0
    if type(wait) not in {int, float} or not wait >= 0:
        raise ValueError(f"wait is a number of seconds, 0 or greater, not {wait!r}.")
    return float(wait) if wait < _WAIT_S_MAX else math.inf


def check_time(time: float) -> int:
    """Return a time as microseconds since 1970.

    Raises:
        ValueError: the time is negative, or no number.
    """
    if type(time) not in {int, float} or not 0 <= time < _TIME_S_MAX:
        raise ValueError(f"A time is a number of seconds since 1970, not {time!r}.")
    return round(time * 1e6)
