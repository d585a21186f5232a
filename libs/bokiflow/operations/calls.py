"""Calls functions from workflows: `await wf.call(send_mail, room, seat)`.

The operation's key is the idempotency key of the call, and the platform records the call before the
function runs. So the call has one outcome, even if several executors make it. The platform holds
the outcome until the run has recorded it (`bokiflow.runs.held_calls`). `Operations.call` uses this
module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from bokiflow.operations.body import Body, check_function
from bokiflow.runs import waiting
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.execution import Execution, OperationOutcome, failure_from, raise_failure
from bokiflow.runs.held_calls import HeldCalls
from bokiflow.runs.keys import short_key
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.run_log import PATIENCE_TRIES, is_transient
from indilog import Context, IndilogError, OutcomeUnknownError
from indilog.sdk import ResultType, function_of, plain_value

CALL: Final = "call"
_KEY_BYTES_MAX: Final = 255
_UNKNOWN_TRIES: Final = 3
_PAUSE_S_MIN: Final = 0.02
_PAUSE_S_MAX: Final = 5.0


class FunctionCall:
    """A function of an application, and the arguments of a call."""

    def __init__(
        self,
        function: str | Callable[..., Any],
        given: tuple[object, ...],
        named: dict[str, object],
    ) -> None:
        if isinstance(function, str):
            if given:
                raise FlowSettingsError(
                    f"Call {function!r} with named arguments; its parameters are not known here."
                )
            self.name, self.arguments = function, named
            self._body: Body | None = None
            return
        check_function(function)
        known = function_of(function)
        if known is None:
            raise FlowSettingsError(
                f"{getattr(function, '__name__', function)!r} is not a function of an app; "
                "make it one with @app.function, or run it with wf.step."
            )
        names = list(inspect.signature(function).parameters)
        names = names[1 if known.signature.takes_context else 0 :]
        if len(given) > len(names):
            raise FlowSettingsError(
                f"{known.qualified_name} takes {len(names)} arguments, not {len(given)}."
            )
        self.name = known.qualified_name
        self.arguments = {**dict(zip(names, given, strict=False)), **named}
        self._body = Body(function, None)
        self._function = function

    async def run(self, ctx: Context, key: str, holder: str) -> bytes:
        """Call the function and return its result as JSON text."""
        if self._body is None:
            value = await ctx.call_held(self.name, self.arguments, key=key, holder=holder)
            return ResultType(self.name, Any).text(value)
        value = await ctx.call_held(self._function, self.arguments, key=key, holder=holder)
        return self._body.text(value)

    def result(self, text: bytes) -> Any:  # noqa: ANN401 - of the function's type
        """Return the value of JSON text."""
        return plain_value(text) if self._body is None else self._body.result(text)


async def call(
    execution: Execution,
    number: str,
    ctx: Callable[[], Context],
    of: FunctionCall,
    held: HeldCalls,
) -> Any:  # noqa: ANN401
    """See `Operations.call`."""
    key = short_key(execution.key(number), _KEY_BYTES_MAX)
    errors: list[BaseException] = []

    async def called() -> OperationOutcome:
        held.note_begun()
        await held.release_if_many()
        try:
            return OperationOutcome(await _call_with_retry(of, ctx(), key, held.holder))
        except Exception as error:  # noqa: BLE001 - each error is an outcome
            errors.append(error)
            return OperationOutcome(b"", failure_from(error))

    decided = await execution.decide(number, of.name, CALL, called, may_wait=True)
    held.note_decided(number, key)
    raise_failure(decided, errors[-1] if errors else None)
    return of.result(decided.result)


async def _call_with_retry(of: FunctionCall, ctx: Context, key: str, holder: str) -> bytes:
    """Call until there is an outcome. The key makes repeated calls idempotent."""
    pause_s, unknown = _PAUSE_S_MIN, 0
    last: IndilogError | None = None
    for tries in range(PATIENCE_TRIES):
        if tries:
            await waiting.pause(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        try:
            return await of.run(ctx, key, holder)
        except IndilogError as error:
            last = error
            unknown += isinstance(error, OutcomeUnknownError)
            if not is_transient(error) or unknown == _UNKNOWN_TRIES:
                raise  # the outcome of this operation is that the outcome of the call is unknown
    raise Stopped(f"{of.name} cannot be called now: {last}", last)
