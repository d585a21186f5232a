"""Ends the code that a cancelled run still executes: bodies of steps, and workflow code.

A cancellation of a run is raised at the run's next operation. If the body of a step is running, it
first gets a time of grace. After this time, `asyncio.CancelledError` is raised where the body
waits. If the body still waits `ENDING_S` seconds later, it is abandoned: its coroutine is closed
and never resumed. Workflow code that waits outside of operations is ended in the same way, but with
`Cancelled`.

`execution` runs the workflow's code and the bodies of its steps through `CancelGrace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

from bokiflow.runs import waiting
from bokiflow.runs.errors import Cancelled
from bokiflow.runs.public_call import Stopped

_ValueT = TypeVar("_ValueT")
ENDING_S: Final = 5.0
"""Seconds that code gets for its clean-up after a cancellation was raised in it."""
_LOOK_S_MAX: Final = 1.0
_LOOK_S_MIN: Final = 0.01


class BodyCancelledError(Exception):
    """The body was ended because its run is cancelled. `how` tells how the body ended."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Interruptible(Generic[_ValueT]):
    """Awaits a coroutine that can be ended from outside, even if it ignores a cancellation.

    Args:
        body: the coroutine.
        raised: returns the error to raise first in the coroutine; None: `CancelledError`.

    Attributes:
        interrupted_at: when that error was raised (`waiting.monotonic_now`); None: not yet.
        is_abandoned: whether the coroutine ignored the error, and was closed.
    """

    def __init__(
        self, body: Coroutine[Any, Any, _ValueT], raised: Callable[[], Exception] | None = None
    ) -> None:
        self.interrupted_at: float | None = None
        self.is_abandoned = False
        self._body = body
        self._raised = raised
        self._task: waiting.Task[Any] | None = None
        self._cancels = 0
        self._is_due = False

    def interrupt(self, ending_s: float) -> None:
        """Raise the error in the coroutine, which is waiting. If the error was raised `ending_s`
        seconds ago or earlier, close the coroutine instead.
        """
        now = waiting.monotonic_now()
        if self._task is None or self._is_due:
            return
        if self.interrupted_at is None:
            self.interrupted_at = now
        elif now - self.interrupted_at >= ending_s:
            self.is_abandoned = True
        else:
            return
        self._is_due = True
        self._task.cancel()

    def abandon(self) -> None:
        """Mark the coroutine to be closed at the next cancellation of its task. The caller cancels
        the task now.
        """
        self.is_abandoned = True

    def __await__(self) -> Generator[Any, Any, _ValueT]:
        """Run the coroutine and return its result.

        Raises:
            BodyCancelledError: the coroutine was ended by `interrupt`.
        """
        self._task = waiting.current_task()
        self._cancels = 0 if self._task is None else self._task.cancelling()
        error: BaseException | None = None
        awaited: object = None
        try:
            while True:
                try:
                    awaited = self._body.send(None) if error is None else self._body.throw(error)
                except StopIteration as end:
                    result: _ValueT = end.value
                    return result
                except waiting.CancelledError as cancelled:
                    if self.interrupted_at is None or self._is_cancelled_otherwise():
                        raise
                    raise BodyCancelledError("Its body was cancelled.") from cancelled
                error = None
                try:
                    yield awaited
                except BaseException as raised:  # noqa: BLE001 - the error is raised in the coroutine
                    error = self._error(raised)
                if self.is_abandoned:
                    self._close()
                    if self._is_cancelled_otherwise():  # cancelled for another reason
                        raise waiting.CancelledError
                    raise BodyCancelledError("Its body ignored the cancellation and was abandoned.")
        finally:
            # An error's traceback has this frame. A cycle of both would keep the body's memory.
            error = awaited = None

    def _is_cancelled_otherwise(self) -> bool:
        """Whether the task was cancelled other than by `interrupt`."""
        return self._task is not None and self._task.cancelling() > self._cancels

    def _error(self, raised: BaseException) -> BaseException:
        """Return the error to raise in the coroutine for an error `raised` from outside."""
        if not (self._is_due and isinstance(raised, waiting.CancelledError)):
            return raised
        self._is_due = False
        assert self._task is not None, "only a running coroutine is interrupted"
        is_stopped = self._task.uncancel() > self._cancels
        return raised if is_stopped or self._raised is None else self._raised()

    def _close(self) -> None:
        """Close the coroutine, which is never resumed. An error is logged, for example if the
        coroutine waits again.
        """
        try:
            self._body.close()
        except Exception as error:  # noqa: BLE001 - of code that has no caller any more
            structlog.get_logger().warning("abandoned code failed", reason=str(error))


class CancelledCode(Protocol):
    """An execution whose run may be cancelled."""

    @property
    def id(self) -> str:
        """The id of the run."""

    @property
    def is_ending(self) -> bool:
        """Whether the execution ends although the run continues."""

    @property
    def is_in_operation(self) -> bool:
        """Whether an operation is in progress."""


class CancelGrace:
    """Ends the bodies of one execution some time after the cancellation of its run.

    Args:
        execution: the execution.
        grace_s: seconds from the cancellation until bodies are ended; infinite: bodies are never
            ended.
    """

    def __init__(self, execution: CancelledCode, grace_s: float) -> None:
        self._execution = execution
        self._grace_s = grace_s
        self._bodies: dict[Interruptible[Any], Callable[[], bool]] = {}
        self._workflow: Interruptible[Any] | None = None
        self._idle_since: float | None = None
        self._asked_at: float | None = None
        self._timer: waiting.Timer | None = None

    def begin(self) -> None:
        """Begin the time of grace, because a cancellation is requested."""
        if self._asked_at is None and self._grace_s < math.inf:
            self._asked_at = waiting.monotonic_now()
            self._timer = waiting.call_later(self._grace_s, self._look)

    def stop(self) -> None:
        """Stop ending bodies, because the execution has ended."""
        if self._timer is not None:
            self._timer.cancel()

    async def run_body(
        self, body: Coroutine[Any, Any, _ValueT], is_cancelled: Callable[[], bool]
    ) -> _ValueT:
        """Return the result of the body of a step.

        Args:
            body: the body.
            is_cancelled: tells whether a cancellation is requested that ends this body.

        Raises:
            BodyCancelledError: the body was ended.
            CancelledError: the execution was ended, whatever the body returned or raised then.
        """
        interruptible = Interruptible(body)
        self._bodies[interruptible] = is_cancelled
        try:
            return await self._unless_ended(interruptible)
        except BodyCancelledError:
            self._log_if_abandoned(interruptible, "the body of a step")
            raise
        finally:
            del self._bodies[interruptible]

    async def run_workflow(
        self, body: Coroutine[Any, Any, _ValueT], notify: Callable[[], None]
    ) -> _ValueT:
        """Return the result of the workflow's code.

        Args:
            body: the code.
            notify: called when the cancellation is raised in the code.

        Raises:
            Cancelled: the code ignored the cancellation, or did not handle it.
            CancelledError: the execution was ended, whatever the code returned or raised then.
        """

        def cancelled() -> Cancelled:
            notify()
            return Cancelled("The run was cancelled while its code waited outside of an operation.")

        self._workflow = interruptible = Interruptible(body, cancelled)
        try:
            return await self._unless_ended(interruptible)
        except BodyCancelledError as error:
            self._log_if_abandoned(interruptible, "the code of a workflow")
            raise Cancelled(
                "The run was cancelled; its code ignored that and was abandoned."
            ) from error
        finally:
            self._workflow = None

    async def _unless_ended(self, code: Interruptible[_ValueT]) -> _ValueT:
        """Return the result of code of a step or workflow.

        Code may catch the `CancelledError` by which an execution is ended, and return or raise
        something else. That is no outcome of the code: the run continues in another execution.
        """
        try:
            result = await code
        except (Exception, Stopped) as error:
            if self._is_ended():
                raise waiting.CancelledError from error
            raise
        if self._is_ended():
            raise waiting.CancelledError
        return result

    def _is_ended(self) -> bool:
        """Whether the execution was ended while the code of the current task ran."""
        task = waiting.current_task()
        return self._execution.is_ending and task is not None and task.cancelling() > 0

    def _log_if_abandoned(self, ended: Interruptible[Any], what: str) -> None:
        if ended.is_abandoned:
            structlog.get_logger().warning(
                "cancelled code was abandoned", run=self._execution.id, what=what
            )

    def abandon(self) -> None:
        """Abandon all bodies of steps; if there are none, abandon the workflow's code. The caller
        now cancels the task of the execution once more, because the code ignored the first
        cancellation.
        """
        left = list(self._bodies)
        if not left and self._workflow is not None:
            left = [self._workflow]
        for code in left:
            if not code.is_abandoned:
                code.abandon()
                structlog.get_logger().warning(
                    "code of a stopped run was abandoned", run=self._execution.id
                )

    def _look(self) -> None:
        """End the bodies whose time of grace is over, and schedule the next check."""
        for body, is_cancelled in list(self._bodies.items()):
            if body.interrupted_at is not None or is_cancelled():
                body.interrupt(ENDING_S)
        self._look_at_workflow()
        look_s = min(_LOOK_S_MAX, max(_LOOK_S_MIN, min(self._grace_s, ENDING_S) / 4))
        self._timer = waiting.call_later(look_s, self._look)

    def _look_at_workflow(self) -> None:
        """End the workflow's code if it has waited outside of operations for the time of grace."""
        now, workflow = waiting.monotonic_now(), self._workflow
        if workflow is None or self._execution.is_in_operation:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now if workflow.interrupted_at is None else workflow.interrupted_at
        if workflow.interrupted_at is not None or now - self._idle_since >= self._grace_s:
            workflow.interrupt(ENDING_S)
