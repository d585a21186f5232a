"""Locks in workflows. The holder is the run, so a re-execution still holds the locks that the run
acquired.

Acquiring and releasing are operations. While the block runs, the executor of the run renews the
lease; after a takeover, the new executor renews it. If the lease has ended, `check` and the end of
the block raise `LockLostError`. `Operations.lock` makes a `RunLock`, which uses
`bokiflow.locks.lock`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Final

from bokiflow.locks.lock import HeldLock, Lock
from bokiflow.locks.lock_replica import replica_of
from bokiflow.operations.notifications import Woken, decide_waiting, run_unless_cancelled
from bokiflow.runs import waiting
from bokiflow.runs.errors import (
    Cancelled,
    LockLostError,
    LockQueueFullError,
    LockTimeoutError,
    NestedLockError,
)
from bokiflow.runs.execution import Execution, OperationOutcome, failure_from, raise_failure
from bokiflow.runs.records import RecordedFailure
from bokiflow.runs.run_log import read_dependency
from indilog import IndilogError, Log

LOCK: Final = "lock"
CHECK_LOCK: Final = "check lock"
UNLOCK: Final = "unlock"
_HELD: Final = b"true"
_RENEWALS_PER_LEASE: Final = 3


class HeldByRun:
    """A lock that a run holds.

    Attributes:
        name: name of the lock.
        token: the fencing token, larger than those of all earlier holders.
    """

    def __init__(self, execution: Execution, log: Log, held: HeldLock, lease_s: float) -> None:
        self.name = held.name
        self._log_name = log.name
        self._is_over = False
        self.token = held.token
        self._held = held
        self._execution = execution
        self._lease_s = lease_s
        self._renewing: asyncio.Task[None] | None = None

    def is_held(self, execution: Execution, log: Log, name: str) -> bool:
        """Tell whether this object is the lock `name` of `log`, and the run of `execution` still
        holds it according to the decided operations.
        """
        is_same = (self._log_name, self.name) == (log.name, name)
        return is_same and self._execution is execution and not self._is_over

    async def check(self) -> None:
        """Check that the run holds the lock, and extend the lease to its full length from now.

        Raises:
            LockLostError: the lease has ended. This outcome is decided.
        """
        await self._ask(CHECK_LOCK, is_cancellable=True)

    async def release(self) -> None:
        """Release the lock to the next caller in the queue.

        Raises:
            LockLostError: the lease had already ended. This outcome is decided.
        """
        await self._ask(UNLOCK, is_cancellable=False)

    async def _ask(self, kind: str, *, is_cancellable: bool) -> None:
        execution, held = self._execution, self._held

        async def ask() -> OperationOutcome:
            await (held.extend(self._lease_s) if kind == CHECK_LOCK else held.release())
            return OperationOutcome(_HELD)

        async def asked() -> OperationOutcome:
            try:
                return await read_dependency(ask)
            except LockLostError as error:
                return OperationOutcome(b"", RecordedFailure(LockLostError.__name__, str(error)))

        decided = await execution.decide(
            execution.number(), self.name, kind, asked, may_wait=True, is_cancellable=is_cancellable
        )
        is_lost = decided.failure is not None and decided.failure.kind == LockLostError.__name__
        self._is_over = self._is_over or is_lost or kind == UNLOCK
        if is_lost:
            raise LockLostError(self.name, self.token)
        raise_failure(decided)

    def keep(self, *, is_new: bool) -> None:
        """Start to renew the lease. Without an event loop, or in a check, do nothing."""
        assert not self._is_over, "only a held lock is renewed"
        assert self._renewing is None, "one task renews a lease"
        if waiting.has_loop() and not self._execution.is_check:
            self._renewing = asyncio.create_task(self._renew(is_new=is_new))
            self._execution.pins += 1

    def stop_renewing(self) -> None:
        """Stop renewing the lease."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
            self._execution.pins -= 1

    async def _renew(self, *, is_new: bool) -> None:
        if is_new:
            await waiting.pause(self._lease_s / _RENEWALS_PER_LEASE)
        while True:
            try:
                await self._held.extend(self._lease_s)
            except LockLostError:
                return  # the end of the block raises the error
            except IndilogError:
                pass  # the log may be available again before the lease ends
            await waiting.pause(self._lease_s / _RENEWALS_PER_LEASE)

    def __repr__(self) -> str:
        return f"HeldByRun(name={self.name!r}, token={self.token})"


_AROUND: Final[ContextVar[tuple[HeldByRun, ...]]] = ContextVar("around", default=())
"""The locks of the blocks that enclose the running code, including blocks around its `gather`."""


class RunLock:
    """The block `async with wf.lock("hotel:7") as lock:` (`Operations.lock`)."""

    def __init__(
        self, execution: Execution, log: Log, name: str, lease: float, wait: float | None
    ) -> None:
        self._number = execution.number()
        self._execution = execution
        self._log = log
        self._name = name
        self._lease_s = lease
        self._lock = Lock(
            log, name, lease=lease, wait=wait, owner=execution.key(self._number), renew=False
        )
        self._held: HeldByRun | None = None
        self._is_new = False

    async def __aenter__(self) -> HeldByRun:
        execution = self._execution
        decided = await decide_waiting(execution, self._number, self._name, LOCK, self._acquire)
        if decided.failure is not None and decided.failure.kind == LockTimeoutError.__name__:
            raise LockTimeoutError(decided.failure.message)
        if decided.failure is not None and decided.failure.kind == NestedLockError.__name__:
            raise NestedLockError(decided.failure.message)
        try:
            raise_failure(decided)
        except Cancelled:
            # An earlier execution may still hold the lock. Then the end of its lease frees the
            # lock.
            if not execution.is_check:
                with suppress(IndilogError):
                    await self._lock.leave()
            raise
        held = HeldLock(
            self._log, self._name, replica_of(self._log, self._name), int(decided.result)
        )
        self._held = HeldByRun(execution, self._log, held, self._lease_s)
        self._held.keep(is_new=self._is_new)
        _AROUND.set((*_AROUND.get(), self._held))
        return self._held

    async def _acquire(self) -> OperationOutcome:
        if any(h.is_held(self._execution, self._log, self._name) for h in _AROUND.get()):
            words = (
                f"Lock {self._name!r} is held by an enclosing block, so this block would wait for "
                "its own run. Remove the inner block, or give its lock another name."
            )
            return OperationOutcome(b"", RecordedFailure(NestedLockError.__name__, words))

        async def acquire() -> OperationOutcome:
            self._is_new = True
            self._execution.lock_waits += 1
            try:
                return OperationOutcome(b"%d" % (await self._lock.acquire()).token)
            except (LockTimeoutError, LockQueueFullError) as error:
                return OperationOutcome(b"", failure_from(error))
            finally:
                self._execution.lock_waits -= 1

        try:
            return await run_unless_cancelled(self._execution, read_dependency(acquire))
        except Woken:  # the lock may have been acquired, so release it
            await read_dependency(self._lock.leave)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        held = self._held
        assert held is not None, "a block is entered before it is left"
        held.stop_renewing()
        _AROUND.set(tuple(around for around in _AROUND.get() if around is not held))
        if error is None:
            await held.release()
        elif isinstance(error, Exception):
            with suppress(LockLostError):  # the error of the block has priority
                await held.release()
        # otherwise this execution stops, and the next execution still holds the lock
