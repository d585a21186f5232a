"""What a workflow can do beside its steps: wait, branch, lock, call, start others, write to stores.

Each operation takes its number where it is written down, before anything is awaited.
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
from bokiflow.operations.signals import SIGNAL, Signals, check_name
from bokiflow.operations.timers import SLEEP, sleep, start_timer
from bokiflow.operations.transactions import TRANSACTION, transact
from bokiflow.runs.execution import Execution
from bokiflow.runs.unawaited_operations import GATHER
from indilog import Context, Log

if TYPE_CHECKING:
    from bokistore import Store, Transaction

_ValueT = TypeVar("_ValueT")


class RunningChild(Generic[_ValueT]):
    """A child that was started.

    Attributes:
        id: of its run.
    """

    def __init__(self, execution: Execution, child: Child[_ValueT]) -> None:
        self.id = child.id
        self._execution = execution
        self._child = child

    def result(self) -> Coroutine[Any, Any, _ValueT]:
        """Return what it returned, once it has.

        Raises:
            StepFailedError: it failed. Cancelled: the run that waits was cancelled.
        """
        number = self._execution.number()
        result = self._child.result(number)
        return self._execution.asked.add(number, self._child.name, CHILD, result)


class Operations:
    """The operations of a workflow, but for its steps."""

    execution: Execution

    def log(self, name: str) -> Log:
        """Return the log `name`, for the bodies of steps."""
        raise NotImplementedError

    @property
    def ctx(self) -> Context:
        """The context of the function that executes this, for its calls."""
        raise NotImplementedError

    @cached_property
    def compensations(self) -> Compensations:
        """What is taken back if the workflow fails."""
        return Compensations(self.execution)

    @cached_property
    def _signals(self) -> Signals:
        return Signals(self.execution)

    def _asked(
        self, number: str, name: str, kind: str, operation: Coroutine[Any, Any, _ValueT]
    ) -> Coroutine[Any, Any, _ValueT]:
        """Return an operation, which the workflow should await; see `AskedOperations.add`."""
        return self.execution.asked.add(number, name, kind, operation)

    # --- waiting

    def sleep(self, duration: float | timedelta) -> Coroutine[Any, Any, None]:
        """Wait that many seconds, counted from the first execution of this line: a restart in
        between neither begins it anew nor shortens it.

        Raises:
            Cancelled: the run was cancelled meanwhile.
        """
        ends = start_timer(self.execution, "sleep", duration)
        number = self.execution.number()
        return self._asked(number, SLEEP, SLEEP, sleep(self.execution, number, ends))

    def signal(
        self,
        name: str,
        *,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Return the value of the next signal `name` that this run was sent; None: in that time
        there was none.

        Signals sent before they are asked for are kept. Each is given once, in the order of the
        log; one that comes when the time is over is kept for the next call.

        Raises:
            Cancelled: the run was cancelled meanwhile. FlowSettingsError: the name is empty.
        """
        check_name(name)
        ends = math.inf if timeout is None else start_timer(self.execution, name, timeout)
        number = self.execution.number()
        return self._asked(number, name, SIGNAL, self._signals.next(number, name, ends))

    # --- branches

    def gather(
        self, *branches: Coroutine[Any, Any, _ValueT], at_once: int = AT_ONCE
    ) -> Coroutine[Any, Any, list[_ValueT]]:
        """Run branches at the same time and return their results, in the order given.

        A branch is an operation, or any coroutine that awaits operations. All of them come to
        their ends, also when one fails; then what the first one that failed raised is raised.

        Args:
            branches: what to run.
            at_once: how many run at once.
        """
        number = self.execution.number()
        gathered = gather(self.execution, number, branches, at_once)
        return self._asked(number, GATHER, GATHER, gathered)

    # --- locks

    def lock(
        self,
        name: str,
        *,
        lease: float = LEASE_S,
        wait: float | None = None,
        log: str | None = None,
    ) -> RunLock:
        """Hold a lock while an `async with` block runs: `async with wf.lock("hotel:7") as lock`.

        The holder is the run: a re-execution holds what an execution before it acquired, with the
        same `lock.token`. The lease is renewed while the block runs; if it ends all the same (the
        run was not executed for longer than `lease`), `lock.check()` and leaving the block raise
        `LockLostError`.

        Args:
            name: of the lock, within its log.
            lease: seconds; give it longer than it takes until a run is taken over.
            wait: seconds to wait for it; None: as long as it takes.
            log: where the lock lives, to share it with others; else the log of the runs.

        Raises:
            LockTimeoutError: on entering: not within `wait` seconds.
            NestedLockError: on entering: a block around this one, also one around the `gather`
                that it is in, holds the lock; so it is decided.
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
        """Start a workflow of the same flow, exactly once, and go on without waiting for it.

        If this run fails or is cancelled, the child is cancelled; if it ends well before the child
        does, the child goes on.

        Raises:
            InvalidArgumentsError: they do not fit the child's type hints.
            FlowSettingsError: `child` is no workflow of this flow.
            Cancelled: this run was cancelled; there is no child.
        """
        begun = self._child(child, arguments, named)
        return self._asked(begun.number, begun.name, START_CHILD, self._started(begun))

    async def _started(self, child: Child[_ValueT]) -> RunningChild[_ValueT]:
        await child.start(self.compensations)
        return RunningChild(self.execution, child)

    def run(
        self,
        child: ChildWorkflow[_ValueT],
        /,
        *arguments: Any,  # noqa: ANN401 - checked by the child's type hints
        **named: Any,  # noqa: ANN401
    ) -> Coroutine[Any, Any, _ValueT]:
        """Run a workflow of the same flow, exactly once, and return its result.

        Raises:
            StepFailedError: the child failed.
            InvalidArgumentsError, FlowSettingsError, Cancelled: as `start_child`.
        """
        begun, number = self._child(child, arguments, named), self.execution.number()
        return self._asked(number, begun.name, CHILD, self._ran(begun, number))

    async def _ran(self, child: Child[_ValueT], number: str) -> _ValueT:
        await child.start(self.compensations)
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

        The platform records the call under the key of this operation, so however many execute this
        and whatever dies, one outcome is decided, and the function is not run again once it has
        one. When its worker is lost it is begun again, so its body may run more than once. What
        must happen once in it belongs into a workflow (`run`), or into a transaction with an id.

        Args:
            function: a decorated function, or `"app.function"`, which takes named arguments only.
            arguments: of the function.
            named: arguments by name.

        Raises:
            StepFailedError: the function raised, or its worker was lost each time; so it is
                decided.
            FlowSettingsError: it is no function of an application.
        """
        of, number = FunctionCall(function, arguments, named), self.execution.number()
        called = call(self.execution, number, lambda: self.ctx, of)
        return self._asked(number, of.name, CALL, called)

    # --- stores

    def transact(
        self,
        store: Store,
        body: Callable[[Transaction], Awaitable[_ValueT]],
        *,
        name: str | None = None,
    ) -> Coroutine[Any, Any, _ValueT]:
        """Run `body(txn)` in a transaction of a store that takes effect exactly once; return its
        result, decided once by the log.

        The body may run several times; only what it wrote at one of them takes effect, whatever
        dies and however many execute this. Its result comes back as JSON, as its return type says.

        Args:
            store: of any log.
            body: as of `Store.transact`.
            name: by which it is known in the log; else that of the body.

        Raises:
            StepFailedError: the body raised, or was in conflict again and again; nothing was
                changed.
        """
        number, known = self.execution.number(), Body(body, name)
        committed = transact(self.execution, number, store, body, known)
        return self._asked(number, known.name, TRANSACTION, committed)
