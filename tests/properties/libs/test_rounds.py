"""Two executions of a run with rounds, in random interleavings of their calls of the log.

A starts; B takes the run over at any moment, and A does not know. A third program sends signals
meanwhile, and old rounds are trimmed at every chance. Each body returns a unique value, which is
the argument of the next round, so the rounds show which outcomes they used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import msgspec
import pytest

from bokiflow.definition import Definition
from bokiflow.runs import rounds
from bokiflow.runs.execution import Execution
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    RunContinued,
    RunStarted,
    RunTaken,
    Signalled,
    encode,
    run_record,
    run_tag,
)
from bokiflow.runs.rounds import ContinuedAsNew, trim_past
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.workflow import Workflow
from indilog.base.log import Session
from indilog.testing import MemoryLogs
from indilog.testing.stepper import SteppedLog, run_stepped

ROUNDS = 4
SIGNALS = 3
SEEDS = 200


class NeverSure:
    """A lease that is never relied on: after every append, the records are read."""

    def is_sure(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return False


@dataclass
class World:
    """One run, and what its executions did.

    Attributes:
        bodies: who ran the body of which round, with which chain of earlier results.
        ends: who reached the end.
    """

    logs: MemoryLogs = field(default_factory=MemoryLogs)
    bodies: list[tuple[str, int, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def workflow(self, who: str) -> Definition:
        async def count(wf: Workflow, number: int, chain: str) -> str:
            async def body() -> str:
                self.bodies.append((who, number, chain))
                return f"{chain}{who}{len(self.bodies)} "

            chain = await wf.step(body)
            if number < ROUNDS:
                wf.continue_as_new(number + 1, chain)
            return chain

        return Definition("count", count)

    async def execution(self, who: str, *, takes: bool) -> None:
        log = SteppedLog(self.logs.log("flow", Session()))
        run = await read_run(log, "r", RunState(), is_reused=True)
        if takes:
            await log.append(encode(RunTaken(run.epoch + 1, who)), tags=[run_tag("r")])
            await read_run(log, "r", run)
        if run.finished is not None or run.executor != who:
            return
        definition = self.workflow(who)
        while True:
            execution = Execution(log, "r", run, NeverSure())
            assert run.started is not None
            arguments = definition.signature.arguments(run.started.arguments)
            wf = Workflow(execution, self.logs)
            try:
                await execution.execute(definition.result_text(wf, arguments))
            except ContinuedAsNew:
                await trim_past(log, "r", run)
            except Stopped:
                return
            else:
                self.ends.append(who)
                return

    async def sender(self) -> None:
        log = SteppedLog(self.logs.log("flow", Session()))
        for number in range(SIGNALS):
            signal = Signalled("item", b"%d" % number, f"k{number}")
            await log.append(encode(signal), tags=[run_tag("r")])


def outcome(seed: int) -> World:
    """Run the executions in an order that the seed chooses; one of them may be far ahead."""
    chance = random.Random(seed)
    world = World()
    started = encode(RunStarted("count", b'{"number":1,"chain":""}', "a", "v"))
    run_stepped([world.logs.log("flow").append(started, tags=[run_tag("r")])], lambda r: r[0])
    weights = [chance.choice([1, 3, 10]) for _ in range(3)]

    def choose(ready: Sequence[int]) -> int:
        return chance.choices(ready, [weights[one] for one in ready])[0]

    every = [world.execution("a", takes=False), world.execution("b", takes=True), world.sender()]
    run_stepped(every, choose)
    return world


def state_of(world: World) -> RunState:
    log = world.logs.log("flow")
    [run] = run_stepped([read_run(log, "r", RunState(), is_reused=True)], lambda r: r[0])
    return run


def check(world: World) -> None:
    """Recompute the decided chain and the signals from what is left, with a simple model."""
    run = state_of(world)
    assert run.finished is not None, "the run ends"
    assert run.round == ROUNDS, "each round begins once"
    chain = run.finished.result.decode().strip('"')
    assert len(chain.split()) == ROUNDS, "one result of each round"
    for who, number, given in world.bodies:
        done = " ".join(chain.split()[: number - 1])
        assert given.strip() == done, f"{who} began round {number} with what was not decided"
    before_end = {signal.key: seqnum for seqnum, signal in run.signals if seqnum < run.ended_at}
    expected = [f"k{n}" for n in range(SIGNALS)]
    assert [*before_end, *expected[len(before_end) :]] == expected, "in order, and none lost"
    late = SIGNALS - len(before_end)
    assert late == late_signals(world, run), "a signal before the end reaches the last round"


def late_signals(world: World, run: RunState) -> int:
    """Return how many signals the log has after the end of the run."""
    log = world.logs.log("flow")
    [page] = run_stepped([log.read_range(run_tag("r"), run.ended_at)], lambda r: r[0])
    return sum(isinstance(run_record(record.data), Signalled) for record in page)


@pytest.fixture(autouse=True)
def trims_at_every_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PAST_MAX", 1)


def test_rounds_are_neither_lost_nor_repeated() -> None:
    worlds = [outcome(seed) for seed in range(SEEDS)]
    for seed, world in enumerate(worlds):
        try:
            check(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert any(len({who for who, *_ in world.bodies}) == 2 for world in worlds)


def without(bug: str) -> Callable[[RunState, int, RunContinued], None]:
    """Return how a round begins with a planted bug."""
    begin_round = RunState._begin_round

    def begin(run: RunState, seqnum: int, record: RunContinued) -> None:
        if bug == "signals that come meanwhile":
            record = msgspec.structs.replace(record, end=2**62)
        begin_round(run, seqnum, record)
        if bug == "the next epoch":
            run.epoch = record.epoch
        if bug == "a look at what it had not read":
            run.floor, run.past = seqnum, 1

    return begin


@pytest.mark.parametrize(
    "bug", ["signals that come meanwhile", "the next epoch", "a look at what it had not read"]
)
def test_the_check_finds_planted_bugs(bug: str) -> None:
    def check_all() -> None:
        for seed in range(SEEDS):
            check(outcome(seed))

    with mock.patch.object(RunState, "_begin_round", without(bug)), pytest.raises(AssertionError):
        check_all()
