"""Running the gateway: uvicorn on the loop that runs already, without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from compute.gateway.unix_socket import UnixSocket
from indilog.config import NodeConfig
from indilog.errors import ConfigError, NotReadyError

_GRACE_S = 3
"""Requests that run get this long to end when the gateway stops."""
_TELL_S = 1
"""Requests that were cut off then get this long to be answered."""
_BACKLOG = 2048
_HEADERS: Final = [
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
]
"""Of every answer: no page of another origin can use it as a script, a style or an image."""


class _Server(uvicorn.Server):
    """Leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _Serving:
    """One uvicorn server on the running loop."""

    def __init__(self, app: ASGIApp, *, message_bytes_max: int, **where: Any) -> None:  # noqa: ANN401 - uvicorn's
        self._server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="websockets-sansio",
                ws_max_size=message_bytes_max,
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                headers=_HEADERS,
                timeout_graceful_shutdown=_GRACE_S,
                **where,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket | None = None) -> None:
        """Serve on a socket, or where the configuration says."""
        sockets = None if listening is None else [listening]
        self._serving = asyncio.ensure_future(self._server.serve(sockets=sockets))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise NotReadyError("The gateway ended while it started.")
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop listening and end: running requests have a few seconds."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        # What still ran was cancelled; its callers are told so before the program goes on.
        if cancelled := set(self._server.server_state.tasks):
            await asyncio.wait(cancelled, timeout=_TELL_S)


class GatewayServer:
    """A gateway that listens.

    Args:
        app: what answers there.
        host: address to listen on.
        port: 0 takes a free one.
        message_bytes_max: of a WebSocket.
        port_is: where the port comes from, for people.
        tls: serve `https://` with this; None: plain HTTP.
        local: what answers on a Unix socket as well, and its file.

    Attributes:
        port: where; valid when `bind` or `start` has returned.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        message_bytes_max: int,
        port_is: str = "",
        tls: ssl.SSLContext | None = None,
        local: tuple[ASGIApp, Path] | None = None,
    ) -> None:
        self.port = port
        self._port_is = port_is
        self._host = host
        self._listening: socket.socket | None = None
        more = {} if tls is None else {"ssl_context_factory": lambda *_: tls}
        self._serving = _Serving(app, message_bytes_max=message_bytes_max, **more)
        self._socket: UnixSocket | None = None
        self._local: _Serving | None = None
        if local is not None:
            self._socket = UnixSocket(local[1])
            self._local = _Serving(
                local[0], message_bytes_max=message_bytes_max, uds=self._socket.address
            )

    def bind(self) -> None:
        """Take the port; connections wait until `start`.

        Raises:
            ConfigError: the port is in use or not allowed, or the host is unknown.
        """
        self._listening = _bound(self._host, self.port, self._port_is)
        self.port = self._listening.getsockname()[1]

    async def start(self) -> None:
        """Listen; when this returns, requests are answered.

        Raises:
            ConfigError: as `bind`.
        """
        if self._listening is None:
            self.bind()
        await self._serving.start(self._listening)
        if self._local is not None:
            await self._local.start()

    async def stop(self) -> None:
        """Stop listening and end: running requests have a few seconds."""
        await asyncio.gather(*[s.stop() for s in (self._serving, self._local) if s is not None])
        if self._listening is not None:
            self._listening.close()
        if self._socket is not None:
            self._socket.remove()


def check_can_listen(node: NodeConfig) -> None:
    """Check that a gateway could listen there now, before anything is made for it.

    Raises:
        ConfigError: the port is in use or not allowed, the host is unknown, or the certificate
            cannot be used.
    """
    tls_of(node)
    _bound(node.host, node.port, "").close()


def tls_of(node: NodeConfig) -> ssl.SSLContext | None:
    """Return what the gateway serves `https://` with; None: it speaks plain HTTP.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    if node.tls_cert is None or node.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(node.tls_cert, node.tls_key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"The certificate {node.tls_cert} with the key {node.tls_key} cannot be used: {error}."
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key needs a password; give one without")


def _bound(host: str, port: int, port_is: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port}{port_is} is in use on {host}; stop what listens there, or choose "
                "another with --port."
            ) from None
        raise ConfigError(
            f"The gateway cannot listen on {host}, port {port}: {error.strerror}."
        ) from None
    listening.listen(_BACKLOG)
    return listening
