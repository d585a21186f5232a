"""Runs the body of a step until it returns, or until no further attempt is due.

Only the outcome of the last attempt is decided. `Workflow` makes an `Attempts` for each step and
each compensation. `CancelGrace` ends bodies of cancelled runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from bokiflow.operations.body import Body
from bokiflow.operations.notifications import Woken, run_unless_cancelled
from bokiflow.runs import waiting
from bokiflow.runs.cancelling import BodyCancelledError
from bokiflow.runs.errors import Cancelled, FlowSettingsError
from bokiflow.runs.execution import KEY, Execution, OperationOutcome, failure_from
from indilog import FunctionFailedError
from indilog.sdk import note_error

RETRIES: Final = 3
ATTEMPTS_MAX: Final = 100_000
PAUSE_S_MAX: Final = 86_400.0
_SECONDS_MAX: Final = 366 * 86_400.0


@dataclass(frozen=True)
class Retry:
    """When a step is attempted again after its body raised.

    Attributes:
        attempts: largest number of attempts, including the first one (1 to 100,000).
        first: seconds before the second attempt (0 or more).
        factor: each further pause is this many times longer (1 or more).
        longest: longest pause in seconds (up to a day).
        until: seconds after the beginning of the first attempt after which no further attempt
            begins; None: without limit.

    Raises:
        FlowSettingsError: a value is out of its range.
    """

    attempts: int = RETRIES + 1
    first: float = 0.1
    factor: float = 2.0
    longest: float = 60.0
    until: float | None = None

    def __post_init__(self) -> None:
        ranges = (
            ("attempts", self.attempts, 1, ATTEMPTS_MAX),
            ("first", self.first, 0, PAUSE_S_MAX),
            ("factor", self.factor, 1, 1000),
            ("longest", self.longest, 0, PAUSE_S_MAX),
            ("until", 0 if self.until is None else self.until, 0, _SECONDS_MAX),
        )
        for name, value, least, most in ranges:
            if not least <= value <= most:
                raise FlowSettingsError(
                    f"Retry: {name} must be {least:,} to {most:,.0f}, not {value!r:.40}."
                )

    def pause_s(self, attempt: int) -> float:
        """Return the seconds between attempt number `attempt` (from 1) and the next one."""
        assert attempt >= 1, "attempts are counted from 1"
        exponent = math.log(self.factor) * (attempt - 1)
        return self.longest if exponent > 50 else min(self.longest, self.first * math.exp(exponent))


@dataclass(frozen=True)
class AttemptPolicy:
    """How a step is attempted.

    Attributes:
        retry: when a failed attempt is repeated.
        timeout_s: seconds after which an attempt has failed; None: without limit.
        give_up_on: errors after which no further attempt is made.
    """

    retry: Retry = field(default_factory=Retry)
    timeout_s: float | None = None
    give_up_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        timeout_s = self.timeout_s
        if timeout_s is not None and not 0 < timeout_s <= _SECONDS_MAX:
            raise FlowSettingsError(
                f"timeout must be greater than 0, at most {_SECONDS_MAX:,.0f} seconds, not "
                f"{timeout_s!r:.40}."
            )
        for kind in self.give_up_on:
            given: object = kind
            if not (isinstance(given, type) and issubclass(given, BaseException)):
                raise FlowSettingsError(f"give_up_on takes types of errors, not {kind!r:.80}.")


class Attempts:
    """The attempts of one step in one execution.

    Args:
        execution: the execution of the step.
        number: number of the step.
        body: body of the step.
        arguments: returns the arguments of the body, beginning with a context if the body takes
            one.
        policy: how the step is attempted.

    Attributes:
        last_error: the error of the last attempt; None: that attempt raised none, or is not the
            last one.
    """

    def __init__(
        self,
        execution: Execution,
        number: str,
        body: Body,
        arguments: Callable[[], tuple[object, ...]],
        policy: AttemptPolicy,
    ) -> None:
        self.last_error: Exception | None = None
        self._execution = execution
        self._number = number
        self._body = body
        self._arguments = arguments
        self._policy = policy

    async def run(self) -> OperationOutcome:
        """Attempt the body until it returns or no further attempt is due; return the outcome."""
        retry, attempt = self._policy.retry, 1
        started = waiting.monotonic_now()
        given = self._arguments()
        begun = self._execution.in_progress[self._number]
        set_before = KEY.set(self._execution.key(self._number))
        try:
            while True:
                self._execution.check_lease()
                begun.begin_attempt(attempt)
                try:
                    value = await self._attempt_unless_cancelled(given)
                except Woken:
                    raise
                except Exception as error:  # noqa: BLE001 - each error is an outcome
                    note_error(error)
                    self.last_error = error
                else:
                    return self._outcome(value)
                pause_s = retry.pause_s(attempt)
                passed_s = waiting.monotonic_now() - started
                if self._is_final(attempt, passed_s + pause_s):
                    return OperationOutcome(b"", failure_from(self.last_error))
                begun.fail_attempt(f"{type(self.last_error).__name__}: {self.last_error}", pause_s)
                self._log_attempt(attempt, pause_s)
                self.last_error = None  # it holds the memory that the attempt needed
                await run_unless_cancelled(self._execution, waiting.pause(pause_s))
                attempt += 1
        finally:
            KEY.reset(set_before)

    async def _attempt_unless_cancelled(self, given: tuple[object, ...]) -> object:
        """Return the result of the next attempt.

        Raises:
            Woken: the run was cancelled, and the body was ended after its time of grace.
        """
        execution, branch = self._execution, self._execution.branch
        try:
            return await execution.grace.run_body(
                self._attempt(given), lambda: execution.is_cancel_asked_in(branch)
            )
        except BodyCancelledError as ended:
            execution.ended_bodies[self._number] = ended.how
            if not self._body.is_async:
                left = waiting.threads_left()
                execution.ended_bodies[self._number] = (
                    f"A thread cannot be ended. Threads of cancelled bodies in its process: {left}."
                )
            raise Woken from ended

    async def _attempt(self, given: tuple[object, ...]) -> object:
        timeout_s = self._policy.timeout_s
        asked = self._body.run(given)
        if timeout_s is None or not waiting.has_loop():
            return await asked
        late = f"Step {self._body.name!r} took longer than its timeout of {timeout_s:g} s."
        return await waiting.run_within(asked, timeout_s, late)

    def _is_final(self, attempt: int, next_at_s: float) -> bool:
        """Tell whether the failure of attempt number `attempt` is the outcome of the step."""
        retry = self._policy.retry
        if isinstance(self.last_error, (Cancelled, *self._policy.give_up_on)):
            return True
        return attempt >= retry.attempts or (retry.until is not None and next_at_s > retry.until)

    def _outcome(self, value: object) -> OperationOutcome:
        """Return the outcome of a body. If its result cannot be recorded, the outcome is a
        permanent failure.
        """
        try:
            return OperationOutcome(self._body.text(value))
        except FunctionFailedError as error:
            return OperationOutcome(b"", failure_from(error))

    def _log_attempt(self, attempt: int, pause_s: float) -> None:
        """Log a failed attempt that is retried. The failure of the last attempt is an outcome."""
        error = self.last_error
        structlog.get_logger().warning(
            "a step failed and is retried",
            run=self._execution.id,
            step=self._body.name,
            number=self._number,
            attempt=attempt,
            attempts_max=self._policy.retry.attempts,
            again_after_s=pause_s,
            error=f"{type(error).__name__}: {error}",
        )
