"""Each user error with workflows raises one sentence that says what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from bokiflow import (
    Flow,
    FlowSettingsError,
    Handle,
    RunCancelledError,
    RunFailedError,
    RunIdInUseError,
    Workflow,
)
from bokiflow.runs import waiting
from indilog.base.log import Record
from indilog.testing import MemoryLog, MemoryLogs

pytestmark = pytest.mark.asyncio


async def effect(n: int) -> int:
    return n


async def mistake_of(flow: Flow, act: Any) -> str:  # noqa: ANN401 - any use of a workflow
    """Return what a run says that ends with `act(wf)`."""

    @flow.workflow
    async def wrong(wf: Workflow) -> None:
        await act(wf)

    with pytest.raises(RunFailedError) as raised:
        await (await wrong.start(id="w")).result(10)
    assert raised.value.kind == "FlowSettingsError"
    return str(raised.value)


async def test_a_function_that_is_run_as_a_child_is_no_workflow(flow: Flow) -> None:
    wrong: Any = effect
    assert await mistake_of(flow, lambda wf: wf.run(wrong, 1)) == (
        "Run 'w' failed: FlowSettingsError: effect is not a workflow of this flow: for a function "
        "of an application use wf.call(effect, ...), for any other wf.step(effect, ...)."
    )


async def test_the_call_of_a_function_is_no_body(flow: Flow) -> None:
    """And Python does not warn that it was never awaited: warnings are errors here."""
    wrong: Any = effect
    reported = "Give the function, then its arguments: effect, ... instead of effect(...)."
    for act in (
        lambda wf: wf.step(wrong(1)),
        lambda wf: wf.step(effect, 1, compensate=wrong(1)),
        lambda wf: wf.call(wrong(1)),
    ):
        assert reported in await mistake_of(flow, act)
        flow = Flow("next")
        flow.attach(MemoryLogs())
    assert "wf.run(effect, ...)" in await mistake_of(flow, lambda wf: wf.run(wrong(1)))


async def test_an_object_that_is_no_function_is_no_body(flow: Flow) -> None:
    wrong: Any = 7
    assert "not int 7." in await mistake_of(flow, lambda wf: wf.step(wrong))


async def test_a_workflow_is_started_not_called(flow: Flow) -> None:
    @flow.workflow
    async def sub(wf: Workflow, n: int) -> int:
        return n

    with pytest.raises(FlowSettingsError, match=r"'sub' must be started.*: sub\.start\(.*run"):
        await sub(1)
    wrong: Any = sub
    reported = await mistake_of(flow, lambda wf: wf.step(wrong, 1))
    assert "sub is a workflow: use wf.run(sub, ...)." in reported


async def test_a_signal_without_a_json_form_was_not_sent(flow: Flow) -> None:
    @flow.workflow
    async def waits(wf: Workflow) -> object:
        return await wf.signal("x")

    handle = await waits.start(id="s")
    with pytest.raises(FlowSettingsError, match="'x' was not sent: its value, of type object"):
        await handle.signal("x", object())
    await handle.signal("x", 0)
    assert await handle.result(10) == 0


async def test_a_signal_has_a_name(flow: Flow) -> None:
    @flow.workflow
    async def waits(wf: Workflow, name: str) -> object:
        return await wf.signal(name)

    with pytest.raises(RunFailedError, match="A signal's name must not be empty"):
        await (await waits.start("")).result(10)
    handle = await waits.start("x")
    with pytest.raises(FlowSettingsError, match="A signal's name must not be empty"):
        await handle.signal("", 1)
    await handle.signal("x", 2)
    assert await handle.result(10) == 2


@pytest.mark.parametrize("is_here", [True, False])
async def test_a_handle_of_another_workflow_is_refused(flow: Flow, is_here: bool) -> None:
    """Whether the run is executed in this process or elsewhere; and nothing is done to it."""

    @flow.workflow
    async def order(wf: Workflow) -> str:
        return str(await wf.signal("go"))

    @flow.workflow
    async def badflow(wf: Workflow) -> int:
        return 1

    right = await order.start(id="o1")
    asked = flow
    if not is_here:
        asked = Flow("shop")
        asked.attach(flow.logs())
        for startable in (order, badflow):
            asked.workflow(startable.definition.body)
    wrong = asked.handle("badflow", "o1")
    reported = r"^Run 'o1' is one of workflow 'order', not of 'badflow'\.$"
    for ask in (wrong.status, wrong.result, lambda: wrong.signal("go", "bad"), wrong.cancel):
        with pytest.raises(RunIdInUseError, match=reported):
            await ask()
    await right.signal("go", "good")
    assert await right.result(10) == "good"
    with pytest.raises(RunIdInUseError, match=reported):
        await wrong.result()


async def test_a_run_without_code_can_be_cancelled_by_any_handle(flow: Flow) -> None:
    """There is no handle of its own."""

    @flow.workflow
    async def order(wf: Workflow) -> str:
        return str(await wf.signal("go"))

    handle = await order.start(id="o1")
    later = Flow("shop")
    later.attach(flow.logs())

    @later.workflow
    async def renamed(wf: Workflow) -> None: ...

    await later.handle("renamed", "o1").cancel()
    with pytest.raises(RunCancelledError):
        await handle.result(10)


async def test_a_timeout_of_a_result_says_that_the_run_continues(flow: Flow) -> None:
    """The same, whether the run is executed in this process or followed in the log."""

    @flow.workflow
    async def waits(wf: Workflow) -> object:
        return await wf.signal("x")

    handle = await waits.start(id="late")
    other = Flow("shop")
    other.attach(flow.logs())
    for of in (handle, other.workflow(waits.definition.body).handle("late")):
        late = r"^Run 'late' has not ended in time; it continues\.$"
        with pytest.raises(TimeoutError, match=late):
            await of.result(0.01)
    await handle.signal("x", "end")
    assert await handle.result(10) == "end"


async def test_an_attempt_that_is_followed_by_another_is_logged(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "pause", lambda s: asyncio.sleep(0 if s < 1 else s))
    left = [ConnectionError("bank is away"), ConnectionError("bank is away")]

    async def charge() -> str:
        if left:
            raise left.pop()
        return "paid"

    @flow.workflow
    async def pays(wf: Workflow) -> str:
        return await wf.step(charge, retries=2, backoff=0.25)

    with capture_logs() as lines:
        assert await (await pays.start(id="p")).result(10) == "paid"
    assert [line for line in lines if line["log_level"] == "warning"] == [
        {
            "event": "a step failed and is retried",
            "log_level": "warning",
            "run": "p",
            "step": "charge",
            "number": "1",
            "attempt": attempt,
            "attempts_max": 3,
            "again_after_s": 0.25 * attempt,
            "error": "ConnectionError: bank is away",
        }
        for attempt in (1, 2)
    ]


async def test_a_start_of_the_same_run_with_other_arguments_is_logged_and_changes_nothing(
    flow: Flow, logs: MemoryLogs
) -> None:
    """This holds in the process that executes the run and in another one. Arguments in another
    order count as the same.
    """

    @flow.workflow
    async def buy(wf: Workflow, item: str, count: int = 1) -> str:
        await wf.signal("go")
        return f"{count} {item}"

    other_flow = Flow("shop")
    other_flow.attach(logs)
    other = other_flow.workflow(buy.definition.body)
    with capture_logs() as lines:
        handle = await buy.start("tea", 2, id="b")
        for startable in (buy, other):
            await startable.start(count=2, item="tea", id="b")
        assert lines == []
        for startable in (buy, other):
            assert (await startable.start("milk", id="b")).id == "b"
    event = "start repeated with other arguments; the run keeps its own"
    warning = {"event": event, "log_level": "warning", "run": "b", "workflow": "buy"}
    assert lines == [warning] * 2
    await handle.signal("go")
    assert await handle.result(10) == "2 tea"


async def test_of_concurrent_starts_of_one_id_those_of_another_workflow_are_refused(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those with other arguments are logged: as if they had come one after the other."""
    read_range = MemoryLog.read_range

    async def slow(*given: Any, **named: Any) -> list[Record]:  # noqa: ANN401 - as the log's
        await asyncio.sleep(0)  # the others begin
        return await read_range(*given, **named)

    monkeypatch.setattr(MemoryLog, "read_range", slow)

    @flow.workflow
    async def buy(wf: Workflow, item: str) -> str:
        return f"{await wf.signal('go')} {item}"

    @flow.workflow
    async def other(wf: Workflow) -> None: ...

    with capture_logs() as lines:
        first, refused, again = await asyncio.gather(
            buy.start("tea", id="x"),
            other.start(id="x"),
            buy.start("milk", id="x"),
            return_exceptions=True,
        )
    assert isinstance(refused, RunIdInUseError)
    assert str(refused) == "Run 'x' is one of workflow 'buy', not of 'other'; choose another id."
    assert [line["event"] for line in lines] == [
        "start repeated with other arguments; the run keeps its own"
    ]
    for handle in (first, again):
        assert isinstance(handle, Handle)
    await buy.handle("x").signal("go", 2)
    assert await buy.handle("x").result(10) == "2 tea"


async def test_a_result_too_large_to_be_kept_is_no_promise_that_nothing_was_done(
    flow: Flow,
) -> None:
    ran: list[str] = []

    async def large(who: str) -> str:
        ran.append(who)
        return "x" * (2 * 1024 * 1024)

    @flow.workflow
    async def steps(wf: Workflow) -> str:
        return await wf.step(large, "step")

    @flow.workflow
    async def returns(wf: Workflow) -> str:
        return await large("workflow")

    for workflow in (steps, returns):
        with pytest.raises(RunFailedError, match="ran, and its effects remain") as raised:
            await (await workflow.start()).result(10)
        assert raised.value.kind == "TooLargeError"
        assert "the limit is 1,048,576" in str(raised.value)
        assert "nothing was done" not in str(raised.value)
    assert ran == ["step", "workflow"]
