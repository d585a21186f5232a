"""The heartbeats of a storage node (decision 0048).

`StorageNode` owns the one `StorageHeartbeat`. The primary counts heartbeats, and index nodes and
aggregators use the placement.
"""

from __future__ import annotations

from typing import Final

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import NodeConfig
from indilog.roles.leadership import Leadership
from indilog.roles.role import Effect, Received, Send
from indilog.wire.replica_messages import PlacementIs, StorageAlive
from indilog_storage.moved_shards import MovedShards
from indilog_storage.ordering import Ordering

HEARTBEATS: Final = 4
"""Heartbeats per `storage_lost_s`. After that time without a heartbeat, a storage node counts as
lost.
"""


class StorageHeartbeat:
    """Sends heartbeats to the primary, if the view lets shards move (`View.moves_shards`).

    Once an entry has changed the first placement, the node also sends the placement to index nodes
    and aggregators.
    """

    def __init__(self, moved: MovedShards, ordering: Ordering, config: NodeConfig) -> None:
        self._moved = moved
        self._ordering = ordering
        self._pause_s = config.ordering.storage_lost_s / HEARTBEATS
        self.has_room = True
        self._due = Instant(0.0)
        self._informed: dict[NodeId, Epoch] = {}
        """The newest incarnation of each index node and aggregator that sent a request."""

    def make_due(self) -> None:
        """Make the next heartbeat due at once."""
        self._due = Instant(0.0)

    def conclude(self, leadership: Leadership, now: Instant) -> list[Effect]:
        """Return the messages that are due."""
        if now < self._due or not self._is_needed:
            return []
        self._due = Instant(now + self._pause_s)
        effects = self.announce() if self._moved.announces else []
        if not self._moved.placement.view.moves_shards:
            return effects
        complete = self._moved.complete
        alive = StorageAlive(leadership.term, self._ordering.position, complete, self.has_room)
        return [Send(leadership.primary, alive), *effects]

    @property
    def _is_needed(self) -> bool:
        return self._moved.placement.view.moves_shards or self._moved.placement.is_changed

    def announce(self) -> list[Effect]:
        """Return messages with the placement to all index nodes and aggregators; none while the
        placement is the first one.
        """
        placement = self._moved.placement
        if not placement.is_changed:
            return []
        message = PlacementIs(placement.view, placement.moved)
        receivers = (*placement.view.index_nodes, *placement.view.aggregators)
        return [Send(node, message) for node in receivers]

    def inform(self, event: Received) -> list[Effect]:
        """Return a message with the placement to the sender, if the sender is a new incarnation of
        an index node or aggregator. A node that starts knows a view, but not which shards moved.
        """
        view = self._moved.placement.view
        receivers = (*view.index_nodes, *view.aggregators)
        if event.sender not in receivers or not self._moved.placement.is_changed:
            return []
        if event.incarnation <= self._informed.get(event.sender, 0):
            return []
        self._informed[event.sender] = event.incarnation
        self._informed = {n: known for n, known in self._informed.items() if n in receivers}
        return [Send(event.sender, PlacementIs(view, self._moved.placement.moved))]

    def deadline(self) -> Instant | None:
        """When the next heartbeat is due."""
        return self._due if self._is_needed else None
