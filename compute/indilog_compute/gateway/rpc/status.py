"""Turns errors into gRPC status codes, with details in the trailing metadata."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Never

import grpc
import structlog

from indilog.base.errors import (
    AppNameTakenError,
    ConditionFailedError,
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
from indilog_compute.gateway.problems import problem_of, problem_text

PROBLEM: Final = "indilog-problem-bin"
"""Trailing metadata with the details of an error, as JSON."""

CODES: Final[dict[type[Exception], grpc.StatusCode]] = {
    UnauthorizedError: grpc.StatusCode.UNAUTHENTICATED,
    UnknownFunctionError: grpc.StatusCode.NOT_FOUND,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    InvalidArgumentsError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidTagError: grpc.StatusCode.INVALID_ARGUMENT,
    TooLargeError: grpc.StatusCode.INVALID_ARGUMENT,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    TypeError: grpc.StatusCode.INVALID_ARGUMENT,
    DeployError: grpc.StatusCode.FAILED_PRECONDITION,
    ConditionFailedError: grpc.StatusCode.FAILED_PRECONDITION,
    WrongStateError: grpc.StatusCode.FAILED_PRECONDITION,
    AppNameTakenError: grpc.StatusCode.ALREADY_EXISTS,
    ConflictError: grpc.StatusCode.ABORTED,
    InvocationCancelledError: grpc.StatusCode.CANCELLED,
    TrimmedError: grpc.StatusCode.OUT_OF_RANGE,
    DataLossError: grpc.StatusCode.DATA_LOSS,
    DiskFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotReadyError: grpc.StatusCode.UNAVAILABLE,
    LinkLostError: grpc.StatusCode.UNAVAILABLE,
    QuorumUnavailableError: grpc.StatusCode.UNAVAILABLE,
    SealedError: grpc.StatusCode.UNAVAILABLE,
    OutcomeUnknownError: grpc.StatusCode.DEADLINE_EXCEEDED,
    WorkerCrashedError: grpc.StatusCode.INTERNAL,
    FunctionFailedError: grpc.StatusCode.UNKNOWN,
}
"""The code of each error; a subclass without an entry has that of its base."""


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the status code of an error."""
    if isinstance(error, FunctionFailedError) and error.temporary:
        return grpc.StatusCode.UNAVAILABLE
    return next(
        (CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL
    )


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Enter a block that answers a request. An error of the block becomes the answer's status."""
    try:
        yield
    except (IndilogError, ValueError, TypeError) as error:
        await _abort(context, error)
    except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.BaseError):
        raise
    except Exception as error:  # noqa: BLE001 - a bug must not end the server
        structlog.get_logger().exception("request failed", exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL, "The platform failed on this request; its log says why."
        )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> Never:
    details = ((PROBLEM, problem_text(problem_of(error))),)
    await context.abort(code_of(error), str(error), details)
    raise AssertionError("`abort` raises")
