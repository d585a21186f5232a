"""What an HTTP caller learns from an error: whose fault it is, and whether it is transient."""

from __future__ import annotations

import pytest

from indilog.base.errors import FunctionFailedError, NotReadyError
from indilog_compute.gateway.problems import problem_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FunctionFailedError("a.f failed: KeyError: 'x'.", kind="KeyError"), 500),
        (FunctionFailedError("a.f failed: InvalidTagError.", kind="InvalidTagError"), 500),
        (FunctionFailedError("a.f failed: NotReadyError.", kind="x", temporary=True), 503),
        (NotReadyError("Not yet."), 503),
    ],
)
def test_a_failed_function_is_never_answered_as_a_client_error(
    error: Exception, status: int
) -> None:
    assert problem_of(error).status == status


def test_a_transient_failure_of_a_function_is_not_answered_as_retryable() -> None:
    """503 says that it may pass; `retryable` would say that repeating is harmless."""
    reported = problem_of(FunctionFailedError("a.f failed.", kind="NotReadyError", temporary=True))
    assert (reported.kind, reported.retryable) == ("NotReadyError", False)
