"""Events and states that a workflow publishes for people, as decided values in its history.

`Workflow.publish` and `Workflow.set_status` write the values. `handle`, `inspection` and
`run_status` read them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from bokiflow.runs.decision_numbers import STATUS
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.records import RunRecord, StepDecided
from bokiflow.runs.run_state import RunState
from indilog import FunctionFailedError
from indilog.sdk import ResultType, SeqNum, plain_value

EVENT: Final = "event"
"""The kind of a decision that is an event."""
TEXT_BYTES_MAX: Final = 16 * 1024
"""Largest number of bytes of JSON in an event or a status."""


class PublishedEvent(NamedTuple):
    """An event that a workflow published.

    Attributes:
        seqnum: place in the run's history. To continue, pass the last one to `Handle.events`.
        value: the event.
    """

    seqnum: SeqNum
    value: Any


def plain_text(what: str, value: object) -> bytes:
    """Return a value as JSON text.

    Args:
        what: a name of the value, for error messages.
        value: the value.

    Raises:
        FlowSettingsError: the value has no JSON form, or is too large.
    """
    try:
        text = ResultType(what, Any).text(value)
    except FunctionFailedError as error:
        raise FlowSettingsError(
            f"{what}: a value of type {type(value).__name__} has no JSON form."
        ) from error
    if len(text) > TEXT_BYTES_MAX:
        raise FlowSettingsError(
            f"{what} has {len(text):,} bytes of JSON; the limit is {TEXT_BYTES_MAX:,}. Store large "
            "values in a log and publish their seqnums."
        )
    return text


def event_in(seqnum: SeqNum, record: RunRecord) -> PublishedEvent | None:
    """Return the event that a record of a run publishes; None: the record is no event."""
    if isinstance(record, StepDecided) and record.kind == EVENT and record.failure is None:
        return PublishedEvent(seqnum, plain_value(record.result))
    return None


def status_value_in(run: RunState) -> object:
    """Return the value that the run has last set as its status; None: it has set no status."""
    for record in reversed(run.steps.values()):
        if record.kind == STATUS:
            return plain_value(record.result)
    return None
