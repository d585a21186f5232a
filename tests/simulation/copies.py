"""Checks that the primary orders a record only while enough replicas still have it.

The check runs between two ticks. It looks at storage nodes whose incarnation the primary knew at
both ticks. The primary has ordered records in between on reports of these incarnations, so their
disks must have the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from indilog.base.ids import Epoch, LocalId, NodeId, ShardId
from indilog.testing.simulation import SimulatedCluster
from indilog_ordering.primary import Primary
from indilog_storage import StorageNode
from tests.simulation.history import Violation
from tests.simulation.sequencer_faults import leading

_Range: TypeAlias = tuple[LocalId, LocalId]


class _Seen(NamedTuple):
    """The state at the last tick."""

    primary: Primary
    proposed: Mapping[ShardId, LocalId]
    counting: Mapping[ShardId, tuple[NodeId, ...]]
    """The replicas whose reports count."""
    incarnations: Mapping[NodeId, Epoch]
    """The incarnations of running storage nodes that the primary knew."""


class CopiesNotes:
    """Appends to `violations` each cut that fewer replicas than the ack quorum have stored.

    Args:
        violations: gets the violations.
        lost: the localids [first, end) of batches that the run has damaged on all replicas. If
            their writer is gone, too, the records around them are ordered without them.
    """

    def __init__(
        self, violations: list[Violation], lost: Mapping[ShardId, Sequence[_Range]]
    ) -> None:
        self._violations = violations
        self._lost_everywhere = lost
        self._seen: _Seen | None = None
        self._lost: dict[tuple[NodeId, Epoch], dict[ShardId, list[_Range]]] = {}
        """The holes that each incarnation of a storage node found at its start in records that no
        entry has ordered. Holes that it repaired since are left out.
        """

    def note(self, cluster: SimulatedCluster) -> None:
        """Check what was proposed since the last tick."""
        before, now = self._seen, self._now(cluster)
        self._seen = now
        self._note_losses(cluster)
        if before is None or now is None or before.primary is not now.primary:
            return
        for shard, counting in now.counting.items():
            proposed = now.proposed.get(shard, 0)
            if proposed == before.proposed.get(shard, 0) or counting != before.counting.get(shard):
                continue
            short: list[Violation] = []
            for node in counting:
                incarnation = now.incarnations.get(node)
                if incarnation is None or before.incarnations.get(node) != incarnation:
                    continue
                kept = _storage(cluster, node)._shards.get(shard)
                stored = kept.stored if kept is not None else 0
                if stored < proposed:
                    what = f"{node} has {stored} records of shard {shard}, {proposed} were ordered"
                    short.append(Violation("copies", what))
                    continue
                first = before.proposed.get(shard, 0)
                lost = [
                    (start, end)
                    for start, end in self._lost.get((node, incarnation), {}).get(shard, [])
                    if start < proposed
                    and end > first
                    and not self._is_everywhere(shard, start, end)
                ]
                if lost:
                    what = f"{node} lost {lost} of shard {shard}, {first} to {proposed} are ordered"
                    short.append(Violation("copies", what))
            quorum = cluster.config.cluster.quorum_of(len(counting))
            if len(short) > len(counting) - quorum:
                self._violations += short

    def _is_everywhere(self, shard: ShardId, start: LocalId, end: LocalId) -> bool:
        """Whether all records [start, end) of a shard are damaged on all replicas."""
        batches = self._lost_everywhere.get(shard, ())
        return all(any(a <= at < b for a, b in batches) for at in range(start, end))

    def _note_losses(self, cluster: SimulatedCluster) -> None:
        """Note the holes in records that no entry has ordered, of each new incarnation."""
        for node in cluster.storage_nodes:
            if (shell := cluster.process_of(node).shell) is None:
                continue
            storage = _storage(cluster, node)
            holes = {
                shard.id: [
                    (start, end) for start, end in shard.holes.items()
                    if start >= shard.ordered
                ]
                for shard in storage._shards.values()
            }  # fmt: skip
            known = self._lost.setdefault((node, shell._epoch), holes)
            for shard, ranges in known.items():
                known[shard] = [one for one in ranges if one in holes.get(shard, ())]

    def _now(self, cluster: SimulatedCluster) -> _Seen | None:
        sequencer = leading(cluster)
        if sequencer is None or (primary := sequencer._primary) is None:
            return None
        incarnations: dict[NodeId, Epoch] = {}
        for node in cluster.storage_nodes:
            storage = cluster.process_of(node).shell
            if storage is not None and sequencer._incarnations._newest.get(node) == storage._epoch:
                incarnations[node] = storage._epoch
        placement = primary._placement
        counting = {shard: placement.counting(shard) for shard in placement.shards}
        return _Seen(primary, dict(primary._cut), counting, incarnations)


def _storage(cluster: SimulatedCluster, node: NodeId) -> StorageNode:
    shell = cluster.process_of(node).shell
    assert shell is not None, "it is up"
    role = shell.roles[node]
    assert isinstance(role, StorageNode)
    return role
