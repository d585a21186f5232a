"""Configuration: what a cluster agrees on, what each node has of its own, and where the values come
from.

Values come from, later wins: the defaults here, a TOML file (tables `[cluster]` and `[node]`), the
environment (`INDILOG_CLUSTER_REPLICAS=2`, `INDILOG_NODE_DATA_DIR=...`), the command line. Every
limit of the platform is here, with its unit last in its name.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from indilog.base.errors import ConfigError
from indilog.base.log import BATCH_RECORDS_LIMIT, RECORD_TAGS_LIMIT
from indilog.base.loopback import is_loopback
from indilog.kernel.records import tags_bytes_max

KIB: Final = 1024
MIB: Final = 1024 * 1024
_BESIDE_PAYLOAD_BYTES: Final = 128 * KIB
"""What a message has beside its payload, at most: envelope, seqnums, lengths."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What all nodes must agree on."""

    sequencers: int = 1
    storage_nodes: int = 1
    replicas: int = 1
    index_shards: int = 2
    index_replicas: int = 1
    aggregators: int = 1
    """Nodes that merge the answers of the index shards; none are needed with `master-slave`."""
    aggregation: Literal["aggregator", "master-slave", "both"] = "aggregator"
    """Who merges the answers of the index shards to one lookup: an aggregator, one of the index
    nodes asked (the master), or both kinds in turn. Chosen per lookup, round robin.
    """
    engines: int = 1
    durability: Literal["fsync", "memory"] = "fsync"
    """`fsync`: what is acknowledged survives the end of the process and of the machine. `memory`:
    it survives the end of the process only; for benchmarks that compare with papers, and for tests.
    After a loss of power, what was written since the last pause may be lost in any part.
    """
    record_bytes_max: int = 1 * MIB
    record_tags_max: int = 64
    batch_bytes_max: int = 4 * MIB
    batch_records_max: int = 10_000
    """Records appended together by one `append_batch`."""
    aux_bytes_max: int = 1 * MIB
    message_bytes_max: int = 16 * MIB
    """A frame between nodes; a larger one is refused by its sender. What has a limit of its own and
    travels in one piece (a page, a record with aux data, a result) must fit into it.
    """

    def __post_init__(self) -> None:
        """Check each field, then the fields against each other."""
        _check_positive(self)
        if self.replicas > self.storage_nodes:
            raise ConfigError(
                f"replicas is {self.replicas} but storage_nodes is {self.storage_nodes}; "
                "give at least as many storage nodes as replicas."
            )
        if self.aggregators == 0 and self.aggregation != "master-slave":
            raise ConfigError(
                f"aggregation is {self.aggregation!r} but aggregators is 0; give at least one, or "
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What each node has of its own."""

    data_dir: Path = Path(".indilog")
    host: str = "127.0.0.1"
    """Address that the gateway listens on. Other than loopback needs `tls_cert`, `tls_key` and
    `auth`.
    """
    port: int = 8080
    """HTTP; 0 takes a free one. With `--processes`, `engine-n` listens on `port` + n."""
    host_names: str = ""
    """Names, separated by commas, under which callers reach the gateway, besides loopback
    addresses, `localhost` and `host`. A request under any other name is answered with 421.
    """
    auth: bool = True
    """Whether requests need the token of the data directory; public functions never do."""
    tls_cert: Path | None = None
    """File with the gateway's certificate and those of its issuers (PEM); None: plain HTTP."""
    tls_key: Path | None = None
    """File with the certificate's private key (PEM, without a password)."""
    browser_sessions_max: int = 64
    """Browsers signed in at a compute node at once; a further one ends the oldest session."""
    browser_session_s_max: float = 43_200.0
    """A browser is signed in for this long."""
    sign_in_code_s: float = 120.0
    """The link of `indilog open` can be used once, within this time."""
    connections_max: int = 4_096
    """Connections open at once at a gateway; further ones are answered with 503. Fewer where the
    limit of open files, less `descriptors_reserve`, is lower.
    """
    descriptors_reserve: int = 256
    """Open files that connections leave to the journal, workers and links; at most half of all."""
    gateway_bytes_max: int = 256 * MIB
    """Bytes of bodies, pages and messages of links that wait in a gateway; a request that needs
    more is answered with 503. Requests below 16 KiB are not counted.
    """
    headers_bytes_max: int = 64 * KIB
    """Bytes of a request's line and headers."""
    headers_timeout_s: float = 10.0
    """Time for a request's line and headers to arrive."""
    body_timeout_s: float = 60.0
    """Time for a request's body, or one WebSocket message, to arrive."""
    answer_timeout_s: float = 60.0
    """Time for a client to read what a socket does not hold of an answer, or of one event."""
    segment_bytes: int = 32 * MIB
    """Size of a journal segment; the newest and the one prepared behind it are never given back."""
    checkpoint_frames: int = 32_768
    """Frames of the journal after which a checkpoint is written, if that is not large itself; a
    start replays about so many. A segment that is full makes one due, too.
    """
    sync_inline_s_max: float = 0.0015
    """Syncs slower than this (moving average) run in a thread, so that the loop goes on."""
    journal_idle_s: float = 0.2
    """Seconds without a write after which a journal notes how far it was synced, so that damage of
    its last frames is told from a torn tail. Costs two syncs each time.
    """

    metalog_entries_kept: int = 16_384
    """Newest metalog entries that a sequencer keeps one by one, at least; older ones go when every
    storage node has them in two checkpoints. Who is farther behind begins anew from a summary.
    """
    ordering_frame_entries: int = 64
    """Metalog entries that a storage node journals together; a restart fetches what is missing."""
    frame_records_max: int = 256
    """Records that an open batch collects before it is closed."""
    frame_bytes: int = 384 * KIB
    """Bytes after which an open batch is closed."""
    frames_in_flight_max: int = 8
    """Batches sent and not yet ordered before further appends wait in the open batch."""
    append_pending_max: int = 65_536
    """Appends waiting to be ordered before a further one is refused."""
    append_pending_bytes_max: int = 256 * MIB
    append_timeout_s: float = 30.0
    """After this an append's outcome is unknown."""
    resend_s: float = 0.25
    """After so many seconds without an answer a message that needs one is sent again."""
    resend_s_max: float = 2.0
    """The pause before it is sent yet again doubles up to so many seconds; any progress ends that.
    """

    metalog_entries_in_flight_max: int = 512
    """Metalog entries in one message, sent to a backup without an answer, and proposed without
    being committed.
    """
    index_positions_ahead_max: int = 65_536
    """Metalog positions of which an index node or engine holds data while it misses an earlier one.
    """
    index_ahead_bytes_max: int = 64 * MIB
    """Bytes of such data; beyond it the farthest positions are dropped, and asked for again."""
    index_memory_bytes_max: int = 512 * MIB
    """Bytes of index that an index node keeps in memory; what is asked for seldom is then in its
    snapshot only, and read from there.
    """
    lost_ranges_max: int = 1024
    """Ranges of seqnums whose tags are lost that an index node or engine keeps; beyond it those
    nearest to each other become one, and records between them count as lost where tags are read.
    """
    index_snapshot_entries_min: int = 1_000_000
    """An index node writes a snapshot when this many entries are new, and half as many as the
    snapshot before has; earlier when memory is short.
    """
    index_forget_entries_min: int = 1024
    """An index node asks storage which records it may forget when this many entries are new, and an
    eighth as many as it had; only if there were trims.
    """
    index_snapshot_retry_s: float = 10.0
    """After this a snapshot that could not be written is tried again."""

    local_index: Literal["none", "default", "extended"] = "default"
    """`none`: every lookup goes to the index tier. `extended`: the index tier is also asked whether
    a tag that is appended here is new, so that all its records are known (thesis 5.7).
    """
    suffix_cuts_max: int = 100_000
    suffix_bytes_max: int = 8 * MIB
    popularity_entries_max: int = 10_000
    popularity_bytes_max: int = 4 * MIB
    tag_cache_seqnums_max: int = 1_000_000
    tag_cache_seqnums_per_tag_max: int = 10_000
    tag_cache_bytes_max: int = 64 * MIB
    answer_cache_entries_max: int = 10_000
    """Answers of the index tier that can never change, such as the first record of a tag."""
    answer_cache_bytes_max: int = 8 * MIB
    new_tags_pending_max: int = 16_384
    """Tags about which the index tier is asked at once whether they are new; more are not asked
    about.
    """
    refill_after_misses: int = 2
    """Lookups of a tag that miss before its newest records are fetched from the index tier, ..."""
    refill_seqnums_max: int = 256
    """... so many of them, ..."""
    refill_candidates_max: int = 10_000
    """... of the tags that missed lately, ..."""
    refills_pending_max: int = 64
    """... at most so many tags at once ..."""
    refills_per_s_max: int = 500
    """... and in a second; 0: none."""
    record_cache_bytes_max: int = 64 * MIB
    aux_cache_bytes_max: int = 16 * MIB

    lookup_timeout_s: float = 1.0
    """After this a lookup or read is started again elsewhere."""
    read_timeout_s: float = 10.0
    """After this a read fails as retryable."""
    hedged_reads_share_max: float = 0.05
    """At most this share of the reads of records is asked of a second replica too, when it takes
    longer than 99 of 100 did lately; 0: none.
    """
    hedge_delay_s_min: float = 0.001
    """A read is not asked of a second replica before this."""
    lookups_pending_max: int = 100_000
    trims_pending_max: int = 10_000
    """Trims under way at once, at the primary and at an engine."""
    reclaim_bytes_per_s: int = 64 * MIB
    """Bytes of batches that a storage node reads to find those that are trimmed, after a trim."""
    reclaim_rest_s_min: float = 1.0
    """The rest behind such a pass, at least; with those in it, ten times as long as it worked."""
    rewrite_dead_share_min: float = 0.5
    """A segment file of the journal of which this share is dead is rewritten without it."""
    rewrite_share_max: float = 0.25
    """What rewriting may write, as a share of what appends write ..."""
    rewrite_bytes_per_s: int = 8 * MIB
    """... and this beside it, so that it goes on when nobody appends."""
    sweep_tags_per_turn: int = 1_000
    """Tags from which an index node takes the records of a trimmed log in one turn."""
    log_floors_max: int = 100_000
    """Trimmed logs whose floors an engine remembers, and as many trimmed tags; what concerns others
    is asked for in the index tier and storage."""
    retention_interval_s: float = 60.0
    """How often the platform trims logs by their retention policies."""
    retention_bytes_per_s: int = 32 * MIB
    """Bytes of records that it reads for policies that bound the size, at most."""
    retention_logs_max: int = 10_000
    """Logs whose retention policies are enforced; those of further ones are not, with a warning."""
    page_bytes_max: int = 4 * MIB
    """Bytes of records, tags and aux data in one answer to `read_range`, and of metalog entries in
    one message.
    """

    disk_reserve_bytes: int = 16 * MIB
    """When the disk has no room for a further segment and so much is left in the last one (or a
    quarter of a segment, if that is less), the node takes no more records.
    """
    disk_retry_s: float = 1.0
    """How often a node whose disk is full looks for room."""
    scrub_interval_s: float = 86_400.0
    """How often a storage node reads and verifies all that it has."""
    scrub_bytes_per_s: int = 4 * MIB
    """How fast it does."""
    repair_bytes_per_s: int = 32 * MIB
    """What a storage node that lost records fetches from other replicas."""
    repair_retry_s_max: float = 60.0
    """What no other replica has is asked for again after a pause that doubles up to this."""

    workers: int = 2
    worker_environment: str = ""
    """Names, separated by commas, of environment variables that functions see besides `PATH`,
    `HOME` and others that a process needs; for secrets that they use.
    """
    worker_calls_max: int = 256
    """Invocations at once in one worker process; more wait."""
    calls_pending_max: int = 10_000
    """Invocations waiting or running on a compute node before a further one is refused."""
    app_slots_share_max: float = 0.9
    """While several applications are deployed, one may run calls in this share of the slots
    (`workers` x `worker_calls_max`) that no other application uses, and in one at least.
    """
    app_pending_share_max: float = 0.5
    """While several are deployed, the calls of one that wait or run are at most this share of
    `calls_pending_max`, without the calls of others.
    """
    call_timeout_s: float = 60.0
    """Time for a call to run, from when a worker has it; a function may have its own."""
    call_wait_s_max: float = 60.0
    """Time that a call waits for a worker before it is refused."""
    worker_silent_s: float = 1.0
    """A worker whose event loop does not turn for this long gets no new calls until it does, and
    calls that it has not begun go to another one.
    """
    worker_stop_s: float = 5.0
    """A worker that is silent for this long after a call's time is over is ended; one with a thread
    that runs for this long after that is replaced. Also how long a worker is looked for that checks
    the arguments of a call that is to be recorded.
    """
    worker_output_lines_per_s_max: int = 1_000
    """Lines that a worker prints or logs which go to the platform's log, per second. Lines above
    this are dropped, and one line says how many.
    """
    worker_output_bytes_per_s_max: int = 1 * MIB
    """Bytes of such lines per second."""
    import_timeout_s: float = 30.0
    """Importing deployed code may take this long; then the process that imports it is ended."""
    import_retry_s_min: float = 1.0
    """An application that does not load any more is tried again after this, doubled each time,
    ..."""
    import_retry_s_max: float = 60.0
    """... up to this."""
    result_bytes_max: int = 4 * MIB
    invocations_open_max: int = 10_000
    """Asynchronous invocations that wait or run on the platform before a further one is refused."""
    app_invocations_open_share_max: float = 0.5
    """The share of `invocations_open_max` that one application may use, without the invocations of
    other applications.
    """
    invocation_delay_s_max: float = 31_536_000.0
    """The longest delay of an asynchronous invocation."""
    invocations_running_max: int = 512
    """Those of one application that a compute node runs at once before it leaves what is due to
    others, or for later.
    """
    invocation_lease_s: float = 5.0
    """When nothing was heard of a compute node for so long, others run what it ran."""
    invocation_tries_max: int = 5
    """An invocation whose worker or compute node was lost so often is given up, ..."""
    invocation_retry_s_min: float = 1.0
    """... and before it is run again there is a pause of this, doubled each time, ..."""
    invocation_retry_s_max: float = 60.0
    """... up to this."""
    schedule_catch_up_max: int = 100
    """Missed due times of a schedule that are run when it catches up with all of them."""
    clock_gap_s_max: float = 30 * 86_400.0
    """How many seconds may pass, by the wall clock, between the last record and a start of the
    platform. A wall clock further ahead is taken for wrong: then no time is counted.
    """
    schedule_late_s_max: float = 60.0
    """A due time that is longer ago than this is missed, for a schedule that does not catch up."""
    results_kept_s: float = 86_400.0
    """What came of asynchronous invocations, and idempotency keys, are kept for this long, ..."""
    results_kept_max: int = 10_000
    """... at most so many of those without a key, ..."""
    keys_kept_max: int = 100_000
    """... so many of those with one, ..."""
    results_kept_bytes_max: int = 64 * MIB
    """... and so many bytes of arguments and results of either. The same on all nodes."""
    app_kept_share_max: float = 0.5
    """The share of `results_kept_max`, `keys_kept_max` and `results_kept_bytes_max` that one
    application may use. The same on all nodes.
    """
    transport: Literal["stream", "zmq"] = "stream"
    """What carries messages between processes: raw streams, or pyzmq. All nodes use the same."""
    send_queue_bytes_max: int = 64 * MIB
    """Bytes waiting for one peer; beyond it messages are dropped (and counted), as a network may.
    """
    send_queue_s_max: float = 2.0
    """A peer that takes nothing for this long is away: what waits for it is dropped."""

    metadata_keys_max: int = 10_000
    metadata_value_bytes_max: int = 1 * MIB
    metadata_watchers_max: int = 1_000
    """Watches, and requests of other processes, that wait in the metadata store at once."""
    metadata_timeout_s: float = 10.0
    """After this without an answer a request to the metadata store fails as retryable."""
    restart_s_min: float = 0.1
    """A process that died is started again after this, doubled each time it dies at once, ..."""
    restart_s_max: float = 5.0
    """... up to this."""
    log_bytes_max: int = 16 * MIB
    """`./start` begins a `platform.log` larger than this anew; it looks every 10 s. The log of
    `indilog up` is its standard error, which its reader bounds.
    """
    log_files_kept: int = 4
    """Older ones that are kept."""
    ready_append_s: float = 2.0
    """`/readyz` says not ready when an append is not acknowledged within this time."""
    hang_s: float = 5.0
    """A process whose event loop sends no heartbeat for so long is killed and started again."""
    start_timeout_s: float = 600.0
    """A process that is not ready for so long after its start is killed and started again. Reading
    a large journal without a usable checkpoint takes minutes.
    """
    stop_timeout_s: float = 10.0
    """After this a process that was told to stop is killed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `host_names`, in lower case."""
        return _listed(self.host_names.lower())

    @property
    def environment_passed(self) -> tuple[str, ...]:
        """The names in `worker_environment`."""
        return _listed(self.worker_environment)

    def __post_init__(self) -> None:
        """Check each field, then the fields against each other."""
        _check_positive(self)
        _check_reachable_safely(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is 0 (any) to 65535, not {self.port}.")
        if self.segment_bytes < 64 * KIB:
            raise ConfigError(f"segment_bytes is at least 65,536, not {self.segment_bytes:,}.")
        for lower, upper in _ORDERED:
            low, high = getattr(self, lower), getattr(self, upper)
            if low > high > 0:
                raise ConfigError(f"{lower} ({low:,}) must not exceed {upper} ({high:,}).")
        for share in _SHARES:
            if getattr(self, share) > 1:
                raise ConfigError(f"{share} is a share, at most 1.")
        if not 2 <= self.refill_seqnums_max <= 10_000:
            raise ConfigError(
                f"refill_seqnums_max is between 2 and 10,000, not {self.refill_seqnums_max}."
            )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _check_reachable_safely(node: NodeConfig) -> None:
    """Refuse to serve other machines in plain text or without a token."""
    if (node.tls_cert is None) != (node.tls_key is None):
        raise ConfigError("tls_cert and tls_key belong together; give both, or neither.")
    if not is_loopback(node.host) and (node.tls_cert is None or not node.auth):
        lacks = "without a token" if not node.auth else "without TLS"
        raise ConfigError(
            f"The gateway does not listen on {node.host} {lacks}, because others could reach it "
            "there; give --tls-cert and --tls-key and leave out --no-auth, or listen on 127.0.0.1."
        )


_ORDERED: Final = (
    ("tag_cache_seqnums_per_tag_max", "tag_cache_seqnums_max"),
    ("resend_s", "append_timeout_s"),  # else nothing is said again before it is given up
    ("resend_s", "resend_s_max"),
    ("hedge_delay_s_min", "lookup_timeout_s"),  # else a read starts again before it is hedged
    ("lookup_timeout_s", "read_timeout_s"),  # else it fails before it starts again
    ("worker_silent_s", "worker_stop_s"),  # else one that was not asked in time is taken for silent
    ("import_retry_s_min", "import_retry_s_max"),
    ("invocation_retry_s_min", "invocation_retry_s_max"),
    ("restart_s_min", "restart_s_max"),
)
"""Settings of a node of which the first must not exceed the second, unless that is 0: none."""

_LINK_LIMITS: Final = (
    ("record_tags_max", RECORD_TAGS_LIMIT),
    ("batch_records_max", BATCH_RECORDS_LIMIT),
)

_SHARES: Final = (
    "hedged_reads_share_max",
    "app_invocations_open_share_max",
    "app_kept_share_max",
    "app_slots_share_max",
    "app_pending_share_max",
    "rewrite_dead_share_min",
)

_ZERO_IS_FINE: Final = frozenset(
    {
        "aggregators",
        "port",
        "workers",
        "suffix_cuts_max",
        "suffix_bytes_max",
        "popularity_entries_max",
        "popularity_bytes_max",
        "tag_cache_bytes_max",
        "answer_cache_entries_max",
        "answer_cache_bytes_max",
        "refills_per_s_max",
        "tag_cache_seqnums_max",
        "tag_cache_seqnums_per_tag_max",
        "record_cache_bytes_max",
        "aux_cache_bytes_max",
        "sync_inline_s_max",
        "hedged_reads_share_max",
        "rewrite_share_max",
    }
)


def _check_positive(config: ClusterConfig | NodeConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float) and value < (0 if field.name in _ZERO_IS_FINE else 1e-9):
            raise ConfigError(f"{field.name} must be greater than 0, not {value}.")


_PartT = TypeVar("_PartT", ClusterConfig, NodeConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Both parts."""

    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    node: NodeConfig = dataclasses.field(default_factory=NodeConfig)

    def __post_init__(self) -> None:
        """Check the parts against each other."""
        if self.node.segment_bytes < self.cluster.batch_bytes_max + KIB:
            raise ConfigError(
                f"segment_bytes ({self.node.segment_bytes:,}) must be larger than "
                f"batch_bytes_max ({self.cluster.batch_bytes_max:,}) by 1 KiB."
            )
        message = self.cluster.message_bytes_max
        if self.node.send_queue_bytes_max < message:
            raise ConfigError(
                f"send_queue_bytes_max ({self.node.send_queue_bytes_max:,}) must have room for a "
                f"message of message_bytes_max ({message:,})."
            )
        for payload_bytes, what in _payloads(self.cluster, self.node):
            if message < payload_bytes + _BESIDE_PAYLOAD_BYTES:
                raise ConfigError(
                    f"message_bytes_max ({message:,}) must be at least "
                    f"{payload_bytes + _BESIDE_PAYLOAD_BYTES:,}, to carry {what}."
                )


def _payloads(cluster: ClusterConfig, node: NodeConfig) -> tuple[tuple[int, str], ...]:
    """Return what travels in one message: how large it may be, and what it is."""
    record = cluster.record_bytes_max + tags_bytes_max(cluster.record_tags_max)
    record += cluster.aux_bytes_max
    page, result = node.page_bytes_max, node.result_bytes_max
    record_told = (
        f"a record of record_bytes_max ({cluster.record_bytes_max:,}) with aux data of "
        f"aux_bytes_max ({cluster.aux_bytes_max:,})"
    )
    page_told = f"a page of page_bytes_max ({page:,}) and the record or batch that exceeds it"
    return (
        (record, record_told),
        (page + max(record, cluster.batch_bytes_max), page_told),
        (result, f"a result of result_bytes_max ({result:,})"),
    )


def config_from(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Put a configuration together.

    Args:
        file: a TOML file with tables `[cluster]` and `[node]`.
        environment: variables; those named `INDILOG_CLUSTER_*` and `INDILOG_NODE_*` count.
        overrides: `{"cluster": {...}, "node": {...}}`, as from a command line; None values are left
            out.
        defaults: what holds instead of the defaults here, in the same form.

    Raises:
        ConfigError: an unknown name, a wrong type, a contradiction; one sentence that names the
            field.
    """
    merged: dict[str, dict[str, Any]] = {"cluster": {}, "node": {}}
    environment_values = _from_environment(environment or {})
    for source in (defaults or {}, _from_file(file), environment_values, overrides or {}):
        for part, values in source.items():
            _check_table(part, values)
            merged[part].update({k: v for k, v in values.items() if v is not None})
    return Config(
        cluster=_converted(ClusterConfig, merged["cluster"], "cluster"),
        node=_converted(NodeConfig, merged["node"], "node"),
    )


def _check_table(part: str, values: object) -> None:
    if part in ("cluster", "node"):
        if not isinstance(values, Mapping):
            raise ConfigError(f"[{part}] must be a table of settings.")
    elif isinstance(values, Mapping):
        raise ConfigError(f"Unknown table [{part}]; there are [cluster] and [node].")
    else:
        raise ConfigError(
            f"The setting {part!r} stands outside the tables [cluster] and [node]; put it into one."
        )


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {file}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The configuration file {file} cannot be read: {error}.") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"cluster": {}, "node": {}}
    for part, kind in (("cluster", ClusterConfig), ("node", NodeConfig)):
        prefix = f"INDILOG_{part.upper()}_"
        for name, value in environment.items():
            if name.startswith(prefix):
                field = name.removeprefix(prefix).lower()
                if field not in _names_of(kind):
                    raise ConfigError(
                        f"The environment variable {name} names no setting of [{part}]"
                        f"{_did_you_mean(field, kind, prefix)}"
                    )
                found[part][field] = value
    return found


def _names_of(kind: type[ClusterConfig | NodeConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _did_you_mean(name: str, kind: type[ClusterConfig | NodeConfig], prefix: str = "") -> str:
    near = get_close_matches(name, _names_of(kind), n=1)
    if not near:
        return "; docs/CONFIGURATION.md lists them."
    return f"; did you mean {prefix}{near[0].upper() if prefix else near[0]}?"


def _converted(kind: type[_PartT], values: dict[str, Any], part: str) -> _PartT:
    if unknown := sorted(set(values) - set(_names_of(kind))):
        raise ConfigError(
            f"Unknown setting {unknown[0]!r} in [{part}]{_did_you_mean(unknown[0], kind)}"
        )
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=_path_from)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{part}] does not fit: {error}.") from error


def _path_from(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"Expected {kind.__name__}, got {type(value).__name__}")
