"""Nodes that join and leave a simulated cluster while it works (decision 0049).

This module has its own random source: without joins a seed gives the same run as before.
"""

from __future__ import annotations

import itertools
from typing import Final

from indilog.base.ids import Epoch, NodeId
from indilog.kernel.view import Members, View
from indilog.testing.simulation import SimulatedCluster
from tests.simulation.elections import leading
from tests.simulation.history import Violation
from tests.simulation.workload import Workload

_SHARE: Final = 0.4
"""The share of runs with joins, of those with several sequencers."""
_MEAN_S: Final = (0.1, 0.4, 1.0)
"""Simulated seconds between two changes, on average."""
_ENGINES_MAX: Final = 4
_STORAGE_MAX: Final = 5
_SEQUENCERS_MAX: Final = 5
_SEQUENCERS_SHARE: Final = 0.6
"""The share of runs with joins in which sequencers join and leave, too."""
_INDEX_SHARDS_MAX: Final = 5
_MEMBERS_WITHIN_S: Final = 60.0


class Joins:
    """Changes the nodes of the cluster until `end`; counts the changes in `injected`."""

    def __init__(
        self, cluster: SimulatedCluster, workload: Workload, injected: dict[str, int]
    ) -> None:
        self._cluster = cluster
        self._workload = workload
        self._injected = injected
        self._chance = cluster.world.chance("joins")
        self._names = set(cluster.view.nodes)
        self._left: list[NodeId] = []
        """Compute nodes that have left, and may come back with an empty disk."""
        self._over = len(cluster.view.sequencers) == 1 or self._chance.random() >= _SHARE
        self._mean_s = self._chance.choice(_MEAN_S)
        self._sequencers_chance = cluster.world.chance("joins of sequencers")
        self._sequencers_change = self._sequencers_chance.random() < _SEQUENCERS_SHARE
        self._next()
        self._next_sequencers()

    def end(self) -> None:
        """Change nothing more."""
        self._over = True

    def _next(self) -> None:
        if not self._over:
            self._cluster.world.after(self._chance.expovariate(1 / self._mean_s), self._change)

    def _change(self) -> None:
        if self._over:
            return
        change = self._chance.choice((self._engines, self._storage, self._index_shards))
        self._want(change.__name__[1:], change(self._cluster.members))
        self._next()

    def _want(self, name: str, members: Members) -> None:
        if members != self._cluster.members:
            self._injected[f"join {name}"] = self._injected.get(f"join {name}", 0) + 1
            self._start(members)
            self._cluster.want_members(members)

    def _next_sequencers(self) -> None:
        if self._sequencers_change and not self._over:
            pause_s = self._sequencers_chance.expovariate(1 / self._mean_s)
            self._cluster.world.after(pause_s, self._change_sequencers)

    def _change_sequencers(self) -> None:
        if not self._over:
            self._want("sequencers", self._sequencers(self._cluster.members))
            self._next_sequencers()

    def _sequencers(self, members: Members) -> Members:
        """Add, remove or replace a sequencer; at least three stay."""
        nodes, chance = members.sequencers, self._sequencers_chance
        kind = chance.choice(("add", "remove", "replace"))
        gone = chance.choice(nodes) if kind != "add" and len(nodes) >= 3 else None
        if kind == "remove" and len(nodes) == 3:
            return members
        if kind != "remove" and len(nodes) < _SEQUENCERS_MAX:
            nodes = (*nodes, self._unused("sequencer"))
        return _with(members, sequencers=tuple(node for node in nodes if node != gone))

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
            added = self._unused("engine")
        return _with(members, engines=(*engines, added))

    def _storage(self, members: Members) -> Members:
        nodes = members.storage_nodes
        if len(nodes) > self._cluster.config.cluster.replicas and self._chance.random() < 0.5:
            gone = self._chance.choice(nodes)
            return _with(members, storage_nodes=tuple(n for n in nodes if n != gone))
        if len(nodes) >= _STORAGE_MAX:
            return members
        added = self._unused("storage")
        return _with(members, storage_nodes=(*nodes, added))

    def _index_shards(self, members: Members) -> Members:
        count = self._chance.randint(1, _INDEX_SHARDS_MAX)
        replicas = range(len(members.index_shards[0]))
        index_shards = tuple(
            tuple(NodeId(f"index-{shard}-{replica}") for replica in replicas)
            for shard in range(count)
        )
        return _with(members, index_shards=index_shards)

    def _unused(self, role: str) -> NodeId:
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
        """Keep the installed view as the metadata store would, and stop the nodes that left. If the
        primary has left, another sequencer takes a term.
        """
        cluster, view = self._cluster, _installed(self._cluster)
        if view is not None and view.number > cluster.stored_view.number:
            cluster.stored_view = view
        sequencers = cluster.stored_view.sequencers
        if cluster.term.term and cluster.term.primary not in sequencers:
            primary = self._sequencers_chance.choice(sequencers)
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
        """Check that the cluster gets the nodes that it is to have."""
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
        return None


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
) -> Members:
    return Members(
        engines or members.engines,
        storage_nodes or members.storage_nodes,
        index_shards or members.index_shards,
        members.aggregators,
        members.version + 1,
        sequencers or members.sequencers,
    )
