"""Decides, without I/O, to which compute node a call is offered.

A call is offered to the node with the fewest calls, as far as this node knows. The answer of a node
contains its load, which this node uses for `LOAD_KEPT_S` (0.05 s). After this time, only the calls
that this node itself has forwarded to the other node count. So nodes exchange no messages while no
call is forwarded. `Forwarder` asks `PeerTable`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from indilog.base.ids import NodeId
from indilog_compute.gateway.forwarding.headers import NodeLoad

LOAD_KEPT_S: Final = 0.05
"""Seconds for which the load in an answer is used; a few short calls take this time."""
UNREACHABLE_S: Final = 1.0
"""Seconds for which no call is offered to a node that could not be reached."""


class PeerPort(NamedTuple):
    """The port at which the gateway of a compute node on another machine receives forwarded calls.
    Both nodes authenticate themselves (docs/decisions/0044).
    """

    host: str
    port: int
    tls: ssl.SSLContext


class Peers(NamedTuple):
    """The other compute nodes of the cluster.

    Attributes:
        own: name of this compute node.
        nodes: returns the compute nodes of the newest view.
        address_of: returns the Unix socket of a node on this machine, or the port of a node on
            another machine; None: the address is not known.
    """

    own: NodeId
    nodes: Callable[[], Sequence[NodeId]]
    address_of: Callable[[NodeId], Path | PeerPort | None]


class _Peer:
    """What this node knows about another compute node, the peer.

    Attributes:
        load: the load in the peer's last answer; None: the peer has not answered yet.
        learned_at: when the peer's last answer came.
        sent: number of unanswered calls that this node offered to the peer.
        since: number of calls that this node has offered to the peer since its last answer.
        asked: number of the last choice that chose the peer. Of nodes with equally many calls, the
            one with the smallest number is chosen.
        unreachable_until: when calls may be offered to the peer again.
        refused: for each application, when the peer last refused a call; an entry counts for
            `LOAD_KEPT_S`.
    """

    __slots__ = ("asked", "learned_at", "load", "refused", "sent", "since", "unreachable_until")

    def __init__(self) -> None:
        self.load: NodeLoad | None = None
        self.learned_at = 0.0
        self.sent = self.since = self.asked = 0
        self.unreachable_until = 0.0
        self.refused: dict[str, float] = {}


class PeerTable:
    """The other compute nodes and their load. All times are in seconds, by the same clock."""

    def __init__(self) -> None:
        self._peers: dict[NodeId, _Peer] = {}
        self._choices = 0

    def set_nodes(self, nodes: Collection[NodeId]) -> None:
        """Set the nodes to which calls may be offered; forget all other nodes."""
        if nodes != self._peers.keys():
            self._peers = {node: self._peers.get(node) or _Peer() for node in nodes}

    def choose(
        self, application: str, now: float, *, without: Collection[NodeId] = ()
    ) -> NodeId | None:
        """Return the node with the fewest calls of those that may have room; None: no node may have
        room.

        Args:
            application: application of the call.
            now: the time.
            without: nodes that are not chosen.
        """
        may = [
            (self._calls(peer, now), peer.asked, node)
            for node, peer in self._peers.items()
            if node not in without and self._may_have_room(peer, application, now)
        ]
        if not may:
            return None
        chosen = min(may)[2]
        self._choices += 1
        self._peers[chosen].asked = self._choices
        return chosen

    def sent(self, node: NodeId) -> None:
        """Count a call that is offered to a node."""
        if (peer := self._peers.get(node)) is not None:
            peer.sent += 1
            peer.since += 1

    def ended(self, node: NodeId) -> None:
        """Count the end of a call that was offered to a node."""
        if (peer := self._peers.get(node)) is not None and peer.sent:
            peer.sent -= 1

    def answered(self, node: NodeId, load: NodeLoad, now: float) -> None:
        """Note the load in the answer to a call. The call has ended and may have made room for any
        application, so earlier refusals no longer count.
        """
        if (peer := self._peers.get(node)) is not None:
            peer.load, peer.learned_at, peer.since = load, now, 0
            peer.refused.clear()

    def refused(self, node: NodeId, application: str, load: NodeLoad | None, now: float) -> None:
        """Note the load in a refusal. For `LOAD_KEPT_S`, no calls of the application are offered to
        the node.
        """
        if (peer := self._peers.get(node)) is not None:
            if load is not None:
                peer.load, peer.learned_at, peer.since = load, now, 0
            peer.refused = {a: at for a, at in peer.refused.items() if now - at < LOAD_KEPT_S}
            peer.refused[application] = now

    def unreachable(self, node: NodeId, now: float) -> None:
        """Note that a node is unreachable; for `UNREACHABLE_S`, no calls are offered to it."""
        if (peer := self._peers.get(node)) is not None:
            peer.unreachable_until = now + UNREACHABLE_S

    # --- internal

    def _calls(self, peer: _Peer, now: float) -> int:
        """Return the number of calls that a node has, as far as this node knows."""
        if peer.load is None or now - peer.learned_at >= LOAD_KEPT_S:
            return peer.sent
        return peer.load.calls + peer.since

    def _may_have_room(self, peer: _Peer, application: str, now: float) -> bool:
        if now < peer.unreachable_until:
            return False
        if now - peer.refused.get(application, -LOAD_KEPT_S) < LOAD_KEPT_S:
            return False
        is_known = peer.load is not None and now - peer.learned_at < LOAD_KEPT_S
        return not is_known or peer.load is None or self._calls(peer, now) < peer.load.slots
