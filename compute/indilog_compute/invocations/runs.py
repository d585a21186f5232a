"""Runs invocations on this compute node: calls the function, and records the outcome.

`InvocationService` begins and abandons the runs. Calls that could not begin are retried, and an
outcome is appended until the append is acknowledged. A second copy of an outcome has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import structlog

from indilog.base.errors import (
    DataLossError,
    FunctionFailedError,
    IndilogError,
    NotReadyError,
    TooLargeError,
    UnknownFunctionError,
    WorkerCrashedError,
)
from indilog.base.ids import MetalogPosition
from indilog.base.log import Entry, Log
from indilog.link.link_messages import Failed, Returned, error_from, failed
from indilog.sdk.outcomes import own_append_missing
from indilog_compute.invocations.checkpoint import RecordedInvocation
from indilog_compute.invocations.records import (
    Event,
    Failure,
    Freed,
    InvocationAccepted,
    InvocationEnded,
    decode,
    encode,
)

_PAUSE_S_MIN: Final = 0.05
_PAUSE_S_MAX: Final = 5.0
"""Longest pause in seconds before a call or an append is retried; pauses double up to this one."""
_FREE_S: Final = 1.0
"""Seconds that a stopping node takes at most to record the invocations that it frees."""


class StartedCall(Protocol):
    """A call of a function that waits or runs on this compute node."""

    @property
    def outcome(self) -> asyncio.Future[Returned | Failed]:
        """A future, resolved once with the result or error."""


CallT = TypeVar("CallT", bound=StartedCall)
_CallT_co = TypeVar("_CallT_co", bound=StartedCall, covariant=True)


class StartCall(Protocol[_CallT_co]):
    """Starts a call of a function on this compute node."""

    def __call__(
        self,
        name: str,
        arguments: bytes,
        *,
        position: MetalogPosition,
        depth: int,
        invocation: str,
    ) -> _CallT_co:
        """Start the function `name` (`app.function`); raises the errors of `FunctionHost.call`."""


class InvocationRuns(Generic[CallT]):
    """Runs invocations on this compute node.

    Args:
        log: the log `$invocations`.
        start: starts a call of a function on this node.
        stop: stops such a call.
        executor: returns the current name of this node's executor.

    Attributes:
        rerun: number of invocations begun here that this or another executor had begun before.
        calling: number of calls of invocations that wait or run.
    """

    def __init__(
        self,
        log: Log,
        start: StartCall[CallT],
        stop: Callable[[CallT], None],
        executor: Callable[[], str],
    ) -> None:
        self.rerun = self.calling = 0
        self._log = log
        self._start = start
        self._stop = stop
        self._executor = executor
        self._running: dict[str, asyncio.Task[None]] = {}

    def begin(self, invocation: RecordedInvocation) -> None:
        """Run an invocation, and record its outcome."""
        self.rerun += invocation.tries > 1
        task = asyncio.get_running_loop().create_task(self._run(invocation, self._executor()))
        self._running[invocation.id] = task
        task.add_done_callback(partial(self._ended, invocation.id))

    def abandon(self, id: str) -> None:  # noqa: A002 - it is called so
        """Stop running an invocation, if it runs here."""
        if (task := self._running.pop(id, None)) is not None:
            task.cancel()

    async def stop(self, open_: Iterable[RecordedInvocation]) -> None:
        """Stop all invocations. For each invocation of `open_`, record that this executor no longer
        runs it.
        """
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        freed = [
            Entry(encode(Freed(self._executor(), i.id, is_lost=False)), (i.stream,)) for i in open_
        ]
        with suppress(IndilogError, TimeoutError):
            if freed:
                async with asyncio.timeout(_FREE_S):
                    await self._log.append_batch(freed)

    # --- internal

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:  # noqa: A002 - it is called so
        if self._running.get(id) is task:
            del self._running[id]
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("invocation not run", invocation=id, exc_info=error)

    async def _run(self, invocation: RecordedInvocation, executor: str) -> None:
        try:
            outcome = await self._run_until_begun(await self._read_accepted(invocation))
        except DataLossError as error:  # the record with the arguments is lost
            outcome = failed(error)
        except Exception:  # noqa: BLE001 - outermost: the invocation must end
            structlog.get_logger().exception("invocation failed", invocation=invocation.id)
            sentence = "The platform failed on this invocation; its log says why."
            outcome = failed(IndilogError(sentence))
        if isinstance(outcome, Failed) and isinstance(error_from(outcome), WorkerCrashedError):
            await self._record(Freed(executor, invocation.id, is_lost=True), invocation)
            return
        try:
            await self._record(_ended(executor, invocation.id, outcome), invocation)
        except TooLargeError as error:
            too_large = failed(_cannot_be_kept(invocation.function, error), outcome.position)
            await self._record(_ended(executor, invocation.id, too_large), invocation)

    async def _read_accepted(self, invocation: RecordedInvocation) -> InvocationAccepted:
        """Return the invocation's `InvocationAccepted` record; retry until the log can be read."""
        pause_s = _PAUSE_S_MIN
        while True:
            try:
                record = await self._log.read(invocation.seqnum)
                if record is None:
                    raise own_append_missing(invocation.seqnum)
            except IndilogError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                continue
            accepted = decode(record.data)
            assert isinstance(accepted, InvocationAccepted), (
                "the invocation table has this seqnum from an `InvocationAccepted` record"
            )
            return accepted

    async def _run_until_begun(self, accepted: InvocationAccepted) -> Returned | Failed:
        """Call the function, retrying until it has begun; return its outcome."""
        pause_s = _PAUSE_S_MIN
        while True:
            try:
                outcome = await self._call(accepted)
            except UnknownFunctionError as error:
                if pause_s == _PAUSE_S_MAX:
                    return failed(error)
                outcome = None  # this node may not have read the deployment yet
            except IndilogError as error:
                outcome = failed(error)
            if outcome is not None and not _could_not_begin(outcome):
                return outcome
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _call(self, accepted: InvocationAccepted) -> Returned | Failed:
        call = self._start(
            accepted.function,
            accepted.arguments,
            position=accepted.position,
            depth=accepted.depth,
            invocation=accepted.id,
        )
        self.calling += 1
        try:
            return await asyncio.shield(call.outcome)  # else a cancellation would cancel it
        except asyncio.CancelledError:
            self._stop(call)
            raise
        finally:
            self.calling -= 1

    async def _record(self, event: Event, invocation: RecordedInvocation) -> None:
        """Append an event; retry until the append is acknowledged."""
        pause_s = _PAUSE_S_MIN
        while True:
            try:
                await self._log.append(encode(event), tags=[invocation.stream])
            except TooLargeError:
                raise
            except IndilogError as error:
                structlog.get_logger().warning(
                    "outcome not recorded yet", invocation=invocation.id, reason=str(error)
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            else:
                return


def _could_not_begin(outcome: Returned | Failed) -> bool:
    return isinstance(outcome, Failed) and isinstance(error_from(outcome), NotReadyError)


def _cannot_be_kept(function: str, error: TooLargeError) -> FunctionFailedError:
    """Return the failure of a call whose result is too large for a record."""
    return FunctionFailedError(
        f"{function} ran, and its effects remain, but its result is too large: the record has "
        f"{error.size:,} bytes, the limit is {error.limit:,}. Store large results in a log and "
        "return their seqnums.",
        kind=TooLargeError.__name__,
    )


def _ended(executor: str, id: str, outcome: Returned | Failed) -> InvocationEnded:  # noqa: A002
    if isinstance(outcome, Returned):
        return InvocationEnded(executor, id, outcome.position, outcome.result)
    failure = Failure(outcome.kind, outcome.message, outcome.attributes)
    return InvocationEnded(executor, id, outcome.position, None, failure)


def outcome_in(event: InvocationEnded) -> Returned | Failed:
    """Return the outcome in a record."""
    if event.failure is None:
        return Returned(event.position, event.result or b"null")
    failure = event.failure
    return Failed(failure.kind, failure.message, failure.attributes, event.position)
