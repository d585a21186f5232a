"""Proxies between all processes of a cluster, to part one of them from the others.

Processes dial the proxies' sockets (`hooks/sitecustomize.py`). A connection carries the messages of
its sender only, so one direction between two processes can be blocked alone. The kernel names the
process that dials.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

Direction: TypeAlias = Literal["both", "in", "out"]
_CREDENTIALS: Final = struct.Struct("3i")
_READ_BYTES: Final = 1 << 16


class Network(Protocol):
    """Where the processes of a cluster receive (`tests.nemesis.tested_cluster`)."""

    def endpoints(self) -> Iterable[str]:
        """Return where processes receive."""

    def receiver_at(self, endpoint: str) -> str:
        """Return the process that receives there."""

    def sender_of(self, pid: int) -> str:
        """Return the process of the cluster that has this id."""

    async def connect(
        self, endpoint: str, pid: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to an endpoint, for the process `pid`."""


class Parted(NamedTuple):
    """A node that is parted from all others.

    Attributes:
        direction: `in`: it receives nothing; `out`: the others receive nothing from it.
        cut: connections break; False: they stay, and no byte passes.
    """

    node: str
    direction: Direction
    cut: bool

    def blocks(self, sender: str, receiver: str) -> bool:
        """Return whether messages between two nodes are blocked."""
        if self.direction != "out" and receiver == self.node:
            return True
        return self.direction != "in" and sender == self.node


class _Connection(NamedTuple):
    sender: str
    receiver: str
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Proxies:
    """The proxies of all endpoints of a network.

    Attributes:
        connections: how many connections went through a proxy.
        bytes: how many bytes did.
    """

    def __init__(self, network: Network, directory: Path) -> None:
        self._network = network
        self.connections = 0
        self.bytes = 0
        self._directory = directory
        self._parted: set[Parted] = set()
        self._changed = asyncio.Event()
        self._open: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        """Listen in the place of each endpoint."""
        self._directory.mkdir()
        for endpoint in self._network.endpoints():

            async def accepted(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: str = endpoint
            ) -> None:
                with contextlib.suppress(OSError):
                    await self._forward(to, reader, writer)
                writer.transport.abort()

            path = str(self._directory / endpoint)
            self._servers.append(await asyncio.start_unix_server(accepted, path))

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers:
            server.close()
        for connection in list(self._open):
            _abort(connection)

    @contextlib.contextmanager
    def parted(self, node: str, direction: Direction, *, cut: bool) -> Iterator[None]:
        """Part a node from all others while the block runs."""
        parted = Parted(node, direction, cut)
        self._parted.add(parted)
        if cut:
            for connection in list(self._open):
                if parted.blocks(connection.sender, connection.receiver):
                    _abort(connection)
        try:
            yield
        finally:
            self._parted.discard(parted)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _forward(
        self, endpoint: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        pid = _dialler(writer.get_extra_info("socket"))
        sender, receiver = self._network.sender_of(pid), self._network.receiver_at(endpoint)
        if any(parted.cut and parted.blocks(sender, receiver) for parted in self._parted):
            return
        back, onward = await self._network.connect(endpoint, pid)
        connection = _Connection(sender, receiver, (writer, onward))
        self._open.add(connection)
        self.connections += 1
        gone = asyncio.create_task(_ended(back, connection))
        try:
            async for data in self._passed(sender, receiver, reader):
                if onward.is_closing():
                    break
                self.bytes += len(data)
                onward.write(data)
                await onward.drain()
        finally:
            self._open.discard(connection)
            gone.cancel()
            _abort(connection)

    async def _passed(
        self, sender: str, receiver: str, reader: asyncio.StreamReader
    ) -> AsyncIterator[bytes]:
        """Yield what the sender wrote, when nothing blocks it."""
        while data := await reader.read(_READ_BYTES):
            while any(parted.blocks(sender, receiver) for parted in self._parted):
                await self._changed.wait()
            yield data


async def _ended(back: asyncio.StreamReader, connection: _Connection) -> None:
    """Wait until the receiver closes the connection, and close its other half."""
    with contextlib.suppress(OSError):
        while await back.read(_READ_BYTES):
            pass
    _abort(connection)


def _abort(connection: _Connection) -> None:
    for writer in connection.writers:
        writer.transport.abort()


def _dialler(connection: socket.socket) -> int:
    """Return the id of the process that has connected."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(given)
    return int(pid)
