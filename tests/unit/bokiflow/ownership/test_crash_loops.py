"""A run that crashes its executors is parked, and runs of the same process are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from bokiflow import Flow, RunCancelledError, State, Workflow, taking
from bokiflow.ownership import crash_loops
from bokiflow.ownership.owners import Owners
from bokiflow.runs.records import RunStarted, RunTaken, encode, run_tag
from bokiflow.runs.run_state import RunState
from indilog.testing import MemoryLogs
from tests.unit.bokiflow.processes import kill

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 0.2


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash-looping runs are taken soon; parked ones stay parked, unless a test says otherwise."""
    monkeypatch.setattr(crash_loops, "_PAUSE_S_MAX", 0.01)
    monkeypatch.setattr(taking, "retry_s", after(600.0))


def after(seconds: float) -> Callable[[RunState], float]:
    """Return what tries parked runs again after so long, cancelled ones at once."""
    return lambda run: 0.0 if run.cancel_asked else seconds


class Process:
    """A process with the workflow `work`, in which some runs wait and others end the process."""

    def __init__(self, logs: MemoryLogs, *, ends: bool = True) -> None:
        self.flow = Flow("shop", lease=LEASE_S)
        self.flow.attach(logs)
        self.is_dead = asyncio.Event()
        self.driver: asyncio.Task[None] | None = None
        self._logs = logs
        self._ends = ends
        self.work = self.flow.workflow(self._work)

    async def _work(self, wf: Workflow, kind: str) -> str:
        if kind == "waits":
            return str(await wf.signal("go"))
        if kind == "dies" and self._ends:
            self.die()
            await asyncio.Event().wait()
        return await wf.step(self.last)

    _work.__name__ = "work"

    async def last(self) -> str:
        if self._ends:
            self.die()
            await asyncio.Event().wait()
        return "well"

    def drive(self) -> None:
        self.driver = asyncio.create_task(self.flow.drive(self._logs))

    def die(self) -> None:
        """End everything at once, and say nothing."""
        kill(self.flow)
        if self.driver is not None:
            self.driver.cancel()
        self.is_dead.set()

    async def stop(self) -> None:
        assert self.driver is not None
        self.driver.cancel()
        with suppress(asyncio.CancelledError):
            await self.driver


@pytest.mark.parametrize(
    ("crashes", "said"), [(0, None), (1, "1 process ended"), (3, "3 processes in a row ended")]
)
async def test_the_status_of_a_crash_looping_run_names_the_problem_before_it_is_parked(
    crashes: int, said: str | None
) -> None:
    logs = MemoryLogs()
    asked, log = Process(logs), logs.log("shop/flow")
    started = RunStarted("work", b'{"kind": "ends"}', "first", "version")
    await log.append(encode(started), tags=[run_tag("r")])
    await log.append(encode(RunTaken(2, "second", crashes)), tags=[run_tag("r")])
    status = await asked.work.handle("r").status()
    assert status.state is State.RUNNING
    if said is None:
        assert status.problem is None
    else:
        assert status.problem is not None
        assert status.problem.startswith(f"{said} right after they had begun to execute it;")


async def die_in_turn(logs: MemoryLogs, run: str) -> tuple[int, Process]:
    """Start processes until one survives the run, because it parked it; return how many died, and
    that one.
    """
    for died in range(1, 20):
        process = Process(logs)
        process.drive()
        dead = asyncio.create_task(process.is_dead.wait())
        while not dead.done():
            if (await process.work.handle(run).status()).state is State.PARKED:
                dead.cancel()
                return died, process
            await asyncio.wait([dead], timeout=LEASE_S / 10)
    raise AssertionError("it was never parked")


async def with_poison(logs: MemoryLogs, kind: str) -> Process:
    """Return the process that parked the run `poison`, which ended those before."""
    first = Process(logs)
    await first.work.start(kind, id="poison")
    await first.is_dead.wait()
    _, parked = await die_in_turn(logs, "poison")
    return parked


async def test_a_run_that_crashes_its_processes_is_parked_and_other_runs_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = MemoryLogs()
    first = Process(logs)
    for number in range(20):
        await first.work.start("waits", id=f"neighbour {number}")
    await first.work.start("ends", id="poison")
    await first.is_dead.wait()
    died, last = await die_in_turn(logs, "poison")
    # More of them died if a slow one had sent a heartbeat first, which ends the count.
    assert died >= crash_loops.CRASHES_PARKED
    status = await last.work.handle("poison").status()
    assert status.problem is not None
    assert "5 processes in a row ended" in status.problem
    assert "It is retried in 0 s; cancel it to end it." in status.problem
    for number in range(20):
        neighbour = last.work.handle(f"neighbour {number}")
        assert (await neighbour.status()).state is State.RUNNING
        await neighbour.signal("go", "on")
        assert await neighbour.result(10) == "on"
    await last.stop()


async def test_a_crash_looping_run_continues_once_it_no_longer_crashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = MemoryLogs()
    parked = await with_poison(logs, "ends")
    await parked.stop()
    monkeypatch.setattr(taking, "retry_s", after(0.01))
    last = Process(logs, ends=False)  # its code is deployed again, its machine has more memory
    last.drive()
    assert await last.work.handle("poison").result(10) == "well"
    await last.stop()


async def test_a_cancelled_run_that_ends_its_processes_does_not_end_another() -> None:
    logs = MemoryLogs()
    parked = await with_poison(logs, "ends")
    await parked.stop()
    last = Process(logs)
    last.drive()
    handle = last.work.handle("poison")
    await handle.cancel()
    with pytest.raises(RunCancelledError):
        await handle.result(10)
    assert not last.is_dead.is_set()
    await last.stop()


async def test_a_cancelled_run_that_ends_its_processes_all_the_same_is_ended() -> None:
    """The run ends its processes in its own code, where no operation notices the cancellation."""
    logs = MemoryLogs()
    parked = await with_poison(logs, "dies")
    handle = parked.work.handle("poison")
    await handle.cancel()
    await parked.is_dead.wait()
    last = Process(logs)
    last.drive()
    with pytest.raises(RunCancelledError, match="were not compensated"):
        await last.work.handle("poison").result(10)
    assert not last.is_dead.is_set()
    await last.stop()


async def test_processes_that_stop_well_are_not_counted() -> None:
    logs = MemoryLogs()
    before = Process(logs)
    before.drive()
    await asyncio.sleep(LEASE_S / 20)
    handle = await before.work.start("waits", id="r")
    for _ in range(crash_loops.CRASHES_PARKED + 2):
        after = Process(logs)
        after.drive()
        await asyncio.sleep(LEASE_S / 20)  # a driver that never had a turn says nothing at its end
        epoch = (await handle.status()).epoch
        await before.stop()
        handle = after.work.handle("r")
        while (await handle.status()).epoch == epoch:
            await logs.log("shop/flow").read_next(run_tag("r"), logs.position, wait=LEASE_S)
        before = after
    assert (await handle.status()).state is State.RUNNING
    run = before.flow.runner.running["r"].execution.run
    assert run.crashes == 0
    await before.stop()


def run_given(executor: str, seqnum: int, crashes: int) -> RunState:
    run = RunState()
    run.apply(0, 0.0, RunStarted("w", b"{}", "first", "v"))
    run.apply(seqnum, 1.0, RunTaken(2, executor, crashes))
    return run


async def test_only_an_end_without_a_later_heartbeat_is_counted() -> None:
    owners, run = Owners(), run_given("b", 5, 3)
    assert crash_loops.crashes_of(run, owners) == 3, "its executor is not known to be dead"
    owners.dead["b"] = 4
    assert crash_loops.crashes_of(run, owners) == 4
    owners.dead["b"] = 6
    assert crash_loops.crashes_of(run, owners) == 0


async def test_groups_shrink_and_pauses_grow() -> None:
    crashes = [*range(2, 6)]
    assert [crash_loops.group_size(c) for c in crashes] == [16, 4, 1, 1]
    assert [crash_loops.is_crash_looping(c) for c in (0, 1, 2)] == [False, False, True]


async def test_pauses_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_loops, "_PAUSE_S_MAX", 600.0)
    assert [crash_loops.pause_s(c) for c in (2, 3, 5, 11, 12, 10_000)] == [1, 2, 8, 512, 600, 600]
