"""Opens connections to other compute nodes, and keeps a few idle connections for later calls.

`Forwarder` takes and releases connections; `Peers` knows the addresses of the nodes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from indilog.base.ids import NodeId
from indilog_compute.gateway.forwarding.connection import PeerConnection
from indilog_compute.gateway.forwarding.peers import PeerPort, Peers

IDLE_MAX: Final = 16
"""Largest number of idle connections that are kept for each node."""
CONNECT_S_MAX: Final = 1.0
"""Seconds after which a connection attempt to another machine fails."""


class PeerConnections:
    """Connections to the other compute nodes.

    Args:
        answer_bytes_max: bytes of the largest body of an answer.
    """

    def __init__(self, peers: Peers, answer_bytes_max: int) -> None:
        self._peers = peers
        self._answer_bytes_max = answer_bytes_max
        self._idle: dict[NodeId, list[PeerConnection]] = {}

    async def take(self, node: NodeId) -> tuple[PeerConnection, bool]:
        """Return a connection to a node, and whether it was kept after an earlier call. No other
        caller gets this connection until `release`.

        Raises:
            OSError: the node cannot be reached.
        """
        idle = self._idle.get(node, [])
        while idle:
            if (connection := idle.pop()).is_reusable:
                return connection, True
        if (address := self._peers.address_of(node)) is None:
            raise ConnectionRefusedError(f"{node} has no known address")
        if isinstance(address, PeerPort):
            return await _connected_to(address, self._answer_bytes_max), False
        return await _connect(address, self._answer_bytes_max), False

    def release(self, node: NodeId, connection: PeerConnection) -> None:
        """Keep a connection for later calls. Close it if it is not reusable, or if `IDLE_MAX`
        connections are idle.
        """
        idle = self._idle.setdefault(node, [])
        idle[:] = [kept for kept in idle if kept.is_reusable]
        if connection.is_reusable and len(idle) < IDLE_MAX:
            idle.append(connection)
        else:
            connection.close()

    def keep_only(self, nodes: tuple[NodeId, ...]) -> None:
        """Close the idle connections to all nodes that are not in `nodes`."""
        for node in self._idle.keys() - set(nodes):
            for connection in self._idle.pop(node):
                connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        self.keep_only(())


async def _connected_to(at: PeerPort, answer_bytes_max: int) -> PeerConnection:
    """Connect to a port of another machine."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S_MAX):
        _, connection = await loop.create_connection(
            lambda: PeerConnection(answer_bytes_max), at.host, at.port, ssl=at.tls
        )
    return connection


async def _connect(socket: Path, answer_bytes_max: int) -> PeerConnection:
    """Connect to a Unix socket, whose path may be longer than a socket address (107 bytes)."""
    folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        address = f"/proc/self/fd/{folder}/{socket.name}"
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: PeerConnection(answer_bytes_max), address
        )
    finally:
        os.close(folder)
    return connection
