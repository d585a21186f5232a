"""The real executors, in simulated time, with clocks that differ by years. Processes crash, are cut
off from the log, or get late acknowledgements.

Bodies have effects that are not idempotent, and return random values. So a second body beside its
successor shows, and so does a value that was used but not decided. The checks use only what the
bodies and the log recorded.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

import msgspec
import pytest
import structlog
from xxhash import xxh3_128_hexdigest

from bokiflow import Flow, RunEndedError, Startable, UnknownRunError, Workflow
from bokiflow import runner as runner_module
from bokiflow.ownership.executor import Executor
from bokiflow.ownership.partition import OwnedPartition
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    RUNS_TAG,
    RunRecord,
    RunStarted,
    RunWaits,
    run_in,
    run_record,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.taking import Taking
from indilog.base.errors import IndilogError, NotReadyError
from indilog.base.log import Entry, Session
from indilog.testing import MemoryLog, MemoryLogs
from tests.support import leaping_loop
from tests.support.hooked_log import HookedLog, Hooks, Read
from tests.support.repeated import first_of
from tests.unit.bokiflow.processes import kill

ROOT = Path(__file__).resolve().parents[3]
LEASE_S = 4.0
PASSIVE_AFTER_S = 1.0
YEAR_S = 366 * 86_400.0
STEPS = 3
HOSTILE_S = 60.0
CALM_S = 600.0
SEEDS = range(6)
FAULT_SEEDS = range(48)
"""Seeds with which a planted fault is looked for, until one shows it."""
SHORT = (4, 9)
"""Seeds that showed a fault with which no other test runs by default, and take little time."""
LOG = "shop/flow"
AHEAD: ContextVar[float] = ContextVar("ahead", default=0.0)


class Bodies:
    """What the bodies of all processes did.

    Attributes:
        active: processes in which a body of a step is running, by run and step.
        returned: the values that bodies returned.
        given: the arguments that bodies got.
        overlaps: the steps of which two bodies ran at once.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.active: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        self.returned: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self.given: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self.overlaps: list[tuple[str, int, list[str]]] = []

    async def body(self, process: str, run: str, step: int, before: int) -> int:
        key = (run, step)
        self.given[key].add(before)
        self.active[key].append(process)
        if len(self.active[key]) > 1:
            self.overlaps.append((*key, list(self.active[key])))
        try:
            await asyncio.sleep(self.dice.choice([0.0, 0.1, LEASE_S / 2, 2 * LEASE_S]))
        finally:
            self.active[key].remove(process)
        value = self.dice.randrange(10**9)
        self.returned[key].add(value)
        return value


class ProcessLog(HookedLog):
    """A log that shares nothing with other processes, such as an estimate of its time."""

    @property
    def scope(self) -> Any:  # noqa: ANN401 - narrower in the base
        return self._hooks


class View(Hooks):
    """The log as one process reaches it: slowly at times, and not at all while it is cut off."""

    def __init__(self, world: World) -> None:
        self._logs = world.logs
        self._dice = world.dice
        self._passive = world.passive
        self.is_cut = False
        self.is_dead = False
        self.late_s = 0.0
        self.in_flight: list[asyncio.Task[None]] = []
        self._never = asyncio.Event()

    def log(self, name: str) -> MemoryLog:
        return ProcessLog(name, logs=self._logs, session=Session(), hooks=self)

    async def before_append(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if isinstance(run_record(entry.data), RunWaits):
                self._passive[run_in(tuple(entry.tags)) or ""].set()
        await self._reach()
        if self.late_s and self._dice.random() < 0.5:
            try:
                await asyncio.sleep(self._dice.uniform(0, self.late_s))  # ordered late
            except asyncio.CancelledError:
                # The append of a cancelled task, or of a dead process, is in flight.
                loop = asyncio.get_running_loop()
                self.in_flight.append(loop.create_task(self._land(entries)))
                raise

    async def _land(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(self._dice.uniform(0, self.late_s))
        await self._logs.log(LOG).append_batch(entries)

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.late_s and self._dice.random() < 0.5:
            await asyncio.sleep(self._dice.uniform(0, self.late_s))  # acknowledged late

    async def before_read(self, read: Read) -> None:
        await self._reach()

    async def _reach(self) -> None:
        await asyncio.sleep(0.001)
        if self.is_dead:
            await self._never.wait()
        if self.is_cut:
            await asyncio.sleep(LEASE_S / 4)
            raise NotReadyError("The log cannot be reached.")


class Process:
    """A process with the workflows `work` and `rest`, and a driver."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.view = View(world)
        self.flow = Flow("shop", lease=LEASE_S, partitions=8, passive_after=PASSIVE_AFTER_S)
        self.flow.attach(self.view)
        self.context: Context = copy_context()
        self.context.run(AHEAD.set, world.dice.choice([0.0, YEAR_S, -YEAR_S, 1.0]))

        async def work(wf: Workflow) -> list[int]:
            values = [0]
            for step in range(STEPS):
                body = world.bodies.body
                values.append(
                    await wf.step(body, self.name, wf.id, step, values[-1], retries=0, name="body")
                )
            return values[1:]

        async def rest(wf: Workflow, first_s: float, then_s: float) -> str:
            await wf.sleep(first_s)
            said: str = await wf.signal("go")
            await wf.sleep(then_s)
            return said

        self.work: Startable[list[int]] = self.flow.workflow(work)
        self.rest: Startable[str] = self.flow.workflow(rest)
        self.driver = asyncio.get_running_loop().create_task(
            self.flow.drive(self.view), context=self.context
        )

    def kill(self) -> None:
        self.view.is_dead = True
        self.driver.cancel()
        kill(self.flow)

    async def start(self, run: str | None) -> None:
        with suppress(IndilogError):
            await self.work.start(id=run)

    async def start_to_rest(self, run: str, first_s: float, then_s: float) -> None:
        with suppress(IndilogError):
            await self.rest.start(first_s, then_s, id=run)


class World:
    """Processes that share only the log."""

    def __init__(self, seed: int, *, rests: bool) -> None:
        self.rests = rests
        self.dice = random.Random(seed)
        self.logs = MemoryLogs(clock=lambda: asyncio.get_running_loop().time())
        self.bodies = Bodies(self.dice)
        self.processes: list[Process] = []
        self.dead: list[Process] = []
        self.signalled: set[str] = set()
        self.passive: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set when a run is about to be removed from memory."""
        self._names = 0

    def add(self) -> None:
        self._names += 1
        self.processes.append(Process(f"p{self._names}", self))

    async def live(self, events: Sequence[Callable[[Process], None]]) -> None:
        """Let things happen for a while, then let all runs end."""
        loop = asyncio.get_running_loop()
        for _ in range(3):
            self.add()
        starting: list[asyncio.Task[None]] = []
        number = 0
        while loop.time() < HOSTILE_S:
            await asyncio.sleep(self.dice.expovariate(1.0))
            process = self.dice.choice(self.processes)
            run = None if self.dice.random() < 0.5 else f"run-{number}"
            number += 1
            starting.append(loop.create_task(process.start(run), context=process.context))
            if self.rests and self.dice.random() < 0.5:
                starting.append(loop.create_task(self._rest(f"rest-{number}")))
            if self.dice.random() < 0.5:
                self.dice.choice(events)(self.dice.choice(self.processes))
        for process in self.processes:
            process.view.is_cut, process.view.late_s = False, 0.0
        await asyncio.wait(starting, timeout=LEASE_S)
        await self._end(loop.time() + CALM_S)

    async def _rest(self, run: str) -> None:
        """Start a run that waits most of the time, and signal it until that is acknowledged."""
        dice, loop = self.dice, asyncio.get_running_loop()
        waits = dice.choice([0.0, 2.0, 9.0]), dice.choice([0.0, 9.0, 40.0])
        process = dice.choice(self.processes)
        start = loop.create_task(process.start_to_rest(run, *waits), context=process.context)
        await asyncio.wait({start}, timeout=4 * LEASE_S)  # the process may have crashed
        while run not in self.signalled and loop.time() < HOSTILE_S + CALM_S / 2:
            with suppress(TimeoutError):
                async with asyncio.timeout(dice.choice([0.0, 5.0, 20.0])):
                    await self.passive[run].wait()
            self.passive[run].clear()
            process = dice.choice(self.processes)
            signal = process.flow.handle("rest", run).signal("go", run, key="go")
            task = loop.create_task(signal, context=process.context)
            try:
                await asyncio.wait_for(task, 2 * LEASE_S)
                self.signalled.add(run)
            except RunEndedError:  # an earlier signal arrived, although nothing said so
                return
            except (IndilogError, UnknownRunError, TimeoutError):
                await asyncio.sleep(LEASE_S / 4)

    async def _end(self, deadline: float) -> None:
        while asyncio.get_running_loop().time() < deadline:
            if all(run.finished is not None for run in (await self.runs()).values()):
                break
            await asyncio.sleep(10.0)
        for process in self.processes:
            process.kill()

    async def runs(self) -> dict[str, RunState]:
        """Return all runs whose start is in the log."""
        log, found = self.logs.log(LOG), dict[str, RunState]()
        for seqnum in range(self.logs.position):
            with suppress(IndilogError):  # it may be trimmed, or of the executors
                record = await log.read(seqnum)
                assert record is not None
                run = run_in(record.tags)
                if run is not None and isinstance(run_record(record.data), RunStarted):
                    found[run] = RunState()
        for run, state in found.items():
            await read_run(log, run, state)
        return found

    # --- what happens

    def crash(self, process: Process) -> None:
        if len(self.processes) > 1:
            self.processes.remove(process)
            self.dead.append(process)
            process.kill()
        self.add()

    def cut(self, process: Process) -> None:
        process.view.is_cut = not process.view.is_cut

    def be_slow(self, process: Process) -> None:
        process.view.late_s = self.dice.choice([0.0, LEASE_S / 8, 2 * LEASE_S, 8 * LEASE_S])


async def check(world: World) -> None:
    """Check what happened, from what bodies and records say."""
    runs = await world.runs()
    assert len(runs) > 10
    assert bool(world.signalled) is world.rests, "some of those that rest were signalled"
    assert not world.bodies.overlaps, "one body of a step at a time"
    for name, run in runs.items():
        assert run.finished is not None, f"{name} ends"
        assert run.finished.failure is None, f"{name}: {run.finished.failure}"
        if name.startswith("rest-"):
            assert msgspec.json.decode(run.finished.result) == name, "the signal arrived"
            continue
        result = msgspec.json.decode(run.finished.result, type=list[int])
        decided = [msgspec.json.decode(step.result) for step in run.steps.values()]
        assert result == decided, f"{name} ends with what was decided"
        for step, value in enumerate(result):
            assert value in world.bodies.returned[name, step], "a body returned it"
            if step:
                assert result[step - 1] in world.bodies.given[name, step]


@contextmanager
def simulated(dice: random.Random) -> Iterator[None]:
    """Clocks of each process (the loop's, with an offset), and names that follow from the seed."""

    def now() -> float:
        return asyncio.get_running_loop().time() + AHEAD.get()

    def new_name() -> str:
        return f"{dice.getrandbits(80):020x}"

    clocks: dict[str, Any] = {"monotonic_now": now, "seconds_now": now, "passed_now": now}
    with mock.patch.multiple(waiting, new_name=new_name, **clocks):
        yield


def play(seed: int, *events: str, rests: bool) -> str:
    """Let all happen that follows from the seed, and check it; return a digest of the log."""

    async def main() -> str:
        world = World(seed, rests=rests)
        with simulated(random.Random(seed)):
            await world.live([getattr(world, event) for event in events])
            await check(world)
        records = [(one.ordered_at, one._names, one.data) for one in world.logs._records]
        return xxh3_128_hexdigest(repr(records).encode())

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        return leaping_loop.run(main())
    finally:
        structlog.reset_defaults()


ALL = ("crash", "cut", "be_slow")


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("seed", first_of(SEEDS, 3))
def test_one_body_of_a_step_runs_at_a_time_and_every_run_ends(seed: int, *, rests: bool) -> None:
    play(seed, *ALL, rests=rests)


@pytest.mark.repeated("tests/simulation/test_simulation.py")
def test_a_seed_repeats_the_log_byte_for_byte() -> None:
    """Neither the hashes of texts nor the addresses of objects decide what happens first. Both
    differ between these two processes.
    """
    program = (
        "from tests.properties.libs.test_executors import ALL, play\n"
        "print(play(1, *ALL, rests=True))"
    )

    def digest(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert digest("1") == digest("2")


# --- planted faults


async def _nothing(*_: object) -> None:
    await asyncio.Event().wait()


def _only_of_running(
    self: Runner, partition: OwnedPartition, run: str, record: RunRecord | None
) -> None:
    if run in self.running or isinstance(record, RunStarted):
        _noted(self, partition, run, record)


_noted = Runner._on_news
FAULTS: dict[str, Callable[[], Any]] = {
    "no watchdog": lambda: mock.patch.object(Executor, "_watch", _nothing),
    "late starts are not looked for": lambda: mock.patch.multiple(
        Executor, _look_for_late_starts=_nothing, _read_starts=AsyncMock(return_value=0)
    ),
    "a start lost with its starter": lambda: mock.patch.multiple(
        runner_module, partition_tag=lambda _: "elsewhere", INBOX_TAG=RUNS_TAG
    ),
}
FAULTS_OF_PASSIVE_RUNS: dict[str, Callable[[], Any]] = {
    "a passive run is not woken by its timer": lambda: mock.patch.object(
        Taking, "wake_at", return_value=None
    ),
    "a passive run is not woken by its signal": lambda: mock.patch.object(
        Runner, "_on_news", _only_of_running
    ),
}


@pytest.mark.parametrize("fault", [*first_of(FAULTS, 1), *first_of(FAULTS_OF_PASSIVE_RUNS, 0)])
def test_planted_faults_are_caught(fault: str) -> None:
    def caught(seed: int) -> bool:
        try:
            with (FAULTS | FAULTS_OF_PASSIVE_RUNS)[fault]():
                play(seed, *ALL, rests=fault in FAULTS_OF_PASSIVE_RUNS)
        except AssertionError:
            return True
        return False

    assert any(caught(seed) for seed in (*SHORT, *FAULT_SEEDS))
