"""The address where a process receives streams: a Unix socket or a TCP port (docs/decisions/0005).

Examples are `unix:///run/x/storage-0` and `stream://10.0.0.7:7401`. `StreamTransport` and the links
of the metadata store listen at such addresses and connect to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from indilog.base.errors import ConfigError

SILENCE_S: Final = 2
"""Seconds without received bytes after which the kernel probes a TCP peer (keepalive)."""
SILENCES_MAX: Final = 3
"""Unanswered probes after which the kernel closes the connection, because the peer's host is
down.
"""
_BACKLOG: Final = 128


class StreamAddress(NamedTuple):
    """A parsed address.

    Attributes:
        name: the address as configured.
        path: path of the Unix socket; empty: the address is a TCP port.
    """

    name: str
    path: str
    host: str
    port: int

    def listener(self) -> socket.socket:
        """Return a socket that listens at this address. If a dead process left a socket file,
        replace the file.

        Raises:
            ConfigError: the address is in use, or cannot be bound.
        """
        listener = socket.socket(self._family())
        try:
            if self.path:
                self._remove_dead()
                listener.bind(self.path)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.host, self.port))
            listener.listen(_BACKLOG)
            listener.settimeout(0)
        except OSError as error:
            listener.close()
            raise ConfigError(f"Cannot receive at {self.name}: {error}.") from error
        return listener

    async def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.Protocol,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect `protocol` to the listener at this address. With `tls`, each side authenticates
        itself.

        Raises:
            ssl.SSLError: the listener belongs to another cluster, or refuses this process.
            OSError: there is no listener, or it cannot be reached.
        """
        if self.path:
            await loop.create_unix_connection(lambda: protocol, self.path)
        else:
            await loop.create_connection(lambda: protocol, self.host, self.port, ssl=tls)

    def _family(self) -> socket.AddressFamily:
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def _remove_dead(self) -> None:
        """Remove the socket file of a process that no longer listens.

        A listener without room for a further connection (`BlockingIOError`) counts as running.
        """
        if not Path(self.path).is_socket():
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0)
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                with contextlib.suppress(BlockingIOError):
                    probe.connect(self.path)
                return
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()


def parse_stream_address(address: str) -> StreamAddress:
    """Return the parts of `address`.

    Raises:
        ConfigError: `address` names no Unix socket or TCP port.
    """
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
            return StreamAddress(address, address.removeprefix("unix://"), "", 0)
        if parts.scheme == "stream" and parts.hostname and parts.port and not parts.path:
            parts.hostname.encode("idna")  # raises for names that cannot be resolved
            return StreamAddress(address, "", parts.hostname, parts.port)
    raise ConfigError(
        f"The address of a stream must be unix:///PATH or stream://HOST:PORT, not {address}."
    )


def tune(connection: asyncio.BaseTransport) -> None:
    """Send small writes at once, and detect a TCP peer whose host is down."""
    own: socket.socket = connection.get_extra_info("socket")
    if own.family == socket.AF_UNIX:
        return
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCES_MAX),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * SILENCES_MAX * 1000),
    ):
        own.setsockopt(level, option, value)
