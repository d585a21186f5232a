"""A keep-alive HTTP/1.1 connection for load generators: one request at a time, with little CPU
time.

If the load generator runs on the platform's machine, its CPU time slows down the platform. So this
connection supports only the part of HTTP that the gateway uses: requests and answers with
Content-Length.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

from indilog import reach

_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_POSITION: Final = b"indilog-position:"
_ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024


class HttpResponse(NamedTuple):
    """An HTTP answer.

    Attributes:
        status: the HTTP status.
        body: the body as received.
        position: the session's position, for the next request; 0 if the answer had none.
    """

    status: int
    body: bytes
    position: int


class HttpConnection(asyncio.Protocol):
    """One connection. It is opened at the first request, and reopened after it was closed."""

    def __init__(self, url: str) -> None:
        endpoint = reach(url)
        parts = urlsplit(endpoint.url)
        assert parts.hostname, "the caller gives a complete URL"
        self._address = (parts.hostname, parts.port or (443 if endpoint.tls else 80))
        self._tls = endpoint.tls
        headers = {"host": parts.netloc, **endpoint.headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None
        self._received = bytearray()
        self._body_start = 0
        self._body_end = 0

    async def post(self, path: str, body: bytes, *, position: int = 0) -> HttpResponse:
        """Send a JSON body and return the answer.

        Raises:
            ConnectionError: the connection was refused, or closed before the answer; the request
                may have been executed.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None:
            try:
                await loop.create_connection(lambda: self, *self._address, ssl=self._tls)
            except OSError as error:
                raise ConnectionRefusedError(f"No server answers at {self._address}.") from error
        assert self._transport is not None, "a connection was made"
        assert self._answer is None, "one request at a time"
        self._answer = loop.create_future()
        self._transport.write(
            b"POST %s HTTP/1.1\r\n%scontent-type: application/json\r\n"
            b"content-length: %d\r\nindilog-position: %d\r\n\r\n%s"
            % (path.encode(), self._headers, len(body), position, body)
        )
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        """Close the connection; a request in progress fails."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass
        self._received.clear()
        self._body_start = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._fail(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        if not self._body_start and not self._read_head():
            return
        if len(self._received) >= self._body_end:
            self._finish()

    def _read_head(self) -> bool:
        """Find the start and length of the body when the head is complete."""
        end = self._received.find(_END)
        if end < 0:
            return False
        length = self._header(_LENGTH, end)
        if length is None or length > _ANSWER_BYTES_MAX:
            self._fail(ConnectionError("An answer without a Content-Length of reasonable size."))
            self.close()
            return False
        self._body_start = end + len(_END)
        self._body_end = self._body_start + length
        return True

    def _header(self, name: bytes, end: int) -> int | None:
        place = self._received.lower().find(name, 0, end)
        if place < 0:
            return None
        line = self._received[place + len(name) : self._received.index(b"\r\n", place)].strip()
        return int(line) if line.isdigit() else None

    def _finish(self) -> None:
        status = int(self._received[9:12])
        position = self._header(_POSITION, self._body_start) or 0
        body = bytes(self._received[self._body_start : self._body_end])
        del self._received[: self._body_end]
        self._body_start = 0
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(HttpResponse(status, body, position))

    def _fail(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            failure = ConnectionError("The connection was closed before the answer was complete.")
            failure.__cause__ = error
            self._answer.set_exception(failure)
