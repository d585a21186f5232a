"""A context for functions and steps that are called directly: `context()` (docs/guides/testing.md).

Logs are in memory. Calls of other functions go to fakes that the test gives, or to real functions.
`FakedContext` is a `Context` over a fake `Caller`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, TypeAlias

from indilog.apps.context import Context
from indilog.apps.function import Function, function_of
from indilog.apps.signature import ResultType
from indilog.base.errors import (
    FunctionFailedError,
    IndilogError,
    InvalidArgumentsError,
    UnknownFunctionError,
)
from indilog.base.log import LogSource, Session
from indilog.testing.memory_log import MemoryLogs

Fakes: TypeAlias = Mapping[str | Callable[..., Any], Any]
"""Keys are functions, or their names (`"app.function"`). A value is the fake that a call of the
function runs, or the result of the call.
"""

_PLAIN: Final = ResultType("a fake", Any)


@dataclass(frozen=True)
class Sent:
    """A function that was started with `ctx.send`.

    Attributes:
        function: `app.function`.
        arguments: its arguments, as JSON values.
        delay: seconds after which it would start.
        idempotency_key: its key; empty if it has none.
        id: the id that `send` returned.
    """

    function: str
    arguments: dict[str, Any]
    delay: float = 0.0
    idempotency_key: str = ""
    id: str = ""


@dataclass
class _Fake:
    """What replaces one function.

    Attributes:
        known: the function that it replaces; None: only its name is known.
        runs: the fake: a function, or a value that is returned.
    """

    known: Function | None
    runs: Any


@dataclass
class _FakeCaller:
    """Runs fakes: a `Caller`."""

    logs: LogSource
    fakes: dict[str, _Fake]
    sent: list[Sent]
    outcomes: dict[tuple[str, str], tuple[bytes, asyncio.Future[bytes]]] = field(
        default_factory=dict
    )
    ids: itertools.count[int] = field(default_factory=itertools.count)

    async def call(
        self,
        function: str,
        arguments: bytes,
        session: Session,
        *,
        key: str = "",
        holder: str = "",  # noqa: ARG002 - all outcomes are kept
    ) -> bytes:
        """Run the fake of `app.function`; with a `key`, once."""
        fake = self._fake(function)
        if not key:
            return await self._run(function, fake, arguments, session)
        before, outcome = self.outcomes.get((function, key), (arguments, None))
        if before != arguments:
            raise InvalidArgumentsError(
                f"{function} was called with other arguments before under the key {key!r}.",
                [{"field": "idempotency_key", "problem": "in use"}],
            )
        if outcome is None:
            running = asyncio.ensure_future(self._run(function, fake, arguments, session))
            self.outcomes[function, key] = arguments, (outcome := running)
        return await asyncio.shield(outcome)

    async def release(self, _holder: str, _keys: Sequence[str]) -> None:
        """Do nothing: all outcomes are kept."""

    async def holders(self, _prefix: str, _after: str, _session: Session) -> Sequence[str]:
        """Return no holder."""
        return ()

    async def send(
        self,
        function: str,
        arguments: bytes,
        session: Session,  # noqa: ARG002 - a start reads nothing
        *,
        delay_s: float,
        key: str = "",
    ) -> str:
        """Note that `app.function` was started; nothing runs."""
        self._check(self._fake(function), arguments)
        given = json.loads(arguments)
        for sent in self.sent:
            if key and (sent.function, sent.idempotency_key) == (function, key):
                return sent.id
        id_ = f"sent-{next(self.ids) + 1}"
        self.sent.append(Sent(function, given, delay_s, key, id_))
        return id_

    def _fake(self, function: str) -> _Fake:
        if (fake := self.fakes.get(function)) is not None:
            return fake
        near = get_close_matches(function, self.fakes, n=1)
        has = f"it has {near[0]!r}" if near else f"it has {', '.join(sorted(self.fakes)) or 'none'}"
        raise UnknownFunctionError(
            f"{function} is called, but this context has no fake of it ({has}); give one: "
            f"context({{{function!r}: lambda **arguments: ...}}), or the function itself."
        )

    def _check(self, fake: _Fake, arguments: bytes) -> dict[str, Any]:
        """Return the arguments as the function gets them."""
        if fake.known is not None:
            return fake.known.signature.arguments(arguments)
        given: dict[str, Any] = json.loads(arguments)
        return given

    async def _run(self, name: str, fake: _Fake, arguments: bytes, session: Session) -> bytes:
        given = self._check(fake, arguments)
        real = function_of(fake.runs)
        try:
            if real is not None:
                value = await self._run_real(real, arguments, session)
            elif callable(fake.runs):
                value = fake.runs(**given)
                value = await value if inspect.isawaitable(value) else value
            else:
                value = fake.runs
        except FunctionFailedError:
            raise
        except Exception as error:
            if isinstance(error, IndilogError) and real is None:
                raise  # what the platform would raise
            kind = type(error).__name__
            text = " ".join(str(error).split()).rstrip(".")
            raise FunctionFailedError(
                f"{name} failed: {kind}{': ' if text else ''}{text}.",
                kind=kind,
                temporary=isinstance(error, IndilogError) and error.retryable,
            ) from error
        known = fake.known or real
        return known.signature.result_text(value) if known is not None else _PLAIN.text(value)

    async def _run_real(self, real: Function, arguments: bytes, session: Session) -> object:
        """Run a function of an application on these logs, as a nested call."""
        ctx = Context(
            self.logs, self, session=session, invocation_id=f"nested-{next(self.ids) + 1}",
            function=real.qualified_name,
        )  # fmt: skip
        given = (ctx,) if real.signature.takes_context else ()
        body = partial(real.body, *given, **real.signature.arguments(arguments))

        async def run() -> object:
            ctx.begin()
            try:
                if real.is_async:
                    return await body()
                value = await asyncio.to_thread(partial(copy_context().run, body))
                return await value if inspect.isawaitable(value) else value
            finally:
                ctx.end()

        return await asyncio.create_task(run())


class FakedContext(Context):
    """A context whose logs are in memory and whose calls go to fakes.

    Attributes:
        logs: the logs; a test may read them, or give them to another context.
        sent: what was started with `send`, in order.
    """

    def __init__(self, logs: LogSource, fakes: Fakes, function: str) -> None:
        self.logs = logs
        self.sent: list[Sent] = []
        caller = _FakeCaller(logs, dict(_named(*item) for item in fakes.items()), self.sent)
        super().__init__(logs, caller, invocation_id="test", function=function)


def context(
    fakes: Fakes | None = None, *, logs: LogSource | None = None, function: str = "test"
) -> FakedContext:
    """Return a context for a function or step that a test calls directly.

    It becomes the current context of the running task, so libraries find it.

    A fake is a function of the arguments (sync or async), a value to return, or a decorated
    function of an app. A decorated function runs on the same logs. A fake that raises an
    `IndilogError` plays the platform: the caller gets that error. After any other exception the
    caller gets `FunctionFailedError`, as on the platform. `send` runs nothing; it appends to
    `sent`.

    Args:
        fakes: the functions that may be called or sent. A key that is a decorated function checks
            arguments and result by its type hints.
        logs: where records go; None: new `MemoryLogs`.
        function: name of the calling function, for its logger.

    Raises:
        TypeError: a key is no function of an app.
        RuntimeError: no event loop runs.
    """
    made = FakedContext(logs if logs is not None else MemoryLogs(), fakes or {}, function)
    made.begin()
    return made


def _named(key: str | Callable[..., Any], runs: object) -> tuple[str, _Fake]:
    if isinstance(key, str):
        return key, _Fake(None, runs)
    if (known := function_of(key)) is None:
        raise TypeError(
            f"{getattr(key, '__name__', key)!r} is not a function of an app; decorate it with "
            '@app.function, or name it "app.function".'
        )
    return known.qualified_name, _Fake(known, runs)
