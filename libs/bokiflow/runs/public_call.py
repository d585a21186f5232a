"""Errors of public calls (`start`, `signal`, ...) when the log is unavailable or full.

An execution that cannot continue stops (`Stopped`) and is retried. A public call raises an
`IndilogError` instead, by which its caller decides whether to repeat the call.
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

    No `Exception`, so that a workflow does not handle it as a failure of a step.

    Attributes:
        error: the log's error, if that is the cause.
    """

    def __init__(self, message: str, error: IndilogError | None = None) -> None:
        super().__init__(message)
        self.error = error


class PublicCall:
    """What one public call has appended so far.

    Attributes:
        unknown: the error of an append of unknown outcome; None: there was none, or a later attempt
            succeeded.
        has_appended: whether a record of the call is in the log.
    """

    def __init__(self) -> None:
        self.unknown: Unknown | None = None
        self.has_appended = False

    @property
    def has_done_nothing(self) -> bool:
        """Whether no record of it is in the log or in flight."""
        return self.unknown is None and not self.has_appended

    def appended(self) -> None:
        """Note that its append succeeded."""
        self.unknown, self.has_appended = None, True

    def error_for_caller(self, error: IndilogError) -> IndilogError:
        """Return the error to raise for `error`: not a retryable one if something was appended."""
        if self.unknown is not None:
            return self.unknown
        if self.has_appended and error.retryable:
            return AppendOutcomeUnknownError(f"It was done at least in part, then: {error}")
        return error


CALL: Final[ContextVar[PublicCall | None]] = ContextVar("public_call", default=None)
"""The current public call; None: an execution, or a background task."""


@contextmanager
def public_call() -> Iterator[None]:
    """A block that is a public call, also one made by a step.

    Raises:
        OutcomeUnknownError: part of it may have been done.
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
