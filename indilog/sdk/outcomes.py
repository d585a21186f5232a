"""What a failure means once a record is appended: no longer that nothing was done.

For libraries that append a record and then read what it came to.
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
    """Refuse what a session read if its own append is missing there.

    A read that follows an append of the same session shows it. If one does not, the read says
    nothing about what the append came to, and no caller may go by it.

    Args:
        seqnum: the record that the session appended, in the sub-stream that was read.
        read_to: below it the sub-stream was read to its end.

    Raises:
        NotReadyError: the record was not shown; read again.
    """
    if read_to <= seqnum:
        raise own_append_missing(seqnum)


def own_append_missing(seqnum: SeqNum) -> NotReadyError:
    """Return the error of a read that does not show the record at `seqnum`, although its session
    appended it.
    """
    return NotReadyError(
        f"The log was read without the record at {seqnum}, which was appended before in the same "
        "session; read again."
    )


@contextmanager
def append_outcome_unknown(seqnum: SeqNum) -> Iterator[None]:
    """Find out in this block what the record at `seqnum`, which was appended, came to.

    Errors that say "nothing was done, repeat it" are true of the read that met them, not of what
    the caller asked for. A conflict is: the log's order decided that the record has no effect.

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
            f"The record was appended at {seqnum}, but what it came to could not be read: {error}"
        ) from error
