"""The connections between the clients and the server of the embedded metadata store.

A message follows its length, a little-endian u32. Messages are few and small, and go both ways on
one connection. A message is lost only with its connection. So a client resends its requests over
each new connection, and never because time has passed. `MetadataServer` uses `MetadataListener`,
and `MetadataClient` uses `MetadataLink`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Collection
from typing import Final, cast

import structlog

from indilog.config import KIB, MIB, NodeConfig
from indilog.runtime.transport.peer_keys import keys_for
from indilog.runtime.transport.stream_address import parse_stream_address, tune
from indilog.runtime.transport.stream_incoming import CONNECTIONS_MAX, LENGTH
from indilog.runtime.transport.stream_server import StreamServer
from indilog.runtime.transport.transport import (
    MALFORMED,
    QUEUE_FULL,
    REFUSED_PEER,
    TOO_MANY_CONNECTIONS,
    TransportCounts,
)

_BESIDE_VALUE_BYTES: Final = 4 * KIB
_UNSENT_BYTES_MAX: Final = 16 * MIB
"""Bytes that may wait for one peer. Above this limit the connection is closed."""
_CONNECT_S_MAX: Final = 2.0
_PAUSE_S_MIN: Final = 0.01
"""Seconds between two attempts to connect; doubled until the server sends a message."""
_PAUSE_S_MAX: Final = 0.16

_log = structlog.get_logger(__name__)


class MetadataConnection(asyncio.Protocol):
    """One connection, at either end.

    Args:
        on_message: called with this connection and each received message.
        connections: the open connections of this end. This connection adds and removes itself.
    """

    def __init__(
        self,
        on_message: Callable[[MetadataConnection, bytes], None],
        connections: set[MetadataConnection],
        config: NodeConfig,
        counts: TransportCounts,
    ) -> None:
        self._on_message = on_message
        self._connections = connections
        self._message_bytes_max = config.metadata.metadata_value_bytes_max + _BESIDE_VALUE_BYTES
        self._counts = counts
        self._connection: asyncio.Transport | None = None
        self._received = bytearray()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, unless there are too many."""
        self._connection = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        if len(self._connections) >= CONNECTIONS_MAX:
            self._refuse(TOO_MANY_CONNECTIONS)
            return
        tune(transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Deliver the messages that `data` completes."""
        self._received += data
        while len(self._received) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received)
            if size > self._message_bytes_max:
                self._refuse(MALFORMED, size=size, limit=self._message_bytes_max)
                return
            end = LENGTH.size + size
            if len(self._received) < end:
                return
            message = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            self._on_message(self, message)

    def send(self, message: bytes) -> None:
        """Send a message. The message is lost if the connection is lost."""
        connection = self._connection
        if connection is None or connection.is_closing():
            return
        if (unsent := connection.get_write_buffer_size()) + len(message) > _UNSENT_BYTES_MAX:
            self._refuse(QUEUE_FULL, unsent_bytes=unsent)
            return
        connection.write(LENGTH.pack(len(message)) + message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        if isinstance(exc, ssl.SSLError):
            _log.warning("refused by a peer of the metadata store", reason=str(exc))
        self._connections.discard(self)
        self._connection = None
        self.lost.set()

    def close(self) -> None:
        """Stop at once."""
        if self._connection is not None:
            self._connection.abort()

    def _refuse(self, reason: str, **details: object) -> None:
        self._counts.dropped[reason] += 1
        _log.warning("metadata connection closed", reason=reason, **details)
        self._received.clear()
        self.close()


class MetadataListener:
    """The server's end: accepts connections at `address`. If the platform has keys, only peers with
    a certificate of the cluster are accepted.

    Raises:
        ConfigError: the address cannot be bound, or needs keys that do not exist.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[MetadataConnection, bytes], None],
        config: NodeConfig,
    ) -> None:
        at = parse_stream_address(address)
        keys = keys_for(at, config)
        self.counts = TransportCounts()
        self._connections: set[MetadataConnection] = set()

        def accepted() -> MetadataConnection:
            return MetadataConnection(on_message, self._connections, config, self.counts)

        loop = asyncio.get_running_loop()
        self._server = StreamServer(at.listener(), accepted, loop, keys, self.counts)
        self._server.start()

    def close(self) -> None:
        """Stop at once. May be called again."""
        self._server.close()
        for connection in self._connections.copy():
            connection.close()


class MetadataLink:
    """The client's end of a link to the metadata store. It opens its connection when there is a
    request to send, and reopens it while requests are unanswered.

    Args:
        unanswered: returns the unanswered requests, which each new connection carries.

    Raises:
        ConfigError: the address is invalid, or needs keys that do not exist.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes], None],
        unanswered: Callable[[], Collection[bytes]],
        config: NodeConfig,
    ) -> None:
        self._to = parse_stream_address(address)
        self._keys = keys_for(self._to, config)
        self._on_message = on_message
        self._unanswered = unanswered
        self._config = config
        self._connection: MetadataConnection | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._pause_s = _PAUSE_S_MIN
        self._closed = False
        self.counts = TransportCounts()

    def send(self, request: bytes) -> None:
        """Send a request, now or over the next connection. `unanswered` must return it already."""
        if self._connection is not None:
            self._connection.send(request)
        elif self._keeping is None and not self._closed:
            self._keeping = asyncio.get_running_loop().create_task(self._keep_connected())

    async def _keep_connected(self) -> None:
        """Keep a connection while there are requests without an answer."""
        try:
            while self._unanswered():
                if (connection := await self._connect()) is not None:
                    self._connection = connection
                    for request in self._unanswered():
                        connection.send(request)
                    await connection.lost.wait()
                    self._connection = None
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        finally:
            self._keeping = None

    async def _connect(self) -> MetadataConnection | None:
        """Connect, and return the connection. None: there is no server, or it refuses this
        client.
        """
        tls = self._keys.client if self._keys is not None else None
        connection = MetadataConnection(self._received, set(), self._config, self.counts)
        is_connected = False
        try:
            async with asyncio.timeout(_CONNECT_S_MAX):
                await self._to.connect(asyncio.get_running_loop(), connection, tls)
            is_connected = True
        except ssl.SSLError as error:
            self.counts.dropped[REFUSED_PEER] += 1
            _log.warning("metadata store refused", peer=self._to.name, reason=str(error))
        except (OSError, TimeoutError):
            pass
        finally:
            if not is_connected:
                connection.close()
        return connection if is_connected else None

    def _received(self, _: MetadataConnection, message: bytes) -> None:
        self._pause_s = _PAUSE_S_MIN
        self._on_message(message)

    def close(self) -> None:
        """Stop at once. May be called again."""
        self._closed = True
        if self._keeping is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._keeping.cancel()
        if self._connection is not None:
            self._connection.close()
