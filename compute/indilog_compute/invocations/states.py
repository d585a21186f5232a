"""The states of a recorded invocation and their transitions, as a table.

`InvocationTable` applies these transitions. A record whose change has no entry for the invocation's
state has no effect. The state diagram in docs/ARCHITECTURE.md is generated from the table
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
        SCHEDULED: not due yet, or due and not claimed by an executor.
        RUNNING: one executor runs it.
        DONE: it ended with a result.
        FAILED: it ended with a failure or was cancelled.
    """

    SCHEDULED = "scheduled"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class InvocationChange(enum.StrEnum):
    """An event about an invocation, as the invocation table reads it from the log.

    Attributes:
        ACCEPTED: recorded by a live executor, due at once; that executor runs it.
        DELAYED: recorded with a delay, or by an executor that had been declared dead.
        CLAIMED: claimed by an executor, after it was due.
        FREED: its executor no longer runs it, and it has no outcome.
        EXECUTOR_DECLARED_DEAD: its executor was declared dead.
        RETURNED: ended with a result.
        FAILED: ended with a failure.
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
    # An executor that was declared dead may still record an outcome, if it is the first one.
    (InvocationState.SCHEDULED, InvocationChange.RETURNED): InvocationState.DONE,
    (InvocationState.SCHEDULED, InvocationChange.FAILED): InvocationState.FAILED,
    (InvocationState.RUNNING, InvocationChange.FREED): InvocationState.SCHEDULED,
    (InvocationState.RUNNING, InvocationChange.EXECUTOR_DECLARED_DEAD): InvocationState.SCHEDULED,
    (InvocationState.RUNNING, InvocationChange.RETURNED): InvocationState.DONE,
    (InvocationState.RUNNING, InvocationChange.FAILED): InvocationState.FAILED,
}
"""The next state. State None: no record has accepted the invocation, or it is no longer kept."""


def state_of(invocation: RecordedInvocation | None) -> InvocationState | None:
    """Return the state of an invocation; None for an unknown one."""
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
