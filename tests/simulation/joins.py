"""Nodes that join and leave a simulated cluster while it works (decision 0049)."""

from __future__ import annotations

import itertools
from typing import Final

from indilog.base.ids import Epoch, NodeId, ShardId
from indilog.kernel.view import Members, View
from indilog.testing.simulation import SimulatedCluster
from tests.simulation.history import Violation
from tests.simulation.random_events import RandomEvents
from tests.simulation.sequencer_faults import leading
from tests.simulation.workload import Workload

_SHARE: Final = 0.4
"""The share of runs with joins, among those with several sequencers."""
_MEAN_S: Final = (0.1, 0.4, 1.0)
"""Simulated seconds between two changes, on average."""
_ENGINES_MAX: Final = 4
_STORAGE_MAX: Final = 5
_SEQUENCERS_MAX: Final = 5
_SEQUENCERS_SHARE: Final = 0.6
"""The share of runs with joins in which sequencers join and leave as well."""
_INDEX_SHARDS_MAX: Final = 5
_REBALANCE_SHARE: Final = 0.3
"""The share of rebalancings among these changes."""
_FINALIZE_SHARE: Final = 0.6
"""The share of runs with joins in which shards are finalized."""
_SHARDS_MAX: Final = 12
_GRACES: Final = (0, 0, 1, 10, 200)
"""Cuts of grace."""
_MEMBERS_WITHIN_S: Final = 60.0


class Joins(RandomEvents):
    """Compute nodes, storage nodes and index shards join and leave; sequencers in some runs."""

    def __init__(
        self, cluster: SimulatedCluster, workload: Workload, injected: dict[str, int]
    ) -> None:
        super().__init__(cluster, injected, "joins")
        self._workload = workload
        self._names = set(cluster.view.nodes)
        self._left: list[NodeId] = []
        """Compute nodes that have left, and may join again with an empty disk."""
        self._sequencers = _SequencerJoins(self, cluster, injected)
        self._finalized = _FinalizedShards(self, cluster, injected)
        joins = len(cluster.view.sequencers) > 1 and self._chance.random() < _SHARE
        mean_s = self._chance.choice(_MEAN_S)
        if joins:
            self._begin(mean_s)
            self._sequencers.begin(mean_s)
            self._finalized.begin(mean_s)

    def end(self) -> None:
        """Change nothing more."""
        super().end()
        self._sequencers.end()
        self._finalized.end()

    def _happen(self) -> None:
        change = self._chance.choice((self._engines, self._storage, self._index_shards))
        self.want(change.__name__[1:], change(self._cluster.members))

    def want(self, name: str, members: Members) -> None:
        """Change the wanted members; `name`: the kind of the nodes that join or leave."""
        if members != self._cluster.members:
            self._count(f"join {name}", traced=False)
            self._start(members)
            self._cluster.want_members(members)

    def _engines(self, members: Members) -> Members:
        engines = members.engines
        if len(engines) > 1 and self._chance.random() < 0.5:
            gone = self._chance.choice(engines)
            self._left.append(gone)
            return _with(members, engines=tuple(node for node in engines if node != gone))
        if len(engines) >= _ENGINES_MAX:
            return members
        there = {node for process in self._cluster.processes for node in process.nodes}
        back = [node for node in self._left if node not in there]
        if back and self._chance.random() < 0.5:
            added = self._chance.choice(back)
            self._left.remove(added)
        else:
            added = self.unused("engine")
        return _with(members, engines=(*engines, added))

    def _storage(self, members: Members) -> Members:
        nodes = members.storage_nodes
        if len(nodes) > self._cluster.config.cluster.replicas and self._chance.random() < 0.5:
            gone = self._chance.choice(nodes)
            return _with(members, storage_nodes=tuple(n for n in nodes if n != gone))
        if len(nodes) >= _STORAGE_MAX:
            return members
        added = self.unused("storage")
        return _with(members, storage_nodes=(*nodes, added))

    def _index_shards(self, members: Members) -> Members:
        count = self._chance.randint(1, _INDEX_SHARDS_MAX)
        replicas = range(len(members.index_shards[0]))
        index_shards = tuple(
            tuple(NodeId(f"index-{shard}-{replica}") for replica in replicas)
            for shard in range(count)
        )
        return _with(members, index_shards=index_shards)

    def unused(self, role: str) -> NodeId:
        """Return a name that no node has had."""
        node = next(
            name
            for number in itertools.count()
            if (name := NodeId(f"{role}-{number}")) not in self._names
        )
        self._names.add(node)
        return node

    def _start(self, members: Members) -> None:
        """Start the processes of new nodes."""
        cluster = self._cluster
        there = {node for process in cluster.processes for node in process.nodes}
        for node in members.nodes:
            if node not in there:
                self._workload.attach(cluster.add_process((node,)))

    def note(self) -> None:
        """Do what supervisors and the metadata store would do after a view was installed.

        Store the view and stop the nodes that left. If the primary has left, begin a new term.
        """
        cluster, view = self._cluster, _installed(self._cluster)
        if view is not None and view.number > cluster.stored_view.number:
            cluster.stored_view = view
        sequencers = cluster.stored_view.sequencers
        if cluster.term.term and cluster.term.primary not in sequencers:
            primary = self._sequencers.choose_primary(sequencers)
            cluster.begin_term(primary, Epoch(cluster.next_epoch()))
        if view is None:
            return
        if view.number < cluster.stored_view.number:
            return
        if view.members_version < cluster.members.version:
            return  # a primary that knows older members may still have a node join
        kept = set(cluster.view.nodes) - set(cluster.view.engines)
        known = {*view.nodes, *cluster.members.nodes, *kept}
        for process in list(cluster.processes):
            if not known.intersection(process.nodes):
                process.crash(power=False)
                cluster.remove_process(process)

    def check(self, violations: list[Violation]) -> None:
        """Check that the cluster gets the wanted nodes in time."""
        cluster = self._cluster
        world = cluster.world
        end_s = world.now_s + _MEMBERS_WITHIN_S
        while (missing := self._missing()) is not None:
            if world.now_s >= end_s:
                violations.append(Violation("members", missing))
                return
            world.run_for(0.1)
            self.note()
        self.note()

    def _missing(self) -> str | None:
        cluster = self._cluster
        if (view := _installed(cluster)) is None:
            return "there is no primary"
        wanted, found = cluster.members, view.members
        if wanted.version != found.version or set(wanted.nodes) != set(found.nodes):
            return f"{wanted} are wanted, there are {found}"
        if not wanted.finalized.keys() <= found.finalized.keys():  # lost nodes finalize others
            return f"{wanted.finalized} are to be finalized, and {found.finalized} are"
        if wanted.rebalance != found.rebalance:
            return f"rebalancing {wanted.rebalance} is wanted, {found.rebalance} is complete"
        return None


class _SequencerJoins(RandomEvents):
    """Sequencers join, leave and replace others; at least three stay."""

    def __init__(self, joins: Joins, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        super().__init__(cluster, injected, "joins of sequencers")
        self._joins = joins
        self._change = self._chance.random() < _SEQUENCERS_SHARE

    def begin(self, mean_s: float) -> None:
        """Begin, if sequencers change in this run."""
        if self._change:
            self._begin(mean_s)

    def choose_primary(self, sequencers: tuple[NodeId, ...]) -> NodeId:
        """Choose the primary of the next term."""
        return self._chance.choice(sequencers)

    def _happen(self) -> None:
        self._joins.want("sequencers", self._changed(self._cluster.members))

    def _changed(self, members: Members) -> Members:
        nodes, chance = members.sequencers, self._chance
        kind = chance.choice(("add", "remove", "replace"))
        gone = chance.choice(nodes) if kind != "add" and len(nodes) >= 3 else None
        if kind == "remove" and len(nodes) == 3:
            return members
        if kind != "remove" and len(nodes) < _SEQUENCERS_MAX:
            nodes = (*nodes, self._joins.unused("sequencer"))
        return _with(members, sequencers=tuple(node for node in nodes if node != gone))


class _FinalizedShards(RandomEvents):
    """Shards get no further records, after some cuts or at once; or shards are rebalanced."""

    def __init__(self, joins: Joins, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        super().__init__(cluster, injected, "finalized shards")
        self._joins = joins
        self._finalizes = self._chance.random() < _FINALIZE_SHARE

    def begin(self, mean_s: float) -> None:
        """Begin, if shards are finalized in this run."""
        if self._finalizes:
            self._begin(mean_s)

    def _happen(self) -> None:
        members, view = self._cluster.members, self._cluster.stored_view
        if self._chance.random() < _REBALANCE_SHARE:
            rebalanced = _with(members, rebalance=members.rebalance + 1)
            self._joins.want("rebalance", rebalanced)
            return
        live = [shard for shard in view.shards if shard not in members.finalized]
        if live and len(view.shards) < _SHARDS_MAX:
            shard = self._chance.choice(live)
            cuts = self._chance.choice(_GRACES)
            self._joins.want("finalize", _with(members, finalized={shard: cuts}))


def _installed(cluster: SimulatedCluster) -> View | None:
    """Return the view of the committed entries of the primary; None: there is no primary."""
    if (sequencer := leading(cluster)) is None:
        return None
    return sequencer.metalog.committed.view or cluster.stored_view


def _with(
    members: Members,
    *,
    engines: tuple[NodeId, ...] | None = None,
    storage_nodes: tuple[NodeId, ...] | None = None,
    index_shards: tuple[tuple[NodeId, ...], ...] | None = None,
    sequencers: tuple[NodeId, ...] | None = None,
    finalized: dict[ShardId, int] | None = None,
    rebalance: int = 0,
) -> Members:
    return Members(
        engines or members.engines,
        storage_nodes or members.storage_nodes,
        index_shards or members.index_shards,
        members.aggregators,
        members.version + 1,
        sequencers or members.sequencers,
        members.zones,
        {**members.finalized, **(finalized or {})},
        rebalance or members.rebalance,
    )
