"""Two executions of one run in every interleaving of their calls of the log.

A starts, B takes the run over at any moment, and A does not know. Each body notes its arguments and
returns a unique value, so the notes show which execution used which results.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
import pytest

from bokiflow.definition import Definition
from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    RunFinished,
    RunRecord,
    RunStarted,
    RunTaken,
    StepDecided,
    encode,
    run_record,
    run_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.workflow import Workflow
from indilog.base.log import Session
from indilog.testing import MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped


class NeverSure:
    """A lease that is never relied on: after every append, the records are read."""

    def is_sure(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return False


@dataclass
class World:
    """One run, and the results of its executions.

    Attributes:
        done: who ran which step on which argument, in order.
        ends: what each execution returned; None: it was stopped.
    """

    logs: MemoryLogs = field(default_factory=MemoryLogs)
    done: list[tuple[str, str, str]] = field(default_factory=list)
    ends: dict[str, bytes | None] = field(default_factory=dict)

    def workflow(self, who: str) -> Definition:
        async def first() -> str:
            self.done.append((who, "first", ""))
            return f"{who}1"

        async def second(before: str) -> str:
            self.done.append((who, "second", before))
            return f"{before}+{who}2"

        async def both(wf: Workflow) -> str:
            return await wf.step(second, await wf.step(first))

        return Definition("both", both)

    async def execution(self, who: str, *, takes: bool) -> None:
        log = SteppedLog(self.logs.log("flow", Session()))
        if takes:
            await log.append(encode(RunTaken(2, who)), tags=[run_tag("r")])
        run = await read_run(log, "r", RunState())
        execution = Execution(log, "r", run, NeverSure())
        if run.finished is not None or run.executor != who:
            return
        definition = self.workflow(who)
        body: Coroutine[Any, Any, bytes] = definition.result_text(
            Workflow(execution, self.logs), {}
        )
        try:
            self.ends[who] = (await execution.execute(body)).result
        except Stopped:
            self.ends[who] = None

    def records(self) -> list[Any]:
        found = run_stepped([self.logs.log("flow").read_range(run_tag("r"))], lambda r: r[0])[0]
        return [run_record(record.data) for record in found]


def outcome(choose: Choose) -> World:
    world = World()
    started = encode(RunStarted("both", b"{}", "a", "v"))
    run_stepped([world.logs.log("flow").append(started, tags=[run_tag("r")])], lambda r: r[0])
    run_stepped([world.execution("a", takes=False), world.execution("b", takes=True)], choose)
    return world


def check(world: World) -> None:
    """Recompute the decided outcomes from the records alone, with a simple model."""
    epoch = 1
    steps: dict[str, str] = {}
    ends: list[bytes] = []
    for record in world.records():
        if isinstance(record, RunTaken) and not ends:
            epoch = record.epoch
        if isinstance(record, StepDecided) and record.epoch == epoch and not ends:
            steps.setdefault(record.number, record.result.decode().strip('"'))
        if isinstance(record, RunFinished) and record.epoch == epoch and not ends:
            ends.append(record.result)
    assert len(ends) == 1, "the run ends"
    assert {end for end in world.ends.values() if end is not None} <= set(ends), "one result"
    for who, step, given in world.done:
        if step == "second":
            assert given == steps["1"], f"{who} went on with what was not decided"


def test_every_execution_continues_with_what_the_log_decided() -> None:
    worlds = list(interleavings(outcome))
    for world in worlds:
        check(world)
    assert len(worlds) > 100
    firsts = {tuple(who for who, step, _ in world.done if step == "first") for world in worlds}
    assert firsts == {("a",), ("a", "b"), ("b",)}
    assert any(world.ends.get("a") is None for world in worlds)


@pytest.mark.parametrize("bug", ["no epochs", "no looking"])
def test_the_check_finds_planted_bugs(bug: str) -> None:
    async def look_away(self: Execution, until: int = -1) -> None:
        return None

    def any_epoch(self: RunState, seqnum: int, time: float, record: RunRecord | None) -> bool:
        if isinstance(record, StepDecided | RunFinished):
            record = msgspec.structs.replace(record, epoch=self.epoch)
        return applied(self, seqnum, time, record)

    applied = RunState.apply
    planted = (
        mock.patch.object(RunState, "apply", any_epoch)
        if bug == "no epochs"
        else mock.patch.object(Execution, "catch_up", look_away)
    )
    with planted, pytest.raises((AssertionError, KeyError)):
        check_all()


def check_all() -> None:
    for world in interleavings(outcome):
        check(world)


def test_outcomes_of_the_interleavings_do_not_depend_on_a_clock() -> None:
    """The interleavings above do not depend on time, because no code in them reads a clock."""
    with mock.patch.object(waiting, "seconds_now", side_effect=AssertionError):
        check(outcome(lambda ready: ready[0]))
