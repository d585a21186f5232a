"""The states of a run and its transitions, as a table.

`bokiflow.runs.run_state` looks each record up in this table, and the diagram in
docs/libs/bokiflow.md is generated from it. A record has no effect if the table has no entry for its
event in the run's state. Examples are a second start, and any record after the end.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from bokiflow.runs.records import (
    CancelAsked,
    ChildEnded,
    MoveAsked,
    OperationNoted,
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


class State(enum.StrEnum):
    """The state of a run that has begun."""

    RUNNING = "running"
    PARKED = "parked"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunEvent(enum.StrEnum):
    """The event that a record reports about a run."""

    STARTED = "started"
    TAKEN = "taken"
    DECIDED = "decided"
    NOTED = "noted"
    SIGNALLED = "signalled"
    CHILD_ENDED = "child ended"
    CANCEL_ASKED = "cancel asked"
    RETRY_ASKED = "retry asked"
    MOVE_ASKED = "move asked"
    WAITS = "waits"
    CONTINUED = "continued"
    PARKED = "parked"
    RETURNED = "returned"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Epoch(enum.Enum):
    """The epoch that a record needs to take effect, relative to the epoch of the run."""

    CURRENT = enum.auto()
    NEXT = enum.auto()


EPOCHS: Final[Mapping[RunEvent, Epoch]] = {
    RunEvent.TAKEN: Epoch.NEXT,
    RunEvent.DECIDED: Epoch.CURRENT,
    RunEvent.NOTED: Epoch.CURRENT,
    RunEvent.WAITS: Epoch.CURRENT,
    RunEvent.CONTINUED: Epoch.CURRENT,
    RunEvent.PARKED: Epoch.CURRENT,
    RunEvent.RETURNED: Epoch.CURRENT,
    RunEvent.FAILED: Epoch.CURRENT,
    RunEvent.CANCELLED: Epoch.CURRENT,
}
"""The epoch that each event needs. Records of the other events are not written by the run's
executor, so they have no epoch.
"""

TRANSITIONS: Final[Mapping[tuple[State | None, RunEvent], State]] = {
    (None, RunEvent.STARTED): State.RUNNING,
    # The earlier rounds of the run were trimmed.
    (None, RunEvent.CONTINUED): State.RUNNING,
    (State.RUNNING, RunEvent.TAKEN): State.RUNNING,
    (State.RUNNING, RunEvent.DECIDED): State.RUNNING,
    (State.RUNNING, RunEvent.NOTED): State.RUNNING,
    (State.RUNNING, RunEvent.SIGNALLED): State.RUNNING,
    (State.RUNNING, RunEvent.CHILD_ENDED): State.RUNNING,
    (State.RUNNING, RunEvent.CANCEL_ASKED): State.RUNNING,
    (State.RUNNING, RunEvent.MOVE_ASKED): State.RUNNING,
    (State.RUNNING, RunEvent.WAITS): State.RUNNING,
    (State.RUNNING, RunEvent.CONTINUED): State.RUNNING,
    (State.RUNNING, RunEvent.PARKED): State.PARKED,
    (State.RUNNING, RunEvent.RETURNED): State.DONE,
    (State.RUNNING, RunEvent.FAILED): State.FAILED,
    (State.RUNNING, RunEvent.CANCELLED): State.CANCELLED,
    (State.PARKED, RunEvent.TAKEN): State.RUNNING,
    (State.PARKED, RunEvent.RETRY_ASKED): State.PARKED,
    (State.PARKED, RunEvent.MOVE_ASKED): State.PARKED,
    # These appends were in flight when the same executor parked the run.
    (State.PARKED, RunEvent.DECIDED): State.PARKED,
    (State.PARKED, RunEvent.PARKED): State.PARKED,
    (State.PARKED, RunEvent.CONTINUED): State.RUNNING,
    (State.PARKED, RunEvent.RETURNED): State.DONE,
    (State.PARKED, RunEvent.FAILED): State.FAILED,
    (State.PARKED, RunEvent.CANCELLED): State.CANCELLED,
    (State.PARKED, RunEvent.SIGNALLED): State.PARKED,
    (State.PARKED, RunEvent.CHILD_ENDED): State.PARKED,
    (State.PARKED, RunEvent.CANCEL_ASKED): State.PARKED,
}
"""The next state. State None: the run has not begun."""


_EVENTS: Final[Mapping[type[RunRecord], RunEvent]] = {
    RunStarted: RunEvent.STARTED,
    RunTaken: RunEvent.TAKEN,
    StepDecided: RunEvent.DECIDED,
    OperationNoted: RunEvent.NOTED,
    Signalled: RunEvent.SIGNALLED,
    ChildEnded: RunEvent.CHILD_ENDED,
    CancelAsked: RunEvent.CANCEL_ASKED,
    RetryAsked: RunEvent.RETRY_ASKED,
    MoveAsked: RunEvent.MOVE_ASKED,
    RunWaits: RunEvent.WAITS,
    RunContinued: RunEvent.CONTINUED,
    RunParked: RunEvent.PARKED,
}
"""The event of each kind of record, except the record of the end."""


def event_of(record: RunRecord) -> RunEvent:
    """Return the event that a record reports."""
    if not isinstance(record, RunFinished):
        return _EVENTS[type(record)]
    if record.was_cancelled:
        return RunEvent.CANCELLED
    return RunEvent.RETURNED if record.failure is None else RunEvent.FAILED


def next_state(state: State | None, record: RunRecord, epoch: int) -> State | None:
    """Return the state after a record; None if the record has no effect.

    Args:
        state: state before the record; None: the run has not begun.
        record: a record of the run.
        epoch: epoch of the run before the record; 0 if the run has not begun.
    """
    event = event_of(record)
    if state is not None and event in EPOCHS:
        due = epoch + (EPOCHS[event] is Epoch.NEXT)
        if getattr(record, "epoch", None) != due:
            return None
    return TRANSITIONS.get((state, event))


def end_state(finished: RunFinished) -> State:
    """Return the state of a run that has ended with this record."""
    return TRANSITIONS[State.RUNNING, event_of(finished)]
