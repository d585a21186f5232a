"""Accepts connections in small groups, so that the limit on connections is never exceeded.

asyncio's own server accepts all waiting connections before it counts the first one. So 2,048
waiting connections could use up all file descriptors of the process in one iteration. `server`
makes an `Acceptor` for each listening socket, instead of an `asyncio.Server`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog

_PER_ITERATION_MAX: Final = 32
_PAUSE_S: Final = 0.1
"""Seconds for which no connection is accepted after the system ran out of file descriptors or
memory.
"""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts the connections of one listening socket.

    Args:
        listening: a non-blocking socket.
        protocol: creates the protocol object of a connection.
        has_room: gets the number of accepted connections that are not open yet, and returns whether
            a further connection may be open. If not, a new connection is closed at once.
        tls: TLS context for the connections; None: no TLS.
        handshake_timeout_s: seconds that a TLS handshake may take.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        self._has_room = has_room
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s if tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._loop.add_reader(listening.fileno(), self._accept)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The listening socket, as the attribute `sockets` of an `asyncio.Server`."""
        return (self._listening,)

    def close(self) -> None:
        """Stop accepting, and close the socket."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        for opening in self._opening:
            opening.cancel()

    async def wait_closed(self) -> None:
        """Return at once, because uvicorn's server itself waits until connections are closed."""

    def _accept(self) -> None:
        for _ in range(_PER_ITERATION_MAX):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause(error)
                return
            if not self._has_room(len(self._opening)):
                connection.close()
                continue
            connection.setblocking(False)  # noqa: FBT003 - `setblocking` takes no keyword
            opening = self._loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except (OSError, asyncio.CancelledError):  # the client left, or speaks no TLS
            connection.close()

    def _pause(self, error: OSError) -> None:
        structlog.get_logger().warning("connections not accepted", reason=error.strerror)
        self._loop.remove_reader(self._listening.fileno())
        self._paused = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._listening.fileno(), self._accept)
