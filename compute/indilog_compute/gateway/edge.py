"""What all connections of a gateway share: limits, figures, and the budget of bytes.

`Edge` is one per gateway, however many sockets it listens on.
"""

from __future__ import annotations

from typing import Final

import structlog
from starlette.types import Message, Scope, Send

from indilog.config import NodeConfig
from indilog.link.byte_budget import ByteBudget, ByteShare
from indilog.runtime.descriptors import room_for_connections
from indilog_compute.gateway.clients import SHARE
from indilog_compute.gateway.figures import GatewayFigures

REFUSALS_MAX: Final = 64
"""Connections beyond the limit that are open at once until they are refused."""
LARGE_BYTES: Final = 64 * 1024
"""An answer above this is counted until its client has read most of it."""


class Edge:
    """What a gateway's connections share.

    Args:
        node: the limits.

    Attributes:
        connections_max: connections that are served at once; a server lowers it to what the
            process has file descriptors for.
        refusals_max: connections beyond them that are open at once until they are refused.
        connections: connections that are open, over all servers.
    """

    def __init__(self, node: NodeConfig) -> None:
        self.node = node
        self.figures = GatewayFigures()
        self.budget = ByteBudget(node.gateway.gateway_bytes_max)
        self.connections_max = node.gateway.connections_max
        self.refusals_max = REFUSALS_MAX
        self.connections = 0

    def limit_connections(self) -> None:
        """Lower the limit of connections to what the process has file descriptors for."""
        room = room_for_connections(self.node.gateway.descriptors_reserve)
        if room < self.connections_max + self.refusals_max:
            self.refusals_max = min(REFUSALS_MAX, room // 4)
            self.connections_max = room - self.refusals_max
            structlog.get_logger().warning(
                "fewer connections than connections_max, by the limit of open files",
                connections_max=self.connections_max,
            )

    def has_room(self, opening: int) -> bool:
        """Tell whether a connection may be opened, if only to be refused.

        Args:
            opening: connections that are accepted and not yet counted.
        """
        return self.connections + opening < self.connections_max + self.refusals_max

    def status(self) -> dict[str, int]:
        """Return figures for people and metrics."""
        return {
            **self.figures.status(),
            "connections": self.connections,
            "connections_max": self.connections_max,
            "bytes": self.budget.used,
            "bytes_max": self.budget.bytes_max,
            "bytes_refused": self.budget.refused,
        }

    async def send(self, scope: Scope, send: Send, message: Message) -> None:
        """Send a part of an answer; a large one is counted until most of it is read."""
        size = len(message.get("body", b""))
        if size <= LARGE_BYTES:
            await send(message)
            return
        share: ByteShare = scope[SHARE]
        share.note(size)
        await send({**message, "more_body": True})
        # The server sends the next part only when this one is nearly gone.
        await send({**message, "body": b""})
        share.give(size)
