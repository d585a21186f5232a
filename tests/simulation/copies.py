"""Whether the primary orders records on the word of replicas that still have them.

Looked at while a run goes on, between two ticks: what was proposed since the last one rests on
reports of storage nodes of which the primary had heard this incarnation by then, so each of them
has stored it in this incarnation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from indilog.ids import Epoch, LocalId, NodeId, ShardId
from indilog.testing.simulation import SimulatedCluster
from ordering.primary import Primary
from ordering.sequencer import Sequencer
from storage import StorageNode
from tests.simulation.history import Violation


class _Seen(NamedTuple):
    """What was so at the last tick."""

    primary: Sequencer
    proposed: Mapping[ShardId, LocalId]
    lives: Mapping[NodeId, Epoch]
    """The incarnations of storage nodes that the primary had heard and that were up."""


class CopiesNotes:
    """Appends what contradicts the promise of enough copies to `violations`."""

    def __init__(self, violations: list[Violation]) -> None:
        self._violations = violations
        self._seen: _Seen | None = None

    def note(self, cluster: SimulatedCluster) -> None:
        """Look at what was proposed since the last time."""
        before, now = self._seen, self._now(cluster)
        self._seen = now
        if before is None or now is None or before.primary is not now.primary:
            return
        for shard, placement in cluster.view.shards.items():
            proposed = now.proposed.get(shard, 0)
            if proposed == before.proposed.get(shard, 0):
                continue
            for node in placement.replicas:
                if (life := now.lives.get(node)) is None or before.lives.get(node) != life:
                    continue
                stored = _storage(cluster, node)._shards[shard].stored
                if stored < proposed:
                    what = f"{node} has {stored} records of shard {shard}, {proposed} were ordered"
                    self._violations.append(Violation("copies", what))

    def _now(self, cluster: SimulatedCluster) -> _Seen | None:
        view = cluster.view
        shell = cluster.process_of(view.primary).shell
        if shell is None:
            return None
        sequencer = shell.roles[view.primary]
        assert isinstance(sequencer, Sequencer)
        part = sequencer._part
        if not isinstance(part, Primary):
            return None
        lives: dict[NodeId, Epoch] = {}
        for node in view.storage_nodes:
            storage = cluster.process_of(node).shell
            if storage is not None and sequencer._incarnations._newest[node] == storage._epoch:
                lives[node] = storage._epoch
        return _Seen(sequencer, dict(part._cut), lives)


def _storage(cluster: SimulatedCluster, node: NodeId) -> StorageNode:
    shell = cluster.process_of(node).shell
    assert shell is not None, "it is up"
    role = shell.roles[node]
    assert isinstance(role, StorageNode)
    return role
