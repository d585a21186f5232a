"""What a person's use of workflows and locks can meet beside the errors of the log."""

from __future__ import annotations

from indilog.errors import IndilogError


class FlowError(IndilogError):
    """Base of the errors of BokiFlow."""


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


class LockQueueFullError(FlowError):
    """Too many wait for the lock already; the caller does not."""

    retryable = True
