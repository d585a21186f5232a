"""Storage nodes that are lost in a simulation: one process after another stops for longer than
`storage_lost_s`, so that other nodes replace it, or shards are finalized (decisions 0048, 0070).
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Final

from indilog.config import Config
from indilog.config.cluster import LOST_STORAGE_POLICIES
from indilog.testing.simulation import SimulatedCluster, SimulatedProcess
from indilog_storage import StorageNode
from tests.simulation.history import Violation
from tests.simulation.random_events import RandomEvents
from tests.simulation.sequencer_faults import leading

_SHARE: Final = 0.2
"""The share of runs in which storage nodes are lost."""
_MEAN_S: Final = (0.1, 0.4)
"""Simulated seconds between two losses, on average."""
_LOST_S: Final = (0.05, 0.2)
_REPLACED_S: Final = (0.1, 0.4)
"""When a storage node counts as lost, and when it is replaced although nothing waits for it."""
_COMPLETE_WITHIN_S: Final = 60.0


def with_spare(config: Config, chance: random.Random) -> Config:
    """Return a configuration in which storage nodes are lost, under one of the policies, in some
    of the runs.
    """
    if chance.random() >= _SHARE:
        return config
    cluster = dataclasses.replace(
        config.cluster, sequencers=3, storage_nodes=config.cluster.replicas + chance.choice((1, 2))
    )
    masks = 0 < cluster.ack_quorum < cluster.replicas
    policies = LOST_STORAGE_POLICIES if masks else LOST_STORAGE_POLICIES[:2]
    ordering = dataclasses.replace(
        config.node.ordering,
        storage_lost_s=chance.choice(_LOST_S),
        storage_replaced_s=chance.choice(_REPLACED_S),
    )
    cluster = dataclasses.replace(cluster, lost_storage_policy=chance.choice(policies))
    return Config(cluster=cluster, node=dataclasses.replace(config.node, ordering=ordering))


def loses_storage(config: Config) -> bool:
    """Whether storage nodes are lost in runs of this configuration."""
    return config.node.ordering.storage_lost_s <= max(_LOST_S)


class LostStorage(RandomEvents):
    """Stops processes of storage nodes, and starts them again later."""

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        super().__init__(cluster, injected, "lost storage nodes")
        storage = set(cluster.view.storage_nodes)
        self._processes = [p for p in cluster.processes if storage.issuperset(p.nodes)]
        if loses_storage(cluster.config) and self._processes:
            self._begin(self._chance.choice(_MEAN_S))

    def _happen(self) -> None:
        chance, world = self._chance, self._cluster.world
        process: SimulatedProcess = chance.choice(self._processes)
        process.crash(power=chance.random() < 0.5)
        self._count("lost_storage")
        world.after(chance.choice((0.1, 0.3, 1.0)) * chance.uniform(0.5, 1.5), process.start)


class Redundancy:
    """Checks that every shard has its replicas again, and that all of them are complete."""

    def __init__(self, cluster: SimulatedCluster, violations: list[Violation]) -> None:
        self._cluster = cluster
        self._violations = violations

    def check(self) -> None:
        """Run the cluster until no shard has to be moved; then let the primary move none."""
        world = self._cluster.world
        end_s = world.now_s + _COMPLETE_WITHIN_S
        while (missing := self._missing()) is not None:
            if world.now_s >= end_s:
                self._violations.append(Violation("redundancy", missing))
                return
            world.run_for(0.1)
        sequencer = leading(self._cluster)
        assert sequencer is not None, "the last look found its placement"
        assert sequencer._primary is not None, "it leads"
        replacements = sequencer._primary._replacements
        replacements._lost_s = replacements._replaced_s = math.inf

    def _missing(self) -> str | None:
        cluster = self._cluster
        sequencer = leading(cluster)
        if sequencer is None or (primary := sequencer._primary) is None:
            return "there is no primary"
        placement = primary._placement
        for shard in placement.shards:
            replicas = placement.replicas(shard)
            if replicas != placement.counting(shard):
                return f"shard {shard} still has {replicas}"
        for node in cluster.storage_nodes:
            shell = cluster.process_of(node).shell
            if shell is None:
                return f"{node} is not up"
            role = shell.roles[node]
            assert isinstance(role, StorageNode)
            if role._moved.placement.moved != placement.moved:
                return f"{node} has not applied all moves"
            if set(role.shards) != set(placement.shards_of(node)):
                return f"{node} keeps {sorted(role.shards)}"
        return None
