"""Accepts connections at a listening socket. With keys, only authenticated peers are accepted.

With keys, `StreamServer` accepts connections itself instead of using asyncio's server. asyncio's
server silently drops a connection whose handshake fails, so refused peers could not be counted.
`StreamTransport` and `MetadataListener` use `StreamServer`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

import structlog

from indilog.runtime.transport.peer_keys import PeerKeys
from indilog.runtime.transport.transport import (
    REFUSED_PEER,
    TOO_MANY_CONNECTIONS,
    TransportCounts,
)

HANDSHAKE_S_MAX: Final = 2.0
"""Seconds within which a peer must complete the handshake."""
HANDSHAKES_MAX: Final = 64
"""Largest number of concurrent handshakes; a further handshake ends the oldest one. A node needs
some milliseconds for a handshake, so connections that send no bytes cannot keep nodes out.
"""
_AGAIN_S: Final = 0.1
"""Seconds until the next attempt, after a connection could not be accepted. For example, no file
descriptor may be left.
"""

_log = structlog.get_logger(__name__)


class StreamServer:
    """Creates a protocol for each accepted connection.

    Args:
        listener: a listening socket; closed by `close`.
        protocol: called once for each accepted connection, after its peer was authenticated.
        loop: the running event loop.
        keys: keys of this process; None: every peer is accepted.
        counts: counts the refused peers.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        loop: asyncio.AbstractEventLoop,
        keys: PeerKeys | None,
        counts: TransportCounts,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._loop = loop
        self._keys = keys
        self._counts = counts
        self._server: asyncio.Task[asyncio.Server] | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Handshakes that run, the oldest first."""

    def start(self) -> None:
        """Accept connections from now on."""
        if self._keys is not None:
            self._accepting = self._loop.create_task(self._accept(self._keys))
        elif self._listener.family == socket.AF_UNIX:
            serve = self._loop.create_unix_server(self._protocol, sock=self._listener)
            self._server = self._loop.create_task(serve)
        else:
            serve = self._loop.create_server(self._protocol, sock=self._listener)
            self._server = self._loop.create_task(serve)

    def close(self) -> None:
        """Accept no further connections; accepted connections stay open."""
        if self._server is not None and not self._server.cancel():
            self._server.result().close()
        for task in (self._accepting, *self._handshakes):
            if task is not None:
                task.cancel()
        self._listener.close()

    async def _accept(self, keys: PeerKeys) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("no connection can be accepted", reason=str(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
                self._counts.dropped[TOO_MANY_CONNECTIONS] += 1
            handshake = self._loop.create_task(self._admit(connection, keys))
            self._handshakes[handshake] = None
            handshake.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _admit(self, connection: socket.socket, keys: PeerKeys) -> None:
        """Do the handshake, and refuse a peer that does not authenticate itself."""
        peer = _name_of(connection)
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=keys.server,
                ssl_handshake_timeout=HANDSHAKE_S_MAX,
            )
        except (OSError, EOFError) as error:  # errors of TLS are `OSError`s too
            self._counts.dropped[REFUSED_PEER] += 1
            _log.warning("peer refused", peer=peer, reason=str(error) or type(error).__name__)


def _name_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "gone"
