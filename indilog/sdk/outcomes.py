"""Errors after an append: none of them may claim that nothing was done.

For libraries that append a record and then read which effect it had.
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
    """Refuse a read that does not show its session's own append.

    A read that follows an append of the same session shows the record. A read without the record
    does not show the record's effect, so no caller may rely on it.

    Args:
        seqnum: the record that the session appended, in the sub-stream that was read.
        read_to: the sub-stream was read completely below this seqnum.

    Raises:
        NotReadyError: the record is missing in the read; read again.
    """
    if read_to <= seqnum:
        raise own_append_missing(seqnum)


def own_append_missing(seqnum: SeqNum) -> NotReadyError:
    """Return the error of a read without the record at `seqnum`, which its session appended."""
    return NotReadyError(
        f"The log was read without the record at {seqnum}, which was appended before in the same "
        "session; read again."
    )


@contextmanager
def append_outcome_unknown(seqnum: SeqNum) -> Iterator[None]:
    """In this block, read the effect of the record appended at `seqnum`.

    A retryable error says that nothing was done. That is true of the read, but not of the append,
    so the caller gets another error. A `ConflictError` is not replaced: the log's order decided
    that the record has no effect.

    Raises:
        AppendOutcomeUnknownError: instead of any other `retryable` error.
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
