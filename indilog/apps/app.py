"""Applications: named sets of functions, services, schedules and operations (API.md, "A
function").

    app = indilog.App("social")

    @app.function
    async def follow(ctx: indilog.Context, user: str, other: str) -> int: ...

A decorated function remains an ordinary function, which tests can call directly. Its first
parameter is a `Context`. Workers (`indilog_compute.workers`) load applications and run their
functions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias, TypeVar, overload

from indilog.apps.context import Caller, Context, check_delay, current_context
from indilog.apps.function import MARK, Function, function_of
from indilog.base.deployed import CatchUp, ScheduleSpec

__all__ = [
    "App",
    "Caller",
    "Context",
    "Function",
    "Service",
    "check_app_name",
    "check_delay",
    "current_context",
    "function_of",
    "is_operation_name",
]

_BodyT = TypeVar("_BodyT", bound=Callable[..., Any])

OperationBody: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
ServiceBody: TypeAlias = Callable[[Context], Coroutine[Any, Any, None]]
_ServiceT = TypeVar("_ServiceT", bound=ServiceBody)

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_OPERATION: Final = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)+")
_OPERATION_CHARACTERS_MAX: Final = 64
OPERATIONS_MAX: Final = 64
"""Operations that one application may have."""
SERVICES_MAX: Final = 16
"""Services that one application may have."""
SCHEDULES_MAX: Final = 64
"""Schedules that one application may have."""


class Service:
    """A coroutine that every worker process runs while its application is deployed.

    Attributes:
        name: unique among the application's services.
    """

    def __init__(self, app: App, body: ServiceBody, *, name: str) -> None:
        self.app = app
        self.name = name
        self.body = body

    @property
    def qualified_name(self) -> str:
        """`app.service`, as shown to users."""
        return f"{self.app.name}.{self.name}"

    def __repr__(self) -> str:
        return f"Service({self.qualified_name})"


class DeployedVersion:
    """A deployment of an application, in one worker.

    A worker may have loaded several deployments of an application: the newest one, which gets all
    new calls, and earlier ones, whose code is kept for runs that began with it.

    Attributes:
        version: number of the deployment; it grows with each deployment of the application.
        code: a digest of the sources; deployments of the same sources have the same one.
        newest: the application in its newest deployment.
        loaded: the application in all deployments that are loaded, by `code`.
        missing: why an earlier deployment, whose code is kept, is not loaded here, by `code`.
    """

    __slots__ = ("code", "loaded", "missing", "newest", "version")

    def __init__(
        self,
        version: int,
        code: str,
        newest: App,
        loaded: Mapping[str, App],
        missing: Mapping[str, str] | None = None,
    ) -> None:
        self.version = version
        self.code = code
        self.newest = newest
        self.loaded = loaded
        self.missing = missing or {}


class App:
    """A named set of functions that are deployed together.

    Attributes:
        name: name of the application: 1 to 64 letters, digits, `_` and `-`; the first is a letter.
        functions: its functions, by name.
        services: its services, by name.
        schedules: its schedules: the functions that the platform calls, and when.
        operations: its operations for people, by name.
        deployed: which deployment this is; None outside of a worker of the platform.
        of_libraries: values that libraries attach to the application, each under the library's
            name.
    """

    def __init__(self, name: str) -> None:
        self.name = check_app_name(name)
        self.functions: dict[str, Function] = {}
        self.services: dict[str, Service] = {}
        self.schedules: list[ScheduleSpec] = []
        self.operations: dict[str, Function] = {}
        self.deployed: DeployedVersion | None = None
        self.of_libraries: dict[str, Any] = {}

    @overload
    def function(self, body: _BodyT, /) -> _BodyT: ...

    @overload
    def function(
        self, /, *, name: str | None = None, timeout_s: float | None = None, public: bool = False
    ) -> Callable[[_BodyT], _BodyT]: ...

    def function(
        self,
        body: Any = None,
        /,
        *,
        name: str | None = None,
        timeout_s: float | None = None,
        public: bool = False,
    ) -> Any:
        """Make a function callable on the platform, and return it unchanged.

        Args:
            body: the function, if the decorator is used without arguments.
            name: name of the function on the platform; default: the name of `body`.
            timeout_s: seconds that a call may take.
            public: HTTP callers need no token (for webhooks): any client that reaches the gateway
                may call it.

        Raises:
            ValueError: the name is invalid or used in this application, or the time is not
                positive.
        """

        def registered(body: _BodyT) -> _BodyT:
            self._add(body, body.__name__ if name is None else name, timeout_s, public=public)
            return body

        return registered if body is None else registered(body)

    def schedule(
        self, expression: str, /, *, timezone: str = "UTC", catch_up: CatchUp = "last"
    ) -> Callable[[_BodyT], _BodyT]:
        """Have the platform call a function at the times of a cron expression (five fields).

        Each due time is one recorded invocation, across all compute nodes and restarts. As with
        `Context.send`, the body runs at least once, and one outcome is kept. The function must have
        no parameters without a default. It becomes a function of the application if it is not one
        yet. A function may have several schedules. Runs may overlap.

        Args:
            expression: minute, hour, day of month, month, day of week, such as `*/5 * * * *`.
            timezone: time zone of the expression, such as `Europe/Berlin`.
            catch_up: which of the due times missed while the platform was down are run: `none`, the
                `last` one, or `all` (the last `schedule_catch_up_max` of them).

        Raises:
            ValueError: the schedule is invalid, or there are too many.
        """
        from indilog.apps.schedule import check_schedule

        def scheduled(body: _BodyT) -> _BodyT:
            function = function_of(body)
            if function is None or self.functions.get(function.name) is not function:
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
        """Have every worker process run a coroutine while this version is deployed."""
        self.add_service(body)
        return body

    def add_service(self, body: ServiceBody, *, name: str | None = None) -> None:
        """Have every worker process run `body(ctx)` while this version is deployed.

        Each worker process of each compute node starts the service when the version takes calls.
        The service is cancelled when another version replaces this one, or the platform stops. A
        service that raises is restarted after a pause that doubles each time. A service that
        returns is not restarted. A service uses no slot for calls, and has no time limit. Several
        processes run it concurrently, possibly also a process that counts as dead. So effects that
        must happen once must be decided by the log.

        Raises:
            ValueError: the name is invalid or used, or there are too many services.
            TypeError: the function is not an async function.
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

    def add_operation(
        self, name: str, body: OperationBody, *, timeout_s: float | None = None
    ) -> None:
        """Let people and tools run `body(ctx, ...)` as the operation `name`, such as `runs.list`.

        For libraries that let people see and change what they keep in an application's logs. An
        operation runs like a function, with the same limits, in a worker process of the
        application. Functions cannot call it, and no caller runs it without a token. An
        `IndilogError` that it raises reaches the caller unchanged.

        Args:
            name: words of lower-case letters, digits, `_` and `-`, at least two, joined by dots; at
                most 64 characters.
            body: an async function whose first parameter is the `Context`; its other parameters and
                its result have type hints, as those of a function.
            timeout_s: seconds that it may take; None: the platform's setting.

        Raises:
            ValueError: the name is invalid or used, the time is not positive, or there are too many
                operations.
            TypeError: the function is not an async function.
        """
        if not inspect.iscoroutinefunction(body):
            raise TypeError(f"An operation is an async function; make {name} one.")
        if len(name) > _OPERATION_CHARACTERS_MAX or not _OPERATION.fullmatch(name):
            raise ValueError(
                "An operation's name is words of lower-case letters, digits, _ and -, joined by "
                f"dots, at most {_OPERATION_CHARACTERS_MAX} characters, not {name!r:.80}."
            )
        if name in self.operations:
            raise ValueError(f"{self.name} has two operations named {name}; rename one.")
        if len(self.operations) >= OPERATIONS_MAX:
            raise ValueError(f"{self.name} has {OPERATIONS_MAX} operations, which is the limit.")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s of {name} must be greater than 0, not {timeout_s}.")
        self.operations[name] = Function(
            self.name, body, name=name, context=Context, timeout_s=timeout_s
        )

    def _add(
        self, body: Callable[..., Any], name: str, timeout_s: float | None, *, public: bool = False
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"A function's name is letters, digits, _ and -, not {name!r}.")
        there = self.functions.get(name)
        if there is not None and there.body is not body:  # `schedule` may have registered it
            raise ValueError(f"{self.name} has two functions named {name}; rename one.")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s of {name} must be greater than 0, not {timeout_s}.")
        function = Function(
            self.name, body, name=name, context=Context, timeout_s=timeout_s, public=public
        )
        self.functions[name] = function
        setattr(body, MARK, function)

    def __repr__(self) -> str:
        return f"App({self.name!r}, functions={sorted(self.functions)})"


def is_operation_name(name: str) -> bool:
    """Tell whether a name without its application is that of an operation, not of a function."""
    return "." in name


def check_app_name(name: str) -> str:
    """Return `name` if it is a valid name of an application.

    Raises:
        ValueError: `name` is not valid.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"An app's name is 1 to 64 letters, digits, _ and -, a letter first, not {name!r}."
        )
    return name
