"""The transition table of runs (`bokiflow.runs.states`)."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from bokiflow.runs.records import (
    CancelAsked,
    ChildEnded,
    CodeVersion,
    MoveAsked,
    OperationNoted,
    RecordedFailure,
    RetryAsked,
    RunContinued,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    RunWaits,
    Signalled,
    StepDecided,
)
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import TRANSITIONS, RecordedEvent, State, event_of
from tests.support.state_diagrams import Diagram

STARTED = RunStarted("order", b"{}", "a", "v1")
FAILURE = RecordedFailure("ValueError", "no")
TO_STATE: dict[State | None, list[RunRecord]] = {
    None: [],
    State.RUNNING: [STARTED],
    State.PARKED: [STARTED, RunParked(1, "v1", "changed")],
    State.DONE: [STARTED, RunFinished(1, b"1")],
    State.FAILED: [STARTED, RunFinished(1, b"", FAILURE)],
    State.CANCELLED: [STARTED, RunFinished(1, b"", FAILURE, was_cancelled=True)],
}
RECORDS: dict[RecordedEvent, RunRecord] = {
    RecordedEvent.STARTED: STARTED,
    RecordedEvent.TAKEN: RunTaken(2, "b"),
    RecordedEvent.DECIDED: StepDecided(1, "1", "book", "step", b"1"),
    RecordedEvent.NOTED: OperationNoted(1, "1", "book", "step", 1.0),
    RecordedEvent.SIGNALLED: Signalled("paid", b"1", "k"),
    RecordedEvent.CHILD_ENDED: ChildEnded("c"),
    RecordedEvent.CANCEL_ASKED: CancelAsked(),
    RecordedEvent.RETRY_ASKED: RetryAsked(),
    RecordedEvent.MOVE_ASKED: MoveAsked(CodeVersion(2, "two")),
    RecordedEvent.WAITS: RunWaits(1, None, "signal 'go'", 1),
    RecordedEvent.CONTINUED: RunContinued(
        epoch=1, round=2, end=0, workflow="order", arguments=b"{}", executor="a", version="v1",
        started_at=0, began=1.0, cancel_asked=False,
    ),
    RecordedEvent.PARKED: RunParked(1, "v1", "again"),
    RecordedEvent.RETURNED: RunFinished(1, b"2"),
    RecordedEvent.FAILED: RunFinished(1, b"", FAILURE),
    RecordedEvent.CANCELLED: RunFinished(1, b"", FAILURE, was_cancelled=True),
}  # fmt: skip
MOVES = {
    RecordedEvent.TAKEN: State.RUNNING,
    RecordedEvent.CONTINUED: State.RUNNING,
    RecordedEvent.PARKED: State.PARKED,
    RecordedEvent.RETURNED: State.DONE,
    RecordedEvent.FAILED: State.FAILED,
    RecordedEvent.CANCELLED: State.CANCELLED,
}


ONLY_IN_ONE_STATE = {RecordedEvent.NOTED, RecordedEvent.WAITS, RecordedEvent.RETRY_ASKED}
"""A running run waits and is noted, a parked one is retried."""


def run_in(state: State | None) -> RunState:
    run = RunState()
    for seqnum, record in enumerate(TO_STATE[state]):
        assert run.apply(seqnum, 1.0, record)
    assert run.state is state
    return run


def expected(state: State | None, event: RecordedEvent) -> State | None:
    """Return the next state by the rules of docs/libs/bokiflow.md; None: no effect."""
    if state is None:
        return State.RUNNING if event in {RecordedEvent.STARTED, RecordedEvent.CONTINUED} else None
    if state not in {State.RUNNING, State.PARKED} or event is RecordedEvent.STARTED:
        return None
    if (event is not RecordedEvent.RETRY_ASKED) == (state is State.PARKED) and (
        event in ONLY_IN_ONE_STATE
    ):
        return None
    return MOVES.get(event, state)


@pytest.mark.parametrize(("state", "event"), list(product(TO_STATE, RecordedEvent)))
def test_a_record_moves_a_run_as_the_rules_say(state: State | None, event: RecordedEvent) -> None:
    run, following = run_in(state), expected(state, event)
    assert event_of(RECORDS[event]) is event
    assert run.apply(5, 2.0, RECORDS[event]) is (following is not None)
    assert run.state is (state if following is None else following)


@pytest.mark.parametrize("state", [State.RUNNING, State.PARKED])
@pytest.mark.parametrize("record", [
    RunTaken(1, "b"), RunTaken(3, "b"), StepDecided(2, "1", "book", "step", b"1"),
    OperationNoted(2, "1", "book", "step", 1.0), RunParked(2, "v1", "again"),
    RunFinished(2, b"2"), RunFinished(2, b"", FAILURE),
    RunFinished(2, b"", FAILURE, was_cancelled=True),
])  # fmt: skip
def test_an_executors_record_of_a_wrong_epoch_has_no_effect(
    state: State, record: RunRecord
) -> None:
    run = run_in(state)
    assert not run.apply(5, 2.0, record)
    assert (run.state, run.epoch, run.executor, run.steps) == (state, 1, "a", {})


def test_no_event_leaves_an_ended_state() -> None:
    assert {state for state, _ in TRANSITIONS} == {None, State.RUNNING, State.PARKED}


def test_a_diagram_without_its_place_in_the_document_is_refused() -> None:
    diagram = Diagram("x", Path("doc.md"), TRANSITIONS)
    with pytest.raises(ValueError, match="has no place for x"):
        diagram.renewed("no comments")
