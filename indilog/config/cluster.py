"""`ClusterConfig`: settings that must be equal on all nodes.

They are the table `[cluster]` of a configuration file, and `Config.cluster`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

from indilog.base.errors import ConfigError
from indilog.base.log import BATCH_RECORDS_LIMIT, RECORD_TAGS_LIMIT
from indilog.config.group import KIB, MIB, SettingsGroup

LOST_STORAGE_POLICIES: Final[
    tuple[Literal["finalize_add"], Literal["remove_replace"], Literal["mask"]]
] = ("finalize_add", "remove_replace", "mask")
"""The values of `lost_storage_policy`."""
_LINK_LIMITS: Final = (
    ("record_tags_max", RECORD_TAGS_LIMIT),
    ("batch_records_max", BATCH_RECORDS_LIMIT),
)
"""Settings that are limited by the formats of links and batches, each with its limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig(SettingsGroup):
    """Settings that must be equal on all nodes."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset(
        {"aggregators", "ack_quorum", "shared_processes", "cut_interval_s"}
    )

    sequencers: int = 1
    """Nodes of the ordering tier: one primary, and the others backups. A metalog entry is committed
    when a majority has it, so an odd number is best.
    """
    storage_nodes: int = 1
    """Nodes of the storage tier; at least `replicas`."""
    replicas: int = 1
    """Storage nodes that store each record."""
    ack_quorum: int = 0
    """Replicas that must have stored a record before its append is acknowledged; 0: all of them.
    With a smaller number, appends continue while other replicas are down. When such a replica is up
    again, it fetches the records that it missed.
    """
    lost_storage_policy: Literal["finalize_add", "remove_replace", "mask"] = "finalize_add"
    """What happens to a shard whose appends wait for a lost storage node (Scalog, Table 2).
    `finalize_add`: the shard is finalized, and its compute node continues on a new shard of other
    storage nodes. `remove_replace`: another storage node takes the place of the lost one.
    `mask`: nothing happens; set `ack_quorum`, so that appends do not wait for one storage node.
    With all policies, copies are restored after `storage_replaced_s`.
    """
    cut_interval_s: float = 0.0
    """Shortest time in seconds between two metalog entries that order records; 0: a new one is
    proposed whenever records can be ordered. With a longer interval, the sequencers can serve more
    shards, and each append may take up to that much longer (Scalog 6.3).
    """
    index_shards: int = 2
    """Parts of the index tier. Metalog positions are assigned to them round robin."""
    index_replicas: int = 1
    """Index nodes that keep each index shard."""
    aggregators: int = 1
    """Nodes that merge the answers of the index shards; 0 is allowed with `master-slave`."""
    aggregation: Literal["aggregator", "master-slave", "both"] = "aggregator"
    """The node that merges the answers of the index shards to one lookup. `aggregator`: an
    aggregator. `master-slave`: one of the index nodes that are asked (the master). `both`: lookups
    alternate between an aggregator and a master.
    """
    engines: int = 1
    """Compute nodes."""
    shared_processes: int = 0
    """Processes over which the nodes of a new cluster are spread, so that each process has a node
    of each kind. 0: each node has a process of its own. `indilog up --nodes` sets it.
    """
    durability: Literal["fsync", "memory"] = "fsync"
    """`fsync`: acknowledged records survive a crash of the process and of the machine. `memory`:
    they survive only a crash of the process; use it for benchmarks and tests. A power failure may
    then lose any part of the data written since the last pause.
    """
    record_bytes_max: int = 1 * MIB
    """Bytes of a record's data."""
    record_tags_max: int = 64
    """Tags of a record (1 to 254)."""
    batch_bytes_max: int = 4 * MIB
    """Bytes of a batch of records; at least 64 KiB more than `record_bytes_max`."""
    batch_records_max: int = 10_000
    """Records that one `append_batch` may append (1 to 100,000)."""
    aux_bytes_max: int = 1 * MIB
    """Bytes of the aux data of a record."""
    message_bytes_max: int = 16 * MIB
    """Bytes of one message between nodes; the sender refuses a larger message. It must be at least
    twice `batch_bytes_max`. A page, a record with aux data, and a result must each fit into a
    message.
    """

    def quorum_of(self, replicas: int) -> int:
        """Return how many of `replicas` must have stored a record before it may be ordered."""
        return self.ack_quorum or replicas

    def __post_init__(self) -> None:
        """Check each setting, then the settings against each other."""
        super().__post_init__()
        if self.replicas > self.storage_nodes:
            raise ConfigError(
                f"replicas is {self.replicas} but storage_nodes is {self.storage_nodes}; "
                "set at least as many storage nodes as replicas."
            )
        if self.ack_quorum > self.replicas:
            raise ConfigError(
                f"ack_quorum is {self.ack_quorum} but replicas is {self.replicas}; "
                "set at least as many replicas, or 0 for all of them."
            )
        if self.lost_storage_policy == "mask" and not 0 < self.ack_quorum < self.replicas:
            raise ConfigError(
                f'lost_storage_policy is "mask", but appends wait for all {self.replicas} '
                "replicas; set a smaller ack_quorum, or another policy."
            )
        if self.aggregators == 0 and self.aggregation != "master-slave":
            raise ConfigError(
                f"aggregation is {self.aggregation!r} but aggregators is 0; set at least one, or "
                'set aggregation to "master-slave".'
            )
        for name, limit in _LINK_LIMITS:
            if (value := getattr(self, name)) > limit:
                raise ConfigError(f"{name} is at most {limit:,}, not {value:,}.")
        if self.batch_bytes_max < self.record_bytes_max + 64 * KIB:
            raise ConfigError(
                f"batch_bytes_max ({self.batch_bytes_max:,}) must leave 64 KiB beside "
                f"a record of record_bytes_max ({self.record_bytes_max:,})."
            )
        if self.message_bytes_max < 2 * self.batch_bytes_max:
            raise ConfigError(
                f"message_bytes_max ({self.message_bytes_max:,}) must be at least twice "
                f"batch_bytes_max ({self.batch_bytes_max:,})."
            )
