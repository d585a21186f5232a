"""The `Workflow` object that a workflow's body gets: steps whose outcomes are decided once, and
values that are the same in every re-execution.

`runner` makes a `Workflow` for each execution of a run, and `replay_check` for each replay. The
base class `Operations` has the other operations.
"""

from __future__ import annotations

import random as chance
import uuid as uuids
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Final, Never, TypeAlias, TypeVar, overload

import structlog
from cachetools import LRUCache
from xxhash import xxh3_128_digest, xxh3_128_intdigest

from bokiflow.operations.attempts import RETRIES, AttemptPolicy, Attempts, Retry
from bokiflow.operations.body import NAME_BYTES_MAX, Body
from bokiflow.operations.compensation import COMPENSATE, COMPENSATION_RETRIES
from bokiflow.operations.notifications import decide_waiting
from bokiflow.operations.operations import Operations
from bokiflow.operations.progress import EVENT, plain_text
from bokiflow.runs import waiting
from bokiflow.runs.decision_numbers import STATUS
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.execution import KEY, Execution, OperationOutcome, raise_failure
from bokiflow.runs.rounds import ContinuedAsNew
from indilog.sdk import Logs

STEP: Final = "step"
NOW: Final = "now"
RETRIES_MAX: Final = 1000
BACKOFF_S: Final = 0.1
_BODIES_MAX: Final = 1024
_ValueT = TypeVar("_ValueT")
Errors: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]
"""A type of errors, or several types."""


class Workflow(Operations):
    """One execution of a run, as the workflow's code sees it.

    The code may run several times, each time from its first line. So the code between operations
    must be deterministic: it may depend only on its arguments and on results of operations. For
    clocks, random values and calls there are operations (`now`, `random`, `uuid`, `call`). Access
    to logs, networks and files belongs into steps.

    Attributes:
        vars: values that queries of the run see (`Flow.query`). Each execution begins without
            values; the workflow's code sets them.
    """

    def __init__(self, execution: Execution, logs: Logs) -> None:
        super().__init__(execution, logs)
        self.vars: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """The run's id."""
        return self.execution.id

    @property
    def key(self) -> str:
        """The idempotency key of the step whose body is running, to pass to external services.

        All attempts and re-executions of the step have the same key. No other step has it.
        """
        key = KEY.get()
        if key is None:
            raise FlowSettingsError("wf.key is the key of a step; use it in the body of a step.")
        return key

    @property
    def logger(self) -> structlog.typing.FilteringBoundLogger:
        """A structured logger that names the run. Each re-execution logs its lines again."""
        logger: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(run=self.id)
        return logger

    # --- steps

    @overload
    def step(
        self,
        body: Callable[..., Coroutine[Any, Any, _ValueT]],
        /,
        *arguments: object,
        retries: int = ...,
        backoff: float = ...,
        retry: Retry | None = ...,
        timeout: float | timedelta | None = ...,
        give_up_on: Errors = ...,
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
        retry: Retry | None = ...,
        timeout: float | timedelta | None = ...,
        give_up_on: Errors = ...,
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
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        give_up_on: Errors = (),
        name: str | None = None,
        compensate: Callable[..., Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Run `body(*arguments)` and return its result, decided once by the log.

        The body may run several times (after an error, after a crash, concurrently with a stalled
        executor). So its external effects should be idempotent, or carry `wf.key`. The step's
        outcome is decided once, and every execution uses that outcome. If the first parameter of
        the body is named `ctx`, it gets the function's context. A sync body runs in a thread.

        Args:
            body: a function; the result is converted to its return type.
            arguments: arguments of the body.
            retries: further attempts after the first one raised (0 to 1,000). Each re-execution
                counts from 0. `Cancelled` is not retried. A cancellation of the run ends the pause
                before a retry.
            backoff: seconds before the first retry. The pause doubles with each further retry, up
                to 60.
            retry: a whole policy instead of `retries` and `backoff`.
            timeout: seconds (or a timedelta) after which an attempt fails with `TimeoutError`. An
                async body is cancelled then. A sync body continues in its thread, and its result is
                dropped. None: without limit.
            give_up_on: a type of errors, or several types, after which no further attempt is made.
            name: name of the step in the log; default: the name of the body.
            compensate: function that undoes the step. If the workflow later fails or is cancelled,
                the function is called with the step's result, as a separate step.

        Raises:
            StepFailedError: the last attempt raised; this failure is the decided outcome.
            Cancelled: the run was cancelled before the step had an outcome.
            ChangedWorkflowError: another operation was decided at this place of the code.
            FlowSettingsError: `body` is not a function, or a limit is exceeded.
        """
        policy = _policy(retries, backoff, retry, timeout, give_up_on)
        do, undo = body_of(body, name), None if compensate is None else body_of(compensate)
        number = self.execution.number()
        step = self._step(number, do, arguments, policy, undo)
        return self.execution.asked.add(number, do.name, STEP, step)

    def compensate(self, undo: Callable[..., Any], /, *arguments: object) -> None:
        """Register `undo(*arguments)` to run as a separate step if the workflow later fails or is
        cancelled.

        Use it to undo the effects of `wf.run`, `wf.call` or `wf.transact`.
        """
        self._add_compensation(self.execution.number(), body_of(undo), arguments)

    def _add_compensation(self, number: str, undo: Body, arguments: tuple[object, ...]) -> None:
        policy = AttemptPolicy(Retry(COMPENSATION_RETRIES + 1))

        async def compensation(number: str) -> OperationOutcome:
            return await self._attempts(number, undo, arguments, policy).run()

        self.compensations.add(number, undo.name, COMPENSATE, compensation)

    async def _step(
        self,
        number: str,
        body: Body,
        arguments: tuple[object, ...],
        policy: AttemptPolicy,
        undo: Body | None,
    ) -> object:
        attempts = self._attempts(number, body, arguments, policy)
        decided = await decide_waiting(self.execution, number, body.name, STEP, attempts.run)
        if decided.failure is not None:
            raise_failure(decided, attempts.last_error)
        value = body.result(decided.result)
        if undo is not None:
            self._add_compensation(number, undo, (value,))
        return value

    def _attempts(
        self, number: str, body: Body, arguments: tuple[object, ...], policy: AttemptPolicy
    ) -> Attempts:
        return Attempts(
            self.execution,
            number,
            body,
            lambda: (self.ctx, *arguments) if body.takes_context else arguments,
            policy,
        )

    # --- endless workflows

    def continue_as_new(self, *arguments: object, **named: object) -> Never:
        """End this round of the run, and begin the next one with these arguments.

        Use it in a workflow that has no end, so that its history stays short. The new round begins
        with an empty history, at the first line of the newest code. The run keeps its id, so
        handles and signals reach the current round. Signals that no operation has consumed remain.
        Compensations of the round are dropped, as when the workflow returns. Children that have not
        ended continue. The code after the call does not run. One record ends the round and begins
        the next one, so a crash cannot separate the two.

        Args:
            arguments: the arguments of the next round.
            named: the arguments of the next round by name.

        Raises:
            FlowSettingsError: the caller is a step, a branch or a task.
            Cancelled: a cancellation is requested; the round does not end.
            InvalidArgumentsError: the arguments do not fit the type hints; the run fails.
            UnfinishedOperationError: an operation has not finished; the run fails.
        """
        self.execution.check_may_continue()
        raise ContinuedAsNew(arguments, named)

    # --- progress for people

    def publish(self, event: object) -> None:
        """Add an event to the run's history, for `Handle.events`: progress, or partial results.

        Each event is published once, in the order of the code. It is durable before the next
        operation begins.

        Args:
            event: any value that has a JSON form, at most 16 KiB of JSON.

        Raises:
            FlowSettingsError: the event has no JSON form, or is too large.
        """
        text = plain_text(f"Event of run {self.id!r}", event)
        self.execution.decide_now(EVENT, EVENT, lambda: text)

    def set_status(self, value: object) -> None:
        """Set the value that `Status.value` shows until the next call. Durability and errors are
        those of `publish`.
        """
        text = plain_text(f"Status of run {self.id!r}", value)
        self.execution.decide_now(STATUS, STATUS, lambda: text)

    # --- changed code

    def patched(self, name: str) -> bool:
        """Tell whether this run takes the path of the changed code; the log decides it once.

        To deploy changed code while runs of the old code are open, write
        `if wf.patched("name"): new steps; else: old steps`. Runs that had already passed this place
        keep the old path; all other runs take the new path. When no run of the old code is left,
        delete the old path and this call.

        Args:
            name: name of the change, unique among the changes of the workflow.

        Raises:
            FlowSettingsError: the name is empty or too long.
        """
        if not name or len(name.encode()) > NAME_BYTES_MAX:
            raise FlowSettingsError(f"A patch's name is 1 to {NAME_BYTES_MAX} bytes of text.")
        return self.execution.decide_patch(name)

    # --- values that stay the same

    def now(self) -> float:
        """Return the time of the first execution of this line, seconds since 1970."""
        decided = self.execution.decide_now(NOW, NOW, lambda: b"%r" % waiting.seconds_now())
        return float(decided.result)

    def random(self) -> chance.Random:
        """Return a random generator with the same seed in every re-execution; not for secrets."""
        number = self.execution.number()
        return chance.Random(xxh3_128_intdigest(self.execution.key(number).encode()))  # noqa: S311 - no secret

    def uuid(self) -> uuids.UUID:
        """Return a UUID that is the same in every re-execution."""
        number = self.execution.number()
        return uuids.UUID(bytes=xxh3_128_digest(self.execution.key(number).encode()), version=5)


def _policy(
    retries: int,
    backoff: float,
    retry: Retry | None,
    timeout: float | timedelta | None,
    give_up_on: Errors,
) -> AttemptPolicy:
    """Return how a step is attempted.

    Raises:
        FlowSettingsError: a value is out of its range, or both forms of a policy are given.
    """
    if isinstance(give_up_on, type):
        give_up_on = (give_up_on,)
    if not 0 <= retries <= RETRIES_MAX or backoff < 0:
        raise FlowSettingsError(f"retries must be 0 to {RETRIES_MAX:,}, and backoff not negative.")
    if retry is None:
        retry = Retry(retries + 1, backoff)
    elif (retries, backoff) != (RETRIES, BACKOFF_S):
        raise FlowSettingsError("Give retry=Retry(...), or retries and backoff, not both.")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return AttemptPolicy(retry, seconds, give_up_on)


_BODIES: Final[LRUCache[object, Body]] = LRUCache(_BODIES_MAX)


def body_of(body: Callable[..., Any], name: str | None = None) -> Body:
    """Return the description of a step's body. Descriptions are cached by the body's code."""
    code = getattr(body, "__code__", None)
    key = (code, name, str(getattr(body, "__annotations__", {}).get("return")))
    known: Body | None = _BODIES.get(key) if code is not None else None
    if known is None:
        known = Body(body, name)
        if code is not None:
            _BODIES[key] = known
        return known
    return known.of(body)
