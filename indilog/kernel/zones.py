"""Zones: labels of nodes that may fail together, such as a rack, a room or a data centre (decision
0054).

Replicas of a shard are placed in different zones where possible. Nodes without a label share the
zone "". `indilog.kernel.view`, and `indilog_ordering` when it moves replicas, choose nodes with
these functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from indilog.base.ids import NodeId

ZONE_BYTES_MAX: Final = 64
"""Bytes of the label of a zone."""


def is_label(zone: str) -> bool:
    """Whether a text can be the label of a zone: 1 to 64 bytes, printable, without comma."""
    return 0 < len(zone.encode()) <= ZONE_BYTES_MAX and zone.isprintable() and "," not in zone


def spread_over_zones(
    candidates: Sequence[NodeId],
    count: int,
    zones: Mapping[NodeId, str],
    beside: Iterable[NodeId] = (),
) -> tuple[NodeId, ...]:
    """Choose up to `count` of `candidates`, in as many zones as possible.

    Each time, the first candidate in a zone with the fewest chosen nodes is chosen. So without
    zones, the first `count` candidates are chosen.

    Args:
        candidates: the best first.
        count: how many to choose.
        zones: the zone of each node that has one.
        beside: nodes that are chosen already.
    """
    used = Counter(zones.get(node, "") for node in beside)
    left = list(candidates)
    chosen: list[NodeId] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda node: used[zones.get(node, "")])
        left.remove(best)
        chosen.append(best)
        used[zones.get(best, "")] += 1
    return tuple(chosen)


def zones_of(nodes: Iterable[NodeId], zones: Mapping[NodeId, str]) -> set[str]:
    """Return the zones of some nodes."""
    return {zones.get(node, "") for node in nodes}


def shares_zones(
    replicas: Collection[NodeId], nodes: Iterable[NodeId], zones: Mapping[NodeId, str]
) -> bool:
    """Whether `replicas` are in fewer zones than the same number of `nodes` could be in."""
    possible = min(len(replicas), len(zones_of(nodes, zones)))
    return len(zones_of(replicas, zones)) < possible
