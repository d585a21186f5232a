"""The log over a link: `Context.log` in a function worker, and the log of a client.

`RemoteLog` keeps the guarantees of `indilog.base.log.Log`. It sends each call with the session's
position to the compute node at the other end, and raises the session to the answer's position. It
refuses records with an invalid size or tag before sending, with the same messages as the platform.
The worker's `runner` and `indilog.remote_client` create it through `RemoteLogs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError, TooLargeError
from indilog.base.ids import MAX_SEQNUM, SeqNum, ShardId, UserTag, check_tag, log_tag
from indilog.base.log import (
    BATCH_RECORDS_LIMIT,
    BATCH_TAGS_LIMIT,
    After,
    Entry,
    Log,
    PlacedSpan,
    Record,
    Session,
    check_after,
    check_batch,
    check_bound,
    check_limit,
    check_record,
    check_time,
    check_wait,
)
from indilog.base.retention import Retention, checked_retention
from indilog.link.link_messages import (
    Answer,
    Appended,
    Done,
    Failed,
    Limits,
    LinkLostError,
    LogAnswer,
    LogAppend,
    LogAppendBatch,
    LogFindTime,
    LogNow,
    LogPlaces,
    LogQuestion,
    LogRead,
    LogReadNext,
    LogReadPrev,
    LogReadRange,
    LogSetAux,
    LogShard,
    LogTail,
    LogTrim,
    PlacesAre,
    Question,
    RecordsFound,
    RecordValue,
    ShardFound,
    TailFound,
    TimeIs,
    error_from,
)
from indilog.link.retention_messages import LogRetention, LogSetRetention, RetentionFound

_AnswerT = TypeVar("_AnswerT")
_BATCH_OVERHEAD_BYTES: Final = 4096


class Asker(Protocol):
    """Asks a compute node: a link, or a client that reconnects."""

    @property
    def limits(self) -> Limits:
        """The platform's limits."""

    async def ask(self, question: Question) -> Answer:
        """Ask and wait for the answer.

        Raises:
            LinkLostError, OverloadedError, TooLargeError: the question was not sent.
        """


class RemoteLogs:
    """A `LogSource` over a link.

    Args:
        asker: asks the compute node.
        scope: the scope of the logs (`Log.scope`); default: the asker. Links of one process to the
            same platform may share one scope.
    """

    def __init__(self, asker: Asker, scope: object | None = None) -> None:
        self._asker = asker
        self._scope = asker if scope is None else scope

    def log(self, name: str, session: Session) -> Log:
        """Return the log `name` for reads and appends within `session`. The log need not exist."""
        return RemoteLog(self._asker, name, session, self._scope)


class RemoteLog(Log):
    """One named log at the other end of a link."""

    _resume_s = 60.0

    def __init__(self, asker: Asker, name: str, session: Session, scope: object) -> None:
        log_tag(name)  # refuses an invalid name
        self.name = name
        self._scope = scope
        self._asker = asker
        self._session = session

    @property
    def scope(self) -> object:
        """See `RemoteLogs` and `Log.scope`."""
        return self._scope

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """Append a record and return its seqnum (`Log.append`)."""
        checked = self._checked(data, tags)
        question = LogAppend(self.name, self._session.position, data, checked)
        return (await self._append(question)).seqnums[0]

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """Append several records atomically, at consecutive seqnums (`Log.append_batch`)."""
        if not entries and after is None:
            return []
        check_batch(entries, records_max=BATCH_RECORDS_LIMIT)
        checked = tuple((e.data, self._checked(e.data, e.tags)) for e in entries)
        if (tags := sum(len(tags) for _, tags in checked)) > BATCH_TAGS_LIMIT:
            raise TooLargeError("The batch's number of tags", size=tags, limit=BATCH_TAGS_LIMIT)
        size = sum(len(data) for data, _ in checked)
        limit = self._asker.limits.message_bytes_max - _BATCH_OVERHEAD_BYTES
        if size > limit:
            raise TooLargeError("The batch's size in bytes", size=size, limit=limit)
        if after is not None:
            after = check_after(self.name, after, entries)
        question = LogAppendBatch.of(self.name, self._session.position, checked, after)
        return list((await self._append(question)).seqnums)

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """Return the record at `seqnum`; None if there is none (`Log.read`)."""
        check_bound(seqnum)
        if seqnum > MAX_SEQNUM:
            return None
        return await self._one(LogRead(self.name, self._session.position, seqnum, fresh))

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """Return the first record with `tag` and seqnum >= `bound` (`Log.read_next`)."""
        bound = check_bound(bound)
        position, wait_s = self._session.position, check_wait(wait) or None
        question = LogReadNext(self.name, position, self._tag(tag), bound, wait_s, fresh)
        return await self._one(question)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """Return the last record with `tag` and seqnum <= `bound` (`Log.read_prev`)."""
        bound = check_bound(bound)
        position = self._session.position
        return await self._one(LogReadPrev(self.name, position, self._tag(tag), bound, fresh))

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        """Return the first records with `tag` from `bound` on, ascending (`Log.read_range`)."""
        bound, limit = check_bound(bound), check_limit(limit)
        position, wait_s = self._session.position, check_wait(wait) or None
        question = LogReadRange(self.name, position, self._tag(tag), bound, limit, fresh, wait_s)
        found = _expected(RecordsFound, await self._read(question))
        return [_record(value) for value in found.records]

    async def tail(self) -> SeqNum:
        """Return the first seqnum not yet written; linearizable over all sessions."""
        answer = await self._read(LogTail(self.name, self._session.position))
        return _expected(TailFound, answer).seqnum

    async def now(self) -> float:
        """Return the time of the log (`Log.now`)."""
        answer = await self._read(LogNow(self.name, self._session.position))
        return _expected(TimeIs, answer).time

    async def find_time(self, time: float) -> SeqNum:
        """Return the first seqnum ordered at `time` or later (`Log.find_time`)."""
        check_time(time)
        question = LogFindTime(self.name, self._session.position, float(time))
        return _expected(TailFound, await self._read(question)).seqnum

    async def places(self, start: SeqNum, end: SeqNum) -> Sequence[PlacedSpan]:
        """Return the places of the records of all logs with seqnums from `start` to below `end`.
        The answer may cover only the first of these records. It is empty if `start` is not ordered
        yet.
        """
        question = LogPlaces(self.name, self._session.position, start, end)
        return _expected(PlacesAre, await self._read(question)).spans

    async def shard(self) -> ShardId | None:
        """Return the shard that the connected compute node writes; None: it writes none now."""
        question = LogShard(self.name, self._session.position)
        return _expected(ShardFound, await self._read(question)).shard

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """Delete the records below `until` (`Log.trim`)."""
        until = check_bound(until)
        question = LogTrim(self.name, self._session.position, self._tag(tag), until)
        _expected(Done, await self._read(question))

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """Set this log's policy (`Log.set_retention`)."""
        wanted = checked_retention(self.name, age_s, size_bytes)
        position = self._session.position
        question = LogSetRetention(self.name, position, wanted.age_s, wanted.size_bytes)
        answer = await self._asker.ask(question)
        _refuse_lost(answer)
        self._saw(answer)
        _expected(Done, answer)

    async def retention(self) -> Retention:
        """Return this log's policy (`Log.retention`)."""
        answer = await self._read(LogRetention(self.name, self._session.position))
        return _expected(RetentionFound, answer).retention

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Cache `aux` with the record at `seqnum` (`Log.set_aux`)."""
        check_bound(seqnum)
        if not isinstance(aux, bytes):
            raise TypeError(f"Aux data must be bytes, not {type(aux).__name__}; encode it first.")
        limit = self._asker.limits.aux_bytes_max
        if len(aux) > limit:
            raise TooLargeError("The aux data's size in bytes", size=len(aux), limit=limit)
        question = LogSetAux(self.name, self._session.position, seqnum, aux)
        _expected(Done, await self._read(question))

    # --- internal

    def _checked(self, data: bytes, tags: Iterable[UserTag]) -> tuple[UserTag, ...]:
        given = tags if isinstance(tags, str) else tuple(tags)
        limits = self._asker.limits
        check_record(
            data, given, bytes_max=limits.record_bytes_max, tags_max=limits.record_tags_max
        )
        checked = tuple(given)
        for tag in checked:
            check_tag(tag)
        return checked

    def _tag(self, tag: UserTag | None) -> UserTag | None:
        if tag is not None:
            check_tag(tag)
        return tag

    async def _append(self, question: LogAppend | LogAppendBatch) -> Appended:
        answer = await self._asker.ask(question)
        _refuse_lost(answer)
        self._saw(answer)
        return _expected(Appended, answer)

    async def _read(self, question: LogQuestion) -> Answer:
        answer = await self._asker.ask(question)
        self._saw(answer)
        return answer

    async def _one(self, question: LogQuestion) -> Record | None:
        records = _expected(RecordsFound, await self._read(question)).records
        return _record(records[0]) if records else None

    def _saw(self, answer: Answer) -> None:
        if isinstance(answer, LogAnswer | Failed):
            self._session.saw(answer.position)


def _refuse_lost(answer: Answer) -> None:
    """Raise `AppendOutcomeUnknownError` if `answer` says that the link was lost."""
    if isinstance(answer, Failed) and answer.kind == LinkLostError.__name__:
        raise AppendOutcomeUnknownError(
            "The connection was lost before the append was acknowledged; retry with a tag that "
            "makes a second copy harmless."
        )


def _record(value: RecordValue) -> Record:
    return Record(value.seqnum, value.names, value.data, value.time, value.ordered_at, value.aux)


def _expected(kind: type[_AnswerT], answer: Answer) -> _AnswerT:
    """Return `answer` if it is a `kind`; otherwise raise the error that it reports."""
    if not isinstance(answer, kind):
        raise _error(answer)
    return answer


def _error(answer: Answer) -> Exception:
    if isinstance(answer, Failed):
        return error_from(answer)
    return NotReadyError(
        f"The other end answered with {type(answer).__name__}, which is not an answer to the "
        "question; "
        "does it run the same version of IndiLog?"
    )
