"""The heartbeats of a storage node (decision 0048)."""

from __future__ import annotations

from typing import Final

from indilog.base.ids import Instant
from indilog.config import NodeConfig
from indilog.kernel.view import View
from indilog.roles.leadership import Leadership
from indilog.roles.role import Effect, Send
from indilog.wire.replica_messages import ReplicasAre, StorageAlive
from indilog_storage.moved_shards import MovedShards
from indilog_storage.ordering import Ordering

HEARTBEATS: Final = 4
"""Heartbeats in the time after which a storage node counts as lost."""


class Heartbeat:
    """Sends a heartbeat to the primary periodically, and what index nodes know of replicas.

    None is sent where no shard can move (`View.moves_shards`).
    """

    def __init__(
        self, view: View, moved: MovedShards, ordering: Ordering, config: NodeConfig
    ) -> None:
        self._moved = moved
        self._ordering = ordering
        self._pause_s = config.ordering.storage_lost_s / HEARTBEATS
        self._receivers = (*view.index_nodes, *view.aggregators)
        self.has_room = True
        self._due = Instant(0.0) if view.moves_shards else None

    def hurry(self) -> None:
        """Send the next heartbeat at once."""
        if self._due is not None:
            self._due = Instant(0.0)

    def conclude(self, leadership: Leadership, now: Instant) -> list[Effect]:
        """Return the messages that are due."""
        if self._due is None or now < self._due:
            return []
        self._due = Instant(now + self._pause_s)
        complete = self._moved.complete
        alive = StorageAlive(leadership.term, self._ordering.position, complete, self.has_room)
        return [Send(leadership.primary, alive), *self.announce()]

    def announce(self) -> list[Effect]:
        """Return what index nodes must know of replicas, if this node announces it."""
        moved = self._moved
        if not moved.placement.moved or not moved.announces:
            return []
        replicas = ReplicasAre(moved.placement.moved)
        return [Send(node, replicas) for node in self._receivers]

    def deadline(self) -> Instant | None:
        """When the next heartbeat is due."""
        return self._due
