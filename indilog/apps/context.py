"""The context of a running function: logs, calls of other functions, its identity (API.md, "A
function").

A `Context` does not depend on where it runs: its worker passes in the source of logs and the caller
of functions. A worker creates a context for each call; `indilog.testing.context` returns one whose
calls go to fakes.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - `map` waits for several calls, sync functions for one
import concurrent.futures
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeVar, overload

import structlog

from indilog.apps.function import Function, function_of
from indilog.apps.signature import arguments_text, plain_value
from indilog.base.deployed import due_time_in
from indilog.base.log import Log, LogSource, Session, check_log_name

_ResultT = TypeVar("_ResultT")

DELAY_S_MAX: Final = 10 * 365 * 24 * 3600
"""Longest delay in seconds: ten years."""
MAP_CALLS_MAX: Final = 32
"""Calls that one `Context.map` runs at once, by default."""


class Caller(Protocol):
    """Calls and starts functions for a context."""

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        """Run `app.function` and return its result as JSON text.

        The call reads at the position of `session`, and raises it.

        With an idempotency `key`, all calls with that key get one outcome. If `holder` is not
        empty, the outcome is held for it.
        """

    async def release(self, holder: str, keys: Sequence[str]) -> None:
        """Release the outcomes that are held for `holder` under these keys, or all of them."""

    async def holders(self, prefix: str, after: str, session: Session) -> Sequence[str]:
        """Return a page of the holders of outcomes. Raise `session`, so that it sees what these
        holders had appended before their calls.
        """

    async def send(
        self, function: str, arguments: bytes, session: Session, *, delay_s: float, key: str = ""
    ) -> str:
        """Start `app.function` later and return the invocation's id."""


class Context:
    """The context of a running function: logs, calls of other functions, its identity.

    All operations of a context share one session. So reads see the function's own appends, its
    caller's appends before the call, and those of the functions that it called.

    Attributes:
        invocation_id: names this run of the function.
    """

    def __init__(
        self,
        logs: LogSource,
        caller: Caller,
        *,
        session: Session | None = None,
        invocation_id: str = "",
        function: str = "",
    ) -> None:
        self.invocation_id = invocation_id
        self.session = session or Session()
        self._logs = logs
        self._caller = caller
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._waits: set[concurrent.futures.Future[Any]] = set()
        self._is_over = False

    def log(self, name: str) -> Log:
        """Return the log `name`; it need not exist before.

        Raises:
            InvalidTagError: `name` cannot be a log's name.
        """
        return self._logs.log(check_log_name(name), self.session)

    @property
    def due(self) -> float | None:
        """The due time for which a schedule called the function, in seconds since 1970; None: the
        function was called otherwise.
        """
        return due_time_in(self.invocation_id)

    @property
    def logger(self) -> structlog.typing.FilteringBoundLogger:
        """A structured logger that names the function and the invocation."""
        logger: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(
            function=self._function, invocation=self.invocation_id
        )
        return logger

    @overload
    async def call(
        self,
        function: Callable[..., Coroutine[Any, Any, _ResultT]],
        /,
        *,
        idempotency_key: str = "",
        **arguments: object,
    ) -> _ResultT: ...

    @overload
    async def call(
        self,
        function: str | Callable[..., Any],
        /,
        *,
        idempotency_key: str = "",
        **arguments: object,
    ) -> Any: ...  # noqa: ANN401

    async def call(
        self,
        function: str | Callable[..., Any],
        /,
        *,
        idempotency_key: str = "",
        **arguments: object,
    ) -> Any:
        """Run another function and return its result.

        A call of a function object returns a value of its return type; a call by `"app.function"`
        returns plain JSON values. The call continues this session, even if the call fails: later
        reads of this context see what the function appended.

        With an `idempotency_key` (1 to 255 characters; keys of different functions are independent)
        the call is recorded first. For `results_kept_s` seconds, each call with the same key gets
        the one recorded outcome, also after a crash. If a worker crashes, the body runs again; the
        outcome is decided once.

        Raises:
            UnknownFunctionError, InvalidArgumentsError: the function did not run; its key may
                belong to a call with other arguments.
            FunctionFailedError: the function raised.
            WorkerCrashedError, CallOutcomeUnknownError: the call may have had effects.
        """
        return await self._call(function, arguments, key=idempotency_key)

    async def _call(
        self,
        function: str | Callable[..., Any],
        arguments: Mapping[str, object],
        *,
        key: str,
        holder: str = "",
    ) -> Any:  # noqa: ANN401
        name, known = _named(function)
        text = await self._caller.call(
            name, arguments_text(arguments), self.session, key=key, holder=holder
        )
        return known.signature.result(text) if known is not None else plain_value(text)

    async def call_held(
        self,
        function: str | Callable[..., Any],
        arguments: Mapping[str, object],
        *,
        key: str,
        holder: str,
    ) -> Any:  # noqa: ANN401
        """Do the same as `call` with an idempotency key, and hold the outcome for `holder` until
        `release_calls`. For libraries that record the outcome elsewhere.

        Args:
            function: the function, or its name.
            arguments: its arguments by name.
            key: the idempotency key (1 to 255 printable characters).
            holder: names who releases the outcome (1 to 512 characters).

        Raises:
            OverloadedError: too many outcomes of the application are held; nothing was done.
            IndilogError: as in `call`.
        """
        return await self._call(function, arguments, key=key, holder=holder)

    async def release_calls(self, holder: str, keys: Sequence[str] = ()) -> None:
        """Release the outcomes that are held for `holder` under these keys (at most 1,000); without
        a key, all of them. From then on they are kept for `results_kept_s` seconds.

        The release is not durable when this returns. If the platform crashes within a second, the
        outcomes may stay held, and must be released again.

        Raises:
            NotReadyError: the outcomes may stay held.
        """
        await self._caller.release(holder, keys)

    async def holders(self, prefix: str) -> AsyncIterator[str]:
        """Yield the holders of outcomes whose names begin with `prefix`, in the order of names.

        Later reads of this context see what a holder had appended before its calls.

        Raises:
            NotReadyError, QuorumUnavailableError: the platform does not answer.
        """
        after = ""
        while page := await self._caller.holders(prefix, after, self.session):
            for holder in page:
                yield holder
            after = page[-1]

    async def send(
        self,
        function: str | Callable[..., Any],
        /,
        *,
        delay: float = 0.0,
        idempotency_key: str = "",
        **arguments: object,
    ) -> str:
        """Start another function without waiting for it; return the invocation's id.

        With `delay` it starts that many seconds later. When this returns, the invocation is as
        durable as an append. It runs again after crashes until one outcome is recorded, so its body
        may run more than once. The outcome is kept for `results_kept_s` seconds. After
        `invocation_tries_max` losses of its worker or compute node the invocation fails. Repeating
        an `idempotency_key` returns the id of the first invocation with that key.

        Raises:
            UnknownFunctionError, InvalidArgumentsError: there is no such function, the arguments do
                not fit it, or the key was used with others; nothing was started.
            OverloadedError: too many invocations are waiting; nothing was started.
            CallOutcomeUnknownError: the call may be recorded.
            ValueError: the delay is negative or no number.
        """
        check_delay(delay)
        name, _ = _named(function)
        return await self._caller.send(
            name,
            arguments_text(arguments),
            self.session,
            delay_s=delay,
            key=idempotency_key,
        )

    async def map(
        self,
        function: str | Callable[..., Any],
        items: Iterable[Mapping[str, Any]],
        *,
        calls_max: int = MAP_CALLS_MAX,
    ) -> list[Any]:
        """Call a function once for each item (its keyword arguments), several at once; return the
        results in the order of the items.

        The first failure cancels the calls that still run, and is raised.
        """
        slots = asyncio.Semaphore(calls_max)

        async def one(item: Mapping[str, Any]) -> Any:  # noqa: ANN401
            async with slots:
                return await self.call(function, **item)

        arguments = list(items)
        for item in arguments:
            if not isinstance(item, Mapping):
                raise TypeError(
                    "map takes the keyword arguments of each call, such as [{'n': 1}, {'n': 2}], "
                    f"not {type(item).__name__}: {item!r:.50}."
                )
        tasks = [asyncio.ensure_future(one(item)) for item in arguments]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def wait(self, awaitable: Awaitable[_ResultT]) -> _ResultT:
        """Wait for an awaitable from a sync function, which runs in a thread.

        `seqnum = ctx.wait(ctx.log("orders").append(b"..."))`. Never call it in an async function.
        If the call has ended while its thread still runs (a timeout, or the caller disconnected),
        this raises `asyncio.CancelledError`, which ends the thread.
        """

        async def awaited() -> _ResultT:
            self.begin()  # the calling thread has no current context
            return await awaitable

        waiting = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        self._waits.add(waiting)
        if self._is_over:  # `end` cancels only the waits that began before it
            waiting.cancel()
        try:
            return waiting.result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError("The call is over.") from None
        finally:
            self._waits.discard(waiting)

    def begin(self) -> None:
        """Make this the current task's context (`current_context`); the worker calls it before the
        body.
        """
        _CURRENT.set(self)

    def end(self) -> None:
        """End the call: each `wait`, current or later, is cancelled."""
        self._is_over = True
        for waiting in list(self._waits):
            waiting.cancel()


_CURRENT: Final[ContextVar[Context | None]] = ContextVar("context", default=None)


def current_context() -> Context | None:
    """Return the context of the function that runs, None outside of functions.

    For libraries whose functions have no context parameter.
    """
    return _CURRENT.get()


@contextmanager
def current_of(context: Context) -> Iterator[None]:
    """Make `context` the current one of this task while the block runs."""
    before = _CURRENT.set(context)
    try:
        yield
    finally:
        with suppress(ValueError):  # the block ends in another task, which never had it
            _CURRENT.reset(before)


def check_delay(delay_s: float, delay_s_max: float = DELAY_S_MAX) -> float:
    """Return `delay_s` if it is a valid delay.

    Args:
        delay_s: seconds.
        delay_s_max: the platform's limit.

    Raises:
        ValueError: `delay_s` is not valid.
    """
    if not 0 <= delay_s <= delay_s_max:
        raise ValueError(f"delay is a number of seconds, 0 to {delay_s_max:,.0f}, not {delay_s!r}.")
    return delay_s


def _named(function: str | Callable[..., Any]) -> tuple[str, Function | None]:
    if isinstance(function, str):
        return function, None
    known = function_of(function)
    if known is None:
        raise TypeError(
            f"{getattr(function, '__name__', function)!r} is not a function of an app; "
            'decorate it with @app.function, or name it "app.function".'
        )
    return known.qualified_name, known
