"""The states of a recorded invocation, and the table of transitions between states.

`InvocationTable` applies the transitions in `TRANSITIONS`. If `TRANSITIONS` has no entry for an
invocation's state and the change in a record, the record has no effect on this invocation. The
state diagram in docs/ARCHITECTURE.md is generated from `TRANSITIONS`
(`tests.support.state_diagrams`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from indilog_compute.invocations.checkpoint import RecordedInvocation


class InvocationState(enum.StrEnum):
    """The public state of an invocation.

    Attributes:
        SCHEDULED: the invocation is not due, or is due and not claimed by an executor.
        RUNNING: one executor runs the invocation.
        DONE: the invocation ended with a result.
        FAILED: the invocation ended with a failure, or was cancelled.
    """

    SCHEDULED = "scheduled"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class InvocationChange(enum.StrEnum):
    """An event about an invocation, as the invocation table reads it from the log.

    Attributes:
        ACCEPTED: a live executor recorded the invocation, without a delay, and runs it.
        DELAYED: the invocation was recorded with a delay, or by an executor that had been declared
            dead.
        CLAIMED: an executor claimed the due invocation.
        FREED: the executor no longer runs the invocation, which has no outcome.
        EXECUTOR_DECLARED_DEAD: the executor of the invocation was declared dead.
        RETURNED: the invocation ended with a result.
        FAILED: the invocation ended with a failure.
    """

    ACCEPTED = "accepted"
    DELAYED = "accepted with a delay"
    CLAIMED = "claimed"
    FREED = "freed"
    EXECUTOR_DECLARED_DEAD = "executor declared dead"
    RETURNED = "ended with a result"
    FAILED = "ended with a failure"


TRANSITIONS: Final[Mapping[tuple[InvocationState | None, InvocationChange], InvocationState]] = {
    (None, InvocationChange.ACCEPTED): InvocationState.RUNNING,
    (None, InvocationChange.DELAYED): InvocationState.SCHEDULED,
    (InvocationState.SCHEDULED, InvocationChange.CLAIMED): InvocationState.RUNNING,
    # An executor that was declared dead may still record the first outcome.
    (InvocationState.SCHEDULED, InvocationChange.RETURNED): InvocationState.DONE,
    (InvocationState.SCHEDULED, InvocationChange.FAILED): InvocationState.FAILED,
    (InvocationState.RUNNING, InvocationChange.FREED): InvocationState.SCHEDULED,
    (InvocationState.RUNNING, InvocationChange.EXECUTOR_DECLARED_DEAD): InvocationState.SCHEDULED,
    (InvocationState.RUNNING, InvocationChange.RETURNED): InvocationState.DONE,
    (InvocationState.RUNNING, InvocationChange.FAILED): InvocationState.FAILED,
}
"""The next state, by state and change. The state None means that no record has accepted the
invocation, or that the invocation is no longer kept.
"""


def state_of(invocation: RecordedInvocation | None) -> InvocationState | None:
    """Return the state of an invocation; None if `invocation` is None."""
    if invocation is None:
        return None
    if invocation.ended is not None:
        return InvocationState.FAILED if invocation.failed else InvocationState.DONE
    return InvocationState.SCHEDULED if invocation.executor is None else InvocationState.RUNNING


def next_state(
    invocation: RecordedInvocation | None, change: InvocationChange
) -> InvocationState | None:
    """Return the state after a change; None if the change has no effect."""
    return TRANSITIONS.get((state_of(invocation), change))
