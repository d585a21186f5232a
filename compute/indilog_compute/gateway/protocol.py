"""One HTTP connection of the gateway: uvicorn's protocol with limits of time and size.

uvicorn limits neither the time of a request's arrival, nor the size of its head, nor how long an
answer may stay unread. Here each connection notes when its current phase began, which costs a few
attributes a request. One timer for all connections (`TimeLimitSweep`) checks these notes once a
second, and closes a connection whose phase takes too long.

- The head (request line and headers, trailers too) has `headers_bytes_max` bytes and
  `headers_timeout_s` seconds at most, from its first byte, or from the connection's beginning.
- The body has `body_timeout_s` seconds, from the end of the head.
- A client must read an answer within `answer_timeout_s` seconds. That time runs only while a part
  of the answer waits in this process, because the socket's buffer is full.
- At most `PIPELINED_MAX` requests wait while an earlier one is answered.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from indilog.base.errors import OverloadedError
from indilog_compute.gateway.problems import MEDIA_TYPE, problem, problem_of, problem_text

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from indilog_compute.gateway.edge import Edge

PIPELINED_MAX: Final = 16
"""Pipelining: requests that a client may send before an earlier one is answered."""
_SWEEP_S: Final = 1.0
_REFUSAL_TIMEOUT_S: Final = 2.0
"""A connection beyond the limit is closed after this time, if it has sent no request."""


class _Phase(Enum):
    HEAD = 1
    BODY = 2
    ANSWER = 3
    """The request is complete: it is being answered, or the connection is idle after its answer."""


_HEAD, _BODY, _ANSWER = _Phase.HEAD, _Phase.BODY, _Phase.ANSWER


class _TooLargeError(Exception):
    """A request's head is too large; stops the parser."""


class GatewayProtocol(HttpToolsProtocol):
    """One HTTP connection.

    Args:
        config, server_state, app_state: uvicorn's.
        edge: limits and figures.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, edge: Edge
    ) -> None:
        super().__init__(config, server_state, app_state)
        # uvicorn calls it as it would call the class
        self.ws_protocol_class = partial(GatewaySocketProtocol, edge=edge)  # type: ignore[assignment]
        self._edge = edge
        self._headers_bytes_max = edge.node.gateway.headers_bytes_max
        self._phase = _HEAD
        self._since = self._now = self.loop.time()
        self._unread_since: float | None = None
        self._head_bytes = 0
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._running: RequestResponseCycle | None = None
        self._is_beyond_limit = False

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; beyond the limit it is refused and closed."""
        super().connection_made(transport)
        self._edge.connections += 1
        if self._edge.connections > self._edge.connections_max:
            self._is_beyond_limit = True
            self._edge.figures.connections_refused += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the request that is being answered; it need not be the newest one."""
        self._edge.connections -= 1
        assert self._edge.connections >= 0, "a connection is counted once"
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def pause_writing(self) -> None:
        """Note when the client stopped reading its answer."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        self._unread_since = None
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        """Become a WebSocket, which is counted as a connection of its own."""
        self._phase = _ANSWER
        self._edge.connections -= 1
        assert self._edge.connections >= 0, "a connection is counted once"
        super().handle_websocket_upgrade()

    # --- what arrives

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and note the phase of the request."""
        self._now = self.loop.time()
        if self._phase is _ANSWER:
            self._phase = _HEAD
            self._since = self._now
            self._head_bytes = 0
        self._head_bytes += len(data)
        HttpToolsProtocol.data_received(self, data)
        if self._phase is _ANSWER or self.transport.is_closing():
            return
        if self._head_bytes > self._headers_bytes_max:
            self._refuse(*self._too_large_head())
            self._close()

    def on_headers_complete(self) -> None:
        """Begin to answer the request, unless it is refused."""
        if self._head_bytes > self._headers_bytes_max:
            self._check_head()
        if len(self.pipeline) >= PIPELINED_MAX:
            self._stop_parsing(
                HTTPStatus.BAD_REQUEST,
                f"At most {PIPELINED_MAX} requests wait on one connection; read their answers.",
            )
        self._phase = _BODY
        self._since = self._now
        self._head_bytes = 0
        HttpToolsProtocol.on_headers_complete(self)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body. Trailers may follow it; they count as part of the head."""
        self._head_bytes = 0
        HttpToolsProtocol.on_body(self, body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._phase = _ANSWER
        HttpToolsProtocol.on_message_complete(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        if self._is_beyond_limit:
            cycle.keep_alive = False
            app = _refused
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's
        """Answer a request at which the parser stopped."""
        if self._refusal is None:
            self._edge.figures.requests_malformed += 1
            self._refuse(HTTPStatus.BAD_REQUEST, "This is not an HTTP request.")
        self._close()

    # --- time

    def check_time(self, now: float) -> None:
        """Close the connection if its current phase takes too long."""
        if self.transport.is_closing():
            return
        node = self._edge.node
        if (
            self._unread_since is not None
            and now - self._unread_since > node.gateway.answer_timeout_s
        ):
            self._edge.figures.clients_too_slow += 1
            self.transport.abort()
            return
        if self._phase is _HEAD:
            timeout_s = (
                _REFUSAL_TIMEOUT_S if self._is_beyond_limit else node.gateway.headers_timeout_s
            )
            if now - self._since > timeout_s:
                self._too_slow(f"The head of a request takes {timeout_s:g} s at most.")
        elif self._phase is _BODY and not self.pipeline:
            timeout_s = node.gateway.body_timeout_s
            if now - self._since > timeout_s:
                self._too_slow(f"The body of a request takes {timeout_s:g} s at most.")

    def _too_slow(self, sentence: str) -> None:
        is_idle = self._phase is _HEAD and not self._head_bytes
        if not is_idle:
            self._edge.figures.clients_too_slow += 1
            if self._running is None or not self._running.response_started:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, sentence)
        self._close()

    # --- inside

    def _check_head(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._headers_bytes_max:
            self._stop_parsing(*self._too_large_head())

    def _too_large_head(self) -> tuple[HTTPStatus, str]:
        return (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"The head of a request has {self._headers_bytes_max:,} bytes at most.",
        )

    def _stop_parsing(self, status: HTTPStatus, sentence: str) -> None:
        """Refuse the request being parsed. The parser turns the exception into `send_400_response`.

        Raises:
            _TooLargeError: always.
        """
        self._refuse(status, sentence)
        raise _TooLargeError

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Write an answer of the server itself, unless another answer is being written."""
        self._refusal = (status, sentence)
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            return
        text = problem_text(problem(status, sentence))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % (MEDIA_TYPE.encode(), len(text))
            + text
        )

    def _close(self) -> None:
        """Close after all written bytes are sent; notify a request that is being answered."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.transport.close()


class GatewaySocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket, after the upgrade of its HTTP connection."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, edge: Edge
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._edge = edge
        self._share = edge.budget.share()
        self._unread_since: float | None = None
        self._unfinished_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        super().connection_made(transport)
        self._edge.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Return the counted bytes to the budget."""
        self._edge.connections -= 1
        assert self._edge.connections >= 0, "a connection is counted once"
        self._share.free()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note when the client stopped reading."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        self._unread_since = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; those of an incomplete message count in the budget."""
        if self._unfinished_since is None:
            self._unfinished_since = self.loop.time()
        super().data_received(data)
        if self.is_unfinished() and not self.disconnected:
            try:
                self._share.take(len(data))
            except OverloadedError:
                self.transport.abort()

    def is_unfinished(self) -> bool:
        """Tell whether an incomplete message is buffered."""
        return self._unfinished_since is not None

    def send_receive_event_to_app(self) -> None:
        """Pass on a complete message; from here the link counts its bytes."""
        self._share.free()
        self._unfinished_since = None
        super().send_receive_event_to_app()

    def check_time(self, now: float) -> None:
        """Close the connection if a message takes too long to arrive, or to be read."""
        node = self._edge.node
        unread, unfinished = self._unread_since, self._unfinished_since
        if (unread is not None and now - unread > node.gateway.answer_timeout_s) or (
            unfinished is not None and now - unfinished > node.gateway.body_timeout_s
        ):
            self._edge.figures.clients_too_slow += 1
            self.transport.abort()


class TimeLimitSweep:
    """Checks the time limits of all connections of one server, once a second."""

    def __init__(self, connections: set[Any]) -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(_SWEEP_S, self._sweep)

    def stop(self) -> None:
        """Stop checking."""
        self._next.cancel()

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in tuple(self._connections):
            connection.check_time(now)
        self._next = self._loop.call_later(_SWEEP_S, self._sweep)


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's
    """Answer a request on a connection beyond the limit."""
    details = problem_of(OverloadedError("Too many connections are open; try again later."))
    text = problem_text(details)
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", b"%d" % len(text)),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": details.status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
