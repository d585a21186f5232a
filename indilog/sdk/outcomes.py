"""Errors that are raised after an append. None of them may claim that nothing was done.

For libraries that append a record and then read its effect. `Replica` and the service of recorded
invocations use these functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConflictError,
    IndilogError,
    NotReadyError,
)
from indilog.base.ids import SeqNum


def check_own_append(seqnum: SeqNum, read_to: SeqNum) -> None:
    """Check that a read shows a record that its session appended.

    A read after an append of the same session must show the record. If it does not, the state that
    was read lacks the record's effect, so no caller may rely on that state.

    Args:
        seqnum: seqnum of the record that the session appended to the sub-stream that was read.
        read_to: seqnum below which the sub-stream was read completely.

    Raises:
        NotReadyError: the read did not return the record; read again.
    """
    if read_to <= seqnum:
        raise own_append_missing(seqnum)


def own_append_missing(seqnum: SeqNum) -> NotReadyError:
    """Return the error of a read without the record at `seqnum`, which its session appended."""
    return NotReadyError(
        f"The log was read without the record at {seqnum}, which the same session had appended; "
        "read again."
    )


@contextmanager
def append_outcome_unknown(seqnum: SeqNum) -> Iterator[None]:
    """Enter a block that reads the effect of the record appended at `seqnum`.

    A retryable error says that nothing was done. After an append that would be wrong, so the caller
    gets another error. A `ConflictError` is not replaced, because it says that the record has no
    effect.

    Raises:
        AppendOutcomeUnknownError: replaces any other `retryable` error.
    """
    try:
        yield
    except ConflictError:
        raise
    except IndilogError as error:
        if not error.retryable:
            raise
        raise AppendOutcomeUnknownError(
            f"The record was appended at {seqnum}, but its effect could not be read: {error}"
        ) from error
