"""Decides which shards are moved, so that replicas are spread evenly over storage nodes and zones
(decision 0056).

A round moves one replica of some shards, at most one to each storage node. The next round follows
when all copies are complete. So a node copies one shard at a time, within `repair_bytes_per_s`.
Every shard keeps its old copies until the new copy is complete. `Replacements` owns the one
`Rebalancing` that is under way.
"""

from __future__ import annotations

from collections.abc import Mapping

from indilog.base.ids import MetalogPosition, NodeId, ShardId
from indilog.kernel.metalog import MOVES_MAX
from indilog.kernel.placement import Placement
from indilog.kernel.zones import zones_of


class Rebalancing:
    """One rebalancing.

    A move either spreads a shard over more zones, or keeps its number of zones and moves a replica
    to a node with at least two shards fewer. So there are finitely many moves.

    Attributes:
        number: see `Members.rebalance`.
        is_complete: whether no further move was found.
    """

    __slots__ = ("is_complete", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_complete = False

    def moves(
        self, placement: Placement, nodes: Mapping[NodeId, MetalogPosition]
    ) -> dict[ShardId, tuple[NodeId, ...]]:
        """Return the new replicas of the shards that the next round moves.

        If no move is possible, the rebalancing is complete. A move to a node that lags in the
        metalog waits for a later call.

        Args:
            placement: the placement; no shard is being copied.
            nodes: the nodes that may get shards, each with the number of entries that it has
                applied.
        """
        load = dict.fromkeys(nodes, 0)
        for shard in placement.shards:
            for node in placement.counting(shard):
                load[node] = load.get(node, 0) + 1
        found: dict[ShardId, tuple[NodeId, ...]] = {}
        behind = False
        free = dict(nodes)
        for shard in sorted(placement.shards):
            move = _move(placement, shard, load, free)
            if move is None or len(found) == MOVES_MAX:
                continue
            old, new = move
            counting = placement.counting(shard)
            # A replica whose reports do not count yet would delay appends.
            if nodes[new] < min((nodes[node] for node in counting if node in nodes), default=0):
                behind = True
                continue
            found[shard] = (*(node for node in counting if node != old), new, old)
            load[old] -= 1
            load[new] += 1
            del free[new]
        self.is_complete = not (found or behind)
        return found


def _move(
    placement: Placement, shard: ShardId, load: Mapping[NodeId, int], free: Mapping[NodeId, object]
) -> tuple[NodeId, NodeId] | None:
    """Return the replica of a shard to replace, and the node to replace it by; None: no replica."""
    counting, zones = placement.counting(shard), placement.view.zones
    now = len(zones_of(counting, zones))
    best: tuple[int, int, NodeId, NodeId] | None = None
    for old in counting:
        others = [node for node in counting if node != old]
        for new in free:
            if new in counting:
                continue
            gained = len(zones_of((*others, new), zones)) - now
            relieved = load[old] - load[new]
            if gained > 0 or (gained == 0 and relieved >= 2):
                move = (-gained, -relieved, old, new)
                best = move if best is None else min(best, move)
    return None if best is None else (best[2], best[3])
