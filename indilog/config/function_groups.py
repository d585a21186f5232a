"""Groups of settings of functions: gateway, workers, recorded invocations, processes.

`NodeConfig` has one instance of each group.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Final, Literal

from indilog.base.errors import ConfigError
from indilog.base.loopback import is_loopback
from indilog.config.group import KIB, MIB, SettingsGroup, names_listed

_WORKER_MEMORY_BYTES_MIN: Final = 128 * MIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewayConfig(SettingsGroup):
    """The HTTP server of a compute node."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset({"port", "grpc_port", "calls_forwarded_max"})

    host: str = "127.0.0.1"
    """Address on which the gateway listens. An address other than loopback needs `tls_cert`,
    `tls_key` and `auth`.
    """
    port: int = 8080
    """Port for HTTP (0 to 65535); 0 takes a free one. With `--processes`, `engine-n` listens on
    `port` + n.
    """
    grpc_port: int | None = None
    """Port for gRPC (0 to 65535); 0 takes a free one, which `/status` shows; None: no gRPC. With
    `--processes`, `engine-n` listens on `grpc_port` + n.
    """
    host_names: str = ""
    """Host names, separated by commas, that requests may use besides loopback addresses,
    `localhost` and `host`. A request with any other host name is answered with 421.
    """
    auth: bool = True
    """Whether requests need the token of the data directory. Public functions never need it."""
    tls_cert: Path | None = None
    """File with the gateway's certificate and its issuers' certificates (PEM); None: plain HTTP."""
    tls_key: Path | None = None
    """File with the private key of the certificate (PEM, without a password)."""
    browser_sessions_max: int = 64
    """Browsers that are signed in at a compute node; one more ends the oldest session."""
    browser_session_s_max: float = 43_200.0
    """Seconds for which a browser stays signed in."""
    sign_in_code_s: float = 120.0
    """Seconds within which the link of `indilog open` can be used, once."""
    connections_max: int = 4_096
    """Open connections of a gateway; further ones are answered with 503. If the limit of open files
    minus `descriptors_reserve` is lower, that limit applies.
    """
    descriptors_reserve: int = 256
    """Open files that are reserved for the journal, workers and links; at most half of the
    process's limit.
    """
    calls_forwarded_max: int = 256
    """Calls that a gateway has forwarded to other compute nodes and that are not answered; each
    uses one connection. Further calls wait for a slot of the gateway's own node. 0: no call is
    forwarded.
    """
    gateway_bytes_max: int = 256 * MIB
    """Bytes of bodies, pages and link messages held in a gateway. A request that would exceed this
    limit is answered with 503. Requests below 16 KiB do not count.
    """
    headers_bytes_max: int = 64 * KIB
    """Bytes of the request line and headers."""
    headers_timeout_s: float = 10.0
    """Seconds for the request line and headers to arrive."""
    body_timeout_s: float = 60.0
    """Seconds for the body of a request, or one WebSocket message, to arrive."""
    answer_timeout_s: float = 60.0
    """Seconds for a client to read an answer, or one event, while the socket's buffer is full."""
    apps_answer_s: float = 10.0
    """Seconds within which each application must answer a question to all of them (`GET /runs`);
    the response names the applications that do not.
    """
    ready_append_s: float = 2.0
    """Seconds within which an append must be acknowledged; otherwise `/readyz` says not ready."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `host_names`, in lower case."""
        return names_listed(self.host_names.lower())

    def __post_init__(self) -> None:
        """Refuse to serve other machines in plain text or without a token."""
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is 0 (any) to 65535, not {self.port}.")
        if self.grpc_port is not None and not 0 <= self.grpc_port <= 65535:
            raise ConfigError(f"grpc_port is 0 (any) to 65535, not {self.grpc_port}.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; give both, or neither.")
        if not is_loopback(self.host) and (self.tls_cert is None or not self.auth):
            lacks = "without a token" if not self.auth else "without TLS"
            raise ConfigError(
                f"The gateway does not listen on {self.host} {lacks}, because others could reach "
                "it there. Give --tls-cert and --tls-key and omit --no-auth, or listen on "
                "127.0.0.1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionsConfig(SettingsGroup):
    """Workers and the calls that they run."""

    may_be_zero: ClassVar[frozenset[str]] = frozenset(
        {"workers", "workers_max", "versions_kept_max", "worker_memory_bytes_max"}
    )
    ordered: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "worker_silent_s",
            "worker_stop_s",
        ),  # otherwise a worker is killed before it can count as silent
        ("import_retry_s_min", "import_retry_s_max"),
    )
    shares: ClassVar[tuple[str, ...]] = ("app_slots_share_max", "app_pending_share_max")

    workers: int = 2
    """Worker processes of a compute node; 0: it runs no functions. If `workers_max` is set, this is
    the smallest number.
    """
    workers_max: int = 0
    """Most worker processes of a compute node; 0: always `workers`. While calls wait for a slot,
    further processes are started.
    """
    workers_idle_s: float = 30.0
    """Seconds during which half of the slots of the other workers must have been enough before a
    worker process beyond `workers` is stopped. The process finishes its calls first.
    """
    worker_environment: str = ""
    """Names, separated by commas, of environment variables that are passed to functions, besides
    `PATH`, `HOME` and others that a process needs. Use it for secrets.
    """
    worker_memory_bytes_max: int = 0
    """Bytes of memory that one worker process may allocate for all its applications, besides the
    stacks of its threads; 0: no limit. The smallest limit is 128 MiB, of which the worker needs
    half. Code that needs more fails with `MemoryError`. If more than half of what imports have left
    stays in use, the worker is replaced. Without a limit, a worker may use up the machine's memory.
    """
    worker_calls_max: int = 256
    """Calls that one worker process runs concurrently; further calls wait."""
    calls_pending_max: int = 10_000
    """Calls that wait or run on a compute node; a further call is refused."""
    app_slots_share_max: float = 0.9
    """Share of the slots that one application may use while several are deployed. It is a share of
    `workers` x `worker_calls_max` minus the slots that other applications use. One slot is always
    allowed.
    """
    app_pending_share_max: float = 0.5
    """Share of the pending calls that one application may have while several are deployed. It is a
    share of `calls_pending_max` minus the waiting and running calls of other applications.
    """
    call_timeout_s: float = 60.0
    """Seconds that a call may run in a worker; a function may declare its own limit."""
    call_wait_s_max: float = 60.0
    """Seconds that a call waits for a worker before it is refused."""
    result_bytes_max: int = 4 * MIB
    """Bytes of the result of a call; a call with a larger result fails."""
    worker_silent_s: float = 1.0
    """A worker whose event loop is blocked for this many seconds gets no new calls until it
    answers. Calls that it has not begun go to another worker. If it is still blocked after
    `call_timeout_s`, or the longest limit of its calls, it is killed. At most `worker_stop_s`.
    """
    worker_stop_s: float = 5.0
    """Seconds after a call's timeout until a worker is killed if it is silent, or replaced if the
    call's thread still runs. Also the time in which a worker must check the arguments of a recorded
    call.
    """
    worker_output_lines_per_s_max: int = 1_000
    """Lines per second that a worker's output adds to the platform's log. Further lines are
    dropped and counted in one line.
    """
    worker_output_bytes_per_s_max: int = 1 * MIB
    """Bytes per second of a worker's output that go to the platform's log."""
    import_timeout_s: float = 30.0
    """Seconds for an import of deployed code; then the importing process is killed."""
    import_retry_s_min: float = 1.0
    """Seconds before the first retry to load an application that did not load; doubled for each
    retry.
    """
    import_retry_s_max: float = 60.0
    """Longest pause between two retries to load an application, in seconds."""
    versions_kept_max: int = 3
    """Earlier deployments of an application whose code workers keep for the open runs that began
    with it; 0: none. Runs of older deployments continue with the newest code.
    """

    @property
    def most_workers(self) -> int:
        """The largest number of worker processes."""
        return self.workers_max or self.workers

    def __post_init__(self) -> None:
        """Check that the numbers of workers fit together."""
        super().__post_init__()
        if 0 < self.worker_memory_bytes_max < _WORKER_MEMORY_BYTES_MIN:
            raise ConfigError(
                f"worker_memory_bytes_max is 0, or at least {_WORKER_MEMORY_BYTES_MIN:,}, not "
                f"{self.worker_memory_bytes_max:,}."
            )
        if self.workers_max and not 1 <= self.workers <= self.workers_max:
            raise ConfigError(
                f"workers is 1 to workers_max ({self.workers_max}), not {self.workers}; leave out "
                "workers_max if the number of workers is fixed."
            )

    @property
    def environment_passed(self) -> tuple[str, ...]:
        """The names in `worker_environment`."""
        return names_listed(self.worker_environment)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvocationsConfig(SettingsGroup):
    """Recorded invocations: asynchronous calls, idempotency keys, schedules."""

    ordered: ClassVar[tuple[tuple[str, str], ...]] = (
        ("invocation_retry_s_min", "invocation_retry_s_max"),
    )
    shares: ClassVar[tuple[str, ...]] = ("app_kept_share_max", "app_invocations_open_share_max")

    invocations_open_max: int = 10_000
    """Recorded invocations that wait or run on the platform; a further one is refused."""
    app_invocations_open_share_max: float = 0.5
    """Share of the open invocations that one application may have (at most 1). It is a share of
    `invocations_open_max` minus the open invocations of other applications.
    """
    invocations_running_max: int = 512
    """Recorded invocations of one application that a compute node runs concurrently. Further due
    invocations wait, or run on other nodes.
    """
    invocation_delay_s_max: float = 31_536_000.0
    """Longest delay of an asynchronous invocation, in seconds (default: a year)."""
    invocation_lease_s: float = 5.0
    """Seconds without a heartbeat after which other compute nodes take over the invocations of a
    compute node.
    """
    invocation_tries_max: int = 5
    """An invocation fails after its worker or compute node has crashed this many times."""
    invocation_retry_s_min: float = 1.0
    """Seconds before an invocation is retried after the first crash of its worker or compute node;
    doubled for each retry.
    """
    invocation_retry_s_max: float = 60.0
    """Longest pause between two retries of an invocation, in seconds."""
    schedule_catch_up_max: int = 100
    """Largest number of missed due times that run for a schedule that catches up with all of
    them.
    """
    schedule_late_s_max: float = 60.0
    """Seconds after which a due time counts as missed, for a schedule that does not catch up.
    """
    results_kept_s: float = 86_400.0
    """Seconds for which outcomes of asynchronous invocations and idempotency keys are kept. The
    same on all nodes.
    """
    results_kept_max: int = 10_000
    """Outcomes without an idempotency key that are kept. The same on all nodes."""
    keys_kept_max: int = 100_000
    """Outcomes with an idempotency key that are kept. The same on all nodes."""
    results_kept_bytes_max: int = 64 * MIB
    """Bytes of arguments and results of the kept outcomes with an idempotency key, and as many
    bytes of those without. The same on all nodes.
    """
    app_kept_share_max: float = 0.5
    """Share of `results_kept_max`, `keys_kept_max`, `results_kept_bytes_max`, `held_calls_max` and
    `held_bytes_max` that one application may use (at most 1). The same on all nodes.
    """
    held_calls_max: int = 100_000
    """Calls whose outcomes are held for workflow runs; further calls wait."""
    held_bytes_max: int = 64 * MIB
    """Bytes of arguments and results of the calls whose outcomes are held."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetadataConfig(SettingsGroup):
    """The metadata store: a file that the supervisor serves, or ZooKeeper."""

    metadata_store: Literal["embedded", "zookeeper"] = "embedded"
    """Store of views, addresses and epochs: `embedded` is a file of the data directory. It cannot
    be changed later.
    """
    metadata_keys_max: int = 10_000
    """Keys in the store; a further key is refused."""
    metadata_value_bytes_max: int = 1 * MIB
    """Bytes of one value."""
    metadata_watchers_max: int = 1_000
    """Watches, and requests of other processes, that may wait in the store."""
    metadata_timeout_s: float = 10.0
    """Seconds without an answer after which a request to the store fails as retryable."""
    metadata_session_s: float = 10.0
    """Seconds without a heartbeat after which a session in the store ends and its keys vanish."""
    metadata_sessions_max: int = 1_000
    """Sessions in the embedded store; a further session is refused."""
    zookeeper_hosts: str = "127.0.0.1:2181"
    """Servers of the ZooKeeper ensemble: `host:port`, separated by commas."""
    zookeeper_root: str = "/indilog"
    """Path in ZooKeeper below which all keys are; each platform needs its own path."""
    zookeeper_auth: Literal["none", "digest", "sasl"] = "none"
    """How to authenticate: not at all, with ZooKeeper's `digest` scheme, or with SASL (DIGEST-MD5).
    With `digest` and `sasl`, only `zookeeper_user` may access the keys that the platform creates.
    """
    zookeeper_user: str = "indilog"
    """User name for `zookeeper_auth`."""
    zookeeper_password_file: Path | None = None
    """File with the password for `zookeeper_auth`; the environment variable
    `INDILOG_ZOOKEEPER_PASSWORD` takes precedence.
    """
    zookeeper_tls: bool = False
    """Whether to use TLS. The host names in the servers' certificates must be those of
    `zookeeper_hosts`.
    """
    zookeeper_tls_ca: Path | None = None
    """PEM file of the authority that signed the servers' certificates; None: the system's
    authorities.
    """
    zookeeper_tls_cert: Path | None = None
    """PEM file of this client's certificate, if the servers require one."""
    zookeeper_tls_key: Path | None = None
    """PEM file of the private key of `zookeeper_tls_cert`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessesConfig(SettingsGroup):
    """Processes of a platform, their supervisor, and the log file of `./start`."""

    ordered: ClassVar[tuple[tuple[str, str], ...]] = (("restart_s_min", "restart_s_max"),)

    restart_s_min: float = 0.1
    """Seconds before a dead process or function worker is restarted. The time doubles each time the
    process ends soon after its start.
    """
    restart_s_max: float = 5.0
    """Longest pause before a restart, in seconds."""
    hang_s: float = 5.0
    """Seconds without a heartbeat of its event loop after which a process is killed and restarted.
    """
    start_timeout_s: float = 600.0
    """Seconds in which a starting process must be ready; otherwise it is killed and restarted.
    Reading a large journal without a usable checkpoint takes minutes.
    """
    stop_timeout_s: float = 10.0
    """Seconds for a process to stop when asked to; then it is killed."""
    log_bytes_max: int = 16 * MIB
    """Bytes of `platform.log` after which `./start` rotates the file; checked every 10 s. `indilog
    up` logs to its standard error, so this limit does not apply.
    """
    log_files_kept: int = 4
    """Number of rotated log files that are kept."""
