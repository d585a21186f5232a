"""One HTTP connection to the gateway of another compute node: offers a call, then sends its body.

A parser in C (`httptools`) reads the answers. A client library would take several times as long as
the other node takes for a short call. `PeerConnections` opens the connections; `Forwarder` calls
`offer` and then `run`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final, NamedTuple, cast

import httptools

_HEADERS_MAX: Final = 64
"""Number of headers of an answer that are kept; further headers are ignored."""


class PeerAnswer(NamedTuple):
    """The answer of another compute node.

    Attributes:
        headers: pairs of name and value; the names are in lower case.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def value(self, name: bytes) -> bytes | None:
        """Return the value of a header; None if it is absent."""
        return next((value for given, value in self.headers if given == name), None)


class PeerLostError(Exception):
    """The connection ended, or the received bytes are not an answer."""


class PeerConnection(asyncio.Protocol):
    """A connection that carries one call at a time.

    Args:
        body_bytes_max: bytes of the largest body of an answer; a larger body closes the connection.
    """

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._answer: asyncio.Future[PeerAnswer] | None = None
        self._is_kept = True
        self._is_offer = False
        """Whether `100 Continue` answers the current request; otherwise `100 Continue` is ignored.
        """

    @property
    def is_reusable(self) -> bool:
        """Whether the connection may carry a further call."""
        return self._is_kept and self._transport is not None and not self._transport.is_closing()

    async def offer(self, head: bytes) -> PeerAnswer | None:
        """Send the head of a request. Return the refusal of the peer; None: the peer takes the
        call, and waits for its body.

        Raises:
            PeerLostError: the connection ended; the call did not run.
        """
        self._is_offer = True
        answer = await self._ask(head)
        if answer.status == HTTPStatus.CONTINUE:
            return None
        self._is_kept = False  # the peer still expects the body
        return answer

    async def run(self, body: bytes) -> PeerAnswer:
        """Send the body of a call that the peer has taken, and return the peer's answer.

        Raises:
            PeerLostError: the connection ended before the answer; the call may have run.
        """
        self._is_offer = False
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        return await self._ask(chunk)

    def close(self) -> None:
        """Close the connection. If the peer has received a call, it still finishes the call."""
        self._is_kept = False
        if self._transport is not None:
            self._transport.abort()

    async def _ask(self, data: bytes) -> PeerAnswer:
        assert self._answer is None, "one call at a time"
        if self._transport is None or self._transport.is_closing():
            raise PeerLostError
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            return await self._answer
        finally:
            self._answer = None

    # --- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # A transport of uvloop is not an instance of `asyncio.Transport`.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Fail the call that waits."""
        self._lose()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self._answer is None:
            self.close()  # no call waits for these bytes
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._lose()

    # --- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        if len(self._headers) < _HEADERS_MAX:
            self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._body += body
        if len(self._body) > self._body_bytes_max:
            self._lose()

    def on_message_complete(self) -> None:
        """Give the answer to the caller that waits for it."""
        status = self._parser.get_status_code()
        answer = PeerAnswer(status, tuple(self._headers), bytes(self._body))
        self._headers.clear()
        self._body.clear()
        if status == HTTPStatus.CONTINUE and not self._is_offer:
            return
        if status != HTTPStatus.CONTINUE and not self._parser.should_keep_alive():
            self._is_kept = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def _lose(self) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PeerLostError())
