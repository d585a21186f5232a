"""The retry policy of libraries for transient errors of the log.

Libraries call `retry_transient` for operations of a log.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - the default pause waits on the event loop
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from indilog.base.errors import DiskFullError, IndilogError, OutcomeUnknownError

_ValueT = TypeVar("_ValueT")


class RetryPolicy(NamedTuple):
    """How long a transient error is retried.

    Attributes:
        tries: number of attempts (1 or more).
        first_s: pause after the first attempt, in seconds; doubled after each further one.
        pause_s_max: longest pause, in seconds.
    """

    tries: int = 13
    first_s: float = 0.02
    pause_s_max: float = 5.0

    def pause_s(self, attempt: int) -> float:
        """Return the pause after attempt number `attempt` (from 0), in seconds."""
        assert attempt >= 0, "attempts are counted from 0"
        return min(self.first_s * 2.0 ** min(attempt, 64), self.pause_s_max)


async def retry_transient(
    ask: Callable[[], Awaitable[_ValueT]],
    policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - immutable
    *,
    is_idempotent: bool = False,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> _ValueT:
    """Return the result of `ask`; repeat it while it fails with a transient error.

    Args:
        ask: the operation; after a retryable error it has done nothing.
        policy: number of attempts, and pauses between them.
        is_idempotent: whether the operation may be repeated after an unknown outcome too.
        pause: waits for a number of seconds.

    Raises:
        OutcomeUnknownError: an attempt had an unknown outcome, and no later one succeeded. The
            other errors would say that nothing was done.
        DiskFullError: at once, because an operator must free disk space first.
        IndilogError: an error that is not transient, or that of the last attempt.
    """
    unknown: OutcomeUnknownError | None = None
    for attempt in range(policy.tries):
        try:
            return await ask()
        except IndilogError as error:
            unknown = error if isinstance(error, OutcomeUnknownError) else unknown
            is_transient = error.retryable or (is_idempotent and error is unknown)
            is_last = attempt + 1 == policy.tries
            if is_last or isinstance(error, DiskFullError) or not is_transient:
                if unknown is None or error is unknown:
                    raise
                raise unknown from error
        await pause(policy.pause_s(attempt))
    raise AssertionError("the last attempt returns or raises")
