"""Compensations of a workflow that fails or is cancelled."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import bokiflow
from bokiflow import Cancelled, Flow, RunCancelledError, RunFailedError, StepFailedError, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG as LOG
from tests.support.flow_executions import begin, decided, execute, take


@pytest.mark.asyncio
async def test_compensations_run_in_reverse_order(flow: Flow) -> None:
    undone: list[int] = []

    async def fail() -> int:
        raise ValueError("no room")

    @flow.workflow
    async def trip(wf: Workflow) -> None:
        for n in (1, 2):
            await wf.step(lambda n=n: n, name="book", compensate=undone.append)
        await wf.gather(
            *(wf.step(lambda n=n: n, name="book", compensate=undone.append) for n in (3, 4))
        )
        with contextlib.suppress(StepFailedError):
            await wf.step(fail, retries=0, compensate=undone.append)
        raise Cancelled("not paid")

    with pytest.raises(RunCancelledError, match="not paid"):
        await (await trip.start()).result(10)
    assert undone == [4, 3, 2, 1]


@pytest.mark.asyncio
async def test_compensations_happen_once_when_executors_change_in_the_middle(
    logs: MemoryLogs,
) -> None:
    log = logs.log(LOG)
    await begin(log, "trip")
    undone: list[str] = []
    stuck = asyncio.Event()

    async def undo(what: str) -> None:
        undone.append(what)
        if what == "room" and len(undone) == 2:
            stuck.set()
            await asyncio.sleep(60)

    async def trip(wf: Workflow) -> None:
        for what in ("car", "room", "seat"):
            await wf.step(lambda what=what: what, name="book", compensate=undo)
        raise Cancelled("not paid")

    first = asyncio.create_task(execute(log, "trip", trip))
    await stuck.wait()
    first.cancel()
    await asyncio.wait([first])
    await take(log, "trip", "second")
    finished = await execute(log, "trip", trip)
    assert finished.was_cancelled
    assert undone == ["seat", "room", "room", "car"]


@pytest.mark.asyncio
async def test_a_failed_compensation_is_reported_and_the_others_run(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(waiting, "pause", pause)
    undone: list[str] = []

    def refuse(what: str) -> None:
        raise ValueError(what)

    @flow.workflow
    async def trip(wf: Workflow) -> None:
        await wf.step(lambda: "car", name="car", compensate=undone.append)
        await wf.step(lambda: "room", name="room", compensate=refuse)
        await wf.step(lambda: 1 / 0, name="pay", retries=0)

    with pytest.raises(RunFailedError, match=r"CompensationFailedError.*ValueError at 2: room"):
        await (await trip.start()).result(10)
    assert undone == ["car"]


@pytest.mark.asyncio
async def test_code_that_does_not_fit_compensates_nothing(logs: MemoryLogs) -> None:
    log = logs.log(LOG)
    await begin(log, "trip")
    undone: list[str] = []

    async def trip(wf: Workflow, second: str) -> None:
        await wf.step(lambda: "car", name="car", compensate=undone.append)
        await wf.step(lambda: second, name=second)
        await wf.sleep(1000)

    first = asyncio.create_task(execute(log, "trip", lambda wf: trip(wf, "room")))
    await decided(logs, "trip", 3)
    first.cancel()
    await asyncio.wait([first])
    await take(log, "trip", "second")
    with pytest.raises(bokiflow.ChangedWorkflowError):
        await execute(log, "trip", lambda wf: trip(wf, "boat"))
    assert undone == []


@pytest.mark.asyncio
async def test_code_that_raises_before_a_decided_step_runs_no_compensation(
    logs: MemoryLogs,
) -> None:
    """Steps that the new code does not come to could not be taken back."""
    log = logs.log(LOG)
    await begin(log, "trip")
    undone: list[str] = []

    async def trip(wf: Workflow, raised: Exception | None = None) -> None:
        await wf.step(lambda: "car", name="car", compensate=undone.append)
        if raised is not None:
            raise raised
        await wf.step(lambda: "room", name="room", compensate=undone.append)
        await wf.signal("paid")

    first = asyncio.create_task(execute(log, "trip", trip))
    await decided(logs, "trip", 2)
    first.cancel()
    await asyncio.wait([first])
    for raised in (NameError("nome"), Cancelled("not paid")):
        await take(log, "trip", "second")
        with pytest.raises(
            bokiflow.ChangedWorkflowError, match=r"step 2 .* ended before"
        ) as reported:
            await execute(log, "trip", lambda wf: trip(wf, raised))  # noqa: B023 - it runs now
        assert f"{type(raised).__name__}: {raised}. Deploy" in str(reported.value)
    assert undone == []
    status = await read_run(log, "trip", RunState())
    assert status.state is State.PARKED


@pytest.mark.asyncio
async def test_code_that_succeeds_after_a_compensation_does_not_fit(
    logs: MemoryLogs,
) -> None:
    log = logs.log(LOG)
    await begin(log, "trip")

    async def trip(wf: Workflow, *, fails: bool, has_undo: bool = True) -> None:
        compensate = (lambda _: None) if has_undo else None
        await wf.step(lambda: "car", name="car", compensate=hang)
        await wf.step(lambda: "room", name="room", compensate=compensate)
        if fails:
            raise Cancelled("not paid")

    async def hang(_: str) -> None:
        await asyncio.sleep(60)

    first = asyncio.create_task(execute(log, "trip", lambda wf: trip(wf, fails=True)))
    await decided(logs, "trip", 3)
    first.cancel()
    await asyncio.wait([first])
    for changed in ({"fails": False}, {"fails": True, "has_undo": False}):
        await take(log, "trip", "second")
        with pytest.raises(bokiflow.ChangedWorkflowError, match=r"step 2\.undo was decided"):
            await execute(log, "trip", lambda wf: trip(wf, **changed))  # noqa: B023 - it runs now


@pytest.mark.asyncio
async def test_anything_can_have_a_compensation(flow: Flow) -> None:
    undone: list[tuple[str, int]] = []

    def undo(what: str, n: int) -> None:
        undone.append((what, n))

    @flow.workflow
    async def book(wf: Workflow, n: int) -> int:
        return n

    @flow.workflow
    async def trip(wf: Workflow) -> None:
        car = await wf.run(book, 1)
        wf.compensate(undo, "car", car)
        room = await wf.run(book, 2)
        wf.compensate(undo, "room", room)
        raise Cancelled("not paid")

    with pytest.raises(RunCancelledError):
        await (await trip.start()).result(10)
    assert undone == [("room", 2), ("car", 1)]
