"""What one compute node decides: plain calls with `now`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from sortedcontainers import SortedList

from indilog.config import node_config
from indilog_compute.invocations.checkpoint import checkpoint_parts
from indilog_compute.invocations.executor import (
    CLAIMS_MAX,
    Abandon,
    Action,
    Append,
    Begin,
    InvocationExecutor,
    Now,
    WriteCheckpoint,
)
from indilog_compute.invocations.invocation_table import InvocationTable, TableLimits
from indilog_compute.invocations.records import (
    EXECUTORS_TAG,
    DeclaredDead,
    Event,
    ExecutorHeartbeat,
    Freed,
    InvocationAccepted,
    InvocationEnded,
    InvocationsClaimed,
    stream_of,
)
from indilog_compute.invocations.scheduling import Schedules

LIMITS = TableLimits(1e6, 100, 100, 1000, 1.0, 4.0)
LEASE_S = 6.0
A, B = "node-a#1", "node-b#1"


class Nodes:
    """Two executors on one log."""

    def __init__(self, *, workers: int = 2, invocations_running_max: int = 512) -> None:
        config = node_config(
            invocation_lease_s=LEASE_S,
            invocation_tries_max=2,
            workers=workers,
            invocations_running_max=invocations_running_max,
        )
        self.table = InvocationTable(LIMITS)
        self.schedules = Schedules(lambda: 0, config)
        self.a = InvocationExecutor(A, self.table, self.schedules, config)
        self.b = InvocationExecutor(B, self.table, Schedules(lambda: 1, config), config)
        self._seqnums = itertools.count()

    def record(self, now: float, *events: Event) -> None:
        for event in events:
            self.table.apply(next(self._seqnums), now, event)

    def accept(
        self, now: float, id_: str, due: float = 0.0, executor: str = A, app: str = "app"
    ) -> None:
        self.record(now, InvocationAccepted(
            id=id_, executor=executor, function=f"{app}.f", arguments=b"{}", position=0,
            stream=stream_of(due - now if due else 0.0), delay_s=due - now if due else 0.0,
        ))  # fmt: skip

    def turn(self, executor: InvocationExecutor, now: float) -> list[Action]:
        """Do what `executor` decides, as far as it is recorded."""
        actions = executor.actions(at(now))
        executor.begun.update(begun(actions))
        executor.begun.difference_update(a.id for a in actions if isinstance(a, Abandon))
        if said := events(actions):
            self.record(now, *said)
            executor.note_recorded(now)
        return actions


def at(now: float) -> Now:
    """All clocks agree."""
    return Now(now, now, now)


def deadline(executor: InvocationExecutor) -> float | None:
    """When `executor` is to be asked again, by clocks that agree."""
    return executor.rest_s(at(0.0))


def events(actions: Iterable[Action]) -> list[Event]:
    return [action.event for action in actions if isinstance(action, Append)]


def begun(actions: Iterable[Action]) -> list[str]:
    return [action.invocation.id for action in actions if isinstance(action, Begin)]


def test_an_invocation_accepted_here_begins_once() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    assert begun(nodes.turn(nodes.a, 0.0)) == ["i"]
    assert begun(nodes.turn(nodes.a, 0.1)) == []
    assert begun(nodes.turn(nodes.b, 0.1)) == []


def test_a_due_timer_is_claimed_first_by_the_node_that_accepted_it() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i", due=10.0)
    assert nodes.turn(nodes.a, 9.9) == []
    assert deadline(nodes.a) == 10.0
    assert deadline(nodes.b) == 10.0 + LEASE_S
    assert nodes.turn(nodes.b, 10.0) == []
    [claim] = events(nodes.turn(nodes.a, 10.0))
    assert claim == InvocationsClaimed(A, ("i",))
    assert begun(nodes.turn(nodes.a, 10.0)) == ["i"]


def test_a_timer_of_a_dead_node_is_claimed_a_lease_later() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i", due=10.0)
    assert events(nodes.turn(nodes.b, 10.0 + LEASE_S)) == [InvocationsClaimed(B, ("i",))]


def test_an_executor_with_work_sends_three_heartbeats_a_lease() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    nodes.turn(nodes.a, 0.0)
    assert deadline(nodes.a) == LEASE_S / 3
    assert events(nodes.turn(nodes.a, 1.9)) == []
    [beat] = [a for a in nodes.turn(nodes.a, 2.0) if isinstance(a, Append)]
    assert beat == Append(ExecutorHeartbeat(A), (EXECUTORS_TAG,))
    nodes.turn(nodes.a, 2.1)
    assert deadline(nodes.a) == pytest.approx(4.1)


def test_an_executor_sends_no_heartbeat_while_nothing_runs() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    nodes.turn(nodes.a, 0.0)
    nodes.record(1.0, InvocationEnded(A, "i", 0, b"1"))
    assert nodes.turn(nodes.a, 100.0) == [Abandon("i")]
    assert deadline(nodes.a) is None
    assert deadline(nodes.b) is None


def test_an_executor_silent_for_a_lease_is_declared_dead_and_others_continue_its_work() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    nodes.turn(nodes.a, 0.0)
    assert events(nodes.turn(nodes.b, 1.0)) == []
    assert deadline(nodes.b) == 5.0, "from when it was first seen"
    assert events(nodes.turn(nodes.b, 4.9)) == []
    assert events(nodes.turn(nodes.b, 5.0)) == [ExecutorHeartbeat(B)], "the log takes records"
    assert deadline(nodes.b) == 1.0 + LEASE_S
    assert events(nodes.turn(nodes.b, 6.9)) == []
    [declared] = events(nodes.turn(nodes.b, 7.0))
    assert declared == DeclaredDead(A, 0, B)
    assert events(nodes.turn(nodes.b, 7.9)) == [], "after a pause"
    assert events(nodes.turn(nodes.b, 8.0)) == [InvocationsClaimed(B, ("i",))]
    assert begun(nodes.turn(nodes.b, 8.0)) == ["i"]


def test_an_outage_of_the_log_makes_no_executor_dead() -> None:
    """Who runs something could not say so, and has a beat to do it when records are taken again."""
    nodes = Nodes()
    nodes.accept(0.0, "i")
    nodes.turn(nodes.a, 0.0)
    nodes.turn(nodes.b, 0.0)
    for now in range(1, 100):
        for executor in (nodes.a, nodes.b):
            executor.actions(at(float(now)))  # nothing of it is recorded
    assert events(nodes.turn(nodes.b, 100.0)) == [ExecutorHeartbeat(B)]
    assert events(nodes.turn(nodes.b, 101.0)) == []
    assert events(nodes.turn(nodes.a, 101.5)) == [ExecutorHeartbeat(A)]
    assert events(nodes.turn(nodes.b, 102.0)) == []
    assert deadline(nodes.b) == 106.0
    nodes.turn(nodes.b, 106.0)
    assert events(nodes.turn(nodes.b, 107.9)) == []
    assert events(nodes.turn(nodes.b, 108.0)) == [DeclaredDead(A, 2, B)], "it is silent after all"


def test_an_executor_with_heartbeats_is_not_declared_dead() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    for now in range(0, 60, 2):
        nodes.turn(nodes.a, float(now))
        assert events(nodes.turn(nodes.b, now + 0.5)) == []


def test_an_executor_that_was_declared_dead_stops_and_continues_under_another_name() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    nodes.turn(nodes.a, 0.0)
    for now in (0.0, 4.0, LEASE_S):
        nodes.turn(nodes.b, now)
    assert nodes.table.is_declared_dead(A)
    assert nodes.a.rename("node-a#2") == [Abandon("i")]
    assert begun(nodes.turn(nodes.a, 6.5)) == []
    nodes.accept(6.5, "j", executor="node-a#2")
    assert begun(nodes.turn(nodes.a, 6.5)) == ["j"]


def test_a_restarted_node_gives_up_its_previous_executor_at_once() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    nodes.a.rename("node-a#2")
    assert events(nodes.turn(nodes.a, 0.1)) == [DeclaredDead(A, 0, "node-a#2")]


def test_an_invocation_that_is_lost_too_often_fails() -> None:
    nodes = Nodes()
    nodes.accept(0.0, "i")
    nodes.turn(nodes.a, 0.0)
    for now in (0.0, 10.0):
        nodes.record(now, Freed(A, "i", is_lost=True))
        nodes.turn(nodes.a, now + 5.0)
    outcome = nodes.table.get("i")
    assert outcome is not None
    assert outcome.failed
    assert outcome.tries == 2


def test_claims_and_running_invocations_are_bounded() -> None:
    nodes = Nodes(invocations_running_max=150)
    for n in range(300):
        nodes.accept(0.0, f"i{n:03}", due=1.0)
    sizes = []
    for _ in range(4):
        claims = [e for e in events(nodes.turn(nodes.a, 2.0)) if isinstance(e, InvocationsClaimed)]
        sizes += [len(claim.ids) for claim in claims]
    assert sizes == [CLAIMS_MAX, 50]
    assert deadline(nodes.a) == pytest.approx(2.0 + LEASE_S / 3), "it is full: no busy loop"


def test_an_application_at_its_limit_does_not_stop_another() -> None:
    nodes = Nodes(invocations_running_max=10)
    for n in range(50):
        nodes.accept(0.0, f"i{n:03}", due=1.0, app="greedy")
    nodes.accept(0.0, "modest", due=2.0, app="modest")
    nodes.turn(nodes.a, 1.5)
    assert deadline(nodes.a) == pytest.approx(2.0), "it looks again when the other one is due"
    claims = [e for e in events(nodes.turn(nodes.a, 2.0)) if isinstance(e, InvocationsClaimed)]
    assert [claim.ids for claim in claims] == [("modest",)]


class NotLookedAt(SortedList[Any]):
    """A queue that no decision goes through."""

    def irange(self, *_: object, **__: object) -> Iterator[Any]:
        raise AssertionError("the queue of a full application was gone through")


def test_waiting_invocations_of_an_application_at_its_limit_are_not_scanned() -> None:
    """Thousands may be due, and each record that is read is a round."""
    nodes = Nodes(invocations_running_max=10)
    for n in range(50):
        nodes.accept(0.0, f"i{n:03}", due=1.0, app="greedy")
    nodes.turn(nodes.a, 1.5)
    nodes.table._free["greedy"] = NotLookedAt(nodes.table._free["greedy"])
    assert [e for e in events(nodes.turn(nodes.a, 1.6)) if isinstance(e, InvocationsClaimed)] == []


def test_the_invocation_due_first_is_claimed_first_over_all_applications() -> None:
    nodes = Nodes(invocations_running_max=2)
    for n, app in enumerate("aabab"):
        nodes.accept(0.0, f"i{n}", due=1.0 + n, app=app)
    [claim] = events(nodes.turn(nodes.a, 10.0))
    assert claim == InvocationsClaimed(A, ("i0", "i1", "i2", "i4"))


def test_a_node_without_workers_claims_nothing() -> None:
    nodes = Nodes(workers=0)
    nodes.accept(0.0, "i", due=1.0)
    assert nodes.turn(nodes.a, 100.0) == []
    assert deadline(nodes.a) is None


def test_the_first_live_node_writes_a_checkpoint_when_enough_is_new() -> None:
    nodes = Nodes()

    def writes(executor: InvocationExecutor) -> bool:
        return WriteCheckpoint() in executor.actions(at(1.0))

    for n in range(500):
        assert not writes(nodes.a)
        nodes.accept(0.0, f"i{n}")
        nodes.record(0.0, InvocationEnded(A, f"i{n}", 0, b"1"))
    assert (writes(nodes.a), writes(nodes.b)) == (True, False)
    nodes.record(1.0, *[ExecutorHeartbeat(B)] * 1000)
    assert (writes(nodes.a), writes(nodes.b)) == (True, True)
    nodes.record(1.0, *checkpoint_parts(nodes.table.checkpoint(), "c"))
    assert (writes(nodes.a), writes(nodes.b)) == (False, False)
