"""The operations of a workflow other than steps: waits, branches, locks, calls, children, stores.

Each operation gets its number when its method is called, before anything is awaited. Its outcome is
decided once. The other modules of this package do the work of single operations.
`bokiflow.workflow.Workflow` inherits from `Operations` and adds steps.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from bokiflow.locks.lock import LEASE_S
from bokiflow.operations.body import Body
from bokiflow.operations.calls import CALL, FunctionCall, call
from bokiflow.operations.children import CHILD, START_CHILD, Child, ChildWorkflow, check_startable
from bokiflow.operations.compensation import Compensations
from bokiflow.operations.gathering import AT_ONCE, gather
from bokiflow.operations.run_lock import RunLock
from bokiflow.operations.signals import Signals, check_name
from bokiflow.operations.timers import SLEEP, sleep, start_timer
from bokiflow.operations.transactions import TRANSACTION, transact
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.execution import Execution
from bokiflow.runs.held_calls import HeldCalls
from bokiflow.runs.rounds import SIGNAL
from bokiflow.runs.unawaited_operations import GATHER
from indilog import Context, Log
from indilog.sdk import Logs

if TYPE_CHECKING:
    from bokistore import Store, Transaction

_ValueT = TypeVar("_ValueT")


class RunningChild(Generic[_ValueT]):
    """A child run that was started.

    Attributes:
        id: id of the child run.
    """

    def __init__(self, execution: Execution, child: Child[_ValueT]) -> None:
        self.id = child.id
        self._execution = execution
        self._child = child

    def result(self) -> Coroutine[Any, Any, _ValueT]:
        """Wait for the end of the child and return its result.

        Raises:
            StepFailedError: the child failed.
            Cancelled: the waiting run was cancelled.
        """
        number = self._execution.number()
        result = self._child.result(number)
        return self._execution.asked.add(number, self._child.name, CHILD, result)


class Operations:
    """The operations of a workflow, except its steps."""

    def __init__(self, execution: Execution, logs: Logs) -> None:
        self.execution = execution
        self._logs = logs

    @property
    def ctx(self) -> Context:
        """The context of the function that executes the run, for calls.

        Raises:
            FlowSettingsError: the run is executed outside of the platform.
        """
        if not isinstance(self._logs, Context):
            raise FlowSettingsError("This workflow runs outside of a function; it has no context.")
        return self._logs

    def log(self, name: str) -> Log:
        """Return the log `name`, to be used in the bodies of steps."""
        return self._logs.log(name)

    @cached_property
    def compensations(self) -> Compensations:
        """The compensations to run if the workflow fails or is cancelled."""
        return Compensations(self.execution)

    @cached_property
    def held_calls(self) -> HeldCalls:
        """The calls whose outcomes are held for the run."""
        execution, logs = self.execution, self._logs
        ctx = logs if isinstance(logs, Context) else None
        return HeldCalls(execution.log.name, execution.id, ctx, execution.is_durable)

    @cached_property
    def _signals(self) -> Signals:
        return Signals(self.execution)

    def _register(
        self, number: str, name: str, kind: str, operation: Coroutine[Any, Any, _ValueT]
    ) -> Coroutine[Any, Any, _ValueT]:
        """Return the coroutine of an operation, to be awaited (`AskedOperations.add`)."""
        return self.execution.asked.add(number, name, kind, operation)

    # --- waiting

    def sleep(self, duration: float | timedelta) -> Coroutine[Any, Any, None]:
        """Wait for this duration (in seconds, or a timedelta), counted from the first execution of
        this line. A restart of the process does not change the end of the wait.

        Raises:
            Cancelled: the run was cancelled while waiting.
        """
        ends = start_timer(self.execution, "sleep", duration)
        number = self.execution.number()
        return self._register(number, SLEEP, SLEEP, sleep(self.execution, number, ends))

    def signal(
        self,
        name: str,
        *,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Wait for the next signal `name` to this run and return its value; None: timeout.

        Signals stay in the log until the workflow consumes them by this call. Each signal is
        returned once, in log order. A signal that arrives after the timeout is kept for the next
        call.

        Raises:
            Cancelled: the run was cancelled while waiting.
            FlowSettingsError: the name is empty.
        """
        check_name(name)
        ends = math.inf if timeout is None else start_timer(self.execution, name, timeout)
        number = self.execution.number()
        return self._register(number, name, SIGNAL, self._signals.next(number, name, ends))

    # --- branches

    def gather(
        self, *branches: Coroutine[Any, Any, _ValueT], at_once: int = AT_ONCE
    ) -> Coroutine[Any, Any, list[_ValueT]]:
        """Run branches concurrently and return their results, in the given order.

        A branch is an operation, or any coroutine that awaits operations. All branches run to their
        end, even if one fails. Then the error of the first failed branch is raised.

        Args:
            branches: branches to run, at most 10,000.
            at_once: largest number of branches that run concurrently (1 or more).
        """
        number = self.execution.number()
        gathered = gather(self.execution, number, branches, at_once)
        return self.execution.asked.add(number, GATHER, GATHER, gathered, branches)

    # --- locks

    def lock(
        self,
        name: str,
        *,
        lease: float = LEASE_S,
        wait: float | None = None,
        log: str | None = None,
    ) -> RunLock:
        """Hold a lock during an `async with` block: `async with wf.lock("hotel:7") as lock`.

        The holder is the run. So a re-execution still holds a lock that an earlier execution
        acquired, with the same `lock.token`. The lease is renewed while the block runs. If no
        process executes the run for longer than `lease`, the lease ends nevertheless. Then
        `lock.check()` and the end of the block raise `LockLostError`.

        Args:
            name: name of the lock, unique in its log.
            lease: length of the lease in seconds; choose it longer than a takeover takes.
            wait: seconds to wait for the lock; None: without limit.
            log: log of the lock, if other programs share it; default: the log of the runs.

        Raises:
            LockTimeoutError: raised on entering: the lock was not acquired within `wait` seconds.
            NestedLockError: raised on entering: an enclosing block of this run holds the lock,
                perhaps a block around the enclosing `gather`. This outcome is decided.
        """
        where = self.execution.log if log is None else self.log(log)
        return RunLock(self.execution, where, name, lease, wait)

    # --- other workflows

    def start_child(
        self,
        child: ChildWorkflow[_ValueT],
        /,
        *arguments: Any,  # noqa: ANN401 - checked by the child's type hints
        **named: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, RunningChild[_ValueT]]:
        """Start a workflow of the same flow exactly once, and do not wait for its end.

        If this run fails or is cancelled, the child is cancelled. If this run succeeds before the
        child has ended, the child continues.

        Raises:
            InvalidArgumentsError: the arguments do not fit the child's type hints.
            FlowSettingsError: `child` is not a workflow of this flow.
            Cancelled: this run was cancelled; there is no child.
        """
        begun = self._child(child, arguments, named)
        return self._register(begun.number, begun.name, START_CHILD, self._begin_child(begun))

    async def _begin_child(self, child: Child[_ValueT]) -> RunningChild[_ValueT]:
        await child.start(self.compensations, is_awaited=False)
        return RunningChild(self.execution, child)

    def run(
        self,
        child: ChildWorkflow[_ValueT],
        /,
        *arguments: Any,  # noqa: ANN401 - checked by the child's type hints
        **named: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, _ValueT]:
        """Run a workflow of the same flow exactly once, and return its result.

        Raises:
            StepFailedError: the child failed. Or the child could never get a place in its limit,
                because all runs with such places wait for the child or for other waiting runs.
            InvalidArgumentsError, FlowSettingsError, Cancelled: as for `start_child`.
        """
        begun, number = self._child(child, arguments, named), self.execution.number()
        return self._register(number, begun.name, CHILD, self._run_child(begun, number))

    async def _run_child(self, child: Child[_ValueT], number: str) -> _ValueT:
        await child.start(self.compensations, is_awaited=True)
        return await child.result(number)

    def _child(
        self,
        child: ChildWorkflow[_ValueT],
        arguments: tuple[object, ...],
        named: dict[str, object],
    ) -> Child[_ValueT]:
        check_startable(child)
        text = child.arguments_text(arguments, named)
        return Child(self.execution, child, self.execution.number(), text)

    # --- functions

    @overload
    def call(
        self,
        function: Callable[..., Coroutine[Any, Any, _ValueT]],
        /,
        *arguments: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, _ValueT]: ...

    @overload
    def call(
        self,
        function: str | Callable[..., Any],
        /,
        *arguments: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, Any]: ...

    def call(
        self,
        function: str | Callable[..., Any],
        /,
        *arguments: Any,
        **named: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Call a function of an application and return its result; the call has one outcome.

        The platform records the call with the key of this operation, and decides one outcome
        despite crashes and concurrent executors. When the outcome is decided, the function does not
        run again for this call. If the worker crashes earlier, the function is restarted, so its
        body may run more than once. Effects that must happen once belong into a workflow (`run`),
        or into a transaction with an id.

        Args:
            function: a decorated function, or `"app.function"`, which takes named arguments only.
            arguments: positional arguments of the function.
            named: arguments of the function by name.

        Raises:
            StepFailedError: the function raised, or its worker crashed in each attempt. This
                outcome is decided.
            FlowSettingsError: `function` is not a function of an application.
        """
        of, number = FunctionCall(function, arguments, named), self.execution.number()
        called = call(self.execution, number, lambda: self.ctx, of, self.held_calls)
        return self._register(number, of.name, CALL, called)

    # --- stores

    def transact(
        self,
        store: Store,
        body: Callable[[Transaction], Awaitable[_ValueT]],
        *,
        name: str | None = None,
    ) -> Coroutine[Any, Any, _ValueT]:
        """Run `body(txn)` in a transaction that takes effect exactly once, and return its result.
        The log decides the result once.

        The body may run several times, because of conflicts, crashes and concurrent executors. The
        writes of exactly one attempt take effect. The result is stored as JSON and converted to the
        return type.

        Args:
            store: a store on any log.
            body: function of the transaction, as for `Store.transact`.
            name: name of the operation in the log; default: the name of the body.

        Raises:
            StepFailedError: the body raised, or all attempts conflicted; nothing was changed.
            Cancelled: the run was cancelled; nothing was changed.
        """
        number, known = self.execution.number(), Body(body, name)
        committed = transact(self.execution, number, store, body, known)
        return self._register(number, known.name, TRANSACTION, committed)
