"""Runs the gateway: uvicorn on the running event loop, without signal handlers.

`indilog.runtime.cluster.assembly` starts and stops `GatewayServer`. `acceptor` accepts connections,
and `protocol` applies the limits of each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from indilog.base.errors import ConfigError, NotReadyError
from indilog.config import NodeConfig
from indilog.link.link import SOCKET_MESSAGE_BYTES
from indilog_compute.gateway.acceptor import Acceptor
from indilog_compute.gateway.forwarding import PeerPort
from indilog_compute.gateway.protocol import GatewayProtocol, TimeLimitSweep
from indilog_compute.gateway.resources import GatewayResources
from indilog_compute.gateway.unix_socket import UnixSocket

_GRACE_S = 3
"""Seconds that running requests have to end when the gateway stops."""
_ANSWER_S = 1
"""Further seconds, after `_GRACE_S`, in which cancelled requests are answered."""
_BACKLOG = 2048
_HEADERS: Final = [
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
]
"""Headers of every answer. Because of them, browsers do not let a page of another origin use an
answer as a script, a style or an image.
"""
_SOCKET_MESSAGE_BYTES_MAX = 2 * SOCKET_MESSAGE_BYTES
"""Largest message of a WebSocket in bytes; a link writes smaller messages."""


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers, with the limits of `GatewayResources`."""

    def __init__(
        self, config: uvicorn.Config, resources: GatewayResources, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._resources = resources
        self._tls = tls
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """Wait until the server stops, without polling; uvicorn's own loop polls ten times a
        second.
        """
        await self.on_tick(0)  # sets the headers of every answer
        await self.stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on these sockets."""
        await self.lifespan.startup()
        state = self.server_state

        def protocol() -> GatewayProtocol:
            return GatewayProtocol(
                self.config, state, self.lifespan.state, resources=self._resources
            )

        self.servers = [  # an acceptor has the methods that uvicorn calls
            Acceptor(  # type: ignore[misc]
                listening,
                protocol,
                self._resources.has_room,
                tls=self._tls,
                handshake_timeout_s=self._resources.node.gateway.headers_timeout_s,
            )
            for listening in sockets or []
        ]
        self._sweep = TimeLimitSweep(state.connections)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections."""
        try:
            await super().shutdown(sockets)
        finally:
            self._sweep.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class _Serving:
    """One uvicorn server on the running loop."""

    def __init__(
        self, app: ASGIApp, resources: GatewayResources, tls: ssl.SSLContext | None = None
    ) -> None:
        self._server = _Server(
            uvicorn.Config(
                app,
                http=GatewayProtocol,
                ws="websockets-sansio",
                ws_max_size=_SOCKET_MESSAGE_BYTES_MAX,
                ws_per_message_deflate=False,  # needs memory per connection; allows zip bombs
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                headers=_HEADERS,
                timeout_graceful_shutdown=_GRACE_S,
            ),
            resources,
            tls,
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        """Serve on a socket."""
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise NotReadyError("The gateway ended while it started.")
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop listening; running requests have a few seconds to end."""
        if self._serving is None:
            return
        self._server.should_exit = True
        self._server.stopping.set()
        await self._serving
        # uvicorn has now cancelled the requests that were still running. Wait until their callers
        # have the answers.
        if cancelled := set(self._server.server_state.tasks):
            await asyncio.wait(cancelled, timeout=_ANSWER_S)


class GatewayServer:
    """A listening gateway.

    Args:
        app: the ASGI application.
        host: address to listen on.
        port: port to listen on; 0: any free port.
        resources: limits and counters of the connections; None: default limits.
        port_is: text after the port in error messages, such as the setting that chose the port.
        tls: TLS context for HTTPS; None: plain HTTP.
        local: ASGI application to serve on a Unix socket, and the path of this socket; None: no
            Unix socket.
        peers: port at which to serve the application of `local` to other machines of the cluster;
            None: no such port.

    Attributes:
        port: the port on which the gateway listens; valid after `bind` or `start` has returned.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        resources: GatewayResources | None = None,
        port_is: str = "",
        tls: ssl.SSLContext | None = None,
        local: tuple[ASGIApp, Path] | None = None,
        peers: PeerPort | None = None,
    ) -> None:
        self.port = port
        self._port_is = port_is
        self._host = host
        self._listening: socket.socket | None = None
        self._resources = resources or GatewayResources(NodeConfig())
        self._serving = _Serving(app, self._resources, tls)
        self._socket: UnixSocket | None = None
        self._local: _Serving | None = None
        if local is not None:
            self._socket = UnixSocket(local[1])
            self._local = _Serving(local[0], self._resources)
        self._peers_at = peers
        self._peers: _Serving | None = None
        self._peers_listening: socket.socket | None = None
        if peers is not None:
            assert local is not None, "other machines use the application of the Unix socket"
            self._peers = _Serving(local[0], self._resources, peers.tls)

    def bind(self) -> None:
        """Bind the ports; connections wait until `start`.

        Raises:
            ConfigError: the port is in use or not allowed, or the host is unknown.
        """
        self._listening = _bound(self._host, self.port, self._port_is)
        self.port = self._listening.getsockname()[1]
        if (at := self._peers_at) is not None:
            self._peers_listening = _bound(at.host, at.port, " (node_port + 1)")

    async def start(self) -> None:
        """Start serving; after this returns, requests are answered.

        Raises:
            ConfigError: as `bind`.
        """
        if self._listening is None:
            self.bind()
        assert self._listening is not None, "`bind` sets it"
        self._resources.limit_connections()
        await self._serving.start(self._listening)
        if self._local is not None and self._socket is not None:
            await self._local.start(_bound_locally(self._socket.address))
        if self._peers is not None and self._peers_listening is not None:
            await self._peers.start(self._peers_listening)

    async def stop(self) -> None:
        """Stop listening; running requests have a few seconds to end."""
        serving = (self._serving, self._local, self._peers)
        await asyncio.gather(*[s.stop() for s in serving if s is not None])
        for listening in (self._listening, self._peers_listening):
            if listening is not None:
                listening.close()
        if self._socket is not None:
            self._socket.remove()


def check_can_listen(node: NodeConfig) -> None:
    """Check that a gateway could listen with this configuration. Afterwards no socket is open.

    Raises:
        ConfigError: the port is in use or not allowed, the host is unknown, or the certificate
            cannot be used.
    """
    tls_of(node)
    _bound(node.gateway.host, node.gateway.port, "").close()


def tls_of(node: NodeConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the gateway; None: plain HTTP.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    if node.gateway.tls_cert is None or node.gateway.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(node.gateway.tls_cert, node.gateway.tls_key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"The certificate {node.gateway.tls_cert} with the key {node.gateway.tls_key} cannot "
            f"be used: {error}."
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; use a key without a password")


def _bound_locally(address: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(address)
    return _listening(listening)


def _listening(bound: socket.socket) -> socket.socket:
    bound.setblocking(False)  # noqa: FBT003 - its only form
    bound.listen(_BACKLOG)
    return bound


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
    return _listening(listening)
