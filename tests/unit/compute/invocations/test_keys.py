"""What callers with an idempotency key learn from an outcome that is kept."""

from __future__ import annotations

import pytest

from indilog.base.errors import FunctionFailedError
from indilog.link.link_messages import Failed, Returned, error_from, failed
from indilog_compute.invocations.keys import kept_with_key


def gave_up(message: str, *, temporary: bool) -> Failed:
    kind = "ConflictError" if temporary else "ValueError"
    return failed(FunctionFailedError(message, kind=kind, temporary=temporary), 7)


@pytest.mark.parametrize("message", ["shop.pay failed: run this one again.", "shop.pay failed: no"])
def test_a_key_of_a_transient_failure_advises_another_key(message: str) -> None:
    """The function's own error asks to run it again, but the same key would always return the same
    outcome.
    """
    reported = kept_with_key(gave_up(message, temporary=True))
    assert isinstance(reported, Failed)
    assert reported.message.startswith(f"{message.rstrip('.')}. This is the outcome of")
    assert reported.message.endswith("use another key.")
    assert kept_with_key(reported) == reported, "said once, through however many calls"
    error = error_from(reported)
    assert isinstance(error, FunctionFailedError)
    assert (error.kind, error.retryable, reported.position) == ("ConflictError", False, 7)


def test_any_other_outcome_of_a_key_is_unchanged() -> None:
    for outcome in (Returned(7, b"1"), gave_up("shop.pay failed: no.", temporary=False)):
        assert kept_with_key(outcome) == outcome
