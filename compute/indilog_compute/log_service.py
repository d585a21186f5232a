"""The log for workers and clients: answers the log questions of one link.

Every question carries the position of its session. Every answer carries the position that the
answer reflects. So one session may use several links. Up to `questions_max` questions are answered
at once. `serve` answers a read that need not wait; each other question has its own task. The task
ends when the link closes or the client sends `Cancel`. A cancelled question also gets an answer,
which shows the client that the question no longer counts against the limit. `workers.serving` calls
`LinkLogService`, which calls `Log`.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - part of the shell: a task per question
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final, TypeAlias, assert_never

import structlog

from indilog.base.errors import (
    IndilogError,
    NotReadyError,
    OverloadedError,
)
from indilog.base.ids import MetalogPosition
from indilog.base.log import Entry, Log, LogSource, Record, Session, check_log_name
from indilog.link.link import Link
from indilog.link.link_messages import (
    CANCELLED,
    Answer,
    Appended,
    Done,
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
    RecordsFound,
    RecordValue,
    ShardFound,
    TailFound,
    TimeIs,
    failed,
)
from indilog.link.retention_messages import LogRetention, LogSetRetention, RetentionFound
from indilog_compute.local_log import sharded

_READS: Final = (LogRead, LogReadPrev)
"""A tuple: `LogRead | LogReadPrev` would make a union for each question, at a greater cost than
`isinstance` has.
"""


class LinkLogService:
    """Serves the log questions of one link.

    Args:
        questions_max: questions answered at once; a further question fails with
            `OverloadedError`.
    """

    def __init__(self, logs: LogSource, *, questions_max: int) -> None:
        self._logs = logs
        self._questions_max = questions_max
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def questions(self) -> int:
        """How many questions are being answered."""
        return len(self._tasks)

    def serve(self, link: Link, call: int, question: LogQuestion) -> None:
        """Answer `question` on `link`, at once or later.

        Raises:
            OverloadedError: `questions_max` questions are being answered.
            NotReadyError: a question with the number `call` is being answered.
        """
        if len(self._tasks) >= self._questions_max:
            raise OverloadedError(
                f"{self._questions_max:,} log calls of this connection are being answered, which "
                "is its limit; wait for some of them."
            )
        if call in self._tasks:
            raise NotReadyError(f"Question {call} is being answered already.")
        answering = self._answer(link, call, question)
        if isinstance(question, _READS) or (
            isinstance(question, LogReadNext) and question.wait_s is None
        ):
            # Most reads are answered by the local index and the record cache, without suspending.
            begun = _run_to_first_wait(answering)
            if begun is None:
                return
            answering = begun
        task = asyncio.get_running_loop().create_task(answering)
        task.add_done_callback(partial(self._on_task_end, link, call))
        self._tasks[call] = task

    def cancel(self, call: int) -> None:
        """Stop answering question `call`, if it is being answered."""
        if (task := self._tasks.get(call)) is not None:
            task.cancel()

    def close(self) -> None:
        """Stop answering: the link is closed."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _answer(self, link: Link, call: int, question: LogQuestion) -> None:
        session = Session(question.position)
        try:
            log = self._logs.log(check_log_name(question.log), session)
            answer_at = await _execute(log, question)
            answer = answer_at(session.position)
        except (IndilogError, ValueError, TypeError) as error:
            answer = failed(error, session.position)
        except Exception:  # noqa: BLE001 - outermost: the asker must not wait forever
            structlog.get_logger().exception("log question failed", question=str(question)[:200])
            answer = failed(IndilogError("The platform failed on this call; its log says why."))
        link.answer(call, answer)

    def _on_task_end(self, link: Link, call: int, task: asyncio.Task[None]) -> None:
        del self._tasks[call]
        if task.cancelled():
            link.answer(call, CANCELLED)


def _run_to_first_wait(
    answering: Coroutine[object, None, None],
) -> Coroutine[object, None, None] | None:
    """Run `answering` in the caller's task up to its first suspension.

    Return the rest of the coroutine, which needs its own task; None: `answering` has ended.
    """
    try:
        suspended_on = answering.send(None)
    except StopIteration:
        return None
    return _Rest(answering, suspended_on)


class _Rest(Coroutine[object, None, None]):
    """The rest of a suspended coroutine. It first yields the object that the coroutine awaits."""

    def __init__(self, coroutine: Coroutine[object, None, None], suspended_on: object) -> None:
        self._coroutine = coroutine
        self._suspended_on = [suspended_on]

    def send(self, value: None) -> object:
        """Run the coroutine up to its next suspension."""
        if self._suspended_on:
            return self._suspended_on.pop()
        return self._coroutine.send(value)

    def throw(self, *raised: Any) -> object:  # noqa: ANN401 - as a coroutine takes it
        """Raise an error where the coroutine is suspended."""
        self._suspended_on.clear()
        return self._coroutine.throw(*raised)

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[object, None, None]:
        return self._coroutine.__await__()


_AnswerAt: TypeAlias = Callable[[MetalogPosition], Answer]
"""Makes the answer from the position that the session has after the operation."""


async def _execute(  # noqa: C901, PLR0911 - one answer per question
    log: Log, question: LogQuestion
) -> _AnswerAt:
    """Execute a question.

    The session is not an argument, so that no answer carries a position from before the end of the
    operation.
    """
    match question:
        case LogAppend():
            seqnum = await log.append(question.data, tags=question.tags)
            return lambda at: Appended(at, (seqnum,))
        case LogAppendBatch():
            entries = [Entry(data, tags) for data, tags in question.entries()]
            seqnums = tuple(await log.append_batch(entries, after=question.after))
            return lambda at: Appended(at, seqnums)
        case LogRead() | LogReadNext() | LogReadPrev() | LogReadRange():
            found = tuple(map(_value, await _records(log, question)))
            return lambda at: RecordsFound(at, found)
        case LogTail():
            tail = await log.tail()
            return lambda at: TailFound(at, tail)
        case LogFindTime():
            first = await log.find_time(question.time)
            return lambda at: TailFound(at, first)
        case LogPlaces():
            spans = tuple(await sharded(log).places(question.start, question.end))
            return lambda at: PlacesAre(at, spans)
        case LogShard():
            shard = await sharded(log).shard()
            return lambda at: ShardFound(at, shard)
        case LogNow():
            time = await log.now()
            return lambda at: TimeIs(at, time)
        case LogRetention():
            policy = await log.retention()
            return lambda at: RetentionFound(at, policy)
        case LogTrim() | LogSetAux() | LogSetRetention():
            await _change(log, question)
            return Done
        case unreachable:
            assert_never(unreachable)


async def _records(
    log: Log, question: LogRead | LogReadNext | LogReadPrev | LogReadRange
) -> list[Record]:
    fresh = question.fresh
    if isinstance(question, LogReadRange):
        return await log.read_range(
            question.tag, question.bound, limit=question.limit, wait=question.wait_s, fresh=fresh
        )
    if isinstance(question, LogRead):
        record = await log.read(question.seqnum, fresh=fresh)
    elif isinstance(question, LogReadNext):
        record = await log.read_next(
            question.tag, question.bound, wait=question.wait_s, fresh=fresh
        )
    else:
        record = await log.read_prev(question.tag, question.bound, fresh=fresh)
    return [] if record is None else [record]


async def _change(log: Log, question: LogTrim | LogSetAux | LogSetRetention) -> None:
    if isinstance(question, LogTrim):
        await log.trim(question.until, tag=question.tag)
    elif isinstance(question, LogSetRetention):
        await log.set_retention(age_s=question.age_s, size_bytes=question.size_bytes)
    else:
        await log.set_aux(question.seqnum, question.aux)


def _value(record: Record) -> RecordValue:
    return RecordValue(
        record.seqnum, record.names, record.data, record.time, record.ordered_at, record.aux
    )
