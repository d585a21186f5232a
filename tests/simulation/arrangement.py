"""What a seed draws before a run: the shape of the cluster, hostile limits, nodes per process.

PITFALLS A2 asks for hostile limits: "suffix of 2 cuts, frames of 64 bytes".
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Final

from indilog.base.ids import NodeId
from indilog.config import KIB, ClusterConfig, Config, NodeConfig, node_config
from indilog.config.node import flat_settings
from indilog.kernel.view import View
from indilog.runtime.cluster.processes import spread
from indilog.testing.simulation import arrangement_of
from indilog.testing.simulation.cluster import view_for
from tests.simulation.lost_storage import with_spare

_CACHES: Final[tuple[dict[str, int], ...]] = (
    {
        "suffix_cuts_max": 0, "popularity_entries_max": 0, "tag_cache_seqnums_max": 0,
        "tag_cache_seqnums_per_tag_max": 0, "record_cache_bytes_max": 0, "aux_cache_bytes_max": 0,
    },
    {
        "suffix_cuts_max": 1, "popularity_entries_max": 1, "tag_cache_seqnums_max": 1,
        "tag_cache_seqnums_per_tag_max": 1, "record_cache_bytes_max": 0,
    },
    {
        "suffix_cuts_max": 2, "popularity_entries_max": 3, "tag_cache_seqnums_max": 12,
        "tag_cache_seqnums_per_tag_max": 5, "record_cache_bytes_max": 2000,
        "aux_cache_bytes_max": 500,
    },
    {},
)  # fmt: skip

_LIMITS: Final[dict[str, tuple[int, ...]]] = {
    "frame_records_max": (1, 2, 3, 256),
    "frame_bytes": (64, 1000, 384 * KIB),
    "frames_in_flight_max": (1, 2, 8),
    "metalog_entries_in_flight_max": (1, 2, 8, 512),
    "ordering_frame_entries": (1, 3, 64),
    "index_positions_ahead_max": (1, 2, 8, 65_536),
    "page_bytes_max": (64, 2000, 56 * KIB),
    "append_pending_max": (4, 65_536, 65_536),
    "append_pending_bytes_max": (4000, 256 * KIB * KIB),
    "index_snapshot_entries_min": (5, 40, 1_000_000),
    "index_memory_bytes_max": (20 * KIB, 512 * KIB * KIB),
    "checkpoint_frames": (2, 10, 32_768, 40),
    "metalog_entries_kept": (1, 20, 16_384, 4),
}
"""Limits, ordinary and hostile; a hostile run draws each on its own. A run that is not hostile has
the last of each. Its checkpoints come after few frames, too, so that metalog bases move."""


_QUORUM_SHARE: Final = 0.2
"""The share of runs in which records are acknowledged before all replicas have them."""
_SHARED_SHARE: Final = 0.25
"""The share of runs in which a process has a node of each kind, as with `indilog up --nodes`."""
_SEGMENT_BYTES: Final = (1 * KIB, 4 * KIB, 4 * KIB, 12 * KIB, 68 * KIB)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A cluster to be simulated."""

    config: Config
    view: View
    processes: tuple[tuple[NodeId, ...], ...]
    segment_bytes: int
    """Bytes of a segment file: small segments fill, so that old ones are rewritten."""

    def describe(self) -> str:
        """Return a description of one line."""
        cluster, node = self.config.cluster, self.config.node
        shape = (
            f"{cluster.sequencers} sequencers, {cluster.storage_nodes} storage nodes, "
            f"R {cluster.replicas}, ack quorum {cluster.quorum_of(cluster.replicas)}, "
            f"{cluster.lost_storage_policy}, "
            f"{cluster.index_shards}x{cluster.index_replicas} index nodes, "
            f"{cluster.aggregators} aggregators ({cluster.aggregation}), {cluster.engines} engines "
            f"({node.caches.local_index} local index) in {len(self.processes)} processes"
        )
        limits = {name: flat_settings(node)[name] for name in (*_CACHES[0], *_LIMITS)}
        return f"{shape}; segments of {self.segment_bytes} bytes; {limits}"


def draw(
    chance: random.Random, quorums: random.Random, spares: random.Random, shared: random.Random
) -> Arrangement:
    """Draw a cluster. `quorums` draws whether two of three replicas suffice, `spares` whether
    storage nodes are replaced, `shared` whether a few processes have a node of each kind.
    """
    storage_nodes = chance.choice((1, 2, 2, 3))
    replicas, ack_quorum = min(storage_nodes, chance.choice((1, 2, 2))), 0
    if quorums.random() < _QUORUM_SHARE:
        storage_nodes, replicas, ack_quorum = 3, 3, 2
    cluster = ClusterConfig(
        sequencers=chance.choice((1, 3)),
        storage_nodes=storage_nodes,
        replicas=replicas,
        ack_quorum=ack_quorum,
        index_shards=chance.choice((1, 2, 3, 4)),
        index_replicas=chance.choice((1, 1, 2)),
        aggregators=chance.choice((1, 1, 2)),
        aggregation=chance.choice(("aggregator", "master-slave", "both")),
        engines=chance.choice((1, 2, 2)),
        record_bytes_max=2 * KIB,
        batch_bytes_max=67 * KIB,
        aux_bytes_max=4 * KIB,
        message_bytes_max=256 * KIB,
    )
    config = with_spare(Config(cluster=cluster, node=_node(chance)), spares)
    view = view_for(config)
    segment_bytes = chance.choice(_SEGMENT_BYTES)
    processes = _processes(view, chance)
    if shared.random() < _SHARED_SHARE:
        count = max(cluster.sequencers, cluster.storage_nodes, 2)
        processes = tuple(spread(view.nodes, count, {}).running(view.nodes).values())
    return Arrangement(config, view, processes, segment_bytes)


def _node(chance: random.Random) -> NodeConfig:
    settings: dict[str, Any] = dict(chance.choice(_CACHES))
    hostile = chance.random()
    for name, values in _LIMITS.items():
        settings[name] = chance.choice(values) if chance.random() < hostile else values[-1]
    return node_config(
        segment_bytes=68 * KIB,
        result_bytes_max=56 * KIB,
        sync_inline_s_max=chance.choice((1e9, 1e9, 0.0)),
        resend_s=0.05,
        resend_s_max=0.4,
        lookup_timeout_s=0.1,
        read_timeout_s=1.0,
        append_timeout_s=chance.choice((1.0, 3.0)),
        index_snapshot_retry_s=0.2,
        repair_retry_s_max=1.0,
        retention_interval_s=chance.choice((0.05, 0.3)),
        local_index=chance.choice(("default", "default", "extended", "none")),
        hedged_reads_share_max=chance.choice((0.0, 0.05, 1.0)),
        reclaim_rest_s_min=chance.choice((0.01, 0.1, 1.0)),
        rewrite_dead_share_min=chance.choice((0.001, 0.1, 0.5)),
        rewrite_bytes_per_s=chance.choice((100 * KIB, 1024 * KIB * KIB)),
        index_forget_entries_min=min(settings["index_snapshot_entries_min"] // 5, 1024),
        **settings,
    )


def _processes(view: View, chance: random.Random) -> tuple[tuple[NodeId, ...], ...]:
    manner = chance.choice(("embedded", "apart", "apart", "mixed"))
    if manner != "mixed":
        return arrangement_of(view, embedded=manner == "embedded")
    count = chance.randint(2, 4)
    groups: list[list[NodeId]] = [[] for _ in range(count)]
    for node in view.nodes:
        chance.choice(groups).append(node)
    return tuple(tuple(group) for group in groups if group)
