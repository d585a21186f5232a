"""What a person's use of workflows and locks can meet beside the errors of the log."""

from __future__ import annotations

from indilog import IndilogError


class FlowError(IndilogError):
    """Base of the errors of BokiFlow."""


class FlowSettingsError(FlowError):
    """A setting, name or id that no workflow can have; nothing was done."""


class RunIdInUseError(FlowError):
    """The run of this id is one of another workflow; nothing was started or done."""


class UnknownRunError(FlowError):
    """There is no run of this id, or it was forgotten."""


class StepFailedError(FlowError):
    """A step, child, call or transaction of a run failed for good: so it was decided, and it is
    raised alike in every execution.

    Attributes:
        step: its name.
        kind: the name of the class of what it failed with.
    """

    def __init__(self, step: str, kind: str, message: str) -> None:
        super().__init__(f"Step {step!r} failed: {kind}: {message}")
        self.step = step
        self.kind = kind


class RunFailedError(FlowError):
    """The workflow ended with an error.

    Attributes:
        run: the run's id.
        kind: the name of the class of what the workflow raised.
    """

    def __init__(self, run: str, kind: str, message: str) -> None:
        super().__init__(f"Run {run!r} failed: {kind}: {message}")
        self.run = run
        self.kind = kind


class RunCancelledError(RunFailedError):
    """The run was cancelled, or the workflow gave up by raising `Cancelled`."""


class Cancelled(FlowError):  # noqa: N818 - raised to give up, which is no error
    """Raised inside a workflow: by a cancellation, or by the workflow to give up."""


class UnfinishedOperationError(FlowError):
    """The workflow returned while something that it had asked for was not finished: a step in a
    task of its own, or one that it did not await. So it is decided, and the run has failed.
    """


class ChangedWorkflowError(FlowError):
    """The code does not fit the steps that are decided: their sequence has changed.

    The run waits, nothing of it is lost; it goes on when code is deployed that fits.

    Attributes:
        run: the run's id.
        number: of the step at which code and log differ.
        decided: what the log has there; None: nothing.
        found: what the code does there; None: it ends before.
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
    """A record was written by a later version of BokiFlow; upgrade this program to read it."""


class LockSettingsError(FlowError):
    """A name, lease or wait that no lock can have; nothing was appended."""


class LockLostError(FlowError):
    """The lease ended before the lock was released; somebody else may hold it, or have held it.

    Attributes:
        name: of the lock.
        token: the fencing token that is void now.
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
    """The lock was not got in the time given; the caller waits for it no longer."""

    retryable = True


class NestedLockError(FlowError):
    """A block of a workflow wants a lock that a block around it holds: it would wait for itself."""


class LockQueueFullError(FlowError):
    """Too many wait for the lock already; the caller does not."""

    retryable = True


class CompensationFailedError(FlowError):
    """A workflow failed or was cancelled, and something that it had done could not be taken back.

    Attributes:
        problems: one text for each of these, beginning with the number of the step.
    """

    def __init__(self, cause: BaseException, problems: list[str]) -> None:
        super().__init__(
            f"What was done could not all be taken back ({'; '.join(problems)}) after "
            f"{type(cause).__name__}: {cause}"
        )
        self.problems = problems


class RunEndedError(FlowError):
    """The run has ended; it can be sent no signals and cannot be cancelled any more."""
