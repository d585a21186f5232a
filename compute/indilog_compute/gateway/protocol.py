"""One HTTP connection of the gateway: uvicorn's protocol with limits on time and size.

uvicorn does not limit the time in which a request arrives, the size of its head, and the time for
which an answer stays unread. Here each connection stores when its current phase began. One timer
for all connections (`TimeLimitSweep`) checks these times once a second, and closes a connection
whose phase takes too long. `server` uses the classes of this module.

- The head (request line, headers and trailers) has at most `headers_bytes_max` bytes. It must
  arrive within `headers_timeout_s` seconds after its first byte. The first head of a connection
  must arrive within this time after the connection was opened.
- The body must arrive within `body_timeout_s` seconds after the head. A message of a WebSocket must
  arrive within `body_timeout_s` seconds after its first bytes.
- A client must read an answer within `answer_timeout_s` seconds. This time runs only while the
  socket's buffer is full and a part of the answer waits in this process.
- At most `PIPELINED_MAX` requests wait on a connection while an earlier request is answered.
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

    from indilog_compute.gateway.resources import GatewayResources

PIPELINED_MAX: Final = 16
"""Largest number of requests that a client may send before an earlier request is answered."""
_SWEEP_S: Final = 1.0
_REFUSAL_TIMEOUT_S: Final = 2.0
"""Seconds after which a connection beyond the limit is closed if it has sent no request."""


class _Phase(Enum):
    HEAD = 1
    BODY = 2
    ANSWER = 3
    """A complete request is being answered, or the connection is idle after an answer."""


_HEAD, _BODY, _ANSWER = _Phase.HEAD, _Phase.BODY, _Phase.ANSWER


class _TooLargeError(Exception):
    """Raised inside the parser to stop it, because a request is refused."""


class GatewayProtocol(HttpToolsProtocol):
    """One HTTP connection.

    Args:
        config, server_state, app_state: passed on to uvicorn's protocol.
        resources: limits and counters.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        resources: GatewayResources,
    ) -> None:
        super().__init__(config, server_state, app_state)
        # uvicorn calls this partial as it would call the class
        self.ws_protocol_class = partial(GatewaySocketProtocol, resources=resources)  # type: ignore[assignment]
        self._resources = resources
        self._headers_bytes_max = resources.node.gateway.headers_bytes_max
        self._phase = _HEAD
        self._since = self._now = self.loop.time()
        self._unread_since: float | None = None
        self._head_bytes = 0
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._running: RequestResponseCycle | None = None
        self._is_beyond_limit = False

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection. If it exceeds the limit, its first request will be refused."""
        super().connection_made(transport)
        self._resources.connections += 1
        if self._resources.connections > self._resources.connections_max:
            self._is_beyond_limit = True
            self._resources.counters.connections_refused += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the request that is being answered that the client has left. With pipelining, this
        may be an earlier request than the newest one, which uvicorn notifies.
        """
        self._resources.connections -= 1
        assert self._resources.connections >= 0, "a connection is counted once"
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def pause_writing(self) -> None:
        """Store the time at which the client stopped reading its answer."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the time limit, because the client has read most of the answer."""
        self._unread_since = None
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        """Pass the connection to the WebSocket protocol, which counts it again."""
        self._phase = _ANSWER
        self._resources.connections -= 1
        assert self._resources.connections >= 0, "a connection is counted once"
        super().handle_websocket_upgrade()

    # --- received data

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and store the phase of the request."""
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
        """Begin to answer the request, unless the request is refused."""
        if self._head_bytes > self._headers_bytes_max:
            self._check_head()
        if len(self.pipeline) >= PIPELINED_MAX:
            self._stop_parsing(
                HTTPStatus.BAD_REQUEST,
                f"At most {PIPELINED_MAX} requests may wait on a connection; read answers first.",
            )
        self._phase = _BODY
        self._since = self._now
        self._head_bytes = 0
        HttpToolsProtocol.on_headers_complete(self)

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body. The trailers after the body count as a new head."""
        self._head_bytes = 0
        HttpToolsProtocol.on_body(self, body)

    def on_message_complete(self) -> None:
        """End the phase of the body; the answer may have begun already."""
        self._phase = _ANSWER
        HttpToolsProtocol.on_message_complete(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        if self._is_beyond_limit:
            cycle.keep_alive = False
            app = _refuse_connection
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's
        """Refuse a request that the parser did not accept, or that `_stop_parsing` refused."""
        if self._refusal is None:
            self._resources.counters.requests_malformed += 1
            self._refuse(HTTPStatus.BAD_REQUEST, "This is not an HTTP request.")
        self._close()

    # --- time

    def check_time(self, now: float) -> None:
        """Close the connection if its current phase takes too long."""
        if self.transport.is_closing():
            return
        node = self._resources.node
        if (
            self._unread_since is not None
            and now - self._unread_since > node.gateway.answer_timeout_s
        ):
            self._resources.counters.clients_too_slow += 1
            self.transport.abort()
            return
        if self._phase is _HEAD:
            timeout_s = (
                _REFUSAL_TIMEOUT_S if self._is_beyond_limit else node.gateway.headers_timeout_s
            )
            if now - self._since > timeout_s:
                self._too_slow(f"The head of a request must arrive within {timeout_s:g} s.")
        elif self._phase is _BODY and not self.pipeline:
            timeout_s = node.gateway.body_timeout_s
            if now - self._since > timeout_s:
                self._too_slow(f"The body of a request must arrive within {timeout_s:g} s.")

    def _too_slow(self, sentence: str) -> None:
        is_idle = self._phase is _HEAD and not self._head_bytes
        if not is_idle:
            self._resources.counters.clients_too_slow += 1
            if self._running is None or not self._running.response_started:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, sentence)
        self._close()

    # --- internal

    def _check_head(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._headers_bytes_max:
            self._stop_parsing(*self._too_large_head())

    def _too_large_head(self) -> tuple[HTTPStatus, str]:
        return (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"The head of a request may have at most {self._headers_bytes_max:,} bytes.",
        )

    def _stop_parsing(self, status: HTTPStatus, sentence: str) -> None:
        """Refuse the request that is being parsed. uvicorn handles the parser's error by
        `send_400_response`.

        Raises:
            _TooLargeError: always.
        """
        self._refuse(status, sentence)
        raise _TooLargeError

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Write an error answer, unless another answer is being written."""
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
        """Close the connection after all written bytes are sent; notify the request that is being
        answered.
        """
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.transport.close()


class GatewaySocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket, after the upgrade of its HTTP connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        resources: GatewayResources,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._resources = resources
        self._share = resources.budget.share()
        self._unread_since: float | None = None
        self._unfinished_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        super().connection_made(transport)
        self._resources.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Return the counted bytes to the budget."""
        self._resources.connections -= 1
        assert self._resources.connections >= 0, "a connection is counted once"
        self._share.free()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Store the time at which the client stopped reading."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the time limit, because the client has read most of the sent bytes."""
        self._unread_since = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; the bytes of an incomplete message count in the budget."""
        super().data_received(data)
        # The parser removes the head of a frame from its buffer, so a frame of which only the head
        # has arrived does not count here. Its client cannot answer pings, so the keepalive closes
        # the connection.
        buffered = len(self.conn.reader.buffer)
        if self.disconnected or not (buffered or self.frames):
            self._complete()
            return
        if self._unfinished_since is None:
            self._unfinished_since = self.loop.time()
        try:
            self._share.take(len(data) if self.frames else min(len(data), buffered))
        except OverloadedError:
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        """Pass a complete message to the application; from now on the link counts its bytes."""
        self._complete()
        super().send_receive_event_to_app()

    def _complete(self) -> None:
        """Note that no incomplete message is buffered; an idle connection has no time limit."""
        self._share.free()
        self._unfinished_since = None

    def check_time(self, now: float) -> None:
        """Close the connection if a message takes too long to arrive, or if the client takes too
        long to read a message.
        """
        node = self._resources.node
        unread, unfinished = self._unread_since, self._unfinished_since
        if (unread is not None and now - unread > node.gateway.answer_timeout_s) or (
            unfinished is not None and now - unfinished > node.gateway.body_timeout_s
        ):
            self._resources.counters.clients_too_slow += 1
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


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's
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
