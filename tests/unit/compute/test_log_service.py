"""A log question is answered in the call that delivers it, unless it has to wait."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from indilog.link.link import Link
from indilog.link.link_messages import (
    CANCELLED,
    Answer,
    Failed,
    LogQuestion,
    LogRead,
    LogReadNext,
    LogReadPrev,
    LogTail,
    RecordsFound,
)
from indilog.testing import MemoryLogs
from indilog_compute.log_service import LinkLogService
from tests.support.hooked_log import HookedLogs, Read

pytestmark = pytest.mark.asyncio

READS: list[LogQuestion] = [
    LogRead("orders", 0, 0),
    LogReadNext("orders", 0, "t", 0, None),
    LogReadPrev("orders", 0, None, 9),
]


class Asking:
    """A link whose answers are kept."""

    def __init__(self, logs: MemoryLogs) -> None:
        self.service = LinkLogService(logs, questions_max=2)
        self.answers: dict[int, Answer] = {}

    def answer(self, call: int, answer: Answer) -> None:
        self.answers[call] = answer

    def ask(self, call: int, question: LogQuestion) -> None:
        self.service.serve(cast("Link", self), call, question)

    async def until(self, questions: int) -> None:
        while self.service.questions != questions:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)


class HeldLogs(HookedLogs):
    """Logs whose reads wait until the test says so, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin, self.may_end = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def before_read(self, read: Read) -> None:
        try:
            await self.may_begin.wait()
            await asyncio.sleep(0)
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


@pytest.mark.parametrize("question", READS, ids=lambda q: type(q).__name__)
async def test_a_read_without_a_wait_is_answered_at_once(question: LogQuestion) -> None:
    logs = MemoryLogs()
    await logs.log("orders").append(b"a", tags=["t"])
    asking = Asking(logs)
    asking.ask(1, question)
    answer = asking.answers[1]
    assert isinstance(answer, RecordsFound)
    assert [record.seqnum for record in answer.records] == [0]
    assert (answer.position, asking.service.questions) == (1, 0)


async def test_a_read_that_fails_at_once_is_answered_at_once() -> None:
    logs = MemoryLogs()
    await logs.log("orders").append(b"a", tags=["t"])
    await logs.log("orders").trim(1)
    asking = Asking(logs)
    asking.ask(1, READS[1])
    answer = asking.answers[1]
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.position) == ("TrimmedError", 1)


async def test_writes_and_waiting_reads_run_in_a_task() -> None:
    asking = Asking(MemoryLogs())
    asking.ask(1, LogTail("orders", 0))
    asking.ask(2, LogReadNext("orders", 0, "t", 0, 60.0))
    assert (asking.answers, asking.service.questions) == ({}, 2)
    await asking.until(1)
    assert list(asking.answers) == [1]
    asking.service.close()
    await asking.until(0)


@pytest.mark.parametrize("question", READS[1:], ids=lambda q: type(q).__name__)
async def test_a_read_that_has_to_wait_continues_in_a_task(question: LogQuestion) -> None:
    logs = HeldLogs()
    await logs.log("orders").append(b"a", tags=["t"])
    asking = Asking(logs)
    asking.ask(1, question)
    assert (asking.answers, asking.service.questions) == ({}, 1)
    logs.may_begin.set()
    logs.may_end.set()
    await asking.until(0)
    answer = asking.answers[1]
    assert isinstance(answer, RecordsFound)
    assert [record.seqnum for record in answer.records] == [0]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_read_that_has_to_wait_can_be_cancelled(*, has_begun: bool) -> None:
    """The read is answered once, like every question, which frees its share of the limit."""
    logs = HeldLogs()
    asking = Asking(logs)
    asking.ask(1, READS[2])
    if has_begun:
        logs.may_begin.set()
        for _ in range(5):
            await asyncio.sleep(0)
    asking.service.cancel(1)
    await asking.until(0)
    assert asking.answers == {1: CANCELLED}
    assert logs.was_cancelled
