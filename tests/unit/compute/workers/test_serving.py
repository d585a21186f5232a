"""What is done for the peer of a link, and what no longer once it has left."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import pytest

from indilog.base.log import LogSource
from indilog.link.link import Link
from indilog.link.link_messages import (
    Answer,
    AskHolders,
    CallFunction,
    Cancel,
    DeployApp,
    Done,
    Failed,
    HoldersFound,
    LogAppend,
    LogRead,
    LogReadNext,
    Question,
    RecordsFound,
    ReleaseCalls,
    Returned,
    SendFunction,
    UndeployApp,
)
from indilog.testing import MemoryLogs
from indilog_compute.positions import Positions
from indilog_compute.workers.host import FunctionHost
from indilog_compute.workers.serving import LinkServer
from tests.support.link_pair import link_pair

pytestmark = pytest.mark.asyncio
KEYED = CallFunction("app.f", b"{}", 0, 0, "k")


class Host:
    """Records calls with a key when it is let; their outcomes come when the test says."""

    def __init__(self, logs: LogSource) -> None:
        self.positions = Positions(logs)
        self.may_record = asyncio.Event()
        self.recorded: list[str] = []
        self.waiting = 0
        self.over: asyncio.Future[Returned | Failed] = asyncio.get_running_loop().create_future()
        self.held = {"run-1": {"a", "b"}, "run-2": {"c"}}

    def release(self, holder: str, keys: tuple[str, ...]) -> None:
        self.held[holder] -= set(keys)

    async def holders(self, prefix: str, after: str) -> tuple[list[str], int]:
        found = [holder for holder, keys in self.held.items() if keys and holder > after]
        return [holder for holder in found if holder.startswith(prefix)], 7

    def reserve_outcome_wait(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def accept_once(self, name: str, *_: object, key: str, **__: object) -> str:
        await self.may_record.wait()
        self.recorded.append(key)
        return f"{name}-{key}"

    async def outcome(self, invocation: str) -> Returned | Failed:
        self.waiting += 1
        try:
            return await asyncio.shield(self.over)
        finally:
            self.waiting -= 1


class Caller:
    """A client of a `LinkServer`, or a worker."""

    def __init__(self, *, is_client: bool = True) -> None:
        self.logs = MemoryLogs()
        self.host = Host(self.logs)
        self.server = LinkServer(
            cast("FunctionHost", self.host), self.logs, questions_max=10, is_client=is_client
        )
        self.link: Link
        self.link, self.far = link_pair(self.server.serve)

    def call(self) -> tuple[int, asyncio.Future[Answer]]:
        reported: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        return self.link.post(KEYED, reported.set_result), reported


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_call_with_a_key_is_answered_with_its_outcome() -> None:
    caller = Caller()
    _, reported = caller.call()
    caller.host.may_record.set()
    await turns()
    assert caller.host.waiting == 1
    caller.host.over.set_result(Returned(3, b"1"))
    assert await reported == Returned(3, b"1")
    assert caller.server._keyed == {}


@pytest.mark.parametrize("when", ["at once", "while it is recorded", "while it waits"])
async def test_a_call_with_a_key_whose_caller_leaves_is_recorded_and_not_waited_for(
    when: str,
) -> None:
    caller = Caller()
    number, reported = caller.call()
    if when != "at once":
        await turns()
    if when == "while it waits":
        caller.host.may_record.set()
        await turns()
        assert caller.host.waiting == 1
    caller.link.cancel(number)
    await turns()
    caller.host.may_record.set()
    outcome = await reported
    assert isinstance(outcome, Failed)
    assert outcome.kind == "CallOutcomeUnknownError"
    assert caller.host.recorded == ["k"]
    assert caller.host.waiting == 0
    assert caller.server._keyed == {}


async def test_no_caller_waits_for_outcomes_over_a_link_that_is_gone() -> None:
    caller = Caller()
    caller.call()
    caller.host.may_record.set()
    await turns()
    assert caller.host.waiting == 1
    caller.server.close()
    await turns()
    assert caller.host.waiting == 0


@pytest.mark.parametrize(
    ("question", "what"),
    [(DeployApp(None, "local", {}), "deploy"), (UndeployApp("demo", "local"), "undeploy")],
)
async def test_a_function_neither_deploys_nor_undeploys(question: Question, what: str) -> None:
    answer = await Caller(is_client=False).link.ask(question)
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.message) == (
        "NotReadyError",
        f"A function cannot {what}; use a client.",
    )


@pytest.mark.parametrize("is_client", [True, False])
async def test_held_outcomes_are_listed_and_released(*, is_client: bool) -> None:
    caller = Caller(is_client=is_client)
    async with asyncio.timeout(60):
        assert await caller.link.ask(AskHolders("run-", "")) == HoldersFound(7, ("run-1", "run-2"))
        assert await caller.link.ask(AskHolders("run-", "run-1")) == HoldersFound(7, ("run-2",))
        assert await caller.link.ask(ReleaseCalls("run-2", ("c",))) == Done(0)
        assert await caller.link.ask(AskHolders("run-", "")) == HoldersFound(7, ("run-1",))


NOWHERE = 10**15


@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize(
    "question",
    [
        LogReadNext("orders", NOWHERE, None, 0, 60.0),
        LogRead("orders", NOWHERE, 0),
        LogAppend("orders", NOWHERE, b"x", ()),
        CallFunction("app.f", b"{}", NOWHERE, 0),
        SendFunction("app.f", b"{}", NOWHERE, 0.0),
    ],
)
async def test_a_position_beyond_the_log_is_refused_at_once(
    question: Question, *, is_client: bool
) -> None:
    """Nothing parks, and nothing is done."""
    caller = Caller(is_client=is_client)
    await caller.logs.log("orders").append(b"x")
    async with asyncio.timeout(60):
        answer = await caller.link.ask(question)
    assert isinstance(answer, Failed)
    assert answer.kind == "InvalidArgumentsError"
    assert answer.message == (
        "Nothing was done: the session's position is 1000000000000000, but the log is at 1; is it "
        "another log's?"
    )
    assert caller.logs.position == 1
    assert caller.server._asking == {}


async def test_a_question_whose_position_is_checked_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_position: int) -> None:
        await asyncio.get_running_loop().create_future()

    caller = Caller()
    monkeypatch.setattr(caller.host.positions, "fault", never)
    number = caller.link.post(LogAppend("orders", NOWHERE, b"x", ()), lambda _: None)
    await turns()
    assert len(caller.server._asking) == 1
    caller.link.cancel(number)
    await turns()
    assert caller.server._asking == {}


async def test_a_position_that_another_node_has_reached_is_accepted() -> None:
    caller = Caller()
    for _ in range(3):
        await caller.logs.log("orders").append(b"x")
    answer = await caller.link.ask(LogRead("orders", caller.logs.position, 0))
    assert isinstance(answer, RecordsFound)


async def test_a_question_is_refused_while_its_number_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_position: int) -> None:
        await asyncio.get_running_loop().create_future()

    caller = Caller()
    monkeypatch.setattr(caller.host.positions, "fault", never)
    number = caller.link.post(LogAppend("orders", NOWHERE, b"x", ()), lambda _: None)
    await turns()
    caller.link._next_call = number
    reported: list[Answer] = []
    caller.link.post(LogRead("orders", 0, 0), reported.append)
    await turns()
    [answer] = reported
    assert isinstance(answer, Failed)
    assert answer.message == f"Question {number} is being answered already."
    assert len(caller.server._asking) == 1
    caller.server.close()
    await turns()


async def test_a_cancel_that_comes_right_after_the_check_of_a_position_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check has ended, and its task is noted still: what it began is to be cancelled."""
    caller = Caller()
    reported: list[Answer] = []
    number = 1

    async def reached(_position: int) -> None:
        asyncio.get_running_loop().call_soon(caller.server.serve, caller.far, number, Cancel())

    monkeypatch.setattr(caller.host.positions, "fault", reached)
    question = CallFunction("app.f", b"{}", NOWHERE, 0, "k")
    assert caller.link.post(question, reported.append) == number
    await turns()
    caller.host.may_record.set()
    await turns()
    [answer] = reported
    assert isinstance(answer, Failed)
    assert "its caller stopped waiting" in answer.message
