"""Chooses the nodes of the index tier for a lookup: one replica of every index shard, and the node
that merges their answers. Thesis 5.2: "on a per-request basis and in round-robin fashion".

The timeout of a lookup shows that one of its nodes failed, but not which one. So all nodes of the
lookup count as silent for a pause (`indilog_compute.reads.silent_nodes`). After the pause, each
lookup tries at most one silent node again, so that the outcome shows whether this node failed.
`TierLookups` and `TagQuestions` ask `LookupRoutes` for routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from indilog.base.ids import Instant, NodeId, ViewNumber
from indilog.kernel.placement import Placement
from indilog_compute.reads.silent_nodes import SilentNodes

Aggregation: TypeAlias = Literal["aggregator", "master-slave", "both"]


class LookupRoute(NamedTuple):
    """The nodes of one lookup.

    Attributes:
        view: the newest known view when the route was chosen.
        replicas: one replica of every index shard, in the order of the view's index shards.
        aggregator: the node that merges the answers of the replicas.
        chosen: when the route was chosen.
    """

    view: ViewNumber
    replicas: tuple[NodeId, ...]
    aggregator: NodeId
    chosen: Instant


class LookupRoutes:
    """Chooses routes round robin; silent nodes come last.

    Args:
        placement: the placement whose view names the index nodes and aggregators.
        aggregation: which nodes merge answers (`ClusterConfig.aggregation`).
        pause_s: seconds for which a node is not asked after a timeout; see `SilentNodes`.
    """

    def __init__(self, placement: Placement, aggregation: Aggregation, *, pause_s: float) -> None:
        assert placement.view.aggregators or aggregation == "master-slave"
        self._placement = placement
        self._aggregation = aggregation
        self._silent = SilentNodes(pause_s)

    @property
    def silent(self) -> int:
        """Number of silent nodes."""
        return len(self._silent)

    def choose(self, request: int, now: Instant) -> LookupRoute:
        """Return the route of the lookup with the number `request`. Lookups with consecutive
        numbers go to the nodes round robin.
        """
        trial = False
        chosen: list[NodeId] = []
        for replicas in self._placement.view.index_shards:
            node, trial = self._silent.pick(replicas, request, now, trial=trial)
            chosen.append(node)
        if self._merged_by_master(request):
            aggregator = self._master(chosen, request)
        else:
            rotation = request // 2 if self._aggregation == "both" else request
            aggregator, _ = self._silent.pick(
                self._placement.view.aggregators, rotation, now, trial=trial
            )
        return LookupRoute(self._placement.view.number, tuple(chosen), aggregator, now)

    def note_view(self) -> None:
        """Forget the silent nodes that are not in the newest view."""
        self._silent.keep(self._nodes)

    def answered(self, route: LookupRoute) -> None:
        """Note that all nodes of a route have answered."""
        if self._silent:
            for node in {*route.replicas, route.aggregator}:
                self._silent.answered(node)

    def timed_out(self, route: LookupRoute, now: Instant) -> None:
        """Note that a lookup timed out. If nodes of its route are silent already, only these stay
        silent for longer; otherwise all nodes of the route become silent.
        """
        nodes = sorted({*route.replicas, route.aggregator} & {*self._nodes})
        known = [node for node in nodes if node in self._silent]
        self._silent.timed_out(known or nodes, route.chosen, now)

    @property
    def _nodes(self) -> tuple[NodeId, ...]:
        view = self._placement.view
        return (*view.index_nodes, *view.aggregators)

    def _merged_by_master(self, request: int) -> bool:
        if self._aggregation == "both":
            return request % 2 == 1
        return self._aggregation == "master-slave"

    def check_invariants(self) -> None:
        """Assert that only nodes of the view are silent, and that pauses are bounded."""
        self._silent.check_invariants(self._nodes)

    def _master(self, chosen: Sequence[NodeId], request: int) -> NodeId:
        """Return one of the chosen nodes as the master; a silent node only if all are silent."""
        rotation = request // 2 if self._aggregation == "both" else request
        trusted = [node for node in chosen if node not in self._silent] or chosen
        return trusted[rotation % len(trusted)]
