"""The interface and guarantees of a transport, which carries frames between processes (ARCHITECTURE
5, 6).

A transport carries opaque frames (encoded `Envelope`s) to nodes. Like a network, it may lose, delay
and repeat frames, and does not report this to the sender. The roles resend messages that must
arrive. A transport never changes a frame, never blocks, and holds a bounded number of bytes for
each peer.

Two classes implement the interface: `StreamTransport` (raw streams, decision 0005) and
`ZmqTransport` (pyzmq, decision 0002). All nodes of a process share the address of the process. The
`Outbox` sends frames, and `NodeShell` receives them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

import structlog

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId

QUEUE_FULL: Final = "queue full"
"""More than `send_queue_bytes_max` bytes wait for the peer."""
TOO_OLD: Final = "too old"
"""The peer took no bytes for `send_queue_s_max`."""
TOO_LARGE: Final = "too large"
"""The frame is larger than `message_bytes_max`."""
UNKNOWN_PEER: Final = "unknown peer"
"""The node has no address."""

MALFORMED: Final = "malformed length"
"""A received frame is malformed or above `message_bytes_max`; the connection was closed."""
TOO_MANY_CONNECTIONS: Final = "too many connections"
"""A connection beyond the limit was closed."""

REFUSED_PEER: Final = "refused peer"
"""A peer did not authenticate itself as a node of this cluster; the connection was closed."""

PEERS_MAX: Final = 4096
"""Largest number of nodes to which a transport sends. A view has fewer nodes."""

_log = structlog.get_logger(__name__)

OnFrames: TypeAlias = Callable[[list[bytes]], None]


@dataclasses.dataclass(slots=True)
class TransportCounts:
    """Counts of a transport since its start."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    dropped: defaultdict[str, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    """Dropped frames and refused connections, by reason (`QUEUE_FULL` and so on)."""

    def refuse(self, receiver: NodeId, frame: bytes, *, known: bool, limit: int) -> None:
        """Count a frame that can never arrive: its receiver is not `known`, or it exceeds `limit`.

        Such a frame is dropped. The transport does not resend it, because a resend would fail too.
        """
        if not known:
            self.dropped[UNKNOWN_PEER] += 1
            _log.error("peer unknown", receiver=receiver)
            return
        self.dropped[TOO_LARGE] += 1
        _log.error("frame too large", receiver=receiver, size=len(frame), limit=limit)


class Transport(Protocol):
    """Carries frames to nodes in other processes."""

    counts: TransportCounts

    def start(self, on_frames: OnFrames) -> None:
        """Start to receive. `on_frames` is called with a list of the frames of each read."""

    def send(self, receiver: NodeId, frame: bytes) -> None:
        """Send `frame` to `receiver` with the next `flush`, or earlier. The frame may be lost.

        Frames to one peer arrive in order, if they arrive. A frame above `message_bytes_max`, or
        beyond the limits of the peer's queue, is dropped and counted.
        """

    def flush(self) -> None:
        """Send as many waiting frames as the peers take. The outbox calls this after it sent the
        messages of an iteration.

        The remaining frames are sent without a further call, as soon as the peers take them.
        """

    def close(self) -> None:
        """Stop at once. Waiting frames are lost. May be called again."""


class GrowingTransport(Transport, Protocol):
    """A transport of a cluster whose nodes change while it runs."""

    def add_peers(self, addresses: Mapping[NodeId, str]) -> None:
        """From now on, send to these nodes as well. A known node may have moved to another address;
        the frames that wait at its old address are lost.

        Raises:
            ConfigError: this transport cannot use an address, or there would be more than
                `PEERS_MAX` nodes. In both cases no node is added.
        """


def check_peers(count: int) -> None:
    """Refuse more than `PEERS_MAX` nodes.

    Raises:
        ConfigError: `count` is greater than `PEERS_MAX`.
    """
    if count > PEERS_MAX:
        raise ConfigError(f"A process sends to at most {PEERS_MAX:,} nodes, not {count:,}.")
