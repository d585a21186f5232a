"""Transient errors are retried with growing pauses, and for a limited time."""

from __future__ import annotations

import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DiskFullError,
    IndilogError,
    NotReadyError,
    TooLargeError,
)
from indilog.replayed import RetryPolicy, retry_transient

pytestmark = pytest.mark.asyncio


class Failing:
    """An operation that fails with the given errors, then returns 7."""

    def __init__(self, *errors: IndilogError) -> None:
        self.errors = list(errors)
        self.pauses: list[float] = []

    async def __call__(self) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return 7

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


async def test_a_transient_error_is_retried_with_growing_pauses() -> None:
    ask = Failing(*[NotReadyError("Away.")] * 4)
    policy = RetryPolicy(tries=5, first_s=1.0, pause_s_max=3.0)
    assert await retry_transient(ask, policy, pause=ask.pause) == 7
    assert ask.pauses == [1.0, 2.0, 3.0, 3.0]


async def test_the_last_error_is_raised() -> None:
    ask = Failing(*[NotReadyError("Away.")] * 5)
    with pytest.raises(NotReadyError):
        await retry_transient(ask, RetryPolicy(tries=5), pause=ask.pause)


@pytest.mark.parametrize("error", [DiskFullError("Full."), TooLargeError("It", size=2, limit=1)])
async def test_other_errors_are_raised_at_once(error: IndilogError) -> None:
    ask = Failing(error)
    with pytest.raises(type(error)):
        await retry_transient(ask, pause=ask.pause)
    assert ask.pauses == []


async def test_an_unknown_outcome_is_retried_only_if_repetition_is_harmless() -> None:
    ask = Failing(AppendOutcomeUnknownError("Unknown."))
    assert await retry_transient(ask, is_idempotent=True, pause=ask.pause) == 7
    ask = Failing(AppendOutcomeUnknownError("Unknown."))
    with pytest.raises(AppendOutcomeUnknownError):
        await retry_transient(ask, pause=ask.pause)


@pytest.mark.parametrize("error", [NotReadyError("Away."), DiskFullError("Full.")])
async def test_after_an_unknown_outcome_no_error_says_that_nothing_was_done(
    error: IndilogError,
) -> None:
    unknown = AppendOutcomeUnknownError("Unknown.")
    ask = Failing(NotReadyError("Away."), unknown, error)
    with pytest.raises(AppendOutcomeUnknownError) as raised:
        await retry_transient(ask, RetryPolicy(tries=3), is_idempotent=True, pause=ask.pause)
    assert raised.value is unknown
    assert raised.value.__cause__ is error
