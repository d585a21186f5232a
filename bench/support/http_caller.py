"""A small HTTP/1.1 client for closed loops: one keep-alive connection per caller, parsed in C.

A full client library would take more time than the measured operations. Benchmarks over HTTP use
this client (`bench.invoke`, `bench.store`, `bench.flow_peers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import cast

import httptools

from indilog.link.access import reach


class HttpCaller(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, host: str, headers: Mapping[str, str] = {}) -> None:
        lines = {"Host": host, **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[bytes] | None = None
        self._body = bytearray()

    async def post(self, path: str, body: bytes) -> bytes:
        """Post JSON; return the body of the answer.

        Raises:
            RuntimeError: the answer is an error, or the connection was closed.
        """
        return await self._ask(
            b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (path.encode(), self._head, len(body), body)
        )

    async def get(self, path: str) -> bytes:
        """Return the body of the answer; errors as `post`."""
        return await self._ask(b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), self._head))

    async def _ask(self, request: bytes) -> bytes:
        assert self._transport is not None, "connect first"
        assert self._answer is None, "one request at a time"
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    # --- what the loop and the parser call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not of that class

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that waits."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RuntimeError(f"the connection ended: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer the caller that waits; be ready for the next message."""
        status, body = self._parser.get_status_code(), bytes(self._body)
        self._body.clear()
        self._parser = httptools.HttpResponseParser(self)
        if self._answer is None or self._answer.done():
            return
        if 200 <= status < 300:
            self._answer.set_result(body)
        else:
            self._answer.set_exception(RuntimeError(f"status {status}: {body.decode()}"))


async def connect(host: str, port: int, callers: int) -> list[HttpCaller]:
    """Return callers, each with its own connection. They send the token if a platform of this
    machine serves that address.
    """
    loop = asyncio.get_running_loop()
    make = partial(HttpCaller, host, reach(f"http://{host}:{port}").headers)
    return [(await loop.create_connection(make, host, port))[1] for _ in range(callers)]
