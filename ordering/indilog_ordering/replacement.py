"""Decides which storage nodes are lost, and what happens to their shards (decisions 0048 and 0070;
Scalog 4.4).

Storage nodes send heartbeats to the primary. The first replicas of a shard are its *counting*
replicas: their reports decide which records are ordered (`indilog.kernel.placement`). If a counting
replica is lost, a metalog entry (`NewReplicas`) names another storage node in its place. The lost
replica stays in the list after the counting replicas, because it may have the only copy of a
record. When every counting replica has all records that were ordered before that entry, another
entry drops the lost replica.

The first replica of a shard sends the tags of new records to the index. So a lost replica moves to
the end of the list even if no other node can replace it yet.

If too few replicas are left for the ack quorum, appends wait. Then `lost_storage_policy` decides
what happens after `storage_lost_s`. Either the shard is finalized (`finalize_add`), or it gets
another replica (`remove_replace`). If no append waits, or the policy is `mask`, the shard gets
another replica after `storage_replaced_s`. This time is longer, because copying a shard is
expensive and the node may come back.

`Primary` owns the one `Replacements`, passes it the heartbeats, and proposes the entries.
`Rebalancing` spreads the shards when no replica is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from indilog.base.ids import Instant, MetalogPosition, NodeId, ShardId
from indilog.config import Config
from indilog.kernel.metalog import MOVES_MAX, REPLICAS_MAX
from indilog.kernel.placement import Placement
from indilog.kernel.view import NO_WRITER
from indilog.kernel.zones import spread_over_zones
from indilog.wire.replica_messages import StorageAlive
from indilog_ordering.rebalancing import Rebalancing

SHARDS_ADDED_MAX: Final = 1024
"""If a view has this many shards, no shard is added for a lost storage node: the shards of that
node get other replicas instead. The limit is needed because a view names all shards, and the number
of a shard is never used again.
"""
_LOOKS: Final = 4
"""Checks of the heartbeats per `storage_lost_s`."""


class _Node:
    """The primary's knowledge of one storage node.

    Attributes:
        heartbeat_at: when the last heartbeat arrived, or when the node last counted as alive
            without a heartbeat.
        position, complete, has_room: as in the last heartbeat (`StorageAlive`).
    """

    __slots__ = ("complete", "has_room", "heartbeat_at", "position")

    def __init__(self, heartbeat_at: Instant) -> None:
        self.heartbeat_at = heartbeat_at
        self.position: MetalogPosition = 0
        self.complete: frozenset[ShardId] = frozenset()
        self.has_room = True


class Replacements:
    """Decides which shards are moved.

    Args:
        placement: the placement of shards according to all entries, committed or not.
        nodes: all storage nodes.
        now: when the term began; all nodes count as alive then.
    """

    def __init__(
        self, placement: Placement, nodes: tuple[NodeId, ...], config: Config, now: Instant
    ) -> None:
        self._placement = placement
        self._config = config.cluster
        self._lost_s = config.node.ordering.storage_lost_s
        self._replaced_s = max(self._lost_s, config.node.ordering.storage_replaced_s)
        self._nodes = {node: _Node(now) for node in nodes}
        self._leaving: frozenset[NodeId] = frozenset()
        """Storage nodes that leave the cluster. Their shards are moved although the nodes are
        running.
        """
        self._due = self._next_look(now)
        self._ran = now
        """When this node ran last."""
        self._rebalancing: Rebalancing | None = None
        """The rebalancing that is under way."""
        self._changed = False
        """Whether a node has come back or completed a shard since the last check."""

    def note_time(self, now: Instant) -> None:
        """Note that this node runs. If this node was paused for longer than its deadlines allow,
        heartbeats may be unread, so all storage nodes count as alive again.
        """
        if now - self._ran > self._lost_s / 2:
            for node in self._nodes.values():
                node.heartbeat_at = now
        self._ran = now

    def set_nodes(
        self, nodes: Collection[NodeId], leaving: Collection[NodeId], now: Instant
    ) -> None:
        """Set the storage nodes, and those of them that leave the cluster."""
        if self._nodes.keys() != set(nodes) or self._leaving != set(leaving):
            # A sole storage node sends no heartbeats, so all nodes count as alive at first.
            self._nodes = {node: self._nodes.get(node) or _Node(now) for node in nodes}
            for node in self._nodes.values():
                node.heartbeat_at = now
            self._leaving = frozenset(leaving)
            self._changed = True

    def set_rebalancing(self, number: int | None) -> None:
        """Begin a rebalancing, or end the one under way (None)."""
        if number is None:
            self._rebalancing = None
        elif self._rebalancing is None or self._rebalancing.number != number:
            self._rebalancing, self._changed = Rebalancing(number), True

    @property
    def rebalanced(self) -> int:
        """The number of the rebalancing if it is complete; 0: it is not, or there is none."""
        one = self._rebalancing
        return one.number if one is not None and one.is_complete else 0

    def _next_look(self, now: Instant) -> Instant:
        """Return when to run next even without messages. Without this, `note_time` would take a
        time without messages for a pause of this node.
        """
        return Instant(now + self._lost_s / _LOOKS)

    def on_alive(self, sender: NodeId, message: StorageAlive, now: Instant) -> bool:
        """Note a heartbeat; False: the sender is no storage node."""
        if (node := self._nodes.get(sender)) is None:
            return False
        back = self._is_lost(sender, now)
        complete = frozenset(message.complete)
        self._changed = self._changed or back or complete != node.complete
        node.heartbeat_at, node.position, node.complete = now, message.position, complete
        node.has_room = message.has_room
        return True

    def forget(self, node: NodeId) -> None:
        """Drop the reports of a restarted node, because it may have lost its disk."""
        if (known := self._nodes.get(node)) is not None:
            known.position, known.complete = 0, frozenset()

    def _is_lost(self, node: NodeId, now: Instant, after_s: float | None = None) -> bool:
        known = self._nodes.get(node)
        lost_s = self._lost_s if after_s is None else after_s
        return known is None or now >= known.heartbeat_at + lost_s

    def alive(self, now: Instant) -> frozenset[NodeId]:
        """Return the storage nodes that are not lost."""
        return frozenset(node for node in self._nodes if not self._is_lost(node, now))

    def unusable(self, now: Instant) -> frozenset[NodeId]:
        """Return the storage nodes that should get no further shard: they are lost, are leaving,
        have no room, or have not reported in this term that they have applied an entry.
        """
        known = self._nodes
        usable = {node for node in known if known[node].has_room and known[node].position}
        return frozenset(
            node
            for node in known
            if node not in usable or node in self._leaving or self._is_lost(node, now)
        )

    def to_finalize(self, now: Instant) -> list[ShardId]:
        """Return the shards whose compute nodes must continue on new shards, because appends wait
        for lost storage nodes (`finalize_add`).
        """
        return [shard for shard in sorted(self._placement.shards) if self._is_to_end(shard, now)]

    def _is_to_end(self, shard: ShardId, now: Instant) -> bool:
        placement = self._placement
        if self._config.lost_storage_policy != "finalize_add" or not self._waits(shard, now):
            return False
        if placement.writer(shard) == NO_WRITER or len(placement.shards) >= SHARDS_ADDED_MAX:
            return False
        copies = max(len(placed.replicas) for placed in placement.view.shards.values())
        return len(self._nodes) - len(self.unusable(now)) >= copies

    def _waits(self, shard: ShardId, now: Instant) -> bool:
        """Whether too few replicas of a shard are left for the ack quorum."""
        counting = self._placement.counting(shard)
        up = sum(not self._is_lost(node, now) for node in counting)
        return up < self._config.quorum_of(len(counting))

    def _replaced_after_s(self, shard: ShardId, now: Instant) -> float:
        """Return the seconds without heartbeats after which a lost replica is replaced."""
        is_masked = self._config.lost_storage_policy == "mask"
        if is_masked or self._placement.is_finalized(shard) or not self._waits(shard, now):
            return self._replaced_s
        return self._replaced_s if self._is_to_end(shard, now) else self._lost_s

    def is_due(self, now: Instant) -> bool:
        """Whether shards may have to be moved now."""
        return self._changed or now >= self._due

    def wanted(self, now: Instant) -> dict[ShardId, tuple[NodeId, ...]]:
        """Return the new replicas of the shards that are to be moved now."""
        self._changed = False
        times = [
            Instant(node.heartbeat_at + after_s)
            for node in self._nodes.values()
            for after_s in (self._lost_s, self._replaced_s)
            if node.heartbeat_at + after_s > now
        ]
        self._due = min((*times, self._next_look(now)))
        found: dict[ShardId, tuple[NodeId, ...]] = {}
        load = dict.fromkeys(self._nodes, 0)
        for shard in self._placement.shards:
            for node in self._placement.counting(shard):
                load[node] = load.get(node, 0) + 1
        for shard in sorted(self._placement.shards):
            before = self._placement.replicas(shard)
            replicas = self._replicas(shard, load, now)
            if replicas != before and len(found) == MOVES_MAX:
                self._changed = True  # the other shards follow with the next entry
            elif replicas != before:
                found[shard] = replicas
                for node in replicas:
                    load[node] = load.get(node, 0) + (node not in before)
        if self._rebalancing is not None and not found and self._is_settled(now):
            found = self._rebalancing.moves(self._placement, self._movable(now))
        return found

    def _is_settled(self, now: Instant) -> bool:
        """Whether no shard is being copied, and no shard has a lost or leaving replica."""
        return all(
            not (self._is_lost(node, now) or node in self._leaving)
            for shard in self._placement.shards
            for node in self._placement.replicas(shard)
        ) and all(
            self._placement.replicas(shard) == self._placement.counting(shard)
            for shard in self._placement.shards
        )

    def _movable(self, now: Instant) -> dict[NodeId, MetalogPosition]:
        """Return the storage nodes that may get shards, each with the number of entries that it has
        applied.
        """
        return {
            node: state.position
            for node, state in self._nodes.items()
            if state.has_room and node not in self._leaving and not self._is_lost(node, now)
        }

    def _replicas(
        self, shard: ShardId, load: Mapping[NodeId, int], now: Instant
    ) -> tuple[NodeId, ...]:
        """Return the replicas that a shard should have now."""
        before, counting = self._placement.replicas(shard), self._placement.counting(shard)
        lost = [node for node in before if self._is_lost(node, now)]
        leaving = [node for node in before if node in self._leaving and node not in lost]
        staying = [node for node in before if node not in lost and node not in leaving]
        missing = [node for node in counting if node not in staying]
        if not missing:
            complete = all(self._is_complete(node, shard) for node in counting)
            return counting if complete else before
        after_s = self._replaced_after_s(shard, now)
        vacant = sum(self._is_lost(node, now, after_s) for node in missing)
        spares, least = self._spares(before, load, now)
        # A spare that lags may replace a lost node, because appends may wait for a replacement. No
        # append waits for a leaving node, so a leaving node waits for a spare that does not lag.
        current = [node for node in spares if self._nodes[node].position >= least]
        behind = [node for node in spares if node not in current][: max(0, vacant - len(current))]
        vacant += sum(node in leaving for node in missing)
        # Replicas after the counting replicas already have a copy.
        vacant -= len(staying) - (len(counting) - len(missing))
        vacant = max(0, min(vacant, REPLICAS_MAX - len(before)))
        zones = self._placement.view.zones
        chosen = spread_over_zones(current, vacant, zones, staying)
        beside = (*staying, *chosen)
        chosen += spread_over_zones(behind, vacant - len(chosen), zones, beside)
        return (*staying, *chosen, *leaving, *lost)

    def _spares(
        self, replicas: tuple[NodeId, ...], load: Mapping[NodeId, int], now: Instant
    ) -> tuple[list[NodeId], MetalogPosition]:
        """Return the nodes that can replace one of `replicas`, the best first, and the number of
        entries that every running replica has applied. Nodes that have applied at least this number
        are best, and among these the nodes with the fewest shards.
        """
        known = self._nodes
        current = [known[node].position for node in replicas if not self._is_lost(node, now)]
        least = min(current, default=0)
        spares = [
            node for node, state in known.items()
            if node not in replicas and node not in self._leaving
            and state.has_room and not self._is_lost(node, now)
        ]  # fmt: skip
        return sorted(spares, key=lambda n: (known[n].position < least, load[n], n)), least

    def _is_complete(self, node: NodeId, shard: ShardId) -> bool:
        """Whether a node has every record that was ordered before the shard was last moved."""
        known = self._nodes.get(node)
        return (
            known is not None
            and known.position > self._placement.since(shard)
            and shard in known.complete
        )

    def deadline(self) -> Instant:
        """When to check the heartbeats again."""
        return self._due
