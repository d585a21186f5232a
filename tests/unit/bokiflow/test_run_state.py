"""The state of a run: the order of the log decides which records take effect."""

from __future__ import annotations

import pytest

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import (
    CancelAsked,
    ExecutorDead,
    ExecutorLeft,
    ExecutorRecord,
    Heartbeat,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    StepDecided,
    encode,
    executor_record,
    run_record,
)
from bokiflow.runs.run_state import Run
from bokiflow.runs.states import State
from bokiflow.takeover.executors import NEW_OWNER_S, Executors


def started(executor: str = "a") -> RunStarted:
    return RunStarted("order", b"{}", executor, "v1")


def step(epoch: int, number: str = "1", result: bytes = b"1") -> StepDecided:
    return StepDecided(epoch, number, "book", "step", result)


def applied(*records: RunRecord | None) -> tuple[Run, list[bool]]:
    run = Run()
    return run, [run.apply(n, float(n), record) for n, record in enumerate(records)]


def test_the_first_start_counts() -> None:
    run, counted = applied(started("a"), started("b"))
    assert counted == [True, False]
    assert (run.executor, run.epoch) == ("a", 1)


def test_nothing_counts_before_the_start() -> None:
    run, counted = applied(step(1), CancelAsked(), RunTaken(1, "b"), started())
    assert counted == [False, False, False, True]
    assert not run.steps
    assert not run.cancel_asked


def test_of_two_decisions_of_a_step_the_first_counts() -> None:
    run, counted = applied(started(), step(1, result=b"1"), step(1, result=b"2"))
    assert counted[1:] == [True, False]
    assert run.steps["1"].result == b"1"


def test_decisions_of_an_executor_count_only_until_another_takes_the_run() -> None:
    run, counted = applied(
        started(), RunTaken(2, "b"), step(1), RunFinished(1, b"old"), step(2, result=b"new")
    )
    assert counted[1:] == [True, False, False, True]
    assert run.state is State.RUNNING
    assert run.steps["1"].result == b"new"


def test_of_two_that_take_a_run_over_the_first_gets_it() -> None:
    run, counted = applied(started(), RunTaken(2, "b"), RunTaken(2, "c"), RunTaken(4, "d"))
    assert counted[1:] == [True, False, False]
    assert (run.executor, run.epoch) == ("b", 2)


def test_nothing_changes_a_run_that_has_ended() -> None:
    run, counted = applied(
        started(), RunFinished(1, b"1"), RunTaken(2, "b"), CancelAsked(), step(1)
    )
    assert counted[2:] == [False, False, False]
    assert run.state is State.DONE


def test_a_parked_run_continues_when_it_is_taken() -> None:
    parked = (started(), RunParked(1, "v1", "changed"))
    assert applied(*parked)[0].state is State.PARKED
    assert applied(*parked, RunTaken(2, "b"))[0].state is State.RUNNING


def test_records_of_others_are_skipped_and_later_formats_are_not() -> None:
    assert run_record(b"not of BokiFlow") is None
    assert executor_record(encode(started())) is None
    with pytest.raises(FlowVersionError):
        run_record(b"\xb0F\x02anything")


# --- executors


def living(*records: tuple[float, ExecutorRecord]) -> Executors:
    executors = Executors()
    for seqnum, (time, record) in enumerate(records):
        executors.apply(seqnum, time, record)
    return executors


def test_a_claim_has_no_effect_if_the_executor_sent_a_heartbeat_since() -> None:
    spoke = living(
        (1.0, Heartbeat("a", 5.0)), (2.0, Heartbeat("a", 5.0)), (8.0, ExecutorDead("a", "b", 1))
    )
    assert not spoke.has_new_owner("a")
    silent = living(
        (1.0, Heartbeat("a", 5.0)), (2.0, Heartbeat("c", 5.0)), (8.0, ExecutorDead("a", "b", 1))
    )
    assert silent.left_to("b") == ["a"]


def test_no_time_of_a_record_decides_the_new_owner() -> None:
    """A reader sees the same new owners at once, late, or with a clock of another year."""
    said: list[ExecutorRecord] = [
        Heartbeat("a", 5.0),
        Heartbeat("b", 5.0),
        ExecutorDead("a", "b", 2),
        Heartbeat("b", 5.0),
        ExecutorDead("b", "c", 3),
    ]
    slow = living(*((10.0 * n, record) for n, record in enumerate(said)))
    at_once = living(*((1e9, record) for record in said))
    new_owners = {"a": "b", "b": None}
    assert {n: known.new_owner for n, known in slow.known.items()} == new_owners
    assert {n: known.new_owner for n, known in at_once.known.items()} == new_owners


def test_a_lease_counts_from_the_read_of_its_heartbeat() -> None:
    executors = living((1.0, Heartbeat("a", 5.0)), (70.0, Heartbeat("b", 5.0)))
    executors.apply(2, 71.0, Heartbeat("a", 5.0))
    assert executors.lapsed(74.9) == []
    assert executors.lapsed(75.0) == ["b"]
    assert executors.next_lapse() == 75.0


def test_the_first_new_owner_gets_all_runs_including_inherited_ones() -> None:
    executors = living(
        (0.0, Heartbeat("a", 1.0)), (0.0, Heartbeat("b", 1.0)), (2.0, ExecutorDead("a", "b", 2)),
        (2.0, ExecutorDead("a", "c", 2)), (3.0, ExecutorDead("b", "c", 4)),
    )  # fmt: skip
    assert executors.left_to("b") == []
    assert sorted(executors.left_to("c")) == ["a", "b"]


def test_a_late_new_owner_is_replaced_although_it_is_alive() -> None:
    executors = living(
        (0.0, Heartbeat("a", 1.0)), (0.0, Heartbeat("b", 1e6)), (2.0, ExecutorDead("a", "b", 2))
    )
    assert executors.lapsed(1.0 + NEW_OWNER_S) == []
    assert executors.lapsed(2.0 + NEW_OWNER_S) == ["a"]
    executors.apply(3, 2.0 + NEW_OWNER_S, ExecutorDead("a", "c", 3))
    assert (executors.left_to("b"), executors.left_to("c")) == ([], ["a"])


def test_the_name_of_a_dead_executor_is_not_used_again() -> None:
    executors = living(
        (0.0, Heartbeat("a", 1.0)), (2.0, ExecutorDead("a", "b", 1)), (2.1, Heartbeat("a", 9.0))
    )
    assert executors.left_to("b") == ["a"]


def test_an_executor_that_leaves_gets_a_new_owner_at_once() -> None:
    executors = living((0.0, Heartbeat("a", 100.0)), (1.0, ExecutorLeft("a", is_idle=False)))
    assert executors.lapsed(1.0) == ["a"]
    executors.apply(2, 1.0, ExecutorDead("a", "b", 2))
    assert executors.left_to("b") == ["a"]
    executors.apply(3, 1.0, ExecutorLeft("a", is_idle=True))
    assert not executors.known


def test_runs_of_a_new_owner_that_leaves_are_open_again() -> None:
    executors = living(
        (0.0, Heartbeat("a", 1.0)), (0.0, Heartbeat("b", 1.0)), (2.0, ExecutorDead("a", "b", 2))
    )
    executors.apply(3, 2.0, ExecutorLeft("b", is_idle=True))
    assert executors.lapsed(2.0) == ["a"]
    executors.apply(4, 2.0, ExecutorDead("a", "c", 4))
    assert executors.left_to("c") == ["a"]


def test_an_executor_that_left_nothing_is_not_read_again() -> None:
    executors = living((0.0, Heartbeat("a", 100.0)), (1.0, ExecutorLeft("a", is_idle=True)))
    assert "a" not in executors.dead_executors


def test_an_executor_whose_new_owner_has_finished_is_read_again() -> None:
    """The same holds for an executor whose record may be a new owner's, as far as this process
    knows.
    """
    executors = living(
        (0.0, Heartbeat("a", 1.0)),
        (2.0, ExecutorDead("a", "b", 1)),
        (2.0, ExecutorLeft("a", is_idle=True)),
    )
    assert "a" in executors.dead_executors
    executors.lost(9, 3.0)
    executors.apply(9, 3.0, Heartbeat("c", 1.0))
    executors.apply(10, 3.0, ExecutorLeft("c", is_idle=True))
    assert "c" in executors.dead_executors
    executors = living((0.0, Heartbeat("a", 1.0)))
    executors.forget("a", 2.0)
    executors.apply(1, 3.0, Heartbeat("a", 1.0))
    executors.apply(2, 3.0, ExecutorLeft("a", is_idle=True))
    assert "a" in executors.dead_executors


def test_after_a_loss_a_new_owner_is_waited_for_one_lease_only() -> None:
    """The lost record may have said so, and no record repeats it."""
    executors = living((1.0, Heartbeat("a", 5.0)), (7.0, ExecutorDead("a", "b", 1)))
    executors.lost(3, 8.0)
    assert executors.lapsed(12.9) == []
    assert executors.lapsed(13.0) == ["a"]


def test_an_executor_that_is_alive_again_is_not_read_as_a_dead_one() -> None:
    """And when it goes again, it is from then on."""
    executors = living((1.0, Heartbeat("a", 5.0)))
    executors.forget("a", 7.0)
    executors.apply(1, 8.0, Heartbeat("a", 5.0))
    assert executors.dead_executors.due(1e9) == []
    executors.forget("a", 5000.0)
    assert executors.dead_executors.due(5000.0) == []
    assert executors.dead_executors.due(6000.0) == ["a"]
