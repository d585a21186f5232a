"""What another process than the executor shows of a step that hangs, or fails and is retried, and
of a wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bokiflow import Flow, Retry, Startable, Workflow
from bokiflow.runs.operation_notes import NOTED_AFTER_S
from bokiflow.runs.records import OperationNoted, run_record, run_tag
from indilog import App
from indilog.client import Client
from indilog.sdk.runs import RunDetails
from indilog.testing import MemoryLogs
from tests.unit.bokiflow.processes import kill

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Process:
    """A worker of the application `shop`, whose step is `body`."""

    def __init__(self, logs: MemoryLogs, body: Callable[[], Awaitable[str]]) -> None:
        self.logs = logs
        self.app = App("shop")
        self.flow = Flow(self.app, lease=1.0)
        self.flow.attach(logs)
        self._body = body
        self.order: Startable[str] = self.flow.workflow(self.order_)
        self.waits: Startable[str] = self.flow.workflow(self.waits_)
        self.listens: Startable[str] = self.flow.workflow(self.listens_)
        self.naps: Startable[None] = self.flow.workflow(self.naps_)

    async def order_(self, wf: Workflow) -> str:
        async def pay() -> str:
            return await self._body()

        return await wf.step(pay, retry=Retry(first=30.0))

    async def waits_(self, wf: Workflow) -> str:
        async with wf.lock("x"):
            return str(await wf.signal("go"))

    async def listens_(self, wf: Workflow, limit_s: float | None = None) -> str:
        return str(await wf.signal("go", timeout=limit_s))

    async def naps_(self, wf: Workflow) -> None:
        await wf.sleep(3600)

    async def show(self) -> RunDetails:
        """Return what this process shows of run `r`."""
        return await Client(self.logs).run(self.app, "r").show()

    async def shown(self, until: Callable[[RunDetails], bool]) -> RunDetails:
        """Return what this process shows of run `r`, as soon as it is so."""
        async with asyncio.timeout(20):
            while not until(found := await self.show()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found


async def hangs() -> str:
    await asyncio.sleep(60)
    return "late"


async def never() -> str:
    raise AssertionError("this process executes nothing")


class FailsFirst:
    """A body that fails, and then hangs or returns."""

    def __init__(self, then: Callable[[], Awaitable[str]]) -> None:
        self.calls, self._then = 0, then

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("no stamps")
        return await self._then()


async def paid() -> str:
    return "paid"


async def test_a_step_that_hangs_is_shown_by_another_process() -> None:
    logs = MemoryLogs()
    executor, other = Process(logs, hangs), Process(logs, never)
    await executor.order.start(id="r")
    before = await executor.shown(lambda found: bool(found.waits))
    found = await other.shown(lambda found: bool(found.waits))
    [wait] = found.waits
    assert (wait.what, wait.attempts, wait.error) == ("step 'pay' (operation 1)", 0, None)
    assert wait.since == pytest.approx(found.run.began, abs=5)
    assert wait.next_attempt is None
    assert [wait.what for wait in before.waits] == ["step 'pay' (operation 1)"]
    await executor.flow.runner.stop()


async def test_a_step_that_failed_is_shown_with_its_error_and_next_attempt() -> None:
    logs = MemoryLogs()
    executor, other = Process(logs, FailsFirst(hangs)), Process(logs, never)
    await executor.order.start(id="r")
    for process in (other, executor):
        found = await process.shown(lambda found: any(wait.attempts for wait in found.waits))
        [wait] = found.waits
        assert (wait.what, wait.attempts) == ("step 'pay' (operation 1)", 1)
        assert wait.error == "ValueError: no stamps"
        assert wait.since is not None
        assert wait.next_attempt == pytest.approx(wait.since + 30, abs=5)
    await executor.flow.runner.stop()


async def test_a_wait_of_a_run_that_stays_in_memory_is_shown_by_another_process() -> None:
    logs = MemoryLogs()
    executor, other = Process(logs, never), Process(logs, never)
    await executor.waits.start(id="r")
    [wait] = (await other.shown(lambda found: bool(found.waits))).waits
    assert wait.what == "signal 'go' (operation 2)"
    await executor.flow.runner.stop()


@pytest.mark.parametrize("what", ["signal 'go' (operation 2)", "sleep (operation 2)"])
async def test_a_wait_with_a_time_limit_is_shown_at_once_by_every_process(what: str) -> None:
    logs = MemoryLogs()
    executor, other = Process(logs, never), Process(logs, never)
    await (executor.naps.start(id="r") if "sleep" in what else executor.listens.start(3600, id="r"))
    found = await executor.shown(lambda found: bool(found.steps))
    assert (await other.show()).waits == found.waits
    [wait] = found.waits
    [timer] = found.steps
    assert (wait.what, wait.since, wait.until) == (what, timer.decided, float(timer.result))
    await executor.flow.runner.stop()


async def test_a_wait_without_a_time_limit_is_shown_while_the_run_is_in_memory() -> None:
    logs = MemoryLogs()
    executor, other = Process(logs, never), Process(logs, never)
    await executor.listens.start(id="r")
    [wait] = (await other.shown(lambda found: bool(found.waits))).waits
    assert not executor.flow.runner.running["r"].is_passive
    assert wait.what == "signal 'go' (operation 1)"
    await executor.flow.runner.stop()


@pytest.mark.parametrize("limit_s", [None, 3600.0])
async def test_a_wait_shows_since_when_the_run_waits_also_after_the_run_left_memory(
    limit_s: float | None,
) -> None:
    logs = MemoryLogs()
    executor, other = Process(logs, never), Process(logs, never)
    driver = asyncio.create_task(executor.flow.drive(logs))
    await executor.listens.start(limit_s, id="r")
    [first] = (await other.shown(lambda found: bool(found.waits))).waits
    assert first.since is not None
    for _ in range(2):  # each signal of another name makes an executor take the run again
        async with asyncio.timeout(60):
            while "r" in executor.flow.runner.running:  # noqa: ASYNC110
                await asyncio.sleep(1)
        [passive] = (await other.show()).waits
        await executor.listens.handle("r").signal("gone")
        async with asyncio.timeout(60):
            while "r" not in executor.flow.runner.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        [again] = (await other.shown(lambda found: bool(found.waits))).waits
        [own] = (await executor.show()).waits
        since = [wait.since for wait in (passive, again, own)]
        assert since == pytest.approx([first.since] * 3, abs=1, rel=0)
        assert [wait.what for wait in (passive, again, own)] == [first.what] * 3
    driver.cancel()
    await asyncio.wait({driver})


async def test_a_takeover_ignores_the_notes_and_shows_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Retry, "pause_s", lambda *_: 2 * NOTED_AFTER_S)
    logs = MemoryLogs()
    body = FailsFirst(paid)
    dying, taker = Process(logs, hangs), Process(logs, body)
    await dying.order.start(id="r")
    await taker.shown(lambda found: bool(found.waits))
    kill(dying.flow)
    driver = asyncio.create_task(taker.flow.drive(logs))
    assert await taker.order.handle("r").result(20) == "paid"
    found = await taker.shown(lambda found: found.run.state == "done")
    assert found.waits == ()
    [step] = found.steps
    assert (step.name, step.attempts, step.result) == ("pay", 2, "paid")
    assert step.duration_s is not None
    assert NOTED_AFTER_S <= step.duration_s < 20
    records = await logs.log(taker.flow.log_name).read_range(run_tag("r"))
    epochs = [r.epoch for one in records if isinstance(r := run_record(one.data), OperationNoted)]
    assert epochs == [1, 2], "one note of each execution"
    driver.cancel()
    await asyncio.wait({driver})
