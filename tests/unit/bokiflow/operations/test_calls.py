"""Functions called from workflows: one outcome each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

import indilog
from bokiflow import Flow, FlowSettingsError, RunFailedError, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import RunFinished
from indilog.apps.app import Context
from indilog.base.errors import (
    CallOutcomeUnknownError,
    FunctionFailedError,
    IndilogError,
    NotReadyError,
    OverloadedError,
    WorkerCrashedError,
)
from indilog.base.log import Session
from indilog.sdk.runs import holder_of
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG, NothingHeld, begin, execute

app = indilog.App("shop")


@dataclass
class Mail:
    """What comes back."""

    to: str
    size: int


@app.function
async def send_mail(ctx: indilog.Context, to: str, text: str = "") -> Mail:
    """Only its signature counts here."""
    return Mail(to, len(text))


@dataclass
class Platform(NothingHeld):
    """Runs what it is asked to, once for each key.

    Attributes:
        ran: keys, functions and arguments.
        held_for: for whom outcomes are held.
        troubles: what it raises first.
    """

    ran: list[tuple[str, str, bytes]] = field(default_factory=list)
    troubles: list[IndilogError] = field(default_factory=list)
    held_for: set[str] = field(default_factory=set)

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        self.held_for.add(holder)
        if key not in {done for done, _, _ in self.ran}:
            self.ran.append((key, function, arguments))
        if self.troubles:
            raise self.troubles.pop(0)
        return b'{"to":"ann","size":%d}' % len(self.ran)

    async def send(self, *_: object, **__: object) -> str:
        raise AssertionError("no mail is sent")


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(waiting, "pause", pause)
    return Platform()


async def mailing(wf: Workflow) -> Mail:
    return await wf.call(send_mail, "ann", text="hello")


async def executed(platform: Platform, logs: MemoryLogs) -> RunFinished:
    """Execute `mailing` as the newest executor of a run."""
    return await execute(logs.log(FLOW_LOG), "r", mailing, context=Context(logs, platform))


@pytest.mark.asyncio
async def test_a_call_is_made_under_the_key_of_its_operation(platform: Platform) -> None:
    logs = MemoryLogs()
    await begin(logs.log(FLOW_LOG), "r")
    finished = await executed(platform, logs)
    assert finished.result == b'{"to":"ann","size":1}'
    assert platform.ran == [(f"{FLOW_LOG}/r@0/1", "shop.send_mail", b'{"to":"ann","text":"hello"}')]
    assert platform.held_for == {holder_of(FLOW_LOG, "r")}


@pytest.mark.asyncio
async def test_a_call_whose_outcome_is_unknown_is_asked_for_again(platform: Platform) -> None:
    platform.troubles = [CallOutcomeUnknownError("lost"), NotReadyError("starting")]
    logs = MemoryLogs()
    await begin(logs.log(FLOW_LOG), "r")
    assert (await executed(platform, logs)).result == b'{"to":"ann","size":1}'
    assert len(platform.ran) == 1


@pytest.mark.asyncio
async def test_an_execution_without_room_for_a_call_stops_and_says_why(platform: Platform) -> None:
    platform.troubles = [OverloadedError("Too many outcomes are held.")] * 100
    logs = MemoryLogs()
    await begin(logs.log(FLOW_LOG), "r")
    with pytest.raises(Stopped, match=r"shop\.send_mail.*Too many outcomes are held\."):
        await executed(platform, logs)


@pytest.mark.parametrize(
    "trouble",
    [
        [FunctionFailedError("no such address", kind="ValueError")],
        [WorkerCrashedError("lost repeatedly")] * 3,
    ],
)
@pytest.mark.asyncio
async def test_the_failure_of_a_function_is_decided(
    platform: Platform, trouble: list[IndilogError]
) -> None:
    platform.troubles = list(trouble)
    logs = MemoryLogs()
    await begin(logs.log(FLOW_LOG), "r")
    finished = await executed(platform, logs)
    assert finished.failure is not None
    assert str(trouble[0]) in finished.failure.message


@pytest.mark.asyncio
async def test_a_workflow_calls_only_deployed_functions() -> None:
    flow = Flow("shop")
    flow.attach(MemoryLogs())

    async def plain() -> None: ...

    @flow.workflow
    async def wrong(wf: Workflow, how: str) -> None:
        match how:
            case "plain":
                await wf.call(plain)
            case "many":
                await wf.call(send_mail, 1, 2, 3)
            case "text":
                await wf.call("other.function", 1)
            case _:
                await wf.call(send_mail, "ann")

    for how, words in [
        ("plain", "is not a function of an app"),
        ("many", "takes 2 arguments, not 3"),
        ("text", "with named arguments"),
        ("outside", "has no context"),
    ]:
        with pytest.raises(RunFailedError, match=words) as reported:
            await (await wrong.start(how)).result(10)
        assert reported.value.kind in {FlowSettingsError.__name__, "StepFailedError"}
