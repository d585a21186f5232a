"""All errors that users and libraries can get, as one class hierarchy.

Each class says whether the operation took effect, and whether a retry can succeed (`retryable`).
Messages are one sentence: what is wrong, and what to do. Ids and limits are attributes, so callers
need not parse messages. Every package raises these errors; the gateway and the links send them to
callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class IndilogError(Exception):
    """Base of all errors of the platform."""

    retryable: ClassVar[bool] = False
    """Whether the same call may be repeated. If so, a repetition is harmless and may succeed."""


class NotReadyError(IndilogError):
    """The platform cannot serve the request now: it is starting or recovering, or a node is
    unreachable.

    Nothing was done, with one exception: a call with an idempotency key may have been recorded. A
    repetition with the same key continues that invocation.
    """

    retryable: ClassVar[bool] = True


class ClientClosedError(IndilogError):
    """The program has closed this client, so nothing was done. Connect again."""


class DiskFullError(NotReadyError):
    """There is no disk space left; nothing was appended. Reads still work. Appends work again when
    there is space.
    """


class OverloadedError(NotReadyError):
    """A bounded queue is full; nothing was done."""


class SealedError(IndilogError):
    """The shard accepts no further records in this view; nothing was appended."""

    retryable: ClassVar[bool] = True


class QuorumUnavailableError(IndilogError):
    """Too few replicas answered in time. A read can be repeated."""

    retryable: ClassVar[bool] = True


class OutcomeUnknownError(IndilogError):
    """The operation may have taken effect. So the error is not `retryable`: a repetition could
    take effect a second time.

    Check first whether the operation took effect, or repeat it if a second effect is harmless.
    """


class AppendOutcomeUnknownError(OutcomeUnknownError):
    """The record may or may not be in the log.

    Retry with a tag that makes a second copy harmless, or read that tag first.
    """


class InvalidTagError(IndilogError):
    """A tag is empty, zero, too long or of a wrong type; nothing was appended."""


class TooLargeError(IndilogError):
    """A value exceeds a configured limit; nothing was done.

    Attributes:
        size: size of the refused value.
        limit: the largest allowed size, in the same unit.
    """

    def __init__(self, what: str, *, size: int, limit: int) -> None:
        super().__init__(f"{what} is {size:,}, the limit is {limit:,}; nothing was done.")
        self.what = what
        self.size = size
        self.limit = limit


class TrimmedError(IndilogError):
    """The record was trimmed.

    Attributes:
        first_seqnum: the first seqnum that can still be read.
    """

    def __init__(self, first_seqnum: int) -> None:
        super().__init__(f"Records below seqnum {first_seqnum} were trimmed; read from there.")
        self.first_seqnum = first_seqnum


class DataLossError(IndilogError):
    """No replica holds an intact copy of a record that was acknowledged.

    Attributes:
        seqnum: the first lost record that the read met; to read backwards, continue below it.
        next_seqnum: the seqnum after the last lost record that the read met; to read forwards,
            continue there.
        tags: tags of the lost records, if only their data is lost; otherwise empty.
    """

    def __init__(
        self,
        message: str,
        *,
        seqnum: int | None = None,
        next_seqnum: int | None = None,
        tags: Sequence[int | str] = (),
    ) -> None:
        super().__init__(message)
        self.seqnum = seqnum
        self.next_seqnum = next_seqnum
        self.tags = list(tags)


class ConfigError(IndilogError):
    """The configuration is invalid, or settings contradict each other; nothing was started."""


class DataDirectoryError(IndilogError):
    """The data directory is in use, has a newer format, or is damaged; nothing was changed."""


class UnauthorizedError(IndilogError):
    """The caller's token is missing or wrong; nothing was done."""


class DeployError(IndilogError):
    """An application could not be deployed; its previous version keeps running."""


class AppNameTakenError(DeployError):
    """Another owner has deployed an application with this name. That application keeps running."""


class UnknownFunctionError(IndilogError):
    """No such application or function is deployed."""


class NotFoundError(IndilogError):
    """The object that an operation names (such as a run) does not exist; nothing was done."""


class WrongStateError(IndilogError):
    """The object that an operation names is in a state that does not allow the operation; nothing
    was done. Example: a run that has ended cannot be cancelled.
    """


class InvocationCancelledError(IndilogError):
    """A recorded invocation was cancelled. An invocation that had begun may have had effects."""


class InvalidArgumentsError(IndilogError):
    """The arguments do not fit the function's signature; the function was not run.

    Attributes:
        errors: one mapping per fault, `{"field": ..., "problem": ...}`.
    """

    def __init__(self, message: str, errors: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []


class FunctionFailedError(IndilogError):
    """The function raised an exception; records that it has appended stay in the log.

    Attributes:
        kind: name of the exception's class.
        temporary: whether the exception was a `retryable` error of the platform, so the function
            may succeed later. A repetition may still be harmful, because the function may have had
            effects before it raised.
    """

    def __init__(self, message: str, *, kind: str = "Exception", temporary: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.temporary = temporary


class WorkerCrashedError(OutcomeUnknownError):
    """The worker process died while it ran the call; the call may have had effects."""


class CallOutcomeUnknownError(OutcomeUnknownError):
    """No answer came in time, or the connection was lost; the call may have run and had effects."""


class ConflictError(IndilogError):
    """Another transaction changed an object that this transaction had read. This transaction had no
    effect.
    """

    retryable: ClassVar[bool] = True


class ConditionFailedError(IndilogError):
    """The condition of an append (`After`) does not hold; nothing was appended.

    Attributes:
        last_seqnum: seqnum of the last record with the tag of the condition.
    """

    def __init__(self, tag: int | str, last_seqnum: int) -> None:
        super().__init__(
            f"The last record with tag {tag!r} is at seqnum {last_seqnum}, after the seqnum that "
            "the condition names; nothing was appended."
        )
        self.last_seqnum = last_seqnum


class MalformedFrameError(IndilogError):
    """Bytes do not have the expected format. Codecs raise it, and the runtime handles it."""
