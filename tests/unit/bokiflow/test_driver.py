"""Runs continue when the process that executes them crashes, is paused, or stops."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from bokiflow import (
    Flow,
    RunCancelledError,
    RunFailedError,
    RunIdInUseError,
    Startable,
    State,
    Workflow,
)
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    RUNS_TAG,
    RunFinished,
    RunStarted,
    RunTaken,
    StepDecided,
    executor_record,
    run_in,
    run_record,
    run_tag,
)
from indilog.testing import MemoryLogs
from tests.unit.bokiflow.processes import kill

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 0.3


class Process:
    """A process with the workflow `two`, whose steps ask `on_step` before they return."""

    def __init__(
        self,
        logs: MemoryLogs,
        on_step: Callable[[Process, str], object] | None = None,
        *,
        executions: int = 100,
    ) -> None:
        self.flow = Flow("shop", lease=LEASE_S, executions=executions)
        self.flow.attach(logs)
        self.driver: asyncio.Task[None] | None = None
        self.ran: list[str] = []
        self._logs = logs
        self._on_step = on_step
        self.two: Startable[str] = self.flow.workflow(self._two)

    async def _two(self, wf: Workflow) -> str:
        return await wf.step(self.second, await wf.step(self.first))

    _two.__name__ = "two"

    async def first(self) -> str:
        return await self._step("first", "1")

    async def second(self, before: str) -> str:
        return await self._step("second", before + "2")

    async def _step(self, name: str, result: str) -> str:
        self.ran.append(name)
        reported = self._on_step(self, name) if self._on_step is not None else None
        if isinstance(reported, asyncio.Event):
            await reported.wait()
        return result

    def drive(self) -> None:
        self.driver = asyncio.create_task(self.flow.drive(self._logs))

    def kill(self) -> None:
        """End everything at once, and say nothing."""
        if self.driver is not None:
            self.driver.cancel()
        kill(self.flow)

    async def stop(self) -> None:
        if self.driver is not None:
            self.driver.cancel()
            with suppress(asyncio.CancelledError):
                await self.driver


class Stuck:
    """Holds up the steps of processes, or only those of one name, until `gate` is set.

    Attributes:
        begun: set when one is held up.
    """

    def __init__(self, step: str | None = None) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self._step = step

    def __call__(self, process: Process, step: str) -> asyncio.Event | None:
        if self._step not in {None, step}:
            return None
        self.begun.set()
        return self.gate


@asynccontextmanager
async def processes(*them: Process) -> AsyncIterator[None]:
    for process in them:
        process.drive()
    yield
    for process in them:
        await process.stop()


async def test_a_run_of_a_dead_process_continues_with_its_decided_steps() -> None:
    logs, stuck = MemoryLogs(), Stuck("second")
    dying, other = Process(logs, stuck), Process(logs)
    async with processes(other):
        await dying.two.start(id="r")
        await stuck.begun.wait()
        dying.kill()
        assert await other.two.handle("r").result(10) == "12"
    assert other.ran == ["second"], "the first step was decided"
    status = await other.two.handle("r").status()
    assert (status.state, status.epoch) == (State.DONE, 2)


async def test_a_process_that_stops_hands_over_at_once() -> None:
    logs, stuck = MemoryLogs(), Stuck()
    old, new = Process(logs, stuck), Process(logs)
    old.flow.runner.member.lease.lease_s = 3600.0  # not even then a process waits for a lease
    async with processes(new, old):
        handle = await old.two.start()
        waiting = asyncio.create_task(handle.result(10))
        await stuck.begun.wait()
        await old.stop()
        assert await waiting == "12", "who waited with the old process waits on"
    assert new.ran == ["first", "second"]


async def test_a_process_paused_beyond_its_lease_decides_nothing_any_more() -> None:
    logs, stuck = MemoryLogs(), Stuck()
    slow, other = Process(logs, stuck), Process(logs)
    handle = await slow.two.start(id="r")
    await stuck.begun.wait()
    slow.flow.runner._background["beat"].cancel()  # its event loop runs nothing else
    slow.flow.runner._background["watch"].cancel()
    async with processes(other):
        assert await other.two.handle("r").result(10) == "12"
        stuck.gate.set()  # now it wakes up in the middle of its step
        assert await handle.result(10) == "12"
    assert "second" not in slow.ran, "it noticed before it began anything else"
    records = [run_record(r.data) for r in await logs.log("shop/flow").read_range(run_tag("r"))]
    assert [r.epoch for r in records if isinstance(r, RunFinished)] == [2]


async def test_a_dead_new_owner_is_replaced() -> None:
    logs, stuck = MemoryLogs(), Stuck()
    first = Process(logs, stuck)
    for _ in range(5):
        await first.two.start()
    new_owner = Process(logs, stuck, executions=2)  # it can take two, the others wait
    await stuck.begun.wait()
    stuck.begun.clear()
    first.kill()
    new_owner.drive()
    await asyncio.wait_for(stuck.begun.wait(), 10)
    new_owner.kill()
    last = Process(logs)
    async with processes(last):
        records = await logs.log("shop/flow").read_range(RUNS_TAG)
        runs = {run_in(record.tags) for record in records}
        for run in runs:
            assert await last.two.handle(run or "").result(10) == "12"
    assert len(runs) == 5


async def killed_in_a_step(logs: MemoryLogs, run: str) -> Process:
    """Return a process that began a run and was killed in the middle of its first step."""
    stuck = Stuck()
    process = Process(logs, stuck)
    await process.two.start(id=run)
    await stuck.begun.wait()
    process.kill()
    return process


async def test_a_new_owner_that_stops_before_it_takes_a_run_is_replaced(
    logs: MemoryLogs,
) -> None:
    await killed_in_a_step(logs, "r")
    new_owner = Process(logs)
    runner = new_owner.flow.runner
    runner.settings = replace(runner.settings, executions_max=0)  # it waits for room
    async with processes(new_owner):
        while not new_owner.flow.runner.taking.has_work:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
    other = Process(logs)
    async with processes(other):
        assert await other.two.handle("r").result(10) == "12"


async def takes_nothing_at_all(wf: Workflow) -> None: ...


async def takes_more(wf: Workflow, more: int) -> str:
    return str(more)


async def takes_nothing() -> str:
    return ""


async def takes_the_unknown(wf: Workflow, more: Unknown) -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(more)


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (takes_more, "'more' is missing"),
        (takes_nothing, "Workflow 'two' must take `wf: bokiflow.Workflow` first."),
        (takes_the_unknown, "two has a type hint that cannot be resolved: name 'Unknown'"),
    ],
)
async def test_new_code_that_a_run_cannot_be_given_to_parks_it(
    logs: MemoryLogs, body: Callable[..., Coroutine[Any, Any, str]], reported: str
) -> None:
    """The run is not tried again before other code is deployed, and its status gives the reason."""
    await killed_in_a_step(logs, "r")
    new = Process(logs)
    new.two.definition.body = body
    async with processes(new):
        handle = new.two.handle("r")
        while (status := await handle.status()).state is not State.PARKED:
            await logs.log("shop/flow").read_next(run_tag("r"), logs.position, wait=1)
    assert status.problem is not None
    assert reported in status.problem


async def test_a_run_that_was_cancelled_before_it_began_here_is_not_held(logs: MemoryLogs) -> None:
    one, other = Process(logs), Process(logs)
    await one.two.start(id="r")
    one.kill()  # its task had no turn yet
    async with processes(other):
        assert await other.two.handle("r").result(10) == "12"
    assert not one.flow.runner.running


async def test_a_process_takes_its_own_runs_back_when_it_lost_them(logs: MemoryLogs) -> None:
    """The old execution ends slowly; only then the new one begins."""
    begun, attempts = asyncio.Event(), [0]

    async def first() -> str:
        attempts[0] += 1
        if attempts[0] > 1:
            return "1"
        begun.set()
        try:
            return str(await asyncio.Event().wait())
        finally:
            await asyncio.sleep(LEASE_S)

    process = Process(logs)
    process.first = first  # type: ignore[method-assign]
    async with processes(process):
        handle = await process.two.start(id="r")
        await begun.wait()
        process.flow.runner.member.lease.end()
        assert await handle.result(10) == "12"
    assert attempts == [2]


async def test_a_workflow_that_cancels_itself_has_failed(logs: MemoryLogs) -> None:
    process = Process(logs)

    async def gives_up(wf: Workflow) -> str:
        raise asyncio.CancelledError

    process.two.definition.body = gives_up
    with pytest.raises(RunFailedError, match="raised CancelledError"):
        await (await process.two.start()).result(10)


async def test_idle_processes_write_nothing() -> None:
    logs = MemoryLogs()
    one, two = Process(logs), Process(logs)
    async with processes(one, two):
        assert await (await one.two.start()).result(10) == "12"
        log = logs.log("shop/flow")
        runners = [process.flow.runner for process in (one, two)]
        while any(r.member.executors_known() or r.owned for r in runners):  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        quiet = await log.tail()
        await asyncio.sleep(2 * LEASE_S)
        assert await log.tail() == quiet
        said = [executor_record(r.data) for r in await log.read_range(EXECUTORS_TAG)]
        assert len(said) < 40


async def test_a_process_that_refused_a_start_with_a_used_id_becomes_idle() -> None:
    """The run with this id had ended, and the refused start counted as an open run."""
    logs = MemoryLogs()
    process = Process(logs)
    other = process.flow.workflow(takes_nothing_at_all)
    async with processes(process):
        assert await (await process.two.start(id="r")).result(10) == "12"
        with pytest.raises(RunIdInUseError):
            await other.start(id="r")
        async with asyncio.timeout(10):
            while process.flow.runner.owned:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0.01)


async def test_parked_runs_continue_with_matching_code() -> None:
    logs, stuck = MemoryLogs(), Stuck("second")
    old = Process(logs, stuck)
    await old.two.start(id="r")
    await stuck.begun.wait()
    old.kill()

    changed = Process(logs)

    async def changed_two(wf: Workflow) -> str:
        return await wf.step(changed.second, "x")

    changed.two.definition.body = changed_two
    handle = changed.two.handle("r")
    async with processes(changed):
        status = await handle.status()
        while status.state is not State.PARKED:
            await logs.log("shop/flow").read_next(run_tag("r"), logs.position, wait=1)
            status = await handle.status()
    assert status.problem is not None
    assert "step 1 was decided as 'step first'" in status.problem
    with pytest.raises(TimeoutError) as late:
        await handle.result(0)
    assert str(late.value) == f"Run 'r' has not ended in time; it is parked: {status.problem}"
    fixed = Process(logs)
    async with processes(fixed):
        assert await fixed.two.handle("r").result(10) == "12"


async def test_cancelling_a_parked_run_ends_it_and_reports_missing_compensations() -> None:
    logs, stuck = MemoryLogs(), Stuck("second")
    old = Process(logs, stuck)
    for id_ in "rs":
        stuck.begun.clear()
        await old.two.start(id=id_)
        await stuck.begun.wait()
    old.kill()

    first, second = Process(logs), Process(logs)

    async def changed(wf: Workflow) -> str:
        return await wf.step(first.second, "x")

    for process in (first, second):
        process.two.definition.body = changed
    handles = [first.two.handle(id_) for id_ in "rs"]
    async with processes(first, second):
        for handle in handles:
            while (await handle.status()).state is not State.PARKED:
                await logs.log("shop/flow").read_next(run_tag("r"), logs.position, wait=1)
        await handles[0].cancel()
        with pytest.raises(RunCancelledError, match=r"were not compensated.*step 1"):
            await handles[0].result(10)
        assert (await handles[1].status()).state is State.PARKED, "it was not cancelled"
    assert first.ran == second.ran == []

    del first.flow.runner.definitions["two"]  # code without the workflow fits nothing either
    async with processes(first):
        await handles[1].cancel()
        with pytest.raises(RunCancelledError, match="The deployed code has no workflow"):
            await handles[1].result(10)


async def test_cancelling_a_run_whose_step_ends_its_processes_spares_the_next_one() -> None:
    logs, died = MemoryLogs(), asyncio.Event()

    def deadly(process: Process, step: str) -> asyncio.Event | None:
        if step != "second":
            return None
        process.kill()
        died.set()
        return asyncio.Event()

    first, second, third = (Process(logs, deadly) for _ in range(3))
    await first.two.start(id="r")
    await died.wait()
    died.clear()
    second.drive()
    await asyncio.wait_for(died.wait(), 10)
    handle = third.two.handle("r")
    await handle.cancel()
    async with processes(third):
        with pytest.raises(RunCancelledError, match="cancelled at step 'second'"):
            await handle.result(10)
    assert (second.ran, third.ran) == (["second"], [])


async def test_a_cancelled_parked_run_is_compensated_if_its_code_fits() -> None:
    logs, begun = MemoryLogs(), asyncio.Event()
    undone: list[str] = []

    async def one(wf: Workflow) -> None:
        await wf.step(lambda: "car", name="car", compensate=undone.append)
        begun.set()
        await wf.signal("go")

    async def other(wf: Workflow) -> None:
        await wf.step(lambda: "boat", name="boat", compensate=undone.append)

    old, changed, fixed = Process(logs), Process(logs), Process(logs)
    for process, body in ((old, one), (changed, other), (fixed, one)):
        process.two.definition.body = body
    await old.two.start(id="r")
    await begun.wait()
    old.kill()
    handle = fixed.two.handle("r")
    async with processes(changed):
        while (await handle.status()).state is not State.PARKED:
            await logs.log("shop/flow").read_next(run_tag("r"), logs.position, wait=1)
    await handle.cancel()  # while no driver runs
    async with processes(fixed):
        with pytest.raises(RunCancelledError, match="cancelled at signal 'go'"):
            await handle.result(10)
    assert undone == ["car"]


@pytest.mark.parametrize("seed", range(3))
async def test_every_run_ends_although_processes_crash_at_random(seed: int) -> None:
    """Whatever dies whenever: each run ends once, and with what the log decided."""
    dice, logs = random.Random(seed), MemoryLogs()
    alive: list[Process] = []

    def deadly(process: Process, step: str) -> asyncio.Event | None:
        if dice.random() < 0.05 and process in alive and len(alive) > 1:
            alive.remove(process)
            process.kill()
            return asyncio.Event()
        return None

    def add() -> None:
        alive.append(Process(logs, deadly))
        alive[-1].drive()

    for _ in range(3):
        add()
    for number in range(60):
        with suppress(asyncio.CancelledError):
            await dice.choice(alive).two.start(id=f"run-{number}")
        if len(alive) < 3:
            add()
        await asyncio.sleep(0)
    ended = 0
    while ended < 60:
        if len(alive) < 2:
            add()
        with suppress(TimeoutError):
            ended += await alive[0].two.handle(f"run-{ended}").result(1) == "12"
    for process in alive:
        await process.stop()
    await _check(logs, 60)


async def _check(logs: MemoryLogs, count: int) -> None:
    """Recompute from the records what was decided."""
    ends: Counter[str] = Counter()
    for number in range(count):
        name = f"run-{number}"
        records = await logs.log("shop/flow").read_range(run_tag(name))
        epoch, steps = 0, set()
        for record in records:
            match run_record(record.data):
                case RunStarted():
                    epoch = max(epoch, 1)
                case RunTaken(epoch=taken):
                    epoch = taken if taken == epoch + 1 else epoch
                case StepDecided(epoch=reported, number=step) if (
                    reported == epoch and not ends[name]
                ):
                    assert step not in steps
                    steps.add(step)
                case RunFinished(epoch=reported) if reported == epoch:
                    ends[name] += 1
                case _:
                    pass
    assert set(ends.values()) == {1}
    assert len(ends) == count


async def test_a_due_run_begins_when_a_start_has_needed_no_room() -> None:
    """The process had room for one more run, and waited until another run ended."""
    logs, stuck = MemoryLogs(), Stuck()
    dying, other = Process(logs, stuck), Process(logs, executions=1)
    async with asyncio.timeout(20), processes(other):
        await dying.two.start(id="r")
        await stuck.begun.wait()
        runner = other.flow.runner
        runner._starting += 1  # as a start does
        dying.kill()
        while not runner.taking._due:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
        runner._starting -= 1
        assert (await other.two.start(id="r")).id == "r", "it exists"
        assert await other.two.handle("r").result() == "12"
