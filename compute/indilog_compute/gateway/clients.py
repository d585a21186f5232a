"""Handles clients that disconnect. A request with an incomplete body is never executed, and a call
whose client has left is cancelled.

A disconnect is an expected event, so it is counted (`GatewayCounters.clients_left`) and not logged.
All routes of the gateway read bodies by `read_body`; routes that wait use `cancel_if_left`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Final, TypeAlias, TypeVar

from indilog.base.errors import TooLargeError
from indilog.link.byte_budget import ByteShare

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

SHARE: Final = "indilog.share"
"""Key in an ASGI scope: the `ByteShare` that counts the request's bytes in the gateway's budget."""

_ValueT = TypeVar("_ValueT")


class ClientLeftError(Exception):
    """The client closed its connection before its request was answered."""


async def read_body(scope: Scope, receive: Receive, bytes_max: int, *, what: str) -> bytes:
    """Read and return a request's complete body.

    Args:
        scope: ASGI scope of the request; its share (`SHARE`) counts the body's bytes until the
            request ends.
        receive: ASGI `receive` of the request.
        bytes_max: size of the largest accepted body. Reading stops at most one chunk after it.
        what: subject of the error's sentence, such as `The request's size in bytes`.

    Raises:
        ClientLeftError: the connection ended before the body was complete.
        TooLargeError: the body has more than `bytes_max` bytes.
        OverloadedError: the gateway's byte budget has no room for the body.
    """
    share: ByteShare = scope[SHARE]
    message = await receive()
    if not message.get("more_body") and message["type"] != "http.disconnect":
        body: bytes = message.get("body", b"")
        if len(body) > bytes_max:
            raise _too_large(scope, len(body), bytes_max, what)
        share.take_up_to(len(body))
        return body
    parts = bytearray()
    while True:
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        parts += message.get("body", b"")
        if len(parts) > bytes_max:
            raise _too_large(scope, len(parts), bytes_max, what)
        share.take_up_to(len(parts))
        if not message.get("more_body"):
            return bytes(parts)
        message = await receive()


async def wait_until_left(receive: Receive) -> None:
    """Return when the client has closed its connection. The caller has read the body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_if_left(receive: Receive, answering: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Return the result of `answering`; cancel it if the client disconnects.

    Raises:
        ClientLeftError: the client disconnected.
    """
    leaving = asyncio.ensure_future(wait_until_left(receive))
    answer = asyncio.ensure_future(answering)
    try:
        await asyncio.wait({leaving, answer}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientLeftError
        return answer.result()
    finally:
        leaving.cancel()
        if not answer.done():
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer


def _too_large(scope: Scope, read: int, bytes_max: int, what: str) -> TooLargeError:
    size = max(read, _content_length(scope))
    return TooLargeError(what, size=size, limit=bytes_max)


def _content_length(scope: Scope) -> int:
    """Return the value of `Content-Length`; 0 if it is absent or not a number."""
    said = dict(scope["headers"]).get(b"content-length", b"")
    return int(said) if said.isdigit() and len(said) <= 18 else 0
