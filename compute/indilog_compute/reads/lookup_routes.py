"""Which nodes of the index tier a lookup is sent to: one replica of every index shard, and the node
that merges their answers (thesis 5.2: "on a per-request basis and in round-robin fashion").

A lookup that times out shows that one of its nodes failed, but not which one. So all of its nodes
are *avoided* for a pause. After the pause each node is tried again, at most one such node in a
lookup, so that the outcome identifies the failed node. The pause doubles while a node does not
answer. If only avoided nodes could answer, one of them is asked: avoiding nodes may unbalance the
load, but never prevents an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from indilog.base.ids import Instant, NodeId
from indilog.kernel.view import View

Aggregation: TypeAlias = Literal["aggregator", "master-slave", "both"]

_PAUSE_DOUBLINGS_MAX: Final = 5


class Route(NamedTuple):
    """The nodes of one lookup.

    Attributes:
        replicas: one of every index shard, in the order of the view's index shards.
        aggregator: the node that merges their answers.
        chosen: when the route was chosen.
    """

    replicas: tuple[NodeId, ...]
    aggregator: NodeId
    chosen: Instant


class _Avoidance:
    """How long one node is avoided.

    Attributes:
        since: when a lookup to the node last timed out.
        tried_again: when the node is tried again.
        pause_s: the pause between the two, seconds.
    """

    __slots__ = ("pause_s", "since", "tried_again")

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.since = self.tried_again = Instant(0.0)


class LookupRoutes:
    """Chooses routes round robin, without nodes that did not answer recently.

    Args:
        view: names the index nodes and aggregators to choose from.
        aggregation: which nodes merge (`ClusterConfig.aggregation`).
        pause_s: how long a node is avoided after its first timeout, seconds; doubled up to 32 times
            that.
    """

    def __init__(self, view: View, aggregation: Aggregation, *, pause_s: float) -> None:
        assert view.aggregators or aggregation == "master-slave"
        self._view = view
        self._aggregation = aggregation
        self._pause_s = pause_s
        self._avoided: dict[NodeId, _Avoidance] = {}

    @property
    def avoided(self) -> int:
        """How many nodes are avoided."""
        return len(self._avoided)

    def choose(self, request: int, now: Instant) -> Route:
        """Return the route of the lookup with number `request`; consecutive numbers go round
        robin.
        """
        trial = False
        chosen: list[NodeId] = []
        for replicas in self._view.index_shards:
            node, trial = self._pick(replicas, request, now, trial=trial)
            chosen.append(node)
        if self._merged_by_master(request):
            aggregator = self._master(chosen, request)
        else:
            turn = request // 2 if self._aggregation == "both" else request
            aggregator, _ = self._pick(self._view.aggregators, turn, now, trial=trial)
        return Route(tuple(chosen), aggregator, now)

    def answered(self, route: Route) -> None:
        """Note that all nodes of a route have answered: none of them is avoided any more."""
        if self._avoided:
            for node in {*route.replicas, route.aggregator}:
                self._avoided.pop(node, None)

    def timed_out(self, route: Route, now: Instant) -> None:
        """Note that a lookup timed out. If it tried avoided nodes again, only these are avoided
        longer; otherwise all of its nodes are avoided.
        """
        nodes = {*route.replicas, route.aggregator}
        known = [node for node in nodes if node in self._avoided]
        for node in known or sorted(nodes):
            avoidance = self._avoided.get(node)
            if avoidance is None:
                avoidance = self._avoided[node] = _Avoidance(self._pause_s)
            elif route.chosen < avoidance.since:
                continue  # sent before the node's last timeout, so it shows nothing new
            else:
                longest = self._pause_s * 2**_PAUSE_DOUBLINGS_MAX
                avoidance.pause_s = min(2 * avoidance.pause_s, longest)
            avoidance.since = now
            avoidance.tried_again = Instant(now + avoidance.pause_s)

    def _merged_by_master(self, request: int) -> bool:
        if self._aggregation == "both":
            return request % 2 == 1
        return self._aggregation == "master-slave"

    def check_invariants(self) -> None:
        """Assert that only nodes of the view are avoided, for bounded pauses."""
        nodes = {*self._view.index_nodes, *self._view.aggregators}
        assert self._avoided.keys() <= nodes, "only nodes that lookups use are avoided"
        for avoidance in self._avoided.values():
            assert self._pause_s <= avoidance.pause_s <= self._pause_s * 2**_PAUSE_DOUBLINGS_MAX
            assert avoidance.since <= avoidance.tried_again, "a node is tried after its pause"

    def _master(self, chosen: Sequence[NodeId], request: int) -> NodeId:
        """Return one of the nodes asked; an avoided one only if all are avoided."""
        turn = request // 2 if self._aggregation == "both" else request
        trusted = [node for node in chosen if node not in self._avoided] or chosen
        return trusted[turn % len(trusted)]

    def _pick(
        self, nodes: Sequence[NodeId], turn: int, now: Instant, *, trial: bool
    ) -> tuple[NodeId, bool]:
        """Return one of `nodes`, and whether the lookup tries an avoided node again."""
        first = turn % len(nodes)
        if not self._avoided:
            return nodes[first], trial
        in_turn = (*nodes[first:], *nodes[:first])
        for node in in_turn:
            avoidance = self._avoided.get(node)
            if avoidance is None:
                return node, trial
            if not trial and avoidance.tried_again <= now:
                avoidance.tried_again = Instant(now + avoidance.pause_s)
                return node, True
        return min(in_turn, key=lambda node: self._avoided[node].tried_again), trial
