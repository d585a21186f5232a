"""Which storage nodes are lost, and who replaces them (decision 0048; Scalog 4.4 adds a shard for a
lost one).

Storage nodes send heartbeats to the primary. If a counting replica of a shard is lost, the next
entry (`NewReplicas`) lets another storage node count instead; the lost one stays in the list after
the counting ones, because it may have the only copy of a record. When all counting replicas have
every record that was ordered before, one more entry drops the others.

A shard whose appends wait gets another replica as soon as a node is lost. A shard that goes on with
fewer (`ack_quorum`) gets it after `storage_replaced_s`, because the copy costs much and the node
may come back. Lost replicas go to the end of the list at once: the first replica sends the tags of
new records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from indilog.base.ids import Instant, MetalogPosition, NodeId, ShardId
from indilog.config import Config
from indilog.kernel.metalog import MOVES_MAX, REPLICAS_MAX
from indilog.kernel.placement import Placement
from indilog.wire.replica_messages import StorageAlive

_LOOKS: Final = 4
"""How often the primary looks in the time after which a storage node counts as lost."""


class _Node:
    """What the primary knows of one storage node."""

    __slots__ = ("complete", "has_room", "heard", "position")

    def __init__(self, heard: Instant) -> None:
        self.heard = heard
        self.position: MetalogPosition = 0
        self.complete: frozenset[ShardId] = frozenset()
        self.has_room = True


class Replacements:
    """Decides which shards are moved.

    Args:
        placement: where shards are by all entries, committed or not.
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
        """Storage nodes that give their shards away, although they are alive."""
        self._due = self._next_look(now)
        self._ran = now
        """When this node ran last."""
        self._changed = False
        """Whether a node has become alive or complete since the last look."""

    def note_time(self, now: Instant) -> None:
        """Note that this node runs, as it does at every deadline. If it did not for a while,
        heartbeats may wait to be read.
        """
        if now - self._ran > self._lost_s / 2:
            for node in self._nodes.values():
                node.heard = now
        self._ran = now

    def set_nodes(
        self, nodes: Collection[NodeId], leaving: Collection[NodeId], now: Instant
    ) -> None:
        """Note which storage nodes there are, and which of them leave the cluster."""
        if self._nodes.keys() != set(nodes) or self._leaving != set(leaving):
            self._nodes = {node: self._nodes.get(node) or _Node(now) for node in nodes}
            self._leaving = frozenset(leaving)
            self._changed = True

    def _next_look(self, now: Instant) -> Instant:
        """When this node runs next, although it hears nothing: otherwise it would take the silence
        for a pause of its own.
        """
        return Instant(now + self._lost_s / _LOOKS)

    def on_alive(self, sender: NodeId, message: StorageAlive, now: Instant) -> bool:
        """Note a heartbeat; False: the sender is no storage node."""
        if (node := self._nodes.get(sender)) is None:
            return False
        back = self._is_lost(sender, now)
        complete = frozenset(message.complete)
        self._changed = self._changed or back or complete != node.complete
        node.heard, node.position, node.complete = now, message.position, complete
        node.has_room = message.has_room
        return True

    def forget(self, node: NodeId) -> None:
        """Forget what a node has, which restarted: it may have lost its disk."""
        if (known := self._nodes.get(node)) is not None:
            known.position, known.complete = 0, frozenset()

    def _is_lost(self, node: NodeId, now: Instant, after_s: float | None = None) -> bool:
        known = self._nodes.get(node)
        lost_s = self._lost_s if after_s is None else after_s
        return known is None or now >= known.heard + lost_s

    def alive(self, now: Instant) -> frozenset[NodeId]:
        """Return the storage nodes that are not lost."""
        return frozenset(node for node in self._nodes if not self._is_lost(node, now))

    def is_due(self, now: Instant) -> bool:
        """Whether something may have to be moved."""
        return self._changed or now >= self._due

    def wanted(self, now: Instant) -> dict[ShardId, tuple[NodeId, ...]]:
        """Return the new replicas of the shards that are to be moved now."""
        self._changed = False
        times = [
            Instant(node.heard + after_s)
            for node in self._nodes.values()
            for after_s in (self._lost_s, self._replaced_s)
            if node.heard + after_s > now
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
                self._changed = True  # the others follow with the next entry
            elif replicas != before:
                found[shard] = replicas
                for node in replicas:
                    load[node] = load.get(node, 0) + (node not in before)
        return found

    def _replicas(
        self, shard: ShardId, load: Mapping[NodeId, int], now: Instant
    ) -> tuple[NodeId, ...]:
        """Return the replicas that a shard should have now."""
        before, counting = self._placement.replicas(shard), self._placement.counting(shard)
        alive = [n for n in before if not self._is_lost(n, now) and n not in self._leaving]
        lost = [node for node in before if node not in alive]
        missing = [node for node in counting if node in lost]
        if not missing:
            complete = all(self._is_complete(node, shard) for node in counting)
            return counting if complete else before
        stalled = len(counting) - len(missing) < self._config.quorum_of(len(counting))
        after_s = self._lost_s if stalled else self._replaced_s
        vacant = sum(n in self._leaving or self._is_lost(n, now, after_s) for n in missing)
        vacant -= len(alive) - (len(counting) - len(missing))  # others that have a copy
        spares = self._spares(before, load, now)
        chosen = spares[: max(0, min(vacant, REPLICAS_MAX - len(before)))]
        return (*alive, *chosen, *lost)

    def _spares(
        self, replicas: tuple[NodeId, ...], load: Mapping[NodeId, int], now: Instant
    ) -> list[NodeId]:
        """Return the nodes that can replace one of `replicas`, the best first: those that have
        applied as much of the metalog as the others, then those with the fewest shards.
        """
        known = self._nodes
        current = [known[node].position for node in replicas if not self._is_lost(node, now)]
        least = min(current, default=0)
        spares = [
            node for node, state in known.items()
            if node not in replicas and node not in self._leaving
            and state.has_room and not self._is_lost(node, now)
        ]  # fmt: skip
        return sorted(spares, key=lambda n: (known[n].position < least, load[n], n))

    def _is_complete(self, node: NodeId, shard: ShardId) -> bool:
        """Whether a node has all that was ordered before the shard was moved."""
        known = self._nodes.get(node)
        return (
            known is not None
            and known.position > self._placement.since(shard)
            and shard in known.complete
        )

    def deadline(self) -> Instant:
        """When to look again."""
        return self._due
