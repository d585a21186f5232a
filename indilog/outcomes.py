"""What a failure means once a record is appended: no longer that nothing was done.

For libraries that append a record and then read what it came to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from indilog.errors import AppendOutcomeUnknownError, ConflictError, IndilogError
from indilog.ids import SeqNum


@contextmanager
def appended(seqnum: SeqNum) -> Iterator[None]:
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
