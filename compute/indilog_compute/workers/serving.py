"""Answers the questions that a worker or a client sends over its link. Workers and clients may use
logs and call functions; clients may also deploy, and ask for recorded invocations.

Each link has its own `LinkServer`. When the link is lost, its log calls, function calls and waits
are cancelled. Recorded work continues: calls with an idempotency key, `send`, cancellations,
deployments and undeployments. `LinkServer` calls `FunctionHost` and `LinkLogService`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol

import structlog

from indilog.base.deployed import AppInfo
from indilog.base.errors import (
    CallOutcomeUnknownError,
    IndilogError,
    InvalidArgumentsError,
    NotReadyError,
    OverloadedError,
)
from indilog.base.ids import MetalogPosition
from indilog.base.log import LogSource
from indilog.link.link import Link
from indilog.link.link_messages import (
    CANCELLED,
    Accepted,
    Answer,
    AskHolders,
    AskInvocation,
    CallFunction,
    Cancel,
    CancelInvocation,
    DeployApp,
    Deployed,
    Done,
    Failed,
    Greeting,
    HoldersFound,
    InvocationFound,
    LogAppend,
    LogReadNext,
    LogReadPrev,
    Question,
    ReleaseCalls,
    Returned,
    SendFunction,
    UndeployApp,
    Undeployed,
    Welcome,
    failed,
)
from indilog.link.worker_messages import (
    CheckArguments,
    Invoke,
    Load,
    MemoryUsedUp,
    Ping,
    Ready,
    RunServices,
    ServicesChanged,
    ThreadsLeft,
    Unload,
)
from indilog_compute.invocations.invocation_status import INVOCATION_WAIT_S_MAX, InvocationStatus
from indilog_compute.log_service import LinkLogService
from indilog_compute.positions import Positions
from indilog_compute.workers.call import Call

_COMMONEST: Final = (LogAppend, LogReadPrev, LogReadNext)


class _Keyed:
    """A call with an idempotency key, whose caller may stop waiting.

    Attributes:
        is_left: whether the caller has stopped waiting.
        waiting: the task that waits for the call's outcome; None: the call is not recorded yet.
    """

    def __init__(self) -> None:
        self.is_left = False
        self.waiting: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """Stop waiting for the outcome, because the caller has stopped waiting."""
        self.is_left = True
        if self.waiting is not None:
            self.waiting.cancel()


class Functions(Protocol):
    """The operations on deployed functions that workers and clients ask for.

    `FunctionHost` implements the operations, and documents their arguments and errors.
    """

    positions: Positions

    def call(self, name: str, arguments: bytes, *, position: MetalogPosition, depth: int) -> Call:
        """Call a function."""
        ...

    def cancel(self, call: Call) -> None:
        """Cancel a call."""

    def reserve_outcome_wait(self, name: str) -> AbstractContextManager[None]:
        """Reserve room for a caller that waits for an outcome."""
        ...

    async def accept_once(
        self,
        name: str,
        arguments: bytes,
        *,
        key: str,
        position: MetalogPosition,
        depth: int,
        holder: str,
    ) -> str:
        """Record a call with an idempotency key; return the id of its invocation."""
        ...

    def release(self, holder: str, keys: Iterable[str]) -> None:
        """Release held outcomes."""

    async def holders(self, prefix: str, after: str) -> tuple[list[str], MetalogPosition]:
        """Return holders of outcomes."""
        ...

    async def outcome(self, invocation: str) -> Returned | Failed:
        """Wait for the outcome of an invocation with a key."""
        ...

    async def send(
        self,
        name: str,
        arguments: bytes,
        *,
        position: MetalogPosition,
        delay_s: float,
        key: str,
    ) -> str:
        """Record a call that is made later; return the id of its invocation."""
        ...

    async def invocation(self, id: str, *, wait_s: float) -> InvocationStatus | None:  # noqa: A002
        """Return a recorded invocation."""
        ...

    async def cancel_invocation(self, id: str) -> InvocationStatus | None:  # noqa: A002
        """Cancel a recorded invocation."""
        ...

    async def deploy(self, sources: Mapping[str, str], *, name: str | None, owner: str) -> AppInfo:
        """Deploy an application."""
        ...

    async def undeploy(self, name: str, *, owner: str) -> AppInfo:
        """Undeploy an application."""
        ...


class LinkServer:
    """Serves one link.

    Args:
        functions: runs the functions.
        logs: the logs of this node.
        questions_max: largest number of log questions that are answered at once, and also the
            largest number of other questions that are answered in tasks.
        is_client: whether the other end is a client. A client may deploy and undeploy, and its
            calls have depth 0.
    """

    def __init__(
        self, functions: Functions, logs: LogSource, *, questions_max: int, is_client: bool
    ) -> None:
        self._functions = functions
        self._log_service = LinkLogService(logs, questions_max=questions_max)
        self._positions = functions.positions
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._is_client = is_client
        self._calls: dict[int, Call] = {}
        self._keyed: dict[int, _Keyed] = {}
        self._questions_max = questions_max
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_deploying = False

    def serve(self, link: Link, call: int, message: Question | Greeting) -> None:
        """Answer one question on `link`, now or later.

        If this node does not know whether the session's position exists, it first checks this.

        Raises:
            IndilogError: the question failed; the link sends the error to the asker.
        """
        if not isinstance(message, Cancel):
            self._check_number(call)
        position: MetalogPosition = getattr(message, "position", 0)
        if self._positions.is_known(position):
            self._answer(link, call, message)
            return
        self._ask(link, call, self._check_position(link, call, message, position))

    def close(self) -> None:
        """Stop the work for a lost link, except recorded work."""
        for asking in list(self._asking.values()):
            asking.cancel()
        self._log_service.close()
        for call in list(self._calls.values()):
            self._functions.cancel(call)
        for keyed in self._keyed.values():
            keyed.leave()

    # --- internal

    def _check_number(self, call: int) -> None:
        if call in self._calls or call in self._asking or call in self._keyed:
            raise NotReadyError(f"Question {call} is being answered already.")

    def _ask(self, link: Link, call: int, asking: Coroutine[Any, Any, None]) -> None:
        """Run `asking` in a task, which is cancelled if the asker disconnects or sends `Cancel`."""
        try:
            self._check_room(self._asking)
        except OverloadedError:
            asking.close()
            raise
        self._asking[call] = task = asyncio.get_running_loop().create_task(asking)
        task.add_done_callback(partial(self._on_task_end, link, call))

    def _on_task_end(self, link: Link, call: int, task: asyncio.Task[None]) -> None:
        if self._asking.get(call) is task:
            del self._asking[call]
        if task.cancelled():
            link.answer(call, CANCELLED)

    async def _check_position(
        self, link: Link, call: int, message: Question | Greeting, position: MetalogPosition
    ) -> None:
        """Answer a question, unless its session position does not exist."""
        try:
            if fault := await self._positions.fault(position):
                raise InvalidArgumentsError(
                    f"Nothing was done: the session's position {fault}",
                    [{"field": "position", "problem": fault}],
                )
            self._answer(link, call, message)
        except IndilogError as error:
            link.answer(call, failed(error))

    def _answer(self, link: Link, call: int, message: Question | Greeting) -> None:
        if isinstance(message, _COMMONEST):
            self._log_service.serve(link, call, message)
            return
        match message:
            case CallFunction():
                self._call(link, call, message)
            case SendFunction():
                self._begin(link, call, self._send(message))
            case ReleaseCalls() | AskHolders():
                self._ask(link, call, _answer_with(link, call, self._held(message)))
            case Cancel():
                self._cancel(call)
            case DeployApp():
                self._deploy(link, call, message)
            case AskInvocation() | CancelInvocation():
                self._check_is_client("ask for invocations")
                self._ask(link, call, _answer_with(link, call, self._invocation(message)))
            case UndeployApp():
                self._check_is_client("undeploy")
                self._begin(link, call, self._undeploy(message))
            case (
                Welcome()
                | Ready()
                | ThreadsLeft()
                | MemoryUsedUp()
                | ServicesChanged()
                | RunServices()
                | Invoke()
                | Load()
                | Unload()
                | CheckArguments()
                | Ping()
            ):
                raise NotReadyError(f"A compute node is not asked {type(message).__name__}.")
            case _:
                self._log_service.serve(link, call, message)

    def _check_room(self, begun: Collection[object]) -> None:
        if len(begun) >= self._questions_max:
            raise OverloadedError("Too many calls of this connection are being started.")

    def _call(self, link: Link, number: int, message: CallFunction) -> None:
        if message.key:
            self._begin(link, number, self._call_once(number, message))
            self._keyed[number] = _Keyed()  # now, because the next message may be its `Cancel`
            return
        call = self._functions.call(
            message.function,
            message.arguments,
            position=message.position,
            depth=0 if self._is_client else message.depth,
        )
        self._calls[number] = call
        call.outcome.add_done_callback(partial(self._on_outcome, link, number))

    def _on_outcome(
        self, link: Link, number: int, outcome: asyncio.Future[Returned | Failed]
    ) -> None:
        self._calls.pop(number, None)
        link.answer(number, outcome.result())

    def _cancel(self, number: int) -> None:
        asking = self._asking.get(number)
        # If the task is done, its answer is already being sent.
        if asking is not None and not asking.done():
            asking.cancel()
        elif (call := self._calls.get(number)) is not None:
            self._functions.cancel(call)
        elif (keyed := self._keyed.get(number)) is not None:
            keyed.leave()
        else:
            self._log_service.cancel(number)

    def _deploy(self, link: Link, number: int, message: DeployApp) -> None:
        self._check_is_client("deploy")
        if self._is_deploying:
            raise NotReadyError("This client is deploying already; wait for that.")
        self._begin(link, number, self._deploy_sources(message))
        self._is_deploying = True

    def _check_is_client(self, what: str) -> None:
        if not self._is_client:
            raise NotReadyError(f"A function cannot {what}; use a client.")

    def _begin(self, link: Link, number: int, answering: Coroutine[Any, Any, Answer]) -> None:
        """Answer with the result of `answering`, which continues even if the link is lost."""
        try:
            self._check_room(self._tasks)
        except OverloadedError:
            answering.close()
            raise
        task = asyncio.get_running_loop().create_task(_answer_with(link, number, answering))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_once(self, number: int, message: CallFunction) -> Answer:
        """Record a call with a key, even if its caller disconnects. Then wait for the outcome of
        the call, as long as the caller waits.
        """
        keyed = self._keyed[number]
        try:
            with self._functions.reserve_outcome_wait(message.function):
                invocation = await self._functions.accept_once(
                    message.function,
                    message.arguments,
                    key=message.key,
                    position=message.position,
                    depth=0 if self._is_client else message.depth,
                    holder=message.holder,
                )
                if keyed.is_left:
                    raise _left(message)
                keyed.waiting = asyncio.current_task()
                return await self._functions.outcome(invocation)
        except asyncio.CancelledError:
            raise _left(message) from None
        finally:
            del self._keyed[number]

    async def _send(self, message: SendFunction) -> Answer:
        invocation = await self._functions.send(
            message.function,
            message.arguments,
            position=message.position,
            delay_s=message.delay_s,
            key=message.key,
        )
        return Accepted(invocation)

    async def _held(self, message: ReleaseCalls | AskHolders) -> Answer:
        if isinstance(message, ReleaseCalls):
            self._functions.release(message.holder, message.keys)
            return Done(0)
        holders, position = await self._functions.holders(message.prefix, message.after)
        return HoldersFound(position, tuple(holders))

    async def _invocation(self, message: AskInvocation | CancelInvocation) -> Answer:
        id_ = message.invocation
        if isinstance(message, CancelInvocation):
            found = await self._functions.cancel_invocation(id_)
        else:
            wait_s = min(max(message.wait_s, 0.0), INVOCATION_WAIT_S_MAX)
            found = await self._functions.invocation(id_, wait_s=wait_s)
        if found is None:
            return InvocationFound(id_)
        return InvocationFound(id_, found.function, found.state.value, found.outcome)

    async def _deploy_sources(self, message: DeployApp) -> Answer:
        try:
            info = await self._functions.deploy(
                message.sources, name=message.name, owner=message.owner
            )
        finally:
            self._is_deploying = False
        return Deployed(info)

    async def _undeploy(self, message: UndeployApp) -> Answer:
        return Undeployed(await self._functions.undeploy(message.name, owner=message.owner))


def _left(message: CallFunction) -> CallOutcomeUnknownError:
    return CallOutcomeUnknownError(f"{message.function} continues; its caller stopped waiting.")


async def _answer_with(link: Link, number: int, answering: Coroutine[Any, Any, Answer]) -> None:
    try:
        answer = await answering
    except IndilogError as error:
        answer = failed(error)
    except Exception:  # noqa: BLE001 - outermost: the asker must get an answer
        structlog.get_logger().exception("question failed")
        answer = failed(IndilogError("The platform failed on this call; its log says why."))
    link.answer(number, answer)
