"""The status of a recorded invocation for callers: the state and the outcome of the invocation.

`InvocationService` reads it; the gateway and the worker host return it to callers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from indilog.base.errors import CallOutcomeUnknownError, TrimmedError
from indilog.base.log import Log
from indilog.link.link_messages import Failed, Returned
from indilog_compute.invocations.checkpoint import RecordedInvocation
from indilog_compute.invocations.records import InvocationEnded, decode
from indilog_compute.invocations.runs import outcome_in
from indilog_compute.invocations.states import InvocationState, state_of

INVOCATION_WAIT_S_MAX: Final = 300.0
"""Longest wait of a caller for an outcome, in seconds."""


class InvocationStatus(NamedTuple):
    """The public status of an invocation; `outcome` is None until the invocation has ended."""

    id: str
    function: str
    state: InvocationState
    outcome: Returned | Failed | None


async def read_status(log: Log, found: RecordedInvocation) -> InvocationStatus | None:
    """Return the status of an invocation, with its outcome from the log; None if other nodes have
    dropped the invocation and trimmed its records.
    """
    state = state_of(found)
    assert state is not None, "an invocation in the table has a state"
    if found.ended is None:
        return InvocationStatus(found.id, found.function, state, None)
    try:
        record = await log.read(found.ended)
    except TrimmedError:
        return None
    event = decode(record.data) if record is not None else None
    assert isinstance(event, InvocationEnded), (
        "the table has this seqnum from an `InvocationEnded` record"
    )
    return InvocationStatus(found.id, found.function, state, outcome_in(event))


def forgotten(id: str) -> CallOutcomeUnknownError:  # noqa: A002 - it is called so
    """Return the error for an outcome that is no longer kept."""
    return CallOutcomeUnknownError(
        f"The outcome of invocation {id} is no longer kept; see the setting results_kept_max."
    )
