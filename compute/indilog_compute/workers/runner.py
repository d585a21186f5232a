"""Runs functions in a worker process: answers the questions that arrive over the link.

Several calls run concurrently on one event loop; sync functions run in threads (`FunctionThreads`).
A call uses the link to read the log, to append, and to call other functions, all in the session of
its caller. The answer carries the position of the session. `starting.worker_process` and
`in_process` make a `WorkerRunner`, which the link calls.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog

from indilog.apps.app import (
    App,
    Context,
    DeployedVersion,
    Function,
    Service,
    is_operation_name,
)
from indilog.base.deployed import LoadedVersion, MissingVersion
from indilog.base.errors import (
    CallOutcomeUnknownError,
    DeployError,
    FunctionFailedError,
    IndilogError,
    NotReadyError,
)
from indilog.base.log import Session
from indilog.base.memory_errors import is_memory_error, note_error
from indilog.link import worker_messages
from indilog.link.caller import LinkCaller
from indilog.link.link import Link
from indilog.link.link_messages import (
    Answer,
    Cancel,
    Done,
    Greeting,
    Limits,
    Question,
    Returned,
    RevokedError,
    Welcome,
    failed,
)
from indilog.link.remote import RemoteLogs
from indilog.link.worker_messages import (
    CheckArguments,
    Invoke,
    Load,
    MemoryUsedUp,
    Ping,
    RunServices,
    ServicesChanged,
    ThreadsLeft,
    Unload,
)
from indilog_compute.workers.claims import WorkerClaims
from indilog_compute.workers.loader import LoadedDeployment, load
from indilog_compute.workers.output import Unawaited, output_of
from indilog_compute.workers.services import RunningServices
from indilog_compute.workers.threads import FunctionThreads

_MESSAGE_CHARACTERS_MAX: Final = 500
_MEMORY_CHECK_S: Final = 2.0
"""Seconds from the last `MemoryError` outside of a call to the check whether the memory stays in
use. By then most code has handled the error: for example, BokiFlow has attempted a step again.
"""
_MEMORY_CHECK_S_MAX: Final = 30.0
"""Seconds from the first `MemoryError` to the check, if more errors follow."""

Answering: TypeAlias = Callable[[], Coroutine[Any, Any, Answer]]
LoadSources: TypeAlias = Callable[[int, str | None, Mapping[str, str], Path], LoadedDeployment]


class LimitedLink:
    """An `Asker` over a link; it knows the platform's limits."""

    __slots__ = ("__weakref__", "ask", "limits")

    def __init__(self, link: Link, limits: Limits) -> None:
        self.ask = link.ask
        self.limits = limits


class WorkerRunner:
    """Answers the compute node's questions.

    Args:
        directory: directory for deployed sources, private to this process.
        threads_max: largest number of sync functions that run concurrently; a further call of a
            sync function is refused.
        claims: shows the compute node which calls have begun.
        around_import: returns a context manager; each import of deployed code runs inside it.
        on_thread: called before each new thread of sync functions begins.
        memory_in_use: returns the bytes of memory that this process uses.
        is_memory_used_up: tells whether most of the memory is in use that the imports of the
            loaded deployments have left; gets the bytes that they took.
        load: imports deployed sources, as `indilog_compute.workers.loader.load` does.
        scope: the `Log.scope` of the logs that functions get (`RemoteLogs`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        threads_max: int,
        claims: WorkerClaims,
        around_import: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_thread: Callable[[], None] = lambda: None,
        memory_in_use: Callable[[], int] = lambda: 0,
        is_memory_used_up: Callable[[int], bool] = lambda _: False,
        load: LoadSources = load,
        scope: object | None = None,
    ) -> None:
        self._scope = scope
        self._memory_in_use = memory_in_use
        self._is_memory_used_up = is_memory_used_up
        self._import_bytes: dict[int, int] = {}
        """Bytes of memory that the import of each loaded deployment took."""
        self._memory_check: asyncio.TimerHandle | None = None
        self._memory_errors_since = 0.0
        """When the first `MemoryError` was noted that the next check is about."""
        self._load_sources = load
        self._around_import = around_import
        self._directory = directory
        self._claims = claims
        self._threads = FunctionThreads(threads_max, self._threads_left, on_thread)
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._deployments: dict[int, LoadedDeployment] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._logs: RemoteLogs | None = None
        self._asker: LimitedLink | None = None
        self._link: Link | None = None
        self._services = RunningServices(self._deployments, self._service_context, self._report)

    def serve(self, link: Link, call: int, message: Question | Greeting) -> None:
        """Answer one message of the compute node, now or later."""
        match message:
            case Invoke():
                self._start(link, call, partial(self._run, message))
            case Cancel():
                self._cancel(call)
            case Load():
                self._start(link, call, partial(self._load, message))
            case Unload():
                self._import_bytes.pop(message.deployment, None)
                if (loaded := self._deployments.pop(message.deployment, None)) is not None:
                    loaded.app.deployed = None
                    self._loading.submit(loaded.unload)
            case CheckArguments():
                self._start(link, call, partial(self._check, message))
            case RunServices():
                self._set_versions(message.versions, message.missing)
                self._services.run(message.deployments)
            case Ping():
                link.answer(call, Done(0))
            case Welcome():
                self._link = link
                self._asker = LimitedLink(link, message.limits)
                self._logs = RemoteLogs(self._asker, self._scope)
            case _:
                raise NotReadyError(f"A worker is not asked {type(message).__name__}.")

    async def stop(self) -> None:
        """Cancel all calls and services, wait until they have ended, and unload all code. Threads
        of sync functions continue until they return.
        """
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._services.stopped(), *tasks, return_exceptions=True)
        while self._deployments:
            _, loaded = self._deployments.popitem()
            loaded.app.deployed = None
            loaded.unload()
        self._threads.close(waits=False)
        self._loading.shutdown(wait=False)

    def close(self) -> None:
        """Wait until all threads have ended."""
        self._threads.close()
        self._loading.shutdown()

    # --- internal

    def _start(self, link: Link, call: int, answering: Answering) -> None:
        task = asyncio.get_running_loop().create_task(_answer(link, call, answering))
        self._tasks[call] = task
        task.add_done_callback(partial(self._ended, link, call))

    def _cancel(self, call: int) -> None:
        if (task := self._tasks.get(call)) is not None:
            task.cancel()

    def _ended(self, link: Link, call: int, task: asyncio.Task[None]) -> None:
        del self._tasks[call]
        if task.cancelled():  # also if the task never began, because the node must get an answer
            unknown = CallOutcomeUnknownError("The call was cancelled; it may have had effects.")
            link.answer(call, failed(unknown))

    def _threads_left(self, count: int) -> None:
        self._report(ThreadsLeft(count))

    def note_memory_error(self) -> None:
        """Check soon whether memory stays in use. This is called in the thread of the event loop
        when code of this process has raised a `MemoryError` outside of a call.
        """
        now = (loop := asyncio.get_running_loop()).time()
        if self._memory_check is None:
            self._memory_errors_since = now
        else:
            self._memory_check.cancel()
        at = min(now + _MEMORY_CHECK_S, self._memory_errors_since + _MEMORY_CHECK_S_MAX)
        self._memory_check = loop.call_at(at, self._check_memory)

    def _check_memory(self) -> None:
        self._memory_check = None
        if self._is_memory_used_up(sum(self._import_bytes.values())):
            self._report(MemoryUsedUp())

    def _report(self, greeting: ThreadsLeft | MemoryUsedUp | ServicesChanged) -> None:
        if self._link is not None:
            self._link.tell(greeting)

    async def _load(self, message: Load) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(self._loading, self._imported, message)
        except ValueError as error:  # an invalid name
            raise DeployError(str(error)) from error
        self._deployments[message.deployment] = loaded
        app = loaded.app
        return worker_messages.Loaded(
            app.name,
            loaded.specs(),
            tuple(app.services),
            tuple(app.schedules),
            loaded.operation_specs(),
        )

    def _set_versions(
        self, versions: Iterable[LoadedVersion], missing: Iterable[MissingVersion]
    ) -> None:
        """Set `App.deployed` of each loaded application: its own deployment, the other loaded
        deployments of the same application, and the problems of those that are not loaded.
        """
        there = self._deployments
        known = [one for one in versions if one.number in there and one.newest in there]
        known.sort(key=lambda one: one.number == one.newest)  # of equal code, the newest one counts
        loaded: dict[int, dict[str, App]] = {one.newest: {} for one in known}
        problems: dict[int, dict[str, str]] = {}
        for lacking in missing:
            text = f"The code of deployment {lacking.version} is not loaded: {lacking.problem}"
            problems.setdefault(lacking.newest, {})[lacking.code] = text
        for one in known:
            deployment, others = there[one.number], loaded[one.newest]
            others[deployment.code] = deployment.app
            newest, lacks = there[one.newest].app, problems.get(one.newest)
            deployment.app.deployed = DeployedVersion(
                one.version, deployment.code, newest, others, lacks
            )

    def _imported(self, message: Load) -> LoadedDeployment:
        before = self._memory_in_use()
        with output_of(message.name or ""), self._around_import():
            loaded = self._load_sources(
                message.deployment, message.name, message.sources, self._directory
            )
        self._import_bytes[message.deployment] = max(0, self._memory_in_use() - before)
        return loaded

    async def _run(self, invoke: Invoke) -> Answer:
        loaded, function = self._function(invoke.deployment, invoke.function)
        arguments = function.signature.arguments(invoke.arguments)
        if not function.is_async:
            self._threads.check_room()
        if not self._claims.begin(invoke.slot):
            raise RevokedError(f"{function.qualified_name} was revoked before it began.")
        session = Session(invoke.position)
        context = self._context(invoke, function, session)
        context.begin()
        given = (context,) if function.signature.takes_context else ()
        body = partial(function.body, *given, **arguments)
        output = output_of(loaded.app.name, invoke.invocation)
        with output:
            try:
                value = await (body() if function.is_async else self._in_thread(body))
                if output.unawaited:
                    dropped = _not_awaited(loaded, function, output.unawaited[0])
                    return failed(dropped, session.position)
                return Returned(session.position, self._text(function, value))
            except BaseException as error:  # user code may raise any exception
                if _is_being_cancelled(error):
                    raise
                if is_memory_error(error):  # checked when the call has ended
                    asyncio.get_running_loop().call_soon(self._check_memory)
                if is_operation_name(function.name) and isinstance(error, IndilogError):
                    return failed(error, session.position)
                return failed(_error_for_caller(loaded, function, error), session.position)
            finally:
                context.end()

    async def _in_thread(self, body: Callable[[], object]) -> object:
        value = await self._threads.run(partial(copy_context().run, body))
        return await value if inspect.isawaitable(value) else value

    def _text(self, function: Function, value: object) -> bytes:
        text = function.signature.result_text(value)
        assert self._asker is not None, "the compute node sends Welcome first"
        limit = self._asker.limits.result_bytes_max
        if len(text) > limit:
            raise FunctionFailedError(
                f"{function.qualified_name} returned {len(text):,} bytes, the limit is {limit:,}; "
                "keep large results in a log and return their seqnums.",
                kind="TooLargeError",
            )
        return text

    async def _check(self, message: CheckArguments) -> Answer:
        _, function = self._function(message.deployment, message.function)
        function.signature.arguments(message.arguments)
        return Done(0)

    def _function(self, deployment: int, name: str) -> tuple[LoadedDeployment, Function]:
        loaded = self._deployments.get(deployment)
        if loaded is None or name not in loaded.functions:
            raise NotReadyError(f"{name} is not loaded in this worker; try again.")
        return loaded, loaded.functions[name]

    def _context(self, invoke: Invoke, function: Function, session: Session) -> Context:
        assert self._logs is not None, "the compute node sends Welcome first"
        assert self._asker is not None, "Welcome carries the limits"
        return Context(
            self._logs,
            LinkCaller(self._asker, invoke.depth + 1),
            session=session,
            invocation_id=invoke.invocation,
            function=function.qualified_name,
        )

    def _service_context(self, service: Service) -> Context:
        assert self._logs is not None, "the compute node sends Welcome first"
        assert self._asker is not None, "Welcome carries the limits"
        run = f"{service.qualified_name}-{secrets.token_hex(8)}"
        caller = LinkCaller(self._asker, 0)
        return Context(self._logs, caller, invocation_id=run, function=service.qualified_name)


async def _answer(link: Link, call: int, answering: Answering) -> None:
    """Answer `call` with the result of `answering`, or with its error."""
    try:
        answer = await answering()
    except IndilogError as error:
        note_error(error)
        answer = failed(error)
    except Exception as error:  # noqa: BLE001 - outermost: the compute node must get an answer
        note_error(error)
        structlog.get_logger().exception("call failed in the worker")
        answer = failed(IndilogError("The function worker failed on this call; its log says why."))
    link.answer(call, answer)


def _not_awaited(
    loaded: LoadedDeployment, function: Function, dropped: Unawaited
) -> FunctionFailedError:
    """Return the error of a function that called a coroutine function without `await`. Without this
    error, the function could omit an append and still report success.
    """
    seen_at = f"{dropped.file}, line {dropped.line}"
    place = loaded.with_author_names(seen_at)
    where = f"{place}: " if place != seen_at else ""  # the line is not in deployed code
    return FunctionFailedError(
        f"{function.qualified_name} failed: {where}{dropped.name} was called without await, so it "
        "did nothing; write await before the call.",
        kind="NotAwaited",
    )


def _is_being_cancelled(error: BaseException) -> bool:
    """Whether `error` is a `CancelledError` because this worker cancels the call, and not because
    the function raised it.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _error_for_caller(
    loaded: LoadedDeployment, function: Function, error: BaseException
) -> FunctionFailedError:
    """Return the error for the caller of a function whose body raised `error`.

    The returned error names the function that failed. The error of a nested call already names a
    function, so it is returned unchanged. Otherwise the traceback goes to the log.
    """
    if isinstance(error, FunctionFailedError):
        return error
    kind = type(error).__name__
    structlog.get_logger().error(
        "function failed",
        function=function.qualified_name,
        place=loaded.place(error),
        exc_info=error,
    )
    text = loaded.with_author_names(" ".join(str(error).split()))[:_MESSAGE_CHARACTERS_MAX].rstrip(
        "."
    )
    return FunctionFailedError(
        f"{function.qualified_name} failed: {kind}{': ' if text else ''}{text}.",
        kind=kind,
        temporary=isinstance(error, IndilogError) and error.retryable,
    )
