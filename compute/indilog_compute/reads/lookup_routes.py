"""Which nodes of the index tier a lookup goes to: one replica of every index shard, and who merges
their answers (thesis 5.2: "on a per-request basis and in round-robin fashion").

A lookup that is not answered in time says that one of its nodes does not work, not which. So all of
them are suspected and avoided for a while where there is another choice; then each is tried again,
at most one suspect in a lookup, and the outcome tells about that one. A node that stays silent is
tried ever less often. Where there is no other choice a suspect is asked all the same: suspicion
costs balance, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from indilog.base.ids import Instant, NodeId
from indilog.kernel.view import View

Aggregation: TypeAlias = Literal["aggregator", "master-slave", "both"]

_PAUSE_DOUBLINGS_MAX: Final = 5


class Route(NamedTuple):
    """Whom one lookup asks: a replica of every index shard, in the order of the view's index
    shards, and who merges.
    """

    replicas: tuple[NodeId, ...]
    aggregator: NodeId
    chosen: Instant


class _Suspicion:
    """Of one node: when it arose, and when the node is tried again."""

    __slots__ = ("pause_s", "since", "tried_again")

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.since = self.tried_again = Instant(0.0)


class LookupRoutes:
    """Chooses routes round robin, around nodes that did not answer lately.

    Args:
        view: whose index nodes and aggregators are chosen from.
        aggregation: who merges (`ClusterConfig.aggregation`).
        pause_s: how long a node is avoided when it is first suspected; doubled up to 32 times that.
    """

    def __init__(self, view: View, aggregation: Aggregation, *, pause_s: float) -> None:
        assert view.aggregators or aggregation == "master-slave"
        self._view = view
        self._aggregation = aggregation
        self._pause_s = pause_s
        self._suspicions: dict[NodeId, _Suspicion] = {}

    @property
    def suspects(self) -> int:
        """How many nodes are suspected."""
        return len(self._suspicions)

    def choose(self, request: int, now: Instant) -> Route:
        """Return the route of the lookup with number `request`; consecutive numbers take turns."""
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
        """All nodes of a route have answered: none of them is suspected any more."""
        if self._suspicions:
            for node in {*route.replicas, route.aggregator}:
                self._suspicions.pop(node, None)

    def timed_out(self, route: Route, now: Instant) -> None:
        """A route led nowhere: suspect its nodes, or only those that were suspected already."""
        nodes = {*route.replicas, route.aggregator}
        known = [node for node in nodes if node in self._suspicions]
        for node in known or sorted(nodes):
            suspicion = self._suspicions.get(node)
            if suspicion is None:
                suspicion = self._suspicions[node] = _Suspicion(self._pause_s)
            elif route.chosen < suspicion.since:
                continue  # it says again what is known
            else:
                longest = self._pause_s * 2**_PAUSE_DOUBLINGS_MAX
                suspicion.pause_s = min(2 * suspicion.pause_s, longest)
            suspicion.since = now
            suspicion.tried_again = Instant(now + suspicion.pause_s)

    def _merged_by_master(self, request: int) -> bool:
        if self._aggregation == "both":
            return request % 2 == 1
        return self._aggregation == "master-slave"

    def _master(self, chosen: Sequence[NodeId], request: int) -> NodeId:
        """Return one of the nodes asked; a suspect only if all are."""
        turn = request // 2 if self._aggregation == "both" else request
        trusted = [node for node in chosen if node not in self._suspicions] or chosen
        return trusted[turn % len(trusted)]

    def _pick(
        self, nodes: Sequence[NodeId], turn: int, now: Instant, *, trial: bool
    ) -> tuple[NodeId, bool]:
        """Return one of `nodes`, and whether the lookup tries a suspect (again)."""
        first = turn % len(nodes)
        if not self._suspicions:
            return nodes[first], trial
        in_turn = (*nodes[first:], *nodes[:first])
        for node in in_turn:
            suspicion = self._suspicions.get(node)
            if suspicion is None:
                return node, trial
            if not trial and suspicion.tried_again <= now:
                suspicion.tried_again = Instant(now + suspicion.pause_s)
                return node, True
        return min(in_turn, key=lambda node: self._suspicions[node].tried_again), trial
