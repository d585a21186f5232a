"""Errors of public calls (`start`, `signal`, ...) when the log is unavailable or full.

An execution that cannot continue stops (`Stopped`) and is retried. A public call raises an
`IndilogError` instead, so that its caller can decide whether to repeat the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from indilog import AppendOutcomeUnknownError, IndilogError, NotReadyError
from indilog import OutcomeUnknownError as Unknown


class Stopped(BaseException):
    """This execution must not continue: the run has another executor, or the log is unavailable.

    `Stopped` is not an `Exception`, so that a workflow does not handle it as the failure of a step.

    Attributes:
        error: the error of the log that is the cause; None: there is another cause.
    """

    def __init__(self, message: str, error: IndilogError | None = None) -> None:
        super().__init__(message)
        self.error = error


class PublicCall:
    """Tracks what one public call has appended.

    Attributes:
        unknown: the error of an append whose outcome is unknown; None if there was none, or if a
            later attempt succeeded.
        has_appended: whether a record of the call is in the log.
    """

    def __init__(self) -> None:
        self.unknown: Unknown | None = None
        self.has_appended = False

    @property
    def has_done_nothing(self) -> bool:
        """Whether no record of the call is in the log or in flight."""
        return self.unknown is None and not self.has_appended

    def note_append(self) -> None:
        """Note that an append of the call succeeded."""
        self.unknown, self.has_appended = None, True

    def error_for_caller(self, error: IndilogError) -> IndilogError:
        """Return the error to raise for `error`. If a record was appended, the returned error is
        not retryable.
        """
        if self.unknown is not None:
            return self.unknown
        if self.has_appended and error.retryable:
            return AppendOutcomeUnknownError(f"The call was done at least in part. Then: {error}")
        return error


CALL: Final[ContextVar[PublicCall | None]] = ContextVar("public_call", default=None)
"""The current public call; None in an execution or a background task."""


@contextmanager
def public_call() -> Iterator[None]:
    """Enter a block that is one public call, even if a step makes the call.

    Raises:
        OutcomeUnknownError: a part of the call may have been done.
        IndilogError: the log's error; never `Stopped`.
    """
    call = PublicCall()
    token = CALL.set(call)
    try:
        yield
    except Stopped as stopped:
        raise call.error_for_caller(stopped.error or NotReadyError(str(stopped))) from stopped
    except IndilogError as error:
        raised = call.error_for_caller(error)
        if raised is error:
            raise
        raise raised from error
    finally:
        CALL.reset(token)


@contextmanager
def uncounted() -> Iterator[None]:
    """Enter a block whose appends do not belong to the current public call."""
    call = CALL.get()
    before = None if call is None else (call.unknown, call.has_appended)
    try:
        yield
    finally:
        if call is not None and before is not None:
            call.unknown, call.has_appended = before
