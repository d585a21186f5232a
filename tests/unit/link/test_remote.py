"""The log over a link: the same promises and messages as the log itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    InvalidTagError,
    NotReadyError,
    TooLargeError,
    TrimmedError,
)
from indilog.base.log import Entry, Log, LogSource, Session
from indilog.config import ClusterConfig
from indilog.link.link import Link
from indilog.link.link_messages import (
    Answer,
    Cancel,
    Failed,
    Greeting,
    LogQuestion,
    LogTail,
    PlacesAre,
    Question,
    ShardFound,
)
from indilog.link.remote import RemoteLog, RemoteLogs
from indilog.testing import MemoryLogs
from indilog_compute.log_service import LinkLogService
from tests.support.link_pair import LIMITS, LinkAsker, link_pair

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Served:
    """Answers log questions from `logs`."""

    def __init__(self, logs: LogSource, questions_max: int = 1000) -> None:
        self.service = LinkLogService(logs, questions_max=questions_max)

    def __call__(self, link: Link, call: int, message: Question | Greeting) -> None:
        if isinstance(message, LogQuestion):
            self.service.serve(link, call, message)
        else:
            self.service.cancel(call)

    async def until_answering(self, questions: int) -> None:
        """Run the loop until the given number of questions is being answered."""
        while self.service.questions != questions:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)


def remote(logs: LogSource, session: Session | None = None) -> tuple[Log, Link]:
    ours, _ = link_pair(Served(logs))
    return RemoteLogs(LinkAsker(ours)).log("orders", session or Session()), ours


async def test_every_call_returns_the_result_of_the_log_itself() -> None:
    logs = MemoryLogs()
    log, _ = remote(logs)
    there = logs.log("orders")
    assert await log.append(b"a", tags=["x", 7]) == 0
    assert await log.append_batch([Entry(b"b", ["x"]), Entry(b"c")]) == [1, 2]
    await log.set_aux(1, b"cache")
    for tag in (None, "x", 7, "absent"):
        assert await log.read_range(tag) == await there.read_range(tag)
        for bound in range(4):
            assert await log.read_next(tag, bound) == await there.read_next(tag, bound)
            assert await log.read_prev(tag, bound) == await there.read_prev(tag, bound)
    record = await log.read(1)
    assert record is not None
    assert (record.tags, record.data, record.aux) == (("x",), b"b", b"cache")
    assert await log.read(9) is None
    assert await log.tail() == 3


OPERATIONS: dict[str, Callable[[Log], Awaitable[object]]] = {
    "append": lambda log: log.append(b"a"),
    "append_batch": lambda log: log.append_batch([Entry(b"a"), Entry(b"b")]),
    "read": lambda log: log.read(0),
    "read_next": lambda log: log.read_next("t"),
    "read_prev": lambda log: log.read_prev("t"),
    "read_range": lambda log: log.read_range("t"),
    "wait": lambda log: log.read_next("t", 1, wait=60),
    "tail": lambda log: log.tail(),
    "find_time": lambda log: log.find_time(0),
    "trim": lambda log: log.trim(1, tag="t"),
    "set_aux": lambda log: log.set_aux(0, b"aux"),
    "set_retention": lambda log: log.set_retention(age_s=60.0),
    "retention": lambda log: log.retention(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_an_answer_raises_the_session_to_the_position_of_its_operation(
    operation: str,
) -> None:
    """Other sessions append during the operation."""
    logs, session = MemoryLogs(), Session()
    await logs.log("orders").append(b"before", tags=["t"])
    log, _ = remote(logs, session)
    doing = asyncio.ensure_future(OPERATIONS[operation](log))
    await logs.log("orders").append_batch([Entry(b"meanwhile", tags=["t"])] * 3)
    await doing
    assert session.position == logs.position


async def test_answers_about_places_and_shards_raise_the_session_too() -> None:
    answers: list[Answer] = [PlacesAre(7, ()), ShardFound(9, None)]

    class Asker:
        limits = LIMITS

        async def ask(self, question: Question) -> Answer:
            return answers.pop(0)

    session = Session()
    log = RemoteLog(Asker(), "orders", session, scope=None)
    assert (await log.places(0, 1), session.position) == ((), 7)
    assert (await log.shard(), session.position) == (None, 9)


async def test_a_failed_question_raises_the_session_too() -> None:
    logs, session = MemoryLogs(), Session()
    await logs.log("orders").append(b"a", tags=["t"])
    await logs.log("orders").trim(1)
    log, _ = remote(logs, session)
    with pytest.raises(TrimmedError):
        await log.read_next("t")
    assert session.position == logs.position


async def test_a_waiting_read_ends_when_a_record_arrives() -> None:
    logs = MemoryLogs()
    log, _ = remote(logs)
    waiting = asyncio.ensure_future(log.read_next("new", wait=60))
    await log.append(b"other")
    assert not waiting.done()
    await log.append(b"it", tags=["new"])
    record = await waiting
    assert record is not None
    assert record.data == b"it"


async def test_a_cancelled_read_ends_at_the_other_end_too() -> None:
    served = Served(MemoryLogs())
    ours, _ = link_pair(served)
    log = RemoteLogs(LinkAsker(ours)).log("orders", Session())
    waiting = asyncio.ensure_future(log.read_next("new", wait=60))
    await served.until_answering(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await served.until_answering(0)


async def test_a_record_over_a_limit_is_refused_at_the_client_with_the_limit() -> None:
    asked: list[Question | Greeting] = []
    ours, _ = link_pair(lambda _link, _call, message: asked.append(message))
    log = RemoteLogs(LinkAsker(ours)).log("orders", Session())
    with pytest.raises(TooLargeError, match="the limit is 1,048,576"):
        await log.append(b"x" * (LIMITS.record_bytes_max + 1))
    with pytest.raises(TooLargeError, match="the limit is 64"):
        await log.append(b"", tags=[f"t{n}" for n in range(65)])
    with pytest.raises(InvalidTagError):
        await log.append(b"", tags=[""])
    with pytest.raises(TypeError):
        await log.append("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or greater"):
        await log.read_next(bound=-1)
    await asyncio.sleep(0)
    assert asked == []


async def test_a_refusal_of_the_platform_arrives_as_its_error() -> None:
    log, _ = remote(MemoryLogs(ClusterConfig(record_bytes_max=10)))
    with pytest.raises(TooLargeError, match="the limit is 10"):
        await log.append(b"x" * 11)


async def test_a_lost_link_leaves_an_appends_outcome_unknown() -> None:
    ours, _ = link_pair(lambda _link, _call, _message: None)
    log = RemoteLogs(LinkAsker(ours)).log("orders", Session())
    appending = asyncio.ensure_future(log.append(b"a"))
    reading = asyncio.ensure_future(log.tail())
    await asyncio.sleep(0)
    ours.lost()
    with pytest.raises(AppendOutcomeUnknownError, match="second copy harmless"):
        await appending
    with pytest.raises(NotReadyError):
        await reading


async def test_the_platforms_own_logs_are_closed_to_users() -> None:
    ours, _ = link_pair(Served(MemoryLogs()))
    log = RemoteLogs(LinkAsker(ours)).log("$apps", Session())
    with pytest.raises(InvalidTagError, match="reserved for the platform"):
        await log.tail()


async def test_more_questions_than_the_bound_are_refused() -> None:
    served = Served(MemoryLogs(), questions_max=2)
    ours, _ = link_pair(served)
    log = RemoteLogs(LinkAsker(ours)).log("orders", Session())
    waiting = [asyncio.ensure_future(log.read_next("new", wait=60)) for _ in range(2)]
    await served.until_answering(2)
    with pytest.raises(NotReadyError, match="which is its limit"):
        await log.tail()
    for reading in waiting:
        reading.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await served.until_answering(0)


async def test_a_question_cancelled_before_its_start_does_not_count_against_the_limit() -> None:
    served = Served(MemoryLogs())
    ours, _ = link_pair(served)
    served(ours, 1, LogTail("orders", 0))
    served(ours, 1, Cancel())
    await served.until_answering(0)


async def test_a_failure_of_the_log_itself_is_answered() -> None:
    class Broken:
        def log(self, name: str, session: Session) -> Log:
            raise RuntimeError("planted")

    ours, _ = link_pair(Served(Broken()))
    log = RemoteLogs(LinkAsker(ours)).log("orders", Session())
    with pytest.raises(Exception, match="its log says why"):
        await log.tail()


async def test_a_failure_is_distinguished_from_an_answer_of_the_wrong_type() -> None:
    def wrong(link: Link, call: int, message: Question | Greeting) -> None:
        link.answer(call, Failed("NoSuchError", "Sentence.", {}))

    ours, _ = link_pair(wrong)
    log = RemoteLogs(LinkAsker(ours)).log("orders", Session())
    with pytest.raises(Exception, match=r"Sentence\."):
        await log.tail()
