"""The state of a run: the order of the log decides which records take effect."""

from __future__ import annotations

import msgspec
import pytest

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import (
    CancelAsked,
    OperationNoted,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    RunWaits,
    StepDecided,
    encode,
    executor_record,
    run_record,
)
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State


def started(executor: str = "a") -> RunStarted:
    return RunStarted("order", b"{}", executor, "v1")


def step(epoch: int, number: str = "1", result: bytes = b"1") -> StepDecided:
    return StepDecided(epoch, number, "book", "step", result)


def applied(*records: RunRecord | None) -> tuple[RunState, list[bool]]:
    run = RunState()
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
        run_record(b"\xb0F\x04anything")


def test_records_of_the_first_format_are_refused_with_advice() -> None:
    with pytest.raises(FlowVersionError, match="reads format 3 only"):
        run_record(b"\xb0F\x01anything")


def test_a_run_without_an_executor_is_taken_in_epoch_1() -> None:
    run = RunState()
    run.apply(0, 0.0, RunStarted("w", b"{}", "", "v"))
    assert (run.state, run.epoch) == (State.RUNNING, 0)
    assert not run.apply(1, 0.0, StepDecided(1, "1", "a", "step", b"1")), "it has no executor yet"
    assert run.apply(2, 0.0, RunTaken(1, "a"))
    assert (run.epoch, run.executor) == (1, "a")


def test_a_run_that_waits_is_running_until_it_is_taken() -> None:
    run = RunState()
    run.apply(0, 0.0, RunStarted("w", b"{}", "a", "v"))
    assert run.apply(1, 0.0, RunWaits(1, 5.0, "sleep", 1))
    assert (run.state, run.waits) == (State.RUNNING, RunWaits(1, 5.0, "sleep", 1))
    assert not run.apply(2, 0.0, RunWaits(2, None, "signal", 1)), "of another epoch"
    assert run.apply(3, 0.0, RunTaken(2, "b"))
    assert run.waits is None


def noted(epoch: int, number: str = "1", failed: int = 0) -> OperationNoted:
    return OperationNoted(epoch, number, "book", "step", 0.0, failed)


def test_a_note_lasts_until_the_step_is_decided_or_the_execution_has_ended() -> None:
    run, counted = applied(started("a"), noted(1), noted(1, failed=2), noted(2), noted(1, "2"))
    assert counted == [True, True, True, False, True]
    assert {number: note.failed for number, note in run.noted.items()} == {"1": 2, "2": 0}
    assert run.apply(5, 5.0, step(1))
    assert not run.apply(6, 6.0, noted(1)), "its append was in flight when the step ended"
    assert list(run.noted) == ["2"]
    assert run.apply(7, 7.0, RunTaken(2, "b"))
    assert (run.noted, list(run.steps)) == ({}, ["1"])
    assert run.apply(8, 8.0, noted(2, "2"))
    assert run.apply(9, 9.0, RunWaits(2, None, "signal", 1))
    assert not run.noted
    assert not run.apply(10, 10.0, noted(2, "2")), "no executor performs the run"


def test_a_decision_of_an_earlier_version_has_no_attempts() -> None:
    whole = encode(step(1))
    content = msgspec.msgpack.decode(whole[3:])
    old = run_record(whole[:3] + msgspec.msgpack.encode(content[:-2]))
    assert old == step(1)
    assert (step(1).attempts, step(1).duration_ms) == (0, None)
