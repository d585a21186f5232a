"""A cancelled run ends although a body or the workflow's code hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
import structlog

from bokiflow import Flow, FlowSettingsError, Handle, RunCancelledError, State, Workflow
from bokiflow.runs import cancelling, waiting
from indilog.testing import MemoryLogs

pytestmark = pytest.mark.asyncio
GRACE_S = 0.05


class Shop:
    """A process whose workflow pays, and then does what the test says."""

    def __init__(self) -> None:
        self.logs = MemoryLogs()
        self.flow = Flow("shop", lease=2.0, cancel_grace=GRACE_S)
        self.flow.attach(self.logs)
        self.undone: list[str] = []
        self.begun = asyncio.Event()

    async def start(self, then: Callable[[Workflow], Any]) -> Handle[Any]:
        """Start a run, and cancel it when it has begun what the test says."""

        async def pay() -> str:
            return "paid"

        async def refund(paid: str) -> None:
            self.undone.append(paid)

        @self.flow.workflow
        async def order(wf: Workflow) -> None:
            await wf.step(pay, compensate=refund)
            await then(wf)

        handle = await order.start(id="r")
        await self.begun.wait()
        await handle.cancel()
        return handle

    async def hangs(self) -> None:
        self.begun.set()
        await asyncio.sleep(60)

    async def ignores(self) -> None:
        self.begun.set()
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


@pytest_asyncio.fixture
async def shop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    monkeypatch.setattr(cancelling, "ENDING_S", GRACE_S)
    shop = Shop()
    yield shop
    await shop.flow.runner.stop()


async def ended(shop: Shop, handle: Handle[Any]) -> str:
    """Wait until the run is cancelled and compensated; return why."""
    with pytest.raises(RunCancelledError) as raised:
        await handle.result(20)
    status = await handle.status()
    assert status.state is State.CANCELLED
    assert shop.undone == ["paid"]
    assert str(status.problem) in str(raised.value)
    return str(status.problem)


async def test_a_body_that_hangs_is_cancelled_after_the_grace(shop: Shop) -> None:
    cleaned: list[int] = []

    async def hangs() -> None:
        try:
            await shop.hangs()
        finally:
            cleaned.append(1)

    problem = await ended(shop, await shop.start(lambda wf: wf.step(hangs)))
    assert problem.endswith("The run was cancelled at step 'hangs'. Its body was cancelled.")
    assert cleaned == [1]


async def test_a_body_that_ignores_its_cancellation_is_abandoned_and_logged_once(
    shop: Shop,
) -> None:
    with structlog.testing.capture_logs() as lines:
        problem = await ended(shop, await shop.start(lambda wf: wf.step(shop.ignores)))
    assert problem.endswith("Its body ignored the cancellation and was abandoned.")
    [line] = [line for line in lines if line["event"] == "cancelled code was abandoned"]
    assert (line["run"], line["what"]) == ("r", "the body of a step")


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
async def test_a_body_that_ignores_even_its_end_is_never_resumed(shop: Shop) -> None:
    resumed: list[int] = []

    async def stubborn() -> None:
        shop.begun.set()
        while True:
            try:
                await asyncio.sleep(60)
            except BaseException:  # noqa: BLE001 - that is tested
                resumed.append(1)

    await ended(shop, await shop.start(lambda wf: wf.step(stubborn)))
    count = len(resumed)
    await asyncio.sleep(4 * GRACE_S)
    assert len(resumed) == count


@pytest.mark.leaping
async def test_a_body_that_ends_in_the_grace_keeps_its_outcome(shop: Shop) -> None:
    undone: list[str] = []

    async def soon() -> str:
        shop.begun.set()
        await asyncio.sleep(GRACE_S / 5)
        return "sent"

    async def undo(sent: str) -> None:
        undone.append(sent)

    async def then(wf: Workflow) -> None:
        await wf.step(soon, compensate=undo)
        await wf.step(soon)

    problem = await ended(shop, await shop.start(then))
    assert undone == ["sent"]
    assert problem.endswith("The run was cancelled at step 'soon'.")


@pytest.mark.leaping
async def test_a_body_that_returns_when_it_is_cancelled_keeps_its_outcome(shop: Shop) -> None:
    undone: list[str] = []

    async def returns() -> str:
        with suppress(asyncio.CancelledError):
            await shop.hangs()
        return "sent"

    async def undo(sent: str) -> None:
        undone.append(sent)

    async def then(wf: Workflow) -> None:
        await wf.step(returns, compensate=undo)
        await wf.sleep(60)

    await ended(shop, await shop.start(then))
    assert undone == ["sent"]


async def test_bodies_of_branches_are_cancelled(shop: Shop) -> None:
    async def then(wf: Workflow) -> None:
        await wf.gather(wf.step(shop.hangs), wf.step(shop.ignores), wf.sleep(60))

    await ended(shop, await shop.start(then))


async def test_a_thread_goes_on_and_is_counted(shop: Shop) -> None:
    release, loop = threading.Event(), asyncio.get_running_loop()

    def blocks() -> None:
        loop.call_soon_threadsafe(shop.begun.set)
        release.wait(30)

    try:
        problem = await ended(shop, await shop.start(lambda wf: wf.step(blocks)))
        assert problem.endswith(
            "A thread cannot be ended. Threads of cancelled bodies in its process: 1."
        )
        assert waiting.threads_left() == 1
    finally:
        release.set()
    async with asyncio.timeout(20):
        while waiting.threads_left():  # noqa: ASYNC110 - not announced
            await asyncio.sleep(0.01)


@pytest.mark.leaping
async def test_a_compensation_is_not_ended_by_the_grace(shop: Shop) -> None:
    undone: list[str] = []

    async def slow_undo() -> None:
        await asyncio.sleep(6 * GRACE_S)
        undone.append("slowly")

    async def then(wf: Workflow) -> None:
        wf.compensate(slow_undo)
        await wf.step(shop.hangs)

    await ended(shop, await shop.start(then))
    assert undone == ["slowly"]


@pytest.mark.leaping
async def test_a_clean_up_after_the_cancellation_is_not_ended_by_the_grace(shop: Shop) -> None:
    cleaned: list[str] = []

    async def clean() -> None:
        await asyncio.sleep(6 * GRACE_S)
        cleaned.append("up")

    async def then(wf: Workflow) -> None:
        try:
            await wf.step(shop.hangs)
        finally:
            await wf.step(clean)

    await ended(shop, await shop.start(then))
    assert cleaned == ["up"]


async def test_workflow_code_that_hangs_outside_of_operations_is_cancelled(shop: Shop) -> None:
    async def then(_: Workflow) -> None:
        await shop.hangs()

    problem = await ended(shop, await shop.start(then))
    assert problem.endswith("was cancelled while its code waited outside of an operation.")


async def test_workflow_code_that_ignores_everything_is_abandoned(shop: Shop) -> None:
    async def then(wf: Workflow) -> None:
        shop.begun.set()
        while True:
            with suppress(Exception):
                await asyncio.sleep(60)

    with structlog.testing.capture_logs() as lines:
        problem = await ended(shop, await shop.start(then))
    assert problem.endswith("its code ignored that and was abandoned.")
    [line] = [line for line in lines if line["event"] == "cancelled code was abandoned"]
    assert (line["run"], line["what"]) == ("r", "the code of a workflow")


async def test_a_stop_of_the_process_is_not_taken_for_the_cancellation(shop: Shop) -> None:
    """A run whose executor stops is neither cancelled nor compensated there."""
    handle = await shop.start(lambda wf: wf.step(shop.ignores))
    [running] = shop.flow.runner.running.values()
    [body] = running.execution.grace._bodies
    while body.interrupted_at is None:  # noqa: ASYNC110 - not announced
        await asyncio.sleep(0)
    assert running.task is not None
    running.was_stopped = True
    running.task.cancel()
    await ended(shop, handle)
    assert (await handle.status()).epoch == 2


async def test_a_negative_grace_is_refused() -> None:
    for grace in (-1.0, float("nan")):
        with pytest.raises(FlowSettingsError, match="cancel_grace must be a number of seconds"):
            Flow("shop", cancel_grace=grace)
