"""Running the gateway: uvicorn on the loop that runs already, without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from indilog.errors import ConfigError, NotReadyError

_GRACE_S = 3
"""Requests that run get this long to end when the gateway stops."""
_TELL_S = 1
"""Requests that were cut off then get this long to be answered."""
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class GatewayServer:
    """A gateway that listens.

    Attributes:
        port: where; valid when `start` has returned.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, message_bytes_max: int, port_is: str = ""
    ) -> None:
        self.port = port
        self._port_is = port_is
        self._host = host
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
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; when this returns, requests are answered.

        Raises:
            ConfigError: the port is in use or not allowed, or the host is unknown.
        """
        listening = _bound(self._host, self.port, self._port_is)
        self.port = listening.getsockname()[1]
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
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


async def serve_gateway(
    app: ASGIApp, host: str, port: int, *, message_bytes_max: int
) -> GatewayServer:
    """Start a gateway on the running loop and return it; `GatewayServer.stop` ends it.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is unknown.
    """
    server = GatewayServer(app, host, port, message_bytes_max=message_bytes_max)
    await server.start()
    return server


def check_can_listen(host: str, port: int) -> None:
    """Check that a gateway could listen there now, before anything is made for it.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is unknown.
    """
    _bound(host, port, "").close()


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
