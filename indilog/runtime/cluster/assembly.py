"""Assembles a platform: chooses the class of each role, and runs all roles in one process
(ARCHITECTURE 5).

Only this module of `indilog.runtime` imports the tiers. Every kind of process creates its roles
with `role_of`. `embedded` runs all roles of the view in this process, for clients and tests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import uvloop

from indilog.base.errors import ConfigError, IndilogError, NotReadyError
from indilog.base.ids import Epoch, NodeId
from indilog.base.release import __version__
from indilog.base.running_platforms import RunningPlatform, registered, running_at
from indilog.config import Config, node_config
from indilog.kernel.view import View, Views
from indilog.link.link import Link, Serve
from indilog.roles.role import ReportsStatus, Role
from indilog.runtime.cluster.cluster_state import EPOCH_KEY, claim_arrangement
from indilog.runtime.cluster.data_directory import directory_usable, journal_lost
from indilog.runtime.cluster.gateway_port import GatewayPort
from indilog.runtime.cluster.layout import view_in
from indilog.runtime.cluster.membership import kind_of
from indilog.runtime.cluster.metadata_opening import opened_metadata
from indilog.runtime.cluster.status_files import PublishedStatus, StatusBoard
from indilog.runtime.cluster.supervisor_link import SupervisorLink
from indilog.runtime.cluster.terms import term_at_start
from indilog.runtime.cluster.token_file import TOKEN_FILE, token_in
from indilog.runtime.descriptors import raise_limit
from indilog.runtime.garbage import collect_rarely
from indilog.runtime.journal.journal import Journal
from indilog.runtime.node import NodeShell
from indilog.runtime.transport.peer_keys import keys_in
from indilog.runtime.transport.stream_address import parse_stream_address
from indilog_compute.engine import Engine
from indilog_compute.local_log import LocalLogs
from indilog_compute.log_kinds import CreatedLog, LogKinds, OtherLogs
from indilog_compute.log_kinds.following_log import FollowingLog
from indilog_compute.retention_service import RetentionService
from indilog_index.aggregator import Aggregator
from indilog_index.index_node import IndexNode
from indilog_ordering.sequencer import Sequencer
from indilog_storage.node import StorageNode

if TYPE_CHECKING:  # imported only when a gateway runs, because other nodes do not need it
    from contextlib import AbstractAsyncContextManager

    from prometheus_client import CollectorRegistry

    from indilog.apps.app import App
    from indilog_compute.gateway import PeerPort, Peers
    from indilog_compute.gateway.app import GatewayApp
    from indilog_compute.gateway.operation import MembershipService
    from indilog_compute.workers.host import FunctionHost

READY_TIMEOUT_S: Final = 60.0
_LOOK_S: Final = 0.02
"""Seconds between two checks whether a primary has fetched the entries that it lacked."""
_LOOKS_SILENT: Final = 250
"""Checks between two warnings that name the awaited nodes: one every 5 s."""

_log = structlog.get_logger(__name__)


_ROLES: Final[Mapping[str, Callable[[NodeId, Views, Config], Role]]] = {
    "sequencer": Sequencer,
    "storage": StorageNode,
    "index": IndexNode,
    "aggregator": Aggregator,
    "engine": Engine,
}


def role_of(node: NodeId, views: Views, config: Config) -> Role:
    """Return a new role for `node`, whose name begins with the kind of its role.

    The view need not contain the node yet: nodes join while the cluster runs.

    Raises:
        ConfigError: the name names no role.
    """
    view, kind = views[-1], kind_of(node)
    if kind is None:
        raise ConfigError(f"The view has no node {node!r}; it has {', '.join(view.nodes)}.")
    return _ROLES[kind](node, views, config)


def installed_view(shell: NodeShell) -> View | None:
    """Return the newest view that a committed metalog entry installs. None: there is no such view,
    or the primary is not in this process.
    """
    roles = [role for role in shell.roles.values() if isinstance(role, Sequencer)]
    return next((view for role in roles if (view := role.installed) is not None), None)


def sequencer_of(shell: NodeShell, node: NodeId) -> Sequencer | None:
    """Return the sequencer `node` of `shell`; None: `node` is not a sequencer."""
    role = shell.roles[node]
    return role if isinstance(role, Sequencer) else None


def logs_of(shell: NodeShell, node: NodeId, config: Config) -> LocalLogs | None:
    """Return the logs of the engine `node` of `shell`; None: `node` is not an engine."""
    role = shell.roles[node]
    return LocalLogs(shell, node, role, config.cluster) if isinstance(role, Engine) else None


@dataclasses.dataclass(frozen=True)
class Platform:
    """A platform that runs in this process."""

    shell: NodeShell
    view: View
    config: Config
    engines: dict[NodeId, LocalLogs]

    @property
    def logs(self) -> LocalLogs:
        """The logs, through the first engine."""
        return self.engines[self.view.engines[0]]


@asynccontextmanager
async def embedded(
    config: Config, on_fatal: Callable[[BaseException], None] | None = None
) -> AsyncIterator[Platform]:
    """Run every role of the view in this process and on this loop.

    `on_fatal` is called if a sync or a role fails. Waiting callers then get a `NotReadyError`.

    Raises:
        DataDirectoryError: the directory is in use, of a newer format, or damaged.
        ConfigError: the directory was created with another layout.
        NotReadyError: the engine did not join the log in time.
    """
    async with opened_metadata(config.node) as metadata:
        store = metadata.store
        await claim_arrangement(store, "embedded")
        view = await view_in(store, config, "embedded")
        await metadata.copy_layout()
        epoch = Epoch(await store.next_sequence(EPOCH_KEY))
        term = await term_at_start(store, view.sequencers, view.nodes, epoch)
        with directory_usable(config.node.data_dir):
            journal = Journal.open(
                config.node.data_dir / "journal",
                segment_bytes=config.node.journal.segment_bytes,
                durability=config.cluster.durability,
            )
        try:
            lost = await journal_lost(store, "journal", journal)
        except BaseException:
            journal.close()
            raise
    shell: NodeShell | None = None
    try:
        roles = {node: role_of(node, [view], config) for node in view.nodes}
        shell = NodeShell(
            roles,
            [view],
            config,
            journal=journal,
            snapshots=config.node.data_dir / "snapshots",
            epoch=epoch,
            on_fatal=on_fatal or (lambda _: None),
        )
        with directory_usable(config.node.data_dir):
            shell.start(journal_lost=lost, term=term)
        engines = {
            node: LocalLogs(shell, node, role, config.cluster)
            for node, role in roles.items()
            if isinstance(role, Engine)
        }
        for logs in engines.values():
            await _wait_for_join_or_error(shell, logs)
        platform = Platform(shell, view, config, engines)
        async with _kinds_served_by(platform), retention_enforced(platform.logs, config):
            yield platform
    finally:
        if shell is not None:
            await shell.close()
        else:
            journal.close()


async def _wait_for_join_or_error(shell: NodeShell, logs: LocalLogs) -> None:
    """Wait until the engine has joined; if a role cannot start, raise its error."""
    try:
        await joined(logs)
    except NotReadyError:
        if isinstance(shell.failed, IndilogError):
            raise shell.failed from None
        raise


async def joined(logs: LocalLogs) -> None:
    """Wait until the engine has joined, and the newest view contains it. Then it has its shard.

    Raises:
        NotReadyError: the engine did not join within `READY_TIMEOUT_S`.
    """
    waiter = logs.future()
    logs.engine.when_ready(waiter)
    logs.wake()
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await waiter
            while not (_is_member(logs) and logs.engine.ready):  # noqa: ASYNC110 - roles await nothing
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise NotReadyError(
            f"The cluster was not ready within {READY_TIMEOUT_S:g} s; are all its nodes up?"
        ) from None


def _is_member(logs: LocalLogs) -> bool:
    """Return whether the newest view that the engine knows contains the engine."""
    return logs.node in logs.engine.placement.view.engines


async def wait_for_metalog(shell: NodeShell) -> None:
    """If the primary is in this process, wait until it has all its earlier metalog entries again.

    Raises:
        DataLossError: no sequencer can show whether the entries are complete.
    """
    roles = [role for role in shell.roles.values() if isinstance(role, Sequencer)]
    if all(role.ready for role in roles):
        return
    _log.warning("the primary lacks metalog entries; it takes them from the other sequencers")
    looks = 0
    while shell.failed is None and not all(role.ready for role in roles):
        await asyncio.sleep(_LOOK_S)
        looks += 1
        if looks % _LOOKS_SILENT == 0:
            silent = sorted({node for role in roles for node in role.silent})
            _log.warning("the primary waits for other sequencers", silent=silent)
    if shell.failed is not None:
        raise shell.failed
    _log.info("the primary has its metalog again", entries=max(role.length for role in roles))


def rank_of(logs: LocalLogs) -> int:
    """Return the index of a compute node in the newest view that it knows; last if it has left."""
    engines = logs.engine.placement.view.engines
    return engines.index(logs.node) if logs.node in engines else len(engines)


def retention_of(logs: LocalLogs, config: Config) -> RetentionService:
    """Return the service, not started, that enforces policies while its node is the first one."""
    logs.retention = RetentionService(
        logs, config.node, serves=lambda: rank_of(logs) == 0, routes=lambda: logs.routes
    )
    return logs.retention


@asynccontextmanager
async def retention_enforced(logs: LocalLogs, config: Config) -> AsyncIterator[None]:
    """Run the service of `retention_of` while the block runs."""
    service = retention_of(logs, config)
    service.start()
    try:
        yield
    finally:
        await service.stop()


@asynccontextmanager
async def _kinds_served_by(platform: Platform) -> AsyncIterator[None]:
    """Serve logs of other kinds through all engines of a platform that runs in this process."""
    directory, is_shared = platform.config.node.data_dir, len(platform.engines) > 1
    async with AsyncExitStack() as stack:
        for logs in platform.engines.values():
            serving = kinds_served(logs, platform.config, directory, is_shared=is_shared)
            await stack.enter_async_context(serving)
        yield


@asynccontextmanager
async def kinds_served(
    logs: LocalLogs, config: Config, platform_dir: Path | None, *, is_shared: bool = True
) -> AsyncIterator[None]:
    """Serve logs of other kinds than `shared`, through one compute node, while the block runs.

    Args:
        logs: the logs of the compute node, which has joined.
        config: settings.
        platform_dir: a directory that all compute nodes reach; None: there is none.
        is_shared: whether the platform has, or may get, several compute nodes.

    Raises:
        NotReadyError: the catalog of created logs cannot be read.
    """

    def opened(created: CreatedLog, *, is_new: bool) -> AbstractAsyncContextManager[OtherLogs]:
        from indilog_cells.opening import created_logs

        return created_logs(
            created, kinds, config, platform_dir, is_new=is_new, is_shared=is_shared
        )

    async def release(created: CreatedLog) -> None:
        from indilog_cells.releasing import release_log

        await release_log(created, kinds, config, platform_dir, is_shared=is_shared)

    kinds = LogKinds(
        logs, logs.node, view=lambda: logs.engine.placement.view,
        open_logs=opened, requests=logs, release=release, config=config,
        has_directory=platform_dir is not None, serves=lambda: rank_of(logs) == 0,
    )  # fmt: skip
    try:
        await kinds.start()
        logs.kinds, logs.routes, logs.opened = kinds, kinds.routes, FollowingLog
        async with logs.requests_served(kinds.append_content, kinds.position_of):
            yield
    finally:
        await kinds.stop()


def load_gateway() -> None:
    """Import the modules that a gateway needs. The import takes long. A primary that sends nothing
    meanwhile would be replaced, so a process with further nodes calls this before its nodes run.
    """
    import indilog_compute.gateway
    import indilog_compute.workers.host  # noqa: F401


@asynccontextmanager
async def calls_served(
    shell: NodeShell,
    logs: LocalLogs,
    config: Config,
    port: GatewayPort,
    *,
    board: StatusBoard,
    members: MembershipService,
    peers: Peers | None = None,
    peer_port: PeerPort | None = None,
    one_machine: bool = True,
) -> AsyncIterator[str]:
    """Run the gateway and the workers of a compute node of a cluster while the block runs; yield
    the gateway's URL. The first compute node also enforces retention policies.

    `config` is the configuration of the process. The compute node uses a directory of its own in
    the process's data directory, and `port`. `one_machine` tells whether all compute nodes can
    reach the process's data directory. The other arguments are those of `gateway_running`.

    Raises:
        NotReadyError, ConfigError: as `joined` and `gateway_running`.
    """
    await joined(logs)
    grpc_port = config.node.gateway.grpc_port
    own = node_config(
        config.node,
        data_dir=config.node.data_dir / logs.node,
        port=port.port,
        grpc_port=grpc_port + port.added if grpc_port else grpc_port,
    )
    own_config = dataclasses.replace(config, node=own)
    async with (
        kinds_served(logs, own_config, config.node.data_dir if one_machine else None),
        retention_enforced(logs, own_config),
        gateway_running(
            shell,
            logs,
            own_config,
            platform_dir=config.node.data_dir,
            published=board,
            peers=peers,
            peer_port=peer_port,
            port_is=port.words,
            members=members,
        ) as url,
    ):
        yield url


@asynccontextmanager
async def gateway_running(
    shell: NodeShell,
    logs: LocalLogs,
    config: Config,
    *,
    platform_dir: Path,
    published: StatusBoard | None = None,
    peers: Peers | None = None,
    peer_port: PeerPort | None = None,
    port_is: str = "",
    members: MembershipService | None = None,
) -> AsyncIterator[str]:
    """Run the functions and the gateway of one compute node while the block runs; yield the
    gateway's URL.

    Args:
        shell: shell of the compute node.
        logs: logs of the compute node.
        config: configuration with the compute node's own data directory and port.
        platform_dir: data directory of the whole platform, which contains the token.
        published: has the status of other processes; None: there are no others.
        peers: other compute nodes, to which the gateway may forward calls.
        peer_port: where compute nodes on other machines forward calls to this one.
        port_is: text after the port in error messages, such as the rule that chose it.
        members: changes the nodes of the cluster; None: the platform is one process.

    Raises:
        ConfigError: the port is in use, the host is unknown, or the certificate or the token
            cannot be used.
        NotReadyError: the deployments cannot be read, or the workers do not start.
    """
    from indilog_compute.gateway import create_gateway
    from indilog_compute.workers.host import FunctionHost

    def status() -> dict[str, Any]:
        return status_of(shell, logs, published)

    host = FunctionHost(config, logs, node_name=logs.node, rank=lambda: rank_of(logs))
    try:
        await host.start()
        registry = _registry_of(shell, logs, published)
        gateway = create_gateway(
            host,
            logs,
            status,
            config,
            registry,
            request_snapshots=logs.request_snapshots,
            members=members,
            peers=peers,
            kinds=logs.kinds,
        )
        token_file = platform_dir / TOKEN_FILE
        listening = _listening(gateway, host, config, token_file, port_is, peer_port)
        async with listening as url, _grpc_listening(gateway, host, logs, config, token_file):
            yield url
    finally:
        await host.stop()


@dataclasses.dataclass(frozen=True)
class FunctionsInProcess:
    """Functions that run in this process.

    Attributes:
        sources_of: returns sources that stand for an `App`; only this platform can deploy them.
        connect: returns a client's link; its arguments answer messages, and handle its loss.
        gateway: returns the gateway's ASGI application, which the first call makes (it is slow).
        skip: lets a number of seconds pass at once, by the time of the log.
    """

    sources_of: Callable[[App], dict[str, str]]
    connect: Callable[[Serve, Callable[[Link], None]], Link]
    gateway: Callable[[], GatewayApp]
    skip: Callable[[float], Awaitable[None]]


@asynccontextmanager
async def functions_in_process(platform: Platform) -> AsyncIterator[FunctionsInProcess]:
    """Run deployed functions, services and schedules on this event loop while the block runs. For
    tests: there is one worker, which has no process of its own.

    Raises:
        NotReadyError: the deployments cannot be read.
    """
    from indilog_compute.workers.host import FunctionHost
    from indilog_compute.workers.in_process import InProcessWorkers, client_link

    logs = platform.logs
    workers = InProcessWorkers(logs)
    node = node_config(platform.config.node, workers=1, workers_max=0)
    config = dataclasses.replace(platform.config, node=node)
    host = FunctionHost(config, logs, node_name=logs.node, start_worker=workers.start)

    @cache
    def gateway() -> GatewayApp:
        from indilog_compute.gateway.app import create_gateway

        return create_gateway(host, logs, dict, config, kinds=logs.kinds)

    async def skip(seconds: float) -> None:
        platform.shell.clock.skip(seconds)
        await host.ask_time()

    try:
        await host.start()
        yield FunctionsInProcess(workers.given.sources, partial(client_link, host), gateway, skip)
    finally:
        await workers.stop()
        await host.stop()


def _registry_of(
    shell: NodeShell, logs: LocalLogs, published: StatusBoard | None
) -> CollectorRegistry:
    """Return the metrics of this process, and the counters of all roles."""
    from indilog.base.exposition import StatusCollector, registry_of

    def roles() -> dict[str, Mapping[str, Any]]:
        return {**status_of_nodes(shell), **_status_elsewhere(shell, logs, published).status}

    registry = registry_of([shell.metrics])
    registry.register(StatusCollector(lambda: _engine_status(logs)))
    registry.register(StatusCollector(roles, "indilog_node", "Counters of roles"))
    return registry


def peers_of(logs: LocalLogs, platform_dir: Path) -> Peers:
    """Return the other compute nodes, whose data directories are in `platform_dir`."""
    from indilog_compute.gateway import Peers, socket_in

    return Peers(
        logs.node,
        nodes=lambda: logs.engine.placement.view.engines,
        address_of=lambda node: socket_in(platform_dir / node),
    )


def peers_on_machines(
    logs: LocalLogs, config: Config, addresses: Callable[[], Mapping[NodeId, str]]
) -> tuple[Peers | None, PeerPort | None]:
    """Return the other compute nodes, each on a machine of its own, and the port at which this node
    receives the calls that they forward. It is the port after the port for messages. Without keys,
    calls are not forwarded, and both results are None.

    Args:
        logs: the logs of this compute node.
        config: configuration of this machine.
        addresses: returns where each node receives messages.

    Raises:
        ConfigError: the keys cannot be used.
    """
    from indilog_compute.gateway import PeerPort, Peers

    messages = config.node.messages
    if messages.node_keys is None:
        return None, None
    keys = keys_in(messages.node_keys)

    def address_of(node: NodeId) -> PeerPort | None:
        if (address := addresses().get(node)) is None:
            return None
        at = parse_stream_address(address)
        return PeerPort(at.host, at.port + 1, keys.client)

    peers = Peers(logs.node, lambda: logs.engine.placement.view.engines, address_of)
    return peers, PeerPort(messages.node_host, messages.node_port + 1, keys.server)


@asynccontextmanager
async def _listening(
    gateway: GatewayApp,
    host: FunctionHost,
    config: Config,
    token_file: Path,
    port_is: str,
    peer_port: PeerPort | None,
) -> AsyncIterator[str]:
    """Run a gateway on its port and its Unix socket; yield its URL."""
    from indilog_compute.gateway import (
        GatewayServer,
        guard_port,
        guard_unix_socket,
        socket_in,
        tls_of,
    )

    node = config.node
    token = token_in(token_file.parent)
    if not node.gateway.auth:
        _log.warning("no authentication: every process on this machine has full access")
    socket = socket_in(node.data_dir)
    server = GatewayServer(
        guard_port(gateway, host, node, token),
        node.gateway.host,
        node.gateway.port,
        resources=gateway.resources,
        port_is=port_is,
        tls=tls_of(node),
        local=(guard_unix_socket(gateway, host, node), socket),
        peers=peer_port,
    )
    try:
        server.bind()
        found = running_at(
            node.gateway.host,
            server.port,
            names=node.gateway.names,
            token_file=token_file if node.gateway.auth else None,
            certificate=node.gateway.tls_cert,
            socket=socket,
        )
        with _findable(found):
            await server.start()
            yield found.url
    finally:
        gateway.end_streams()
        await server.stop()


@asynccontextmanager
async def _grpc_listening(
    gateway: GatewayApp, host: FunctionHost, logs: LocalLogs, config: Config, token_file: Path
) -> AsyncIterator[None]:
    """Run the gRPC server of a compute node while the block runs, if it has a port."""
    from indilog_compute.gateway import tls_of

    node = config.node
    if node.gateway.grpc_port is None:
        yield
        return
    from indilog_compute.gateway.rpc import GrpcServer

    server = GrpcServer(
        config,
        logs,
        host,
        gateway.resources,
        token=token_in(token_file.parent) if node.gateway.auth else None,
        tls=tls_of(node),
    )
    try:
        await server.start()
        gateway.resources.grpc_port = server.port
        _log.info("gRPC ready", host=node.gateway.host, port=server.port)
        yield
    finally:
        await server.stop()


@contextmanager
def _findable(platform: RunningPlatform) -> Iterator[None]:
    """Register the gateway for callers of this user. If that fails, log a warning."""
    with ExitStack() as stack:
        try:
            stack.enter_context(registered(platform))
        except OSError as error:
            _log.warning("callers need INDILOG_TOKEN: they do not find it", reason=str(error))
        yield


def status_of(
    shell: NodeShell, logs: LocalLogs, board: StatusBoard | None = None
) -> dict[str, Any]:
    """Return the status of the platform as this process knows it, for people: `GET /status`.

    `release`: the release of this process. `ready`: this compute node serves calls. `read_only`: a
    full disk prevents appends. `nodes`: the status of roles; other processes publish theirs
    periodically. `elsewhere`: nodes in other processes. `silent`: nodes without a recent status.
    `shards`: the replicas of each shard, and those whose reports decide what is ordered
    (`counting`). `filling`, `failing`: see `LogKinds.status`. `layout`: the newest view.
    `lost_records`: records that no replica has any more; if not 0, with a `warning`.
    """
    view = logs.engine.placement.view
    published = _status_elsewhere(shell, logs, board)
    engine = _engine_status(logs)
    nodes = {**status_of_nodes(shell), **published.status}
    return {
        "release": __version__,
        "ready": shell.failed is None and not shell.closed,
        "read_only": bool(engine["progress"]["read_only"]),
        **_losses(nodes),
        "view": view.number,
        "shards": {
            str(shard): {
                "writer": logs.engine.placement.writer(shard),
                "replicas": list(logs.engine.placement.replicas(shard)),
                "counting": list(logs.engine.placement.counting(shard)),
                "finalized": logs.engine.placement.is_finalized(shard),
            }
            for shard in view.shards
        },
        "layout": {**_layout(view), "lost_storage_policy": logs.limits.lost_storage_policy},
        **({} if logs.kinds is None else logs.kinds.status()),
        "nodes": nodes,
        "elsewhere": _elsewhere(shell, logs),
        "silent": published.silent,
        "engine": engine,
    }


def _layout(view: View) -> dict[str, Any]:
    """Return the nodes of a view by role, and its index schedule."""
    return {
        "sequencers": list(view.sequencers),
        "storage_nodes": list(view.storage_nodes),
        "index_shards": {str(n): list(nodes) for n, nodes in enumerate(view.index_shards)},
        "index_eras": [{"start": era.start, "shards": list(era.shards)} for era in view.eras],
        "aggregators": list(view.aggregators),
        "engines": list(view.engines),
        "zones": dict(view.zones),
    }


def _losses(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of permanently lost records, and a warning about reads of them."""
    lost = sum(status.get("lost_records", 0) for status in nodes.values())
    if not lost:
        return {"lost_records": 0}
    first = min(
        (f["first_lost_seqnum"] for f in nodes.values() if "first_lost_seqnum" in f), default=None
    )
    place = "" if first is None else f", the first one at seqnum {first}"
    warning = (
        f"Lost records: {lost:,}{place}; the disk is damaged there, and there is no other copy. "
        "Reads that would skip them raise DataLossError, which says where to continue."
    )
    return {"lost_records": lost, "warning": warning}


def _engine_status(logs: LocalLogs) -> dict[str, Mapping[str, Any]]:
    status: dict[str, Mapping[str, Any]] = {**logs.engine.status()}
    if logs.retention is not None and logs.retention.serves():
        status["retention"] = logs.retention.status()
    return status


def _elsewhere(shell: NodeShell, logs: LocalLogs) -> list[NodeId]:
    return [node for node in logs.engine.placement.view.nodes if node not in shell.roles]


def _status_elsewhere(
    shell: NodeShell, logs: LocalLogs, board: StatusBoard | None
) -> PublishedStatus:
    if board is None:
        return PublishedStatus({}, [])
    return board.read(_elsewhere(shell, logs))


def status_of_nodes(shell: NodeShell) -> dict[str, Mapping[str, Any]]:
    """Return the status of the roles of this process; of an engine only its position."""
    return {
        node: {"position": role.position} if isinstance(role, Engine) else role.status()
        for node, role in shell.roles.items()
        if isinstance(role, ReportsStatus)
    }


def run_embedded(
    config: Config,
    on_ready: Callable[[str], None] | None = None,
    *,
    supervisor_fd: int | None = None,
) -> None:
    """Run the platform in this process, with gateway and workers, until SIGTERM or SIGINT.

    Args:
        config: configuration of the platform.
        on_ready: called once with the gateway's URL when it serves calls.
        supervisor_fd: a socket to the process that started this one; the platform stops cleanly
            when the other end is closed.

    Raises:
        IndilogError: as `embedded` and `gateway_running`. It is a `NotReadyError` if a fault
            stopped the running platform.
    """
    raise_limit()
    uvloop.run(_run_embedded(config, on_ready, supervisor_fd))


async def _run_embedded(
    config: Config, on_ready: Callable[[str], None] | None, supervisor_fd: int | None
) -> None:
    from indilog_compute.gateway.server import check_can_listen

    asked = asyncio.Event()
    faults: list[BaseException] = []

    def fail(error: BaseException) -> None:
        faults.append(error)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    supervisor = SupervisorLink(supervisor_fd, None, asked.set)
    check_can_listen(config.node)  # checked first, so that a failure leaves no new data directory
    async with (
        embedded(config, fail) as platform,
        gateway_running(
            platform.shell, platform.logs, config, platform_dir=config.node.data_dir
        ) as url,
    ):
        collect_rarely()
        if on_ready is not None:
            on_ready(url)
        supervisor.ready(url)
        await asked.wait()
    supervisor.close()
    if faults:
        raise NotReadyError(f"The platform stopped by a fault: {faults[0]}") from faults[0]
