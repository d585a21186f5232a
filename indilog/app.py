"""Applications: what a person writes (API.md, "A function"), and the context that a running
function gets.

    app = indilog.App("social")

    @app.function
    async def follow(ctx: indilog.Context, user: str, other: str) -> int: ...

A decorated function stays an ordinary function, to be called directly in tests. Nothing here knows
where it runs: a `Context` reaches the log and other functions through what its worker gives it.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - `map` waits for several calls, sync functions for one
import concurrent.futures
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeAlias, TypeVar, overload

import structlog

from indilog.deployed import CatchUp, ScheduleSpec
from indilog.log import Log, LogSource, Session, check_log_name
from indilog.signature import Signature, arguments_text, plain_value

_ResultT = TypeVar("_ResultT")
_BodyT = TypeVar("_BodyT", bound=Callable[..., Any])

ServiceBody: TypeAlias = Callable[["Context"], Coroutine[Any, Any, None]]
_ServiceT = TypeVar("_ServiceT", bound=ServiceBody)

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
DELAY_S_MAX: Final = 10 * 365 * 24 * 3600
"""Seconds: nothing is started later than in ten years."""
SERVICES_MAX: Final = 16
"""Services that one application may have."""
SCHEDULES_MAX: Final = 64
"""Schedules that one application may have."""
MAP_CALLS_MAX: Final = 32
"""Calls that one `Context.map` runs at once, unless told otherwise."""


class Function:
    """One function of an application: its body, and what it takes and gives.

    Attributes:
        name: unique in its application.
        is_async: whether the body is awaited; otherwise it runs in a thread.
        timeout_s: after this its caller gets a `CallOutcomeUnknownError`; None: the platform's.
    """

    def __init__(
        self, app: App, body: Callable[..., Any], *, name: str, timeout_s: float | None
    ) -> None:
        self.app = app
        self.name = name
        self.body = body
        self.is_async = inspect.iscoroutinefunction(body)
        self.timeout_s = timeout_s
        self._signature: Signature | None = None

    @property
    def qualified_name(self) -> str:
        """`app.function`, as callers write it."""
        return f"{self.app.name}.{self.name}"

    @property
    def doc(self) -> str:
        """The docstring, or an empty text."""
        return inspect.getdoc(self.body) or ""

    @property
    def signature(self) -> Signature:
        """What it takes and gives; worked out at first use, when every type it names is defined.

        Raises:
            TypeError: its type hints cannot be used; one sentence.
        """
        if self._signature is None:
            self._signature = Signature(self.qualified_name, self.body, Context)
        return self._signature

    def __repr__(self) -> str:
        return f"Function({self.qualified_name})"


class Service:
    """A coroutine of an application that every worker process runs while it is deployed.

    Attributes:
        name: unique among the application's services.
    """

    def __init__(self, app: App, body: ServiceBody, *, name: str) -> None:
        self.app = app
        self.name = name
        self.body = body

    @property
    def qualified_name(self) -> str:
        """`app.service`, as people read it."""
        return f"{self.app.name}.{self.name}"

    def __repr__(self) -> str:
        return f"Service({self.qualified_name})"


class App:
    """A named set of functions that are deployed together.

    Attributes:
        name: 1 to 64 letters, digits, `_` and `-`, a letter first.
        functions: by name.
        services: by name.
        schedules: when the platform calls which function.
    """

    def __init__(self, name: str) -> None:
        self.name = check_app_name(name)
        self.functions: dict[str, Function] = {}
        self.services: dict[str, Service] = {}
        self.schedules: list[ScheduleSpec] = []

    @overload
    def function(self, body: _BodyT, /) -> _BodyT: ...

    @overload
    def function(
        self, /, *, name: str | None = None, timeout_s: float | None = None
    ) -> Callable[[_BodyT], _BodyT]: ...

    def function(
        self,
        body: Any = None,
        /,
        *,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Make a function callable on the platform; returns it unchanged.

        Raises:
            ValueError: the name is taken in this application, or no name, or the time is not
                positive.
        """

        def registered(body: _BodyT) -> _BodyT:
            self._add(body, body.__name__ if name is None else name, timeout_s)
            return body

        return registered if body is None else registered(body)

    def schedule(
        self, expression: str, /, *, timezone: str = "UTC", catch_up: CatchUp = "last"
    ) -> Callable[[_BodyT], _BodyT]:
        """Have the platform call a function at the times of a cron expression (five fields).

        Each due time is one recorded invocation, over all compute nodes and restarts: as with
        `Context.send`, the body runs at least once, and one outcome is kept. The function takes
        no arguments, or has defaults for them. It is made a function of the application if it is
        none; several schedules may stand above one another. Runs may overlap.

        Args:
            expression: minute, hour, day of month, month, day of week, such as `*/5 * * * *`.
            timezone: of the expression, such as `Europe/Berlin`.
            catch_up: of due times that were missed while the platform was down, run `none`, the
                `last` one, or `all` (the last `schedule_catch_up_max` of them).

        Raises:
            ValueError: it is no schedule, or there are too many.
        """
        from indilog.schedule import check_schedule

        def scheduled(body: _BodyT) -> _BodyT:
            function = function_of(body)
            if function is None or function.app is not self:
                self._add(body, body.__name__, None)
                function = self.functions[body.__name__]
            spec = ScheduleSpec(function.name, expression, timezone, catch_up)
            if len(self.schedules) >= SCHEDULES_MAX:
                raise ValueError(f"{self.name} has {SCHEDULES_MAX} schedules, which is the limit.")
            if check_schedule(spec) not in self.schedules:
                self.schedules.append(spec)
            return body

        return scheduled

    def service(self, body: _ServiceT, /) -> _ServiceT:
        """Have every worker process run a coroutine while this version is deployed; as
        `add_service`, as a decorator that returns it unchanged.
        """
        self.add_service(body)
        return body

    def add_service(self, body: ServiceBody, *, name: str | None = None) -> None:
        """Have every worker process run `body(ctx)` while this version is deployed.

        It is started when the version takes calls, once in each worker process of each compute
        node, and cancelled when another version has taken its place or the platform stops. One that
        raises is started again after a pause that doubles; one that returns is over. It takes no
        call's place and has no time limit. Several processes run it at once, and one that was
        thought dead may still: what must happen once is for the log to decide.

        Raises:
            ValueError: the name is taken or no name, or there are too many.
            TypeError: it is not an async function.
        """
        name = body.__name__ if name is None else name
        if not inspect.iscoroutinefunction(body):
            raise TypeError(f"A service is an async function; make {name} one.")
        if not _NAME.fullmatch(name):
            raise ValueError(f"A service's name is letters, digits, _ and -, not {name!r}.")
        if name in self.services:
            raise ValueError(f"{self.name} has two services named {name}; rename one.")
        if len(self.services) >= SERVICES_MAX:
            raise ValueError(f"{self.name} has {SERVICES_MAX} services, which is the limit.")
        self.services[name] = Service(self, body, name=name)

    def _add(self, body: Callable[..., Any], name: str, timeout_s: float | None) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"A function's name is letters, digits, _ and -, not {name!r}.")
        there = self.functions.get(name)
        if there is not None and there.body is not body:  # `schedule` may have made it one
            raise ValueError(f"{self.name} has two functions named {name}; rename one.")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s of {name} must be greater than 0, not {timeout_s}.")
        function = Function(self, body, name=name, timeout_s=timeout_s)
        self.functions[name] = function
        setattr(body, _MARK, function)

    def __repr__(self) -> str:
        return f"App({self.name!r}, functions={sorted(self.functions)})"


_MARK: Final = "__indilog_function__"


def check_app_name(name: str) -> str:
    """Return `name` if an application may have it.

    Raises:
        ValueError: it may not.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"An app's name is 1 to 64 letters, digits, _ and -, a letter first, not {name!r}."
        )
    return name


def function_of(function: object) -> Function | None:
    """Return what an application knows of a decorated function, or None of any other object."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, Function) else None


class Caller(Protocol):
    """How a context reaches other functions."""

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = ""
    ) -> bytes:
        """Run `app.function` and return its result as JSON text; `session` goes in and is raised.

        With an idempotency `key` it is run once.
        """

    async def send(
        self, function: str, arguments: bytes, session: Session, *, delay_s: float, key: str = ""
    ) -> str:
        """Start `app.function` later and return the invocation's id."""


class Context:
    """What a running function has in hand: logs, other functions, its identity.

    One session goes through everything done with it: reads see the function's own appends, those
    of its caller before the call, and those of the functions it called.

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
            InvalidTagError: it cannot be a log's name.
        """
        return self._logs.log(check_log_name(name), self.session)

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

        A function given as an object gives back its return type; one given as `"app.function"`
        gives plain JSON values. The session goes with the call and comes back with the result, also
        when it failed.

        With an `idempotency_key` (of this function, 1 to 255 characters) the call is recorded
        first. Whoever calls with the same key gets the outcome of the one run, also later and after
        a crash, for `results_kept_s`. A run whose worker is lost is begun again: the body may run
        more than once, the outcome is decided once.

        Raises:
            UnknownFunctionError, InvalidArgumentsError: it was not run; the key may have been used
                with other arguments.
            FunctionFailedError: it raised.
            WorkerCrashedError, CallOutcomeUnknownError: it may have had effects.
        """
        name, known = _named(function)
        text = await self._caller.call(
            name, arguments_text(arguments), self.session, key=idempotency_key
        )
        if known is not None:
            return known.signature.result(text)
        return plain_value(text)

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

        With `delay` it starts that many seconds later. When this returns it is recorded, as durably
        as an append: whatever process is lost, it is run until one outcome of it is recorded, which
        is kept for `results_kept_s`. So its body may run more than once. One whose worker or
        compute node was lost `invocation_tries_max` times is given up. With an `idempotency_key` as
        `call`: the id is that of the first one with it.

        Raises:
            UnknownFunctionError, InvalidArgumentsError: there is no such function, or the arguments
                do not fit it, or the key had others; it is not started.
            OverloadedError: too much waits already.
            CallOutcomeUnknownError: it may be recorded or not.
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
        """For sync functions, which run in a thread: wait for what an async method returns.

        `seqnum = ctx.wait(ctx.log("orders").append(b"..."))`. Never in an async function. When the
        call is over although its thread goes on (its time was over, or its caller is gone), this
        raises `asyncio.CancelledError`, which ends the thread.
        """

        async def awaited() -> _ResultT:
            self.begin()  # a thread does not hand it down
            return await awaitable

        waiting = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        self._waits.add(waiting)
        if self._is_over:  # looked at after the addition: `end` cancels what it finds
            waiting.cancel()
        try:
            return waiting.result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError("The call is over.") from None
        finally:
            self._waits.discard(waiting)

    def begin(self) -> None:
        """For who runs the function: what the current task awaits from now on belongs to it
        (`current_context`).
        """
        _CURRENT.set(self)

    def end(self) -> None:
        """For who runs the function: the call is over; `wait` ends, now and from now on."""
        self._is_over = True
        for waiting in list(self._waits):
            waiting.cancel()


_CURRENT: Final[ContextVar[Context | None]] = ContextVar("context", default=None)


def current_context() -> Context | None:
    """Return the context of the function that runs, None outside of functions.

    For libraries whose users do not hand it on. In a sync function, within `Context.wait`.
    """
    return _CURRENT.get()


def check_delay(delay_s: float) -> float:
    """Return `delay_s` if something may be started that much later.

    Raises:
        ValueError: it may not.
    """
    if not 0 <= delay_s <= DELAY_S_MAX:
        raise ValueError(f"delay is a number of seconds, 0 to {DELAY_S_MAX:,}, not {delay_s!r}.")
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
