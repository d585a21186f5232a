"""The errors of workflows and locks, in addition to those of the log."""

from __future__ import annotations

from indilog import IndilogError


class FlowError(IndilogError):
    """Base of the errors of BokiFlow."""


class FlowSettingsError(FlowError):
    """An invalid setting, name or id; nothing was done."""


class RunIdInUseError(FlowError):
    """The run of this id belongs to another workflow; nothing was done."""


class UnknownRunError(FlowError):
    """There is no run of this id, or it was trimmed after its retention."""


class StepFailedError(FlowError):
    """A step, child, call or transaction failed permanently. The failure is its decided outcome, so
    every execution raises it.

    Attributes:
        step: its name.
        kind: class name of the error that it failed with.
    """

    def __init__(self, step: str, kind: str, message: str) -> None:
        super().__init__(f"Step {step!r} failed: {kind}: {message}")
        self.step = step
        self.kind = kind


class RunFailedError(FlowError):
    """The workflow ended with an error.

    Attributes:
        run: the run's id.
        kind: class name of the error that the workflow raised.
    """

    def __init__(self, run: str, kind: str, message: str) -> None:
        super().__init__(f"Run {run!r} failed: {kind}: {message}")
        self.run = run
        self.kind = kind


class RunCancelledError(RunFailedError):
    """The run was cancelled, or the workflow raised `Cancelled`."""


class Cancelled(FlowError):  # noqa: N818 - a request, not an error
    """Raised inside a workflow: by a cancellation of its run, or by the workflow to end as
    cancelled.
    """


class UnfinishedOperationError(FlowError):
    """The workflow returned before an operation that it had requested was finished: a step in
    another task, or one that it did not await. That is decided, and the run has failed.
    """


class ChangedWorkflowError(FlowError):
    """The code does not match the decided steps: their sequence has changed.

    The run is parked and keeps its steps. It continues when matching code is deployed.

    Attributes:
        run: the run's id.
        number: of the step at which code and log differ.
        decided: the step in the log; None: none.
        found: the step in the code; None: the code ends before.
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
            does = f"ends before it with {type(raised).__name__}: {raised!s:.300}"
        else:
            does = "ends before it" if found is None else f"does {found!r} there"
        super().__init__(
            f"Run {run!r} does not fit the code: step {number} was decided as {decided!r}, "
            f"the code {does.rstrip('.')}. "
            "Deploy code that does the same steps first, or let old runs end."
        )
        self.run = run
        self.number = number
        self.decided = decided
        self.found = found


class FlowVersionError(FlowError):
    """A later version of BokiFlow wrote a record; upgrade this program to read it."""


class LockSettingsError(FlowError):
    """An invalid name, lease or wait of a lock; nothing was appended."""


class LockLostError(FlowError):
    """The lease ended before the lock was released; another holder may have, or have had, the lock.

    Attributes:
        name: of the lock.
        token: the fencing token, which is no longer valid.
    """

    def __init__(self, name: str, token: int) -> None:
        super().__init__(
            f"The lease on lock {name!r} (token {token}) ended before it was released; take a "
            "longer lease, and let what it guards refuse tokens that are smaller than the largest "
            "it has seen."
        )
        self.name = name
        self.token = token


class LockTimeoutError(FlowError):
    """The lock was not acquired in the given time; the caller no longer waits for it."""

    retryable = True


class NestedLockError(FlowError):
    """A block of a workflow acquires a lock that an enclosing block holds, which would deadlock."""


class LockQueueFullError(FlowError):
    """Too many callers wait for the lock already; this one was not added."""

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


class RunEndedError(FlowError):
    """The run has ended; it takes no signals and cannot be cancelled."""
