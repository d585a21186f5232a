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


class RecordedEvent(enum.StrEnum):
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


EPOCHS: Final[Mapping[RecordedEvent, Epoch]] = {
    RecordedEvent.TAKEN: Epoch.NEXT,
    RecordedEvent.DECIDED: Epoch.CURRENT,
    RecordedEvent.NOTED: Epoch.CURRENT,
    RecordedEvent.WAITS: Epoch.CURRENT,
    RecordedEvent.CONTINUED: Epoch.CURRENT,
    RecordedEvent.PARKED: Epoch.CURRENT,
    RecordedEvent.RETURNED: Epoch.CURRENT,
    RecordedEvent.FAILED: Epoch.CURRENT,
    RecordedEvent.CANCELLED: Epoch.CURRENT,
}
"""The epoch that each event needs. Records of the other events are not written by the run's
executor, so they have no epoch.
"""

TRANSITIONS: Final[Mapping[tuple[State | None, RecordedEvent], State]] = {
    (None, RecordedEvent.STARTED): State.RUNNING,
    # The earlier rounds of the run were trimmed.
    (None, RecordedEvent.CONTINUED): State.RUNNING,
    (State.RUNNING, RecordedEvent.TAKEN): State.RUNNING,
    (State.RUNNING, RecordedEvent.DECIDED): State.RUNNING,
    (State.RUNNING, RecordedEvent.NOTED): State.RUNNING,
    (State.RUNNING, RecordedEvent.SIGNALLED): State.RUNNING,
    (State.RUNNING, RecordedEvent.CHILD_ENDED): State.RUNNING,
    (State.RUNNING, RecordedEvent.CANCEL_ASKED): State.RUNNING,
    (State.RUNNING, RecordedEvent.MOVE_ASKED): State.RUNNING,
    (State.RUNNING, RecordedEvent.WAITS): State.RUNNING,
    (State.RUNNING, RecordedEvent.CONTINUED): State.RUNNING,
    (State.RUNNING, RecordedEvent.PARKED): State.PARKED,
    (State.RUNNING, RecordedEvent.RETURNED): State.DONE,
    (State.RUNNING, RecordedEvent.FAILED): State.FAILED,
    (State.RUNNING, RecordedEvent.CANCELLED): State.CANCELLED,
    (State.PARKED, RecordedEvent.TAKEN): State.RUNNING,
    (State.PARKED, RecordedEvent.RETRY_ASKED): State.PARKED,
    (State.PARKED, RecordedEvent.MOVE_ASKED): State.PARKED,
    # These appends were in flight when the same executor parked the run.
    (State.PARKED, RecordedEvent.DECIDED): State.PARKED,
    (State.PARKED, RecordedEvent.PARKED): State.PARKED,
    (State.PARKED, RecordedEvent.CONTINUED): State.RUNNING,
    (State.PARKED, RecordedEvent.RETURNED): State.DONE,
    (State.PARKED, RecordedEvent.FAILED): State.FAILED,
    (State.PARKED, RecordedEvent.CANCELLED): State.CANCELLED,
    (State.PARKED, RecordedEvent.SIGNALLED): State.PARKED,
    (State.PARKED, RecordedEvent.CHILD_ENDED): State.PARKED,
    (State.PARKED, RecordedEvent.CANCEL_ASKED): State.PARKED,
}
"""The state after an event, by the state before it. None: the run has not begun."""


_EVENTS: Final[Mapping[type[RunRecord], RecordedEvent]] = {
    RunStarted: RecordedEvent.STARTED,
    RunTaken: RecordedEvent.TAKEN,
    StepDecided: RecordedEvent.DECIDED,
    OperationNoted: RecordedEvent.NOTED,
    Signalled: RecordedEvent.SIGNALLED,
    ChildEnded: RecordedEvent.CHILD_ENDED,
    CancelAsked: RecordedEvent.CANCEL_ASKED,
    RetryAsked: RecordedEvent.RETRY_ASKED,
    MoveAsked: RecordedEvent.MOVE_ASKED,
    RunWaits: RecordedEvent.WAITS,
    RunContinued: RecordedEvent.CONTINUED,
    RunParked: RecordedEvent.PARKED,
}
"""The event of each kind of record, except the record of the end."""


def event_of(record: RunRecord) -> RecordedEvent:
    """Return the event that a record reports."""
    if not isinstance(record, RunFinished):
        return _EVENTS[type(record)]
    if record.was_cancelled:
        return RecordedEvent.CANCELLED
    return RecordedEvent.RETURNED if record.failure is None else RecordedEvent.FAILED


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
