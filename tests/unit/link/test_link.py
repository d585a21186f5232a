"""A link: answers find their questions; the end of the stream fails every open question once."""

from __future__ import annotations

import asyncio

import pytest

from indilog.base.errors import NotReadyError, OverloadedError, TooLargeError
from indilog.link.link import QUEUE_BYTES_MAX, Link, unless_large
from indilog.link.link_messages import (
    Accepted,
    Answer,
    Appended,
    Cancel,
    Done,
    Failed,
    Greeting,
    InvocationFound,
    LinkLostError,
    LogTail,
    Question,
    RecordsFound,
    RecordValue,
    Returned,
    TailFound,
    failed,
)
from tests.support.link_pair import link_pair, refuse_questions

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
QUESTION = LogTail("orders", 0)


def echo(link: Link, call: int, message: Question | Greeting) -> None:
    assert isinstance(message, LogTail)
    link.answer(call, TailFound(message.position, message.position + 1))


class Collected:
    """Keeps the questions of the other end, to be answered later."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Question | Greeting]] = []
        self.came = asyncio.Event()

    def __call__(self, link: Link, call: int, message: Question | Greeting) -> None:
        self.asked.append((call, message))
        self.came.set()


async def test_answers_in_any_order_find_their_questions() -> None:
    questions = Collected()
    ours, theirs = link_pair(questions)
    asks = [asyncio.ensure_future(ours.ask(LogTail("l", n))) for n in range(3)]
    await questions.came.wait()
    for call, message in reversed(questions.asked):
        echo(theirs, call, message)
    assert await asyncio.gather(*asks) == [TailFound(n, n + 1) for n in range(3)]
    assert ours.calls_open == 0


async def test_messages_of_one_loop_iteration_leave_in_one_write() -> None:
    writes: list[bytes] = []
    link = Link(refuse_questions, message_bytes_max=1024)
    link.connected(lambda data: writes.append(bytes(data)), lambda: None, int)
    for _ in range(5):
        link.post(QUESTION, lambda _: None)
    assert writes == []
    await asyncio.sleep(0)
    assert len(writes) == 1


async def test_both_ends_may_use_the_same_question_numbers() -> None:
    ours, theirs = link_pair(echo, echo)
    answers = await asyncio.gather(ours.ask(LogTail("l", 1)), theirs.ask(LogTail("l", 5)))
    assert list(answers) == [TailFound(1, 2), TailFound(5, 6)]


async def test_a_lost_stream_fails_every_open_question_once() -> None:
    ours, _ = link_pair(Collected())
    answers: list[Answer] = []
    for _ in range(3):
        ours.post(QUESTION, answers.append)
    ours.lost()
    ours.lost()
    assert [a.kind for a in answers if isinstance(a, Failed)] == ["LinkLostError"] * 3
    with pytest.raises(LinkLostError):
        ours.post(QUESTION, answers.append)


async def test_the_loss_is_announced_before_the_questions_fail() -> None:
    story: list[str] = []
    link = Link(refuse_questions, message_bytes_max=1024, on_lost=lambda _: story.append("lost"))
    link.connected(lambda _: None, lambda: None, int)
    link.post(QUESTION, lambda _: story.append("failed"))
    link.lost()
    assert story == ["lost", "failed"]


async def test_a_malformed_frame_closes_the_link() -> None:
    closed = asyncio.Event()
    link = Link(refuse_questions, message_bytes_max=1024)
    link.connected(lambda _: None, closed.set, int)
    answers: list[Answer] = []
    link.post(QUESTION, answers.append)
    link.received(b"\0\0\0\1\xc1")
    assert closed.is_set()
    assert link.is_lost
    assert len(answers) == 1


async def test_a_cancelled_question_is_cancelled_at_the_other_end() -> None:
    questions = Collected()
    ours, _ = link_pair(questions)
    asking = asyncio.ensure_future(ours.ask(QUESTION))
    await questions.came.wait()
    questions.came.clear()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await questions.came.wait()
    assert questions.asked == [(1, QUESTION), (1, Cancel())]
    assert ours.calls_open == 0


async def test_a_late_answer_to_an_abandoned_question_is_ignored() -> None:
    questions = Collected()
    ours, theirs = link_pair(questions)
    answers: list[Answer] = []
    call = ours.post(QUESTION, answers.append)
    await questions.came.wait()
    ours.abandon(call)
    theirs.answer(call, Done(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert answers == []
    assert not ours.is_lost


async def test_a_question_over_the_limit_is_refused_and_the_link_stays_open() -> None:
    ours, _ = link_pair(echo, message_bytes_max=200)
    with pytest.raises(TooLargeError, match="the limit is 200"):
        await ours.ask(LogTail("x" * 300, 0))
    assert await ours.ask(QUESTION) == TailFound(0, 1)


async def test_the_announced_limit_of_the_other_end_applies_in_both_directions() -> None:
    def large(link: Link, call: int, message: Question | Greeting) -> None:
        link.answer(call, RecordsFound(1, (RecordValue(1, b"l", b"x" * 300, 0.0, 0.0, None),)))

    ours, theirs = link_pair(large, message_bytes_max=200)
    theirs.set_limit(1000)
    ours.set_limit(1000)
    assert isinstance(await ours.ask(LogTail("x" * 300, 0)), RecordsFound)
    ours.set_limit(100)
    with pytest.raises(TooLargeError, match="the limit is 100"):
        await ours.ask(LogTail("x" * 300, 0))


async def test_an_answer_over_the_limit_arrives_as_a_failure_with_the_limit() -> None:
    def large(link: Link, call: int, message: Question | Greeting) -> None:
        link.answer(call, RecordsFound(1, (RecordValue(1, b"l", b"x" * 300, 0.0, 0.0, None),)))

    ours, _ = link_pair(large, message_bytes_max=200)
    answer = await ours.ask(QUESTION)
    assert isinstance(answer, Failed)
    assert answer.kind == "TooLargeError"


async def test_a_peer_that_does_not_read_gets_no_more_questions() -> None:
    link = Link(refuse_questions, message_bytes_max=1024)
    link.connected(lambda _: None, lambda: None, lambda: QUEUE_BYTES_MAX + 1)
    with pytest.raises(OverloadedError):
        link.post(QUESTION, lambda _: None)


async def test_a_peer_that_does_not_read_its_answers_gets_failures_instead() -> None:
    writes: list[bytes] = []
    link = Link(refuse_questions, message_bytes_max=4096)
    link.connected(
        lambda data: writes.append(bytes(data)), lambda: None, lambda: QUEUE_BYTES_MAX + 1
    )
    link.answer(1, RecordsFound(1, (RecordValue(1, b"l", b"x" * 3000, 0.0, 0.0, None),)))
    await asyncio.sleep(0)
    assert len(writes[0]) < 200


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (Returned(7, b"1"), "CallOutcomeUnknownError"),
        (RecordsFound(7, ()), "OverloadedError"),
        (Appended(7, (3,)), None),
        (Accepted("i"), None),
    ],
)
async def test_the_answer_of_a_completed_operation_is_never_replaced_by_a_failure(
    answer: Answer, failure: str | None
) -> None:
    """A failure would be no smaller than these answers, and it would make the caller repeat the
    operation.
    """
    answers: list[Answer] = []
    ours, theirs = link_pair(lambda link, call, _: link.answer(call, answer))
    theirs.connected(
        lambda data: ours.received(bytes(data)), ours.lost, lambda: QUEUE_BYTES_MAX + 1
    )
    ours.post(QUESTION, answers.append)
    for _ in range(5):
        await asyncio.sleep(0)
    [got] = answers
    if failure is None:
        assert got == answer
    else:
        assert isinstance(got, Failed)
        assert got.kind == failure


async def test_a_refusal_of_the_server_is_the_answer() -> None:
    def refusing(link: Link, call: int, message: Question | Greeting) -> None:
        raise OverloadedError("Too much.")

    ours, _ = link_pair(refusing)
    answer = await ours.ask(QUESTION)
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.message) == ("OverloadedError", "Too much.")


async def test_only_large_answers_are_replaced_for_a_peer_that_does_not_read() -> None:
    """The answer to a cancelled invocation is kept, because its outcome was recorded."""
    cancelled = InvocationFound("i", "app.f", "failed", failed(NotReadyError("Cancelled.")))
    assert unless_large(cancelled) is cancelled
    replaced = unless_large(InvocationFound("i", "app.f", "done", Returned(7, b"1")))
    assert isinstance(replaced, Failed)
    assert replaced.kind == "OverloadedError"
