"""Limits, counters and the byte budget that all connections of a gateway share.

A gateway has one `GatewayResources`, even if it listens on several sockets. Its servers, its
connections (`protocol`) and its routes use this object.
"""

from __future__ import annotations

from typing import Final

import structlog
from starlette.types import Message, Scope, Send

from indilog.config import NodeConfig
from indilog.link.byte_budget import ByteBudget, ByteShare
from indilog.runtime.descriptors import room_for_connections
from indilog_compute.gateway.clients import SHARE
from indilog_compute.gateway.counters import GatewayCounters

REFUSALS_MAX: Final = 64
"""Number of connections beyond `connections_max` that may be open while their refusals are sent."""
LARGE_BYTES: Final = 64 * 1024
"""An answer with more than this many bytes counts in the budget until the client has read most of
it.
"""


class GatewayResources:
    """Limits, counters and the byte budget of a gateway's connections.

    Args:
        node: settings with the limits.

    Attributes:
        connections_max: number of connections that are served at a time; `limit_connections` may
            lower it.
        refusals_max: number of connections beyond `connections_max` that may be open while they
            are refused.
        connections: number of open connections of all servers.
        grpc_port: the port of the gRPC server; None: there is no gRPC server.
    """

    def __init__(self, node: NodeConfig) -> None:
        self.node = node
        self.counters = GatewayCounters()
        self.budget = ByteBudget(node.gateway.gateway_bytes_max)
        self.connections_max = node.gateway.connections_max
        self.refusals_max = REFUSALS_MAX
        self.connections = 0
        self.grpc_port: int | None = None

    def limit_connections(self) -> None:
        """Lower `connections_max` and `refusals_max` if the process may not open enough file
        descriptors for them.
        """
        room = room_for_connections(self.node.gateway.descriptors_reserve)
        if room < self.connections_max + self.refusals_max:
            self.refusals_max = min(REFUSALS_MAX, room // 4)
            self.connections_max = room - self.refusals_max
            structlog.get_logger().warning(
                "the limit on open files lowers connections_max",
                connections_max=self.connections_max,
            )

    def has_room(self, opening: int) -> bool:
        """Whether a further connection may be opened, which is then served or refused.

        Args:
            opening: number of accepted connections that `connections` does not count yet.
        """
        return self.connections + opening < self.connections_max + self.refusals_max

    def status(self) -> dict[str, int]:
        """Return the counters for `/status` and `/metrics`."""
        grpc = {} if self.grpc_port is None else {"grpc_port": self.grpc_port}
        return {
            **self.counters.status(),
            **grpc,
            "connections": self.connections,
            "connections_max": self.connections_max,
            "bytes": self.budget.used,
            "bytes_max": self.budget.bytes_max,
            "bytes_refused": self.budget.refused,
        }

    async def send(self, scope: Scope, send: Send, message: Message) -> None:
        """Send a part of an answer. A large part counts in the budget until the client has read
        most of it.
        """
        size = len(message.get("body", b""))
        if size <= LARGE_BYTES:
            await send(message)
            return
        share: ByteShare = scope[SHARE]
        share.note(size)
        await send({**message, "more_body": True})
        # `send` returns only when most of the previous part has been sent.
        await send({**message, "body": b""})
        share.release(size)
