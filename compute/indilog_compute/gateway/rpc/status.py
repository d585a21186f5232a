"""Turns errors into gRPC status codes, with details in the trailing metadata.

The handlers of `LogService` and `InvokeService` run inside `answering`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Never

import grpc
import structlog

from indilog.base.errors import IndilogError
from indilog_compute.gateway.problems import problem_of, problem_text, statuses_of

PROBLEM: Final = "indilog-problem-bin"
"""Key of the trailing metadata with the details of an error (`Problem`), as JSON."""


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the status code of an error."""
    _, name = statuses_of(error)
    return grpc.StatusCode[name]


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
