"""What a call of the library from outside of an execution tells when the log is away or full.

An execution that cannot go on stops (`Stopped`) and is tried again; whoever calls `start`,
`signal` and the like is told an `IndilogError`, by which to decide whether to repeat the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from indilog import AppendOutcomeUnknownError, IndilogError, NotReadyError
from indilog import OutcomeUnknownError as Unknown


class Stopped(BaseException):
    """This execution must not go on: the run has another executor, or the log is away.

    No `Exception`, so that no workflow takes it for a failure of a step.

    Attributes:
        error: what the log said, if that is why.
    """

    def __init__(self, message: str, error: IndilogError | None = None) -> None:
        super().__init__(message)
        self.error = error


class PublicCall:
    """What one call has done to the log so far.

    Attributes:
        unknown: what a try to append met of which nobody knows what it did; None: none did, or a
            later one succeeded.
        has_appended: whether something is in the log.
    """

    def __init__(self) -> None:
        self.unknown: Unknown | None = None
        self.has_appended = False

    @property
    def has_done_nothing(self) -> bool:
        """Whether nothing of it is in the log, nor can come there."""
        return self.unknown is None and not self.has_appended

    def appended(self) -> None:
        """What it appends is there."""
        self.unknown, self.has_appended = None, True

    def told(self, error: IndilogError) -> IndilogError:
        """Return what the caller is told of `error`: nothing retryable if something was done."""
        if self.unknown is not None:
            return self.unknown
        if self.has_appended and error.retryable:
            return AppendOutcomeUnknownError(f"It was done at least in part, then: {error}")
        return error


CALL: Final[ContextVar[PublicCall | None]] = ContextVar("public_call", default=None)
"""The call that goes on; None: an execution, or what runs beside all calls."""


@contextmanager
def public_call() -> Iterator[None]:
    """A call from outside of an execution, also one that a step makes.

    Raises:
        OutcomeUnknownError: something of it may have been done.
        IndilogError: as the log says; never `Stopped`.
    """
    call = PublicCall()
    token = CALL.set(call)
    try:
        yield
    except Stopped as stopped:
        raise call.told(stopped.error or NotReadyError(str(stopped))) from stopped
    except IndilogError as error:
        told = call.told(error)
        if told is error:
            raise
        raise told from error
    finally:
        CALL.reset(token)
