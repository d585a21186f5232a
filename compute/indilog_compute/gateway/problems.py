"""Turns errors into RFC 9457 problem details: a status, a sentence, and whether to retry.

All routes of the gateway use it. `gateway.rpc.status` uses the same table for gRPC.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec

from indilog.base.errors import (
    AppNameTakenError,
    ConditionFailedError,
    ConfigError,
    ConflictError,
    DataLossError,
    DeployError,
    DiskFullError,
    FunctionFailedError,
    IndilogError,
    InvalidArgumentsError,
    InvalidTagError,
    InvocationCancelledError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    OverloadedError,
    QuorumUnavailableError,
    SealedError,
    TooLargeError,
    TrimmedError,
    UnauthorizedError,
    UnknownFunctionError,
    WorkerCrashedError,
    WrongStateError,
)
from indilog.link.link_messages import LinkLostError

MEDIA_TYPE: Final = "application/problem+json"

STATUSES: Final[dict[type[Exception], tuple[HTTPStatus, str]]] = {
    UnauthorizedError: (HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED"),
    UnknownFunctionError: (HTTPStatus.NOT_FOUND, "NOT_FOUND"),
    NotFoundError: (HTTPStatus.NOT_FOUND, "NOT_FOUND"),
    InvalidArgumentsError: (HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_ARGUMENT"),
    InvalidTagError: (HTTPStatus.BAD_REQUEST, "INVALID_ARGUMENT"),
    ValueError: (HTTPStatus.BAD_REQUEST, "INVALID_ARGUMENT"),
    TypeError: (HTTPStatus.BAD_REQUEST, "INVALID_ARGUMENT"),
    TooLargeError: (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "INVALID_ARGUMENT"),
    DeployError: (HTTPStatus.UNPROCESSABLE_ENTITY, "FAILED_PRECONDITION"),
    ConfigError: (HTTPStatus.CONFLICT, "FAILED_PRECONDITION"),
    ConditionFailedError: (HTTPStatus.PRECONDITION_FAILED, "FAILED_PRECONDITION"),
    WrongStateError: (HTTPStatus.CONFLICT, "FAILED_PRECONDITION"),
    AppNameTakenError: (HTTPStatus.CONFLICT, "ALREADY_EXISTS"),
    ConflictError: (HTTPStatus.CONFLICT, "ABORTED"),
    InvocationCancelledError: (HTTPStatus.CONFLICT, "CANCELLED"),
    TrimmedError: (HTTPStatus.GONE, "OUT_OF_RANGE"),
    DataLossError: (HTTPStatus.INTERNAL_SERVER_ERROR, "DATA_LOSS"),
    DiskFullError: (HTTPStatus.INSUFFICIENT_STORAGE, "RESOURCE_EXHAUSTED"),
    OverloadedError: (HTTPStatus.SERVICE_UNAVAILABLE, "RESOURCE_EXHAUSTED"),
    NotReadyError: (HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE"),
    LinkLostError: (HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE"),
    QuorumUnavailableError: (HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE"),
    SealedError: (HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE"),
    OutcomeUnknownError: (HTTPStatus.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED"),
    WorkerCrashedError: (HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL"),
    FunctionFailedError: (HTTPStatus.INTERNAL_SERVER_ERROR, "UNKNOWN"),
}
"""The HTTP status and the gRPC code of each class of errors. A class without an entry has the entry
of its nearest base class.
"""
_INTERNAL: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL")
_TEMPORARY: Final = (HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE")


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an answer that is an error.

    Attributes:
        title: the name of the error's class, for programs.
        kind: if a function raised an exception, the class name of the exception.
        errors: one `{"field", "problem"}` for each invalid argument.
        seqnum: if records are lost, the seqnum of the first lost record.
        next_seqnum: if records are lost or trimmed, the seqnum at which reading can continue.
        last_seqnum: if the condition of an append did not hold, the seqnum of the last record with
            the tag of the condition.
    """

    title: str
    status: int
    detail: str
    retryable: bool
    type: str = "about:blank"
    kind: str = ""
    errors: list[dict[str, str]] = []
    seqnum: int | None = None
    next_seqnum: int | None = None
    last_seqnum: int | None = None


def statuses_of(error: Exception) -> tuple[HTTPStatus, str]:
    """Return the HTTP status and the name of the gRPC code of an error."""
    if isinstance(error, FunctionFailedError) and error.temporary:
        return _TEMPORARY
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), _INTERNAL)


def problem_of(error: Exception) -> Problem:
    """Return the problem that describes `error` to an HTTP caller."""
    status, _ = statuses_of(error)
    return Problem(
        title=type(error).__name__,
        status=int(status),
        detail=str(error),
        retryable=isinstance(error, IndilogError) and error.retryable,
        kind=error.kind if isinstance(error, FunctionFailedError) else "",
        errors=error.errors if isinstance(error, InvalidArgumentsError) else [],
        seqnum=error.seqnum if isinstance(error, DataLossError) else None,
        next_seqnum=_next_seqnum(error),
        last_seqnum=error.last_seqnum if isinstance(error, ConditionFailedError) else None,
    )


def problem_of_stop(error: IndilogError) -> Problem:
    """Return the problem for a request that was interrupted because the platform stops.

    The status is 503; `retryable` says whether the same request may be repeated.
    """
    return msgspec.structs.replace(problem_of(error), status=int(HTTPStatus.SERVICE_UNAVAILABLE))


def _next_seqnum(error: Exception) -> int | None:
    if isinstance(error, TrimmedError):
        return error.first_seqnum
    return error.next_seqnum if isinstance(error, DataLossError) else None


def problem(status: HTTPStatus, detail: str) -> Problem:
    """Return a problem whose title is the HTTP status, for errors without a class of their own."""
    title = status.phrase.replace(" ", "")
    return Problem(title=title, status=int(status), detail=detail, retryable=False)


def problem_text(details: Problem) -> bytes:
    """Return the JSON text of a problem."""
    return msgspec.json.encode(details)


PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "title": "Problem",
    "required": ["title", "status", "detail", "retryable"],
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "retryable": {"type": "boolean"},
        "kind": {"type": "string"},
        "seqnum": {"type": "integer"},
        "next_seqnum": {"type": "integer"},
        "last_seqnum": {"type": "integer"},
        "errors": {
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    },
}
