"""The `Workflow` object that a workflow's body gets. It has steps whose outcomes are decided once,
and values that are the same in every re-execution.
"""

from __future__ import annotations

import random as chance
import uuid as uuids
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar, overload

import structlog
from cachetools import LRUCache
from xxhash import xxh3_128_digest, xxh3_128_intdigest

from bokiflow.operations.body import Body
from bokiflow.operations.compensation import COMPENSATE, COMPENSATION_RETRIES
from bokiflow.operations.notifications import decide_waiting, run_unless_cancelled
from bokiflow.operations.operations import Operations
from bokiflow.runs import waiting
from bokiflow.runs.errors import Cancelled, FlowSettingsError
from bokiflow.runs.execution import KEY, Execution, OperationOutcome, failure_from, raise_failure
from bokiflow.runs.run_log import Logs
from indilog import Context, FunctionFailedError, Log

STEP: Final = "step"
NOW: Final = "now"
RETRIES: Final = 3
RETRIES_MAX: Final = 1000
BACKOFF_S: Final = 0.1
BACKOFF_S_MAX: Final = 60.0
_BODIES_MAX: Final = 1024
_ValueT = TypeVar("_ValueT")


class Workflow(Operations):
    """One execution of a run, as the workflow's code sees it.

    The code may run several times, each time from its first line. So the code between operations
    must be deterministic: it may depend only on its arguments and on results of operations. For
    clocks, random values and calls there are operations (`now`, `random`, `uuid`, `call`). Access
    to logs, networks and files belongs into steps.
    """

    def __init__(self, execution: Execution, logs: Logs) -> None:
        self.execution = execution
        self._logs = logs

    @property
    def id(self) -> str:
        """The run's id."""
        return self.execution.id

    @property
    def key(self) -> str:
        """The idempotency key of the step whose body is running, to pass to external services.

        All attempts and re-executions of the step have the same key; no other step has it.
        """
        key = KEY.get()
        if key is None:
            raise FlowSettingsError("wf.key is the key of a step; use it in the body of a step.")
        return key

    @property
    def ctx(self) -> Context:
        """The context of the function that executes the run, for calls.

        Raises:
            FlowSettingsError: the run is executed outside of the platform.
        """
        if not isinstance(self._logs, Context):
            raise FlowSettingsError("This workflow runs outside of a function; it has no context.")
        return self._logs

    @property
    def logger(self) -> structlog.typing.FilteringBoundLogger:
        """A structured logger that names the run. Each re-execution logs its lines again."""
        logger: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(run=self.id)
        return logger

    def log(self, name: str) -> Log:
        """Return the log `name`, to be used in the bodies of steps."""
        return self._logs.log(name)

    # --- steps

    @overload
    def step(
        self,
        body: Callable[..., Coroutine[Any, Any, _ValueT]],
        /,
        *arguments: object,
        retries: int = ...,
        backoff: float = ...,
        name: str | None = ...,
        compensate: Callable[[_ValueT], object] | None = ...,
    ) -> Coroutine[Any, Any, _ValueT]: ...

    @overload
    def step(
        self,
        body: Callable[..., _ValueT],
        /,
        *arguments: object,
        retries: int = ...,
        backoff: float = ...,
        name: str | None = ...,
        compensate: Callable[[_ValueT], object] | None = ...,
    ) -> Coroutine[Any, Any, _ValueT]: ...

    def step(
        self,
        body: Callable[..., Any],
        /,
        *arguments: object,
        retries: int = RETRIES,
        backoff: float = BACKOFF_S,
        name: str | None = None,
        compensate: Callable[..., Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Run `body(*arguments)` and return its result, decided once by the log.

        The body may run several times (after an error, after a crash, concurrently with a stalled
        executor). So its external effects should be idempotent, or carry `wf.key`. The step's
        outcome is decided once, and every execution uses that outcome. If the first parameter is
        named `ctx`, it gets the function's context. A sync body runs in a thread.

        Args:
            body: a function; the result is converted to its return type.
            arguments: arguments of the body.
            retries: further attempts after the first one raised (0 to 1,000). Each re-execution
                counts from 0. `Cancelled` is not retried. A cancellation of the run ends the pause
                before a retry.
            backoff: seconds before the first retry; doubled for each further retry, at most 60.
            name: name of the step in the log; default: the name of the body.
            compensate: function that undoes the step. It is called with the step's result, as a
                separate step, if the workflow fails or is cancelled later.

        Raises:
            StepFailedError: the last attempt raised; this failure is the decided outcome.
            Cancelled: the run was cancelled before the step had an outcome.
            ChangedWorkflowError: another operation was decided at this place of the code.
            FlowSettingsError: `body` is not a function, or a limit is exceeded.
        """
        if not 0 <= retries <= RETRIES_MAX or backoff < 0:
            raise FlowSettingsError(
                f"retries must be 0 to {RETRIES_MAX:,}, and backoff not negative."
            )
        do, undo = body_of(body, name), None if compensate is None else body_of(compensate)
        number = self.execution.number()
        step = self._step(number, do, arguments, retries, backoff, undo)
        return self.execution.asked.add(number, do.name, STEP, step)

    def compensate(self, undo: Callable[..., Any], /, *arguments: object) -> None:
        """Run `undo(*arguments)` as a separate step if the workflow fails or is cancelled later.

        Use it to undo the effects of `wf.run`, `wf.call` or `wf.transact`.
        """
        self._add_compensation(self.execution.number(), body_of(undo), arguments)

    def _add_compensation(self, number: str, undo: Body, arguments: tuple[object, ...]) -> None:
        async def compensation(number: str) -> OperationOutcome:
            return await self._attempts(
                number, undo, arguments, COMPENSATION_RETRIES, BACKOFF_S, []
            )

        self.compensations.add(number, undo.name, COMPENSATE, compensation)

    async def _step(
        self,
        number: str,
        body: Body,
        arguments: tuple[object, ...],
        retries: int,
        backoff: float,
        undo: Body | None,
    ) -> object:
        errors: list[BaseException] = []
        attempts = partial(self._attempts, number, body, arguments, retries, backoff, errors)
        decided = await decide_waiting(self.execution, number, body.name, STEP, attempts)
        if decided.failure is not None:
            raise_failure(decided, errors[-1] if errors else None)
        value = body.result(decided.result)
        if undo is not None:
            self._add_compensation(number, undo, (value,))
        return value

    async def _attempts(
        self,
        number: str,
        body: Body,
        arguments: tuple[object, ...],
        retries: int,
        backoff: float,
        errors: list[BaseException],
    ) -> OperationOutcome:
        given = (self.ctx, *arguments) if body.takes_context else arguments
        set_before = KEY.set(self.execution.key(number))
        try:
            for attempt in range(retries + 1):
                try:
                    value = await body.run(given)
                except Exception as error:  # noqa: BLE001 - each error is an outcome
                    errors.append(error)
                else:
                    return _outcome(body, value)
                if attempt == retries or isinstance(errors[-1], Cancelled):
                    break
                pause_s = min(backoff * 2**attempt, BACKOFF_S_MAX)
                self._log_attempt(number, body, attempt, retries, pause_s, errors[-1])
                await run_unless_cancelled(self.execution, waiting.pause(pause_s))
            return OperationOutcome(b"", failure_from(errors[-1]))
        finally:
            KEY.reset(set_before)

    def _log_attempt(
        self,
        number: str,
        body: Body,
        attempt: int,
        retries: int,
        pause_s: float,
        error: BaseException,
    ) -> None:
        """Log a failed attempt that is retried. The failure of the last attempt is an outcome."""
        self.logger.warning(
            "a step failed and is retried",
            step=body.name,
            number=number,
            attempt=attempt + 1,
            attempts_max=retries + 1,
            again_after_s=pause_s,
            error=f"{type(error).__name__}: {error}",
        )

    # --- values that stay the same

    def now(self) -> float:
        """Return seconds since 1970 as of the first execution of this line."""
        decided = self.execution.decide_now(NOW, NOW, lambda: b"%r" % waiting.seconds_now())
        return float(decided.result)

    def now_utc(self) -> datetime:
        """Return `now` as a UTC datetime."""
        return datetime.fromtimestamp(self.now(), UTC)

    def random(self) -> chance.Random:
        """Return a random generator with the same seed in every re-execution; not for secrets."""
        number = self.execution.number()
        return chance.Random(xxh3_128_intdigest(self.execution.key(number).encode()))  # noqa: S311 - no secret

    def uuid(self) -> uuids.UUID:
        """Return a UUID that is the same in every re-execution."""
        number = self.execution.number()
        return uuids.UUID(bytes=xxh3_128_digest(self.execution.key(number).encode()), version=5)


def _outcome(body: Body, value: object) -> OperationOutcome:
    """Return the outcome of a step. A result that cannot be recorded is a permanent failure."""
    try:
        return OperationOutcome(body.text(value))
    except FunctionFailedError as error:
        return OperationOutcome(b"", failure_from(error))


_BODIES: Final[LRUCache[object, Body]] = LRUCache(_BODIES_MAX)


def body_of(body: Callable[..., Any], name: str | None = None) -> Body:
    """Return the description of a step's body, cached by its place in the code."""
    code = getattr(body, "__code__", None)
    key = (code, name, str(getattr(body, "__annotations__", {}).get("return")))
    known: Body | None = _BODIES.get(key) if code is not None else None
    if known is None:
        known = Body(body, name)
        if code is not None:
            _BODIES[key] = known
        return known
    return known.of(body)
