"""Executors crash, drivers start and stop, and heartbeats are lost, for all or for later readers.
No driver takes a run from a live executor, and all orphaned runs are taken over.

The processes of the model share only records; the model tracks the owner of each run separately. A
record can be lost at any time, when only some processes have read it, and can become readable
again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest

from bokiflow.runs.records import ExecutorDead, ExecutorLeft, ExecutorRecord, Heartbeat
from bokiflow.takeover import executors as executors_module
from bokiflow.takeover.executors import Executors
from indilog.base.ids import SeqNum

LEASE_S = 8.0
SURE_S = LEASE_S / 2
TICK_S = 1.0
NEW_OWNER_S = 5 * LEASE_S
LATE = 0.2
SEEDS = 150


@dataclass
class Process:
    """A process that executes runs and has a driver, with its own monotonic clock.

    Attributes:
        sent_at: when it sent the last heartbeat of its name.
        stands_still: whether it is paused.
        has_just_woken: whether it resumed from a pause and has not noticed it.
    """

    name: str
    clock_s: float
    executors: Executors = field(default_factory=Executors)
    sent_at: float | None = None
    stands_still: bool = False
    has_just_woken: bool = False


class World:
    """Processes, their records, and the owner of each run."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.said: list[ExecutorRecord] = []
        self.lost: set[SeqNum] = set()
        self.processes: list[Process] = []
        self.holder: dict[int, str] = {}
        self.names = 0
        self.is_hostile = True
        self.on_the_way: list[Callable[[], None]] = []
        for _ in range(3):
            self.come()

    def come(self) -> None:
        self.processes.append(Process(self.new_name(), self.dice.uniform(0, 1e6)))

    def new_name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    # --- what a process does

    def say(self, record: ExecutorRecord) -> None:
        self.said.append(record)

    def soon(self, arrive: Callable[[], None]) -> None:
        """Mostly at once; otherwise after steps of other processes."""
        if self.is_hostile and self.dice.random() < LATE:
            self.on_the_way.append(arrive)
        else:
            arrive()

    def read(self, process: Process) -> None:
        executors, now = process.executors, self.now + process.clock_s
        while executors.end < len(self.said):
            end = executors.end
            if end not in self.lost:
                executors.apply(end, now, self.said[end])
                continue
            while end in self.lost:
                end += 1
            executors.lost(end, now)

    def be_named(self, process: Process) -> None:
        """Take another name if its lease has expired by its own clock; its runs are left without an
        executor.
        """
        if process.sent_at is None or self.now - process.sent_at < LEASE_S:
            return
        old, process.name, process.sent_at = process.name, self.new_name(), None
        if not self.runs(old) and not process.executors.left_to(old):
            self.say(ExecutorLeft(old, is_idle=True))

    def live(self, process: Process) -> None:
        if process.sent_at is None or self.now - process.sent_at >= SURE_S:
            self.say(Heartbeat(process.name, LEASE_S))
            process.sent_at = self.now

    def renew(self, process: Process) -> None:
        """Rely on a further heartbeat once it is read, and no record before it contradicts."""
        name, before, asked_at = process.name, process.sent_at, self.now
        assert before is not None, "what has runs has said that it lives"

        def arrive() -> None:
            self.say(Heartbeat(name, LEASE_S))
            if process.name != name or process.stands_still:
                return
            self.read(process)
            if self.now - before >= LEASE_S or process.executors.has_new_owner(name):
                process.name, process.sent_at = self.new_name(), None
            else:
                process.sent_at = max(asked_at, process.sent_at or 0.0)

        self.soon(arrive)

    def runs(self, name: str) -> list[int]:
        return [run for run, holder in self.holder.items() if holder == name]

    def take(self, process: Process, name: str) -> None:
        for other in self.processes:
            if other.name == name and other is not process and other.sent_at is not None:
                assert self.now - other.sent_at >= SURE_S, "it relies on keeping its runs"
        for run in self.runs(name):
            self.live(process)
            self.holder[run] = process.name

    def turn(self, process: Process) -> None:
        """As `bokiflow.driver`."""
        self.be_named(process)
        if self.runs(process.name) and self.now - (process.sent_at or 0.0) >= LEASE_S / 4:
            self.renew(process)
        if not process.has_just_woken:  # else it stood still since it has read
            self.read(process)
        process.has_just_woken = False
        executors, now = process.executors, self.now + process.clock_s
        end = executors.end
        for name in executors.lapsed(now):
            if name == process.name or not executors.is_silent(name, end):
                continue
            if self.runs(name) or executors.left_to(name):
                self.live(process)
                dead = ExecutorDead(name, process.name, end)
                self.soon(partial(self.say, dead))
            else:
                executors.forget(name, now)
        self.read(process)
        for name in executors.left_to(process.name):
            self.take(process, name)
            self.say(ExecutorLeft(name, is_idle=True))
        if now >= executors.unknown_until(LEASE_S):
            self.take_of_unknown(process, now)

    def take_of_unknown(self, process: Process, now: float) -> None:
        executors = process.executors
        for name in executors.dead_executors.due(now):
            if name not in executors.known and name != process.name:
                self.take(process, name)
            executors.dead_executors.note_read(name, now, 0)
        if executors.lost_at is not None:
            for name in set(self.holder.values()) - executors.known.keys() - {process.name}:
                executors.dead_executors.add(name, now)
            executors.lost_at = None

    # --- what happens

    def step(self) -> None:
        dice, process = self.dice, self.dice.choice(self.processes)
        what = dice.random()
        if what < 0.5:
            self.now += dice.uniform(0, 2 * TICK_S)
            self.turns()
        elif what < 0.65 and not process.stands_still:
            self.be_named(process)
            self.live(process)
            self.holder[len(self.holder)] = process.name
        elif what < 0.75 and self.said:
            first = dice.randrange(max(0, len(self.said) - 12), len(self.said))
            self.lost.update(range(first, dice.randint(first, len(self.said) - 1) + 1))
        elif what < 0.8 and self.lost:
            self.lost -= set(dice.choices(sorted(self.lost), k=3))
        elif what < 0.85:
            self.processes.remove(process)
            self.come()
        elif what < 0.9:
            process.stands_still = not process.stands_still
            process.has_just_woken = self.dice.random() < 0.5
        elif self.on_the_way:
            self.on_the_way.pop(dice.randrange(len(self.on_the_way)))()

    def turns(self) -> None:
        for process in self.dice.sample(self.processes, len(self.processes)):
            if not process.stands_still:
                self.turn(process)

    def end_well(self) -> None:
        """No further crash, loss or delay happens; all orphaned runs are taken over in bounded
        time.
        """
        self.is_hostile = False
        for arrive in self.on_the_way:
            arrive()
        for process in self.processes:
            process.stands_still = False
        self.on_the_way.clear()
        for _ in range(int((NEW_OWNER_S + 6 * LEASE_S) / TICK_S)):
            self.now += TICK_S
            self.turns()
        names = {process.name for process in self.processes}
        assert set(self.holder.values()) <= names, "orphaned runs are taken over"


def check(seeds: range) -> None:
    with mock.patch.object(executors_module, "NEW_OWNER_S", NEW_OWNER_S):
        for seed in seeds:
            world = World(seed)
            for _ in range(120):
                world.step()
            world.end_well()


def test_after_any_loss_live_executors_keep_their_runs_and_others_are_taken() -> None:
    check(range(SEEDS))


def forgets_no_lease(self: Executors, end: SeqNum, now: float) -> None:
    """A planted bug: a lost record counts as if it had never existed."""
    self.end = end


def looks_for_none(self: Executors, end: SeqNum, now: float) -> None:
    lost(self, end, now)
    self.lost_at = None


def believes_who_has_not_read(self: Executors, name: str, end: SeqNum) -> bool:
    return name in self.known


def forgets_where_it_was_lost(self: Executors, name: str, end: SeqNum) -> bool:
    known = self.known.get(name)
    return known is not None and known.last_record_at < end


lost = Executors.lost


@pytest.mark.parametrize(
    ("method", "planted"),
    [
        ("lost", forgets_no_lease),
        ("lost", looks_for_none),
        ("is_silent", believes_who_has_not_read),
        ("is_silent", forgets_where_it_was_lost),
    ],
)
def test_the_check_finds_planted_bugs(method: str, planted: object) -> None:
    with mock.patch.object(Executors, method, planted), pytest.raises(AssertionError):
        check(range(20 * SEEDS))
