"""Groups of settings of the log: ordering, storage, index, appends and reads.

`NodeConfig` has one instance of each group; the roles read the settings from it.
"""

from __future__ import annotations

import dataclasses
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from indilog.base.errors import ConfigError
from indilog.base.loopback import is_loopback
from indilog.config.group import KIB, MIB, SettingsGroup

_PORT_MAX: Final = 65_535
_COLD_PARAMETERS: Final = frozenset({"endpoint_override", "scheme", "region"})
"""Parameters of `cold_place`, named as those of `pyarrow.fs.S3FileSystem`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JournalConfig(SettingsGroup):
    """The journal of a process, and its disk."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset({"sync_inline_s_max", "rewrite_share_max"})
    shares: ClassVar[tuple[str, ...]] = ("rewrite_dead_share_min",)

    segment_bytes: int = 32 * MIB
    """Bytes of a segment file; at least 64 KiB, and 1 KiB more than `batch_bytes_max`. The newest
    segment, and the empty one prepared after it, are never freed.
    """
    checkpoint_frames: int = 32_768
    """Frames after which a checkpoint is written; a start replays about this many. If a checkpoint
    is large, it is written after more frames. A full segment makes a checkpoint due, too.
    """
    sync_inline_s_max: float = 0.0015
    """While the moving average of the time of a sync is below this many seconds, syncs run on the
    event loop. Otherwise they run in a thread. 0: all run in a thread.
    """
    journal_idle_s: float = 0.2
    """Seconds without a write after which a journal records how far it is synced. The record
    distinguishes damage of the last frames from a torn tail, and costs two syncs.
    """
    rewrite_dead_share_min: float = 0.5
    """A segment file is rewritten without its dead frames when at least this share of the file is
    dead (at most 1).
    """
    rewrite_share_max: float = 0.25
    """Bytes that rewrites may write for each byte that appends write."""
    rewrite_bytes_per_s: int = 8 * MIB
    """Bytes per second that rewrites may write in addition to `rewrite_share_max`, so that they
    continue without appends.
    """
    disk_reserve_bytes: int = 16 * MIB
    """Bytes of the last segment that are kept free when the disk has no room for another segment;
    at most a quarter of a segment. The node takes no more records until there is room. So many
    bytes, and up to 15 MB more, are also reserved on disks with cells (docs/KINDS.md).
    """
    disk_retry_s: float = 1.0
    """Seconds between two checks whether a full disk has room again."""

    def __post_init__(self) -> None:
        """Check each setting, then the smallest segment."""
        super().__post_init__()
        if self.segment_bytes < 64 * KIB:
            raise ConfigError(f"segment_bytes must be at least 65,536, not {self.segment_bytes:,}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessagesConfig(SettingsGroup):
    """Messages between nodes: transport, resending, sizes."""

    ordered: ClassVar[tuple[tuple[str, str], ...]] = (("resend_s", "resend_s_max"),)

    transport: Literal["stream", "zmq"] = "stream"
    """Transport of messages between processes: raw streams or pyzmq. All nodes must use the same.
    """
    node_host: str = ""
    """IP address at which the processes of a platform receive each other's messages over TCP.
    Empty: Unix sockets, for one machine. An address other than loopback needs `node_keys`.
    """
    node_port: int = 7400
    """First TCP port (1 to 65535) for `node_host`. The metadata store uses it; the nodes use the
    next ones. The process of `indilog node` uses this port. With keys, it also uses the next port,
    for calls that other machines forward.
    """
    node_keys: Path | None = None
    """Directory with the keys of this node, made by `indilog cluster init`. With it, TCP
    connections between processes are encrypted, and both sides authenticate themselves.
    """
    resend_s: float = 0.25
    """Seconds without an answer after which a message is resent; at most `append_timeout_s`.
    """
    resend_s_max: float = 2.0
    """Longest pause between two resends, in seconds. The pause doubles with each resend; any
    progress resets it to `resend_s`.
    """
    page_bytes_max: int = 4 * MIB
    """Bytes of records, tags and aux data in one answer to `read_range`, and of metalog entries in
    one message. A page may exceed this by one record or batch.
    """
    send_queue_bytes_max: int = 64 * MIB
    """Bytes that may wait for one peer; at least `message_bytes_max`. Further messages are dropped
    and counted.
    """
    send_queue_s_max: float = 2.0
    """Seconds without progress after which a peer counts as unreachable; its queue is dropped."""

    def __post_init__(self) -> None:
        """Refuse to send messages in plain text to other machines."""
        super().__post_init__()
        if not self.node_host:
            return
        if not _is_address(self.node_host):
            raise ConfigError(
                "node_host must be an IP address at which the other nodes reach this node, not "
                f"{self.node_host!r}."
            )
        if self.node_port > _PORT_MAX:
            raise ConfigError(f"node_port must be 1 to {_PORT_MAX:,}, not {self.node_port:,}.")
        if self.node_keys is None and not is_loopback(self.node_host):
            raise ConfigError(
                f"Nodes do not listen on {self.node_host} without keys, because every machine that "
                "reaches it could read and append. Make keys with `indilog cluster init` and set "
                "node_keys, or listen on 127.0.0.1."
            )
        if self.node_keys is not None and self.transport == "zmq":
            raise ConfigError(
                'transport = "zmq" does not encrypt; set transport to "stream", or omit node_keys.'
            )


def _is_address(host: str) -> bool:
    try:
        return not ip_address(host).is_unspecified
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderingConfig(SettingsGroup):
    """The metalog: sequencers, and the ordering journals of storage nodes."""

    metalog_entries_kept: int = 16_384
    """Smallest number of newest metalog entries that a sequencer keeps individually. When every
    storage node has older entries in two checkpoints, the sequencer replaces them by a base. A node
    that is farther behind starts from the base.
    """
    metalog_entries_in_flight_max: int = 512
    """Largest number of metalog entries in one message, of entries sent to a backup and not
    acknowledged, and of entries proposed and not committed.
    """
    ordering_frame_entries: int = 64
    """Metalog entries that a storage node journals together. After a restart, it fetches the
    entries that were not journaled.
    """
    primary_lost_s: float = 1.0
    """Seconds without a heartbeat after which another sequencer becomes the primary. ZooKeeper may
    require a longer time.
    """
    storage_lost_s: float = 5.0
    """Seconds without a heartbeat after which a storage node counts as lost. If appends wait for
    the lost node, `lost_storage_policy` says what happens. A cluster with one sequencer does not
    replace storage nodes.
    """
    storage_replaced_s: float = 60.0
    """Seconds without a heartbeat after which another storage node restores the copies of a lost
    storage node, even if no append waits for the lost one.
    """
    clock_gap_s_max: float = 30 * 86_400.0
    """Longest time in seconds, by the wall clock, between the last record and a start of the
    platform. If more time has passed, the wall clock counts as wrong, and the log's time continues
    without the gap.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageConfig(SettingsGroup):
    """Background work of storage nodes: scrubs, repairs, and freeing space."""

    scrub_interval_s: float = 86_400.0
    """Seconds between two scrubs; a scrub reads and verifies all data of a storage node."""
    scrub_bytes_per_s: int = 4 * MIB
    """Bytes per second that a scrub reads."""
    repair_bytes_per_s: int = 32 * MIB
    """Bytes per second that a storage node fetches from other replicas to repair lost records."""
    repair_retry_s_max: float = 60.0
    """Longest pause in seconds before records that no replica had are requested again; the pause
    doubles up to it.
    """
    reclaim_bytes_per_s: int = 64 * MIB
    """Bytes of batches per second that a storage node reads, after a trim, to find dead records."""
    reclaim_rest_s_min: float = 1.0
    """Shortest pause in seconds between two passes that search for dead records
    (`reclaim_bytes_per_s`). The pauses of a pass add up to at least ten times its working time.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColdConfig(SettingsGroup):
    """Cold storage of old records (docs/OPERATIONS.md)."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset({"cold_after_s", "cold_local_bytes_max"})

    cold_place: str = ""
    """Cold storage to which old records are moved: an absolute path, or `s3://bucket/prefix` with
    parameters (docs/OPERATIONS.md). Empty: no records are moved.
    """
    cold_after_s: float = 30 * 86_400.0
    """Seconds after its ordering when a record may be moved; 0: age does not matter. Records above
    `cold_local_bytes_max` are moved earlier.
    """
    cold_local_bytes_max: int = 0
    """Bytes of records that a storage node keeps on its own disk. Beyond this, its oldest records
    are moved. 0: size does not matter.
    """
    cold_object_bytes: int = 32 * MIB
    """Bytes of records in one object (at most 512 MiB). Old records of a shard wait until they fill
    an object.
    """
    cold_bytes_per_s: int = 8 * MIB
    """Bytes of records per second that a storage node moves."""
    cold_requests_max: int = 4
    """Concurrent reads of cold storage by a process; further reads wait."""
    cold_cache_bytes_max: int = 64 * MIB
    """Bytes of row groups read from cold storage that a storage node keeps in memory."""
    cold_timeout_s: float = 5.0
    """Seconds after which a read of cold storage fails as retryable; at most `read_timeout_s`. A
    stopping process waits as long for requests in flight.
    """
    cold_retry_s: float = 10.0
    """Seconds after which an operation that cold storage refused is retried."""

    def __post_init__(self) -> None:
        """Check each setting, then that the age or the size decides what is moved."""
        super().__post_init__()
        if self.cold_object_bytes > 512 * MIB:
            raise ConfigError(
                f"cold_object_bytes must be at most 536,870,912, not {self.cold_object_bytes:,}."
            )
        if not self.cold_place:
            return
        check_place("cold_place", self.cold_place)
        if not self.cold_after_s and not self.cold_local_bytes_max:
            raise ConfigError(
                "cold_place is set, but cold_after_s and cold_local_bytes_max are both 0; set one "
                "of them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectLogsConfig(SettingsGroup):
    """Logs of kind object-store (docs/KINDS.md)."""

    object_place: str = ""
    """Object store of new logs of kind object-store: an absolute path that all compute nodes reach,
    or `s3://bucket/prefix` with parameters (docs/OPERATIONS.md). Empty: the directory `objects` of
    the data directory, if all compute nodes run on one machine.
    """
    object_timeout_s: float = 10.0
    """Seconds after which a request to an object store over the network fails. Appends and reads
    repeat it within `append_timeout_s`.
    """
    object_cells_in_flight: int = 2
    """Objects that a compute node writes at once for one log. Appends that arrive meanwhile share
    the next object. More objects cost more requests, and lower the latency under load.
    """
    object_appends_max: int = 65_536
    """Appends to one log that may wait for an object on a compute node; further ones fail as
    retryable.
    """
    object_fill_after_s: float = 1.0
    """Seconds after which an object that another writer has not written is filled with junk, if a
    later object is written.
    """
    object_cache_bytes_max: int = 16 * MIB
    """Bytes of objects of one log that a compute node keeps in memory, and as many of the log's
    index.
    """
    object_logs_max: int = 100
    """Logs of kind object-store, and segments of this kind of switched logs. Each has an index of
    up to 65,536 records in the memory of each compute node that uses it.
    """

    def __post_init__(self) -> None:
        """Check each setting, then the form of the place."""
        super().__post_init__()
        if self.object_place:
            check_place("object_place", self.object_place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellsConfig(SettingsGroup):
    """Logs of kind order-first and owned (docs/KINDS.md)."""

    cell_requests_max: int = 4096
    """Requests for cells that may wait on a storage node; further ones are refused as retryable."""
    cell_request_bytes_max: int = 64 * MIB
    """Bytes of the cells that may wait on a storage node; further ones are refused as retryable."""
    cell_timeout_s: float = 2.0
    """Seconds after which a request to a storage node fails. Appends and reads repeat it within
    `append_timeout_s`. If the owner of a log of kind owned is silent so long, a compute node claims
    the log.
    """
    cells_in_flight: int = 4
    """Cells that a compute node writes at once for one log. Appends that arrive meanwhile share
    the next cell.
    """
    cell_appends_max: int = 65_536
    """Appends to one log that may wait for a cell on a compute node; further ones fail as
    retryable.
    """
    cell_fill_after_s: float = 0.05
    """Seconds after which a cell that another writer has not written is filled with junk, if a
    later cell is written.
    """
    cell_cache_bytes_max: int = 16 * MIB
    """Bytes of cells of one log that a compute node keeps in memory, and as many of the log's
    index.
    """
    cell_replace_after_s: float = 10.0
    """Seconds after which another storage node replaces a storage node that does not answer, in the
    logs of kind order-first and owned.
    """
    order_first_logs_max: int = 100
    """Logs of kind order-first, and segments of this kind of switched logs. Each has an index of up
    to 65,536 records in the memory of each compute node that uses it.
    """
    owned_logs_max: int = 100
    """Logs of kind owned, and segments of this kind of switched logs. Each has an index of up to
    65,536 records in the memory of each compute node that uses it.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrimsConfig(SettingsGroup):
    """Trims and retention policies."""

    trims_pending_max: int = 10_000
    """Trims in flight at the primary, and at a compute node."""
    sweep_tags_per_iteration: int = 1_000
    """Tags that an index node sweeps per iteration of the event loop after a trim of a log.
    """
    log_floors_max: int = 100_000
    """Trimmed logs whose floors a compute node keeps in memory, and as many trimmed tags. For other
    logs and tags it asks the index tier and storage.
    """
    retention_interval_s: float = 60.0
    """Seconds between two rounds in which the platform trims logs by their retention policies."""
    retention_bytes_per_s: int = 32 * MIB
    """Bytes of records per second that a round of `retention_interval_s` reads, for policies that
    bound the size.
    """
    retention_logs_max: int = 10_000
    """Logs whose retention policies are enforced. Further policies are ignored, with a warning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTierConfig(SettingsGroup):
    """Index nodes, and index data that is sent to them and to compute nodes."""

    index_memory_bytes_max: int = 512 * MIB
    """Bytes of its index that an index node keeps in memory. Entries that are read seldom are only
    in its snapshot, and are read from there.
    """
    index_positions_ahead_max: int = 65_536
    """Metalog positions whose data an index node or engine keeps while the data of an earlier
    position is missing.
    """
    index_ahead_bytes_max: int = 64 * MIB
    """Bytes of data that an index node or engine keeps because of `index_positions_ahead_max`.
    Above this, the latest positions are dropped and requested again.
    """
    lost_ranges_max: int = 1024
    """Ranges of seqnums with lost tags that an index node or engine keeps. Above this, the ranges
    closest to each other are merged; reads by tag then treat the records between them as lost.
    """
    index_snapshot_entries_min: int = 1_000_000
    """New entries after which an index node writes a snapshot. There must also be at least half as
    many new entries as the previous snapshot has. If memory is short, the node writes a snapshot
    earlier.
    """
    index_snapshot_retry_s: float = 10.0
    """Seconds after which a failed write of a snapshot is retried."""
    index_forget_entries_min: int = 1024
    """Growth of its index, in entries, after which an index node asks storage which records are
    discarded. The index must also have grown by at least an eighth.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppendsConfig(SettingsGroup):
    """Appends of a compute node."""

    frame_records_max: int = 256
    """Records after which an open batch is closed."""
    frame_bytes: int = 384 * KIB
    """Bytes after which an open batch is closed, at most `batch_bytes_max`.

    A larger append gets its own batch.
    """
    frames_in_flight_max: int = 8
    """Batches sent and not yet ordered. At this number, further appends wait in the open batch."""
    append_pending_max: int = 65_536
    """Appends that wait to be ordered; a further one is refused."""
    append_pending_bytes_max: int = 256 * MIB
    """Bytes of appends, with tags and names, that wait to be ordered; a further append is refused.
    A storage node keeps as many bytes of batches that are not ordered yet in memory.
    """
    append_timeout_s: float = 30.0
    """Seconds after which an append that is not ordered fails with an unknown outcome."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadsConfig(SettingsGroup):
    """Reads and lookups."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset({"hedged_reads_share_max"})
    ordered: ClassVar[tuple[tuple[str, str], ...]] = (
        ("hedge_delay_s_min", "lookup_timeout_s"),  # otherwise a read restarts before it is hedged
        ("lookup_timeout_s", "read_timeout_s"),  # otherwise a read fails before it restarts
    )
    shares: ClassVar[tuple[str, ...]] = ("hedged_reads_share_max",)

    lookup_timeout_s: float = 1.0
    """Seconds after which a lookup or read restarts with other nodes; at most `read_timeout_s`."""
    read_timeout_s: float = 10.0
    """Seconds after which a read fails as retryable."""
    lookups_pending_max: int = 100_000
    """Reads, lookups and waiting readers in flight at one node; further ones are refused, or the
    oldest one is dropped.
    """
    hedged_reads_share_max: float = 0.05
    """Share of record reads that may also be sent to a second replica (at most 1).

    A read is sent there when it takes longer than 99 of the last 100 reads. 0: no read is sent.
    """
    hedge_delay_s_min: float = 0.001
    """Shortest time in seconds before a read is sent to a second replica; at most
    `lookup_timeout_s`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachesConfig(SettingsGroup):
    """Caches of nodes: the local index of a compute node, records, aux data."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset(
        {
            "suffix_cuts_max",
            "suffix_bytes_max",
            "popularity_entries_max",
            "popularity_bytes_max",
            "tag_cache_bytes_max",
            "tag_cache_seqnums_max",
            "tag_cache_seqnums_per_tag_max",
            "answer_cache_entries_max",
            "answer_cache_bytes_max",
            "record_cache_bytes_max",
            "aux_cache_bytes_max",
        }
    )
    ordered: ClassVar[tuple[tuple[str, str], ...]] = (
        ("tag_cache_seqnums_per_tag_max", "tag_cache_seqnums_max"),
    )

    local_index: Literal["none", "default", "extended"] = "default"
    """`none`: every lookup goes to the index tier. `extended`: when a compute node appends a tag
    that it does not know, it asks the index tier whether the tag is new. If so, it knows all
    records of the tag from then on (thesis 5.7).
    """
    suffix_cuts_max: int = 100_000
    """Newest cuts for which a compute node knows the shard of every record."""
    suffix_bytes_max: int = 8 * MIB
    """Bytes of memory for the cuts of `suffix_cuts_max`."""
    popularity_entries_max: int = 10_000
    """Older seqnums whose shards a compute node caches; the least recently used one is evicted
    first.
    """
    popularity_bytes_max: int = 4 * MIB
    """Bytes of memory for the seqnums of `popularity_entries_max`."""
    tag_cache_seqnums_max: int = 1_000_000
    """Seqnums that a compute node caches for all tags together."""
    tag_cache_seqnums_per_tag_max: int = 10_000
    """Newest seqnums that a compute node caches for one tag; at most `tag_cache_seqnums_max`."""
    tag_cache_bytes_max: int = 64 * MIB
    """Bytes of memory for the seqnums of `tag_cache_seqnums_max`."""
    answer_cache_entries_max: int = 10_000
    """Answers of the index tier that can never change, such as the first record of a tag, that a
    compute node keeps.
    """
    answer_cache_bytes_max: int = 8 * MIB
    """Bytes of memory for the answers of `answer_cache_entries_max`."""
    record_cache_bytes_max: int = 64 * MIB
    """Bytes of records that a compute node keeps, appended or read recently; a storage node keeps
    as many bytes of batches.
    """
    aux_cache_bytes_max: int = 16 * MIB
    """Bytes of aux data that a compute node keeps; a storage node keeps as many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefillsConfig(SettingsGroup):
    """Requests by which a compute node fills its local index from the index tier ahead of reads."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset({"refills_per_s_max"})

    new_tags_pending_max: int = 16_384
    """Tags about which a compute node with the extended local index asks the index tier at once. It
    does not ask whether further tags are new.
    """
    refill_after_misses: int = 2
    """Missed lookups of a tag after which a refill fetches the tag's newest records."""
    refill_seqnums_max: int = 256
    """Records fetched per refill (2 to 10,000)."""
    refill_candidates_max: int = 10_000
    """Tags whose misses are counted; the least recently missed one is dropped first."""
    refills_pending_max: int = 64
    """Refills of a compute node in flight at once."""
    refills_per_s_max: int = 500
    """Refills per second of a compute node; 0: none."""

    def __post_init__(self) -> None:
        """Check each setting, then the range of a refill."""
        super().__post_init__()
        if not 2 <= self.refill_seqnums_max <= 10_000:
            raise ConfigError(
                f"refill_seqnums_max must be between 2 and 10,000, not {self.refill_seqnums_max}."
            )


def check_place(setting: str, place: str) -> None:
    """Check the form of the place of an object store, without access to the store.

    Args:
        setting: name of the setting that has the place.
        place: its value.

    Raises:
        ConfigError: the place is neither a path nor an S3 address, or contains credentials.
    """
    if "://" not in place:
        if not Path(place).is_absolute():
            raise ConfigError(f"{setting} must be an absolute path or s3://..., not {place!r}.")
        return
    parts = urlsplit(place)
    if parts.scheme != "s3" or not parts.hostname:
        raise ConfigError(
            f"{setting} must be an absolute path or s3://bucket/prefix, not {place!r}."
        )
    if "@" in parts.netloc:
        raise ConfigError(f"{setting} contains credentials; give them in the environment.")
    unknown = {name for name, _ in parse_qsl(parts.query)} - _COLD_PARAMETERS
    if unknown:
        raise ConfigError(
            f"{setting} has unknown parameters ({', '.join(sorted(unknown))}); known are "
            f"{', '.join(sorted(_COLD_PARAMETERS))}."
        )
