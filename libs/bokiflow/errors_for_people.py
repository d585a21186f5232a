"""Raises errors of flows as errors of the platform, for operations of applications.

The operations `runs.*` and `schedules.*` use this, because the platform's errors have an HTTP
status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bokiflow.runs.errors import (
    FlowError,
    FlowSettingsError,
    FlowVersionError,
    RunEndedError,
    RunIdInUseError,
    UnknownRunError,
)
from indilog import InvalidArgumentsError, NotFoundError, WrongStateError


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Raise errors of flows as the platform's errors, which have an HTTP status."""
    try:
        yield
    except UnknownRunError as error:
        raise NotFoundError(str(error)) from error
    except (RunEndedError, RunIdInUseError, FlowVersionError) as error:
        raise WrongStateError(str(error)) from error
    except FlowSettingsError as error:
        raise InvalidArgumentsError(str(error)) from error
    except FlowError as error:
        raise WrongStateError(str(error)) from error
