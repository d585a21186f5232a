"""The errors of BokiFlow's workflows and locks. All other errors are those of the log."""

from __future__ import annotations

from indilog import IndilogError


class FlowError(IndilogError):
    """Base of the errors of BokiFlow."""


class FlowSettingsError(FlowError):
    """An invalid setting, name or id; nothing was done."""


class RunIdInUseError(FlowError):
    """The run with this id belongs to another workflow; nothing was done."""


class UnknownRunError(FlowError):
    """There is no run with this id, or it was trimmed after its retention."""


def _what(kind: str, message: str) -> str:
    """Return the description of an error; many errors of Python have no message."""
    return f"{kind}: {message}" if message else f"{kind}."


class StepFailedError(FlowError):
    """A step, child, call or transaction failed permanently. The log has decided this outcome, so
    every execution raises the same error.

    Attributes:
        step: name of the operation.
        kind: class name of the error with which it failed.
    """

    def __init__(self, step: str, kind: str, message: str) -> None:
        super().__init__(f"Step {step!r} failed: {_what(kind, message)}")
        self.step = step
        self.kind = kind


class RunFailedError(FlowError):
    """The workflow ended with an error.

    Attributes:
        run: the run's id.
        kind: class name of the error that the workflow raised.
    """

    def __init__(self, run: str, kind: str, message: str) -> None:
        super().__init__(f"Run {run!r} failed: {_what(kind, message)}")
        self.run = run
        self.kind = kind


class RunCancelledError(RunFailedError):
    """The run was cancelled, or the workflow raised `Cancelled`."""


class Cancelled(FlowError):  # noqa: N818 - a request, not an error
    """Raised inside a workflow after a cancellation of its run was requested. A workflow may also
    raise it to end as cancelled.
    """


class UnfinishedOperationError(FlowError):
    """The workflow returned before one of its operations had finished, such as a step in another
    task, or a step that was not awaited. The log has decided this outcome, so the run has failed.
    """


class ChangedWorkflowError(FlowError):
    """An execution of the code does not match the decided steps: the code has changed, or it is not
    deterministic.

    The run is parked and keeps its steps. It continues when matching code is deployed.

    Attributes:
        run: the run's id.
        number: number of the step at which execution and log differ.
        decided: the step in the log; None if there is none.
        found: the step that this execution called; None: the execution ended before that step.
    """

    def __init__(
        self,
        run: str,
        number: str,
        decided: str | None,
        found: str | None,
        raised: BaseException | None = None,
    ) -> None:
        if raised is not None:
            did = f"ended before it with {type(raised).__name__}: {raised!s:.300}"
        else:
            did = "ended before it" if found is None else f"called {found!r} there"
        super().__init__(
            f"Run {run!r} does not match the code: step {number} was decided as {decided!r}, "
            f"but this execution {did.rstrip('.')}. "
            "Deploy code that does the same steps first, or let old runs end. "
            "If the code has not changed, it is not deterministic."
        )
        self.run = run
        self.number = number
        self.decided = decided
        self.found = found


class FlowVersionError(FlowError):
    """A record was written by another version of BokiFlow, and this program cannot read it. The
    message says what to do.
    """


class LockSettingsError(FlowError):
    """An invalid name, lease or wait of a lock; nothing was appended."""


class LockLostError(FlowError):
    """The lease ended before the lock was released. Since then another holder may have had the
    lock.

    Attributes:
        name: name of the lock.
        token: the fencing token; it is no longer valid.
    """

    def __init__(self, name: str, token: int) -> None:
        super().__init__(
            f"The lease on lock {name!r} (token {token}) ended before the lock was released. Use a "
            "longer lease, and let the guarded resource refuse tokens smaller than the largest "
            "it has seen."
        )
        self.name = name
        self.token = token


class LockTimeoutError(FlowError):
    """The lock was not acquired within the given time. The caller is no longer queued."""

    retryable = True


class NestedLockError(FlowError):
    """A block of a workflow acquires a lock that an enclosing block holds, which would deadlock."""


class LockQueueFullError(FlowError):
    """The queue of the lock is full. This caller was not added."""

    retryable = True


class CompensationFailedError(FlowError):
    """A workflow failed or was cancelled, and some of its compensations failed.

    Attributes:
        problems: one text for each failed compensation, beginning with the number of its step.
    """

    def __init__(self, cause: BaseException, problems: list[str]) -> None:
        super().__init__(
            f"Some compensations failed ({'; '.join(problems)}) after "
            f"{type(cause).__name__}: {cause}"
        )
        self.problems = problems


class QueryFailedError(FlowError):
    """A query raised or took too long, or the code does not match the run's decided operations."""


class RunNotMovedError(FlowError):
    """The code does not continue the run's history, so the run was not moved to it."""


class RunNotParkedError(FlowError):
    """The run is not parked, so it cannot be retried."""


class RunEndedError(FlowError):
    """The run has ended, so it cannot receive signals and cannot be cancelled."""
