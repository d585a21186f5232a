"""Running functions in a worker process: what arrives over the link is answered here.

Several calls run at once on one event loop; sync functions run in threads. A call sees the log and
other functions through the link, with its caller's session, and gives the session back with its
result or its failure.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog

from compute.workers.loader import Loaded, load
from indilog import calls
from indilog.app import Context, Function
from indilog.caller import LinkCaller
from indilog.calls import (
    Answer,
    Cancel,
    Greeting,
    Invoke,
    Limits,
    Load,
    Question,
    Returned,
    Unload,
    Welcome,
    failed,
)
from indilog.errors import (
    CallOutcomeUnknownError,
    DeployError,
    FunctionFailedError,
    IndilogError,
    InvalidArgumentsError,
    NotReadyError,
    OverloadedError,
    UnknownFunctionError,
)
from indilog.link import Link
from indilog.log import Session
from indilog.remote import RemoteLogs

_NOT_PASSED_ON: Final = (InvalidArgumentsError, UnknownFunctionError, DeployError)
"""Errors that speak of the call itself: from inside a body they are about another call."""

_MESSAGE_CHARACTERS_MAX: Final = 500

Answering: TypeAlias = Callable[[], Coroutine[Any, Any, Answer]]


class LimitedLink:
    """The link as logs see it: an `Asker`, with the platform's limits."""

    __slots__ = ("__weakref__", "ask", "limits")

    def __init__(self, link: Link, limits: Limits) -> None:
        self.ask = link.ask
        self.limits = limits


class Runner:
    """Answers what the compute node asks of this worker.

    Args:
        directory: where deployed sources are written; private to this process.
        threads_max: sync functions that run at once; a further one is refused.
        around_import: a context that deployed code is imported in.

    Attributes:
        threads_used: by sync functions, also by those that were cancelled and do not end.
    """

    def __init__(
        self,
        directory: Path,
        *,
        threads_max: int,
        around_import: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._around_import = around_import
        self._directory = directory
        self._threads_max = threads_max
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="function")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="load")
        self.threads_used = 0
        self._deployments: dict[int, Loaded] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._logs: RemoteLogs | None = None
        self._asker: LimitedLink | None = None

    def serve(self, link: Link, call: int, message: Question | Greeting) -> None:
        """Start to answer one message of the compute node."""
        match message:
            case Invoke():
                self._start(link, call, partial(self._run, message))
            case Cancel():
                if (task := self._tasks.get(call)) is not None:
                    task.cancel()
            case Load():
                self._start(link, call, partial(self._load, message))
            case Unload():
                if (loaded := self._deployments.pop(message.deployment, None)) is not None:
                    self._loading.submit(loaded.unload)
            case Welcome():
                self._asker = LimitedLink(link, message.limits)
                self._logs = RemoteLogs(self._asker)
            case _:
                raise NotReadyError(f"A worker is not asked {type(message).__name__}.")

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.shutdown()
        self._loading.shutdown()

    # --- inside

    def _start(self, link: Link, call: int, answering: Answering) -> None:
        task = asyncio.get_running_loop().create_task(_answered(link, call, answering))
        self._tasks[call] = task
        task.add_done_callback(partial(self._ended, link, call))

    def _ended(self, link: Link, call: int, task: asyncio.Task[None]) -> None:
        del self._tasks[call]
        if task.cancelled():  # also one that never began: its slot must become free
            told = CallOutcomeUnknownError("The call was cancelled; it may have had effects.")
            link.answer(call, failed(told))

    async def _load(self, message: Load) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(self._loading, self._imported, message)
        except ValueError as error:  # a name that no application may have
            raise DeployError(str(error)) from error
        self._deployments[message.deployment] = loaded
        return calls.Loaded(loaded.app.name, loaded.specs())

    def _imported(self, message: Load) -> Loaded:
        with self._around_import():
            return load(message.deployment, message.name, message.sources, self._directory)

    async def _run(self, invoke: Invoke) -> Answer:
        function = self._function(invoke)
        arguments = function.signature.arguments(invoke.arguments)
        session = Session(invoke.position)
        if function.signature.takes_context:
            context = self._context(invoke, function, session)
            body = partial(function.body, context, **arguments)
        else:
            body = partial(function.body, **arguments)
        try:
            value = await (body() if function.is_async else self._in_thread(body))
            return Returned(session.position, self._text(function, value))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a person's code may raise anything
            return failed(_told(function, error), session.position)

    async def _in_thread(self, body: Callable[[], object]) -> object:
        """Run a sync body in a thread; one that is cancelled keeps its thread until it ends."""
        if self.threads_used >= self._threads_max:
            raise OverloadedError(
                f"{self._threads_max:,} sync functions run in this worker already; try again later."
            )
        running = self._threads.submit(body)
        self.threads_used += 1
        loop = asyncio.get_running_loop()
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._thread_freed))
        value = await asyncio.wrap_future(running)
        return await value if inspect.isawaitable(value) else value

    def _thread_freed(self) -> None:
        self.threads_used -= 1

    def _text(self, function: Function, value: object) -> bytes:
        text = function.signature.result_text(value)
        assert self._asker is not None, "the compute node says Welcome first"
        limit = self._asker.limits.result_bytes_max
        if len(text) > limit:
            raise FunctionFailedError(
                f"{function.qualified_name} returned {len(text):,} bytes, the limit is {limit:,}; "
                "keep large results in a log and return their seqnums.",
                kind="TooLargeError",
            )
        return text

    def _function(self, invoke: Invoke) -> Function:
        loaded = self._deployments.get(invoke.deployment)
        if loaded is None or invoke.function not in loaded.functions:
            raise NotReadyError(f"{invoke.function} is not loaded in this worker; try again.")
        return loaded.functions[invoke.function]

    def _context(self, invoke: Invoke, function: Function, session: Session) -> Context:
        assert self._logs is not None, "the compute node says Welcome first"
        assert self._asker is not None, "with its limits"
        return Context(
            self._logs,
            LinkCaller(self._asker, invoke.depth + 1),
            session=session,
            invocation_id=invoke.invocation,
            function=function.qualified_name,
        )


async def _answered(link: Link, call: int, answering: Answering) -> None:
    """Answer `call` with what `answering` gives, or why it gives nothing."""
    try:
        answer = await answering()
    except IndilogError as error:
        answer = failed(error)
    except Exception:  # noqa: BLE001 - outermost: the compute node must not wait for ever
        structlog.get_logger().exception("call failed in the worker")
        answer = failed(IndilogError("The function worker failed on this call; its log says why."))
    link.answer(call, answer)


def _told(function: Function, error: BaseException) -> Exception:
    """Return what the caller is told of an error that came out of a function's body.

    What the log or a called function reported goes on as it is; everything else becomes a
    `FunctionFailedError`, and its traceback goes to the log.
    """
    if isinstance(error, IndilogError) and not isinstance(error, _NOT_PASSED_ON):
        return error
    structlog.get_logger().error(
        "function failed", function=function.qualified_name, exc_info=error
    )
    kind = type(error).__name__
    told = " ".join(str(error).split())[:_MESSAGE_CHARACTERS_MAX].rstrip(".")
    return FunctionFailedError(
        f"{function.qualified_name} failed: {kind}{': ' if told else ''}{told}.", kind=kind
    )
