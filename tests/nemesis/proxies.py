"""Proxies between all nodes of a cluster, to part a node from the others.

Nodes dial the proxies' sockets (`hooks/sitecustomize.py`). A connection carries the messages of its
sender only, so one direction between two nodes can be blocked alone. The kernel names the process
that dials, and its command line its node and the directory of the true sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

Direction: TypeAlias = Literal["both", "in", "out"]
_CREDENTIALS: Final = struct.Struct("3i")
_READ_BYTES: Final = 1 << 16


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
    """The proxies of all nodes.

    Attributes:
        connections: how many connections went through a proxy.
        bytes: how many bytes did.
    """

    def __init__(self, directory: Path) -> None:
        self.connections = 0
        self.bytes = 0
        self._directory = directory
        self._parted: set[Parted] = set()
        self._changed = asyncio.Event()
        self._open: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []

    async def start(self, nodes: Iterable[str]) -> None:
        """Listen in the place of each node."""
        self._directory.mkdir()
        for node in nodes:

            async def accepted(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: str = node
            ) -> None:
                with contextlib.suppress(OSError):
                    await self._forward(node, reader, writer)
                writer.transport.abort()

            path = str(self._directory / node)
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
        self, receiver: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sender, run = _dialler(writer.get_extra_info("socket"))
        if any(parted.cut and parted.blocks(sender, receiver) for parted in self._parted):
            return
        back, onward = await asyncio.open_unix_connection(str(run / receiver))
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


def _dialler(connection: socket.socket) -> tuple[str, Path]:
    """Return the node that has connected, and the directory of the nodes' sockets."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(given)
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    metadata = command[command.index("--metadata") + 1]
    return command[command.index("--name") + 1], Path(metadata.removeprefix("unix://")).parent
