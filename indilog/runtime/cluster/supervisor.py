"""The cluster as separate processes on one machine: `indilog up --processes` (ARCHITECTURE 5).

The first process is the supervisor. It serves the metadata store to the other processes, unless
ZooKeeper is the metadata store. It starts the processes of the nodes of the view, and of each node
that joins (`indilog.runtime.cluster.scaling`). Each node has a process of its own, or several nodes
share a process (`indilog.runtime.cluster.processes`). A process that dies, or hangs for `hang_s`,
is restarted.

No records pass through the supervisor. If it is killed, the other processes continue to serve
calls, without restarts and without the embedded metadata store. If the next supervisor has the same
settings, it adopts the processes. If not, it stops them and starts new ones.

Sockets are Unix sockets in a directory of this run, readable by this user only. In measurements
they are a third faster than TCP (docs/decisions/0002), and they need no free port. With
`node_host`, nodes use TCP ports. With `node_keys`, these connections are encrypted and
authenticated (docs/decisions/0044).
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
import uvloop

from indilog.base.errors import ConfigError, DataDirectoryError, NotReadyError
from indilog.base.ids import NodeId
from indilog.config import Config, NodeConfig, config_from, node_config
from indilog.kernel.view import NODES_MAX, View
from indilog.runtime.cluster.cluster_members import want_zones, wanted_in
from indilog.runtime.cluster.cluster_state import (
    RunSettings,
    claim_arrangement,
    publish_run,
    run_of,
    settings_of,
)
from indilog.runtime.cluster.fork_server import NODE_PROGRAM
from indilog.runtime.cluster.gateway_port import free_port
from indilog.runtime.cluster.layout import view_in
from indilog.runtime.cluster.membership import kind_of, leaving_engines, needed
from indilog.runtime.cluster.metadata_address import published_address
from indilog.runtime.cluster.metadata_opening import opened_metadata
from indilog.runtime.cluster.node_starter import NodeStarter
from indilog.runtime.cluster.processes import Processes, processes_in, zones_in_turn
from indilog.runtime.cluster.run_directory import RunDirectory, remove_stale_directories
from indilog.runtime.cluster.scaling import Scaling
from indilog.runtime.cluster.supervised_process import SupervisedProcess
from indilog.runtime.cluster.supervisor_link import SupervisorLink, control_address
from indilog.runtime.metadata.service import MetadataServer
from indilog.runtime.metadata.store import MetadataStore

PROCESSES_DEFAULTS: Final[Mapping[str, Any]] = {
    "cluster": {"sequencers": 3, "storage_nodes": 2, "replicas": 2}
}
"""Defaults of a cluster of processes. With these defaults, the loss of one disk loses no data."""
_SOCKET_PATH_BYTES_MAX: Final = 100
_PORT_MAX: Final = 65_535
_FAILURES_MAX: Final = 3
"""If so many starts of a node of the view fail, the start of the cluster fails."""
_SCHEMES: Final[Mapping[str, tuple[str, str]]] = {
    "stream": ("unix", "stream"),
    "zmq": ("ipc", "tcp"),
}
"""The schemes of the nodes' Unix sockets and TCP ports, by the setting `transport`. The metadata
store always uses streams.
"""

_log = structlog.get_logger(__name__)


def processes_config(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    shared: int | None = None,
) -> Config:
    """Return the configuration of a cluster of processes; see `config_from`.

    `shared`: the number of shared processes; None: each node has a process of its own.

    Raises:
        ConfigError: as `config_from`; or `shared` is below 1 or above `NODES_MAX`.
    """
    defaults = PROCESSES_DEFAULTS if shared is None else shared_defaults(shared)
    return config_from(file, environment, overrides, defaults=defaults)


def shared_defaults(count: int) -> dict[str, dict[str, int]]:
    """Return the default settings of a cluster of `count` processes with a node of each kind.

    With three or more processes, the loss of one process loses no data and stops nothing.

    Raises:
        ConfigError: the count is below 1 or above `NODES_MAX`.
    """
    if not 1 <= count <= NODES_MAX:
        raise ConfigError(f"A cluster has 1 to {NODES_MAX:,} nodes, not {count:,}.")
    replicas = min(count, 3)
    cluster = {
        "shared_processes": count,
        "sequencers": 3 if count >= 3 else 1,
        "storage_nodes": count,
        "replicas": replicas,
        "ack_quorum": replicas // 2 + 1 if count >= 3 else 0,
        "index_shards": min(count, 2),
        "index_replicas": min(count, 2),
        "aggregators": min(count, 2),
        "engines": count,
    }
    return {"cluster": cluster}


class Supervisor:
    """Runs a cluster of processes.

    Args:
        left_out: processes that the supervisor does not start, because another program (a benchmark
            or test) runs them.

    Attributes:
        processes: the processes by name; valid after `start`. A process with a single node has the
            name of this node.
        metadata_address: address of the metadata store; valid after `start`.
    """

    def __init__(self, config: Config, *, left_out: Collection[str] = ()) -> None:
        keys = config.node.messages.node_keys
        node = node_config(
            config.node,
            data_dir=config.node.data_dir.absolute(),
            node_keys=None if keys is None else keys.absolute(),
        )
        self._config = dataclasses.replace(config, node=node)
        self._left_out = left_out
        self._metadata = AsyncExitStack()
        self._directory: RunDirectory | None = None
        self._starter = NodeStarter()
        self._scaling: Scaling | None = None
        self._scaler: asyncio.Task[NoReturn] | None = None
        self._layout = Processes()
        self.processes: dict[str, SupervisedProcess] = {}
        self.metadata_address = ""

    async def start(self) -> None:
        """Adopt or start every process; returns when all nodes of the view are ready.

        Raises:
            DataDirectoryError: the data directory cannot be used, is in use, has a newer format, or
                is damaged.
            ConfigError: the directory was created with another layout or metadata store; or sockets
                cannot be created.
            QuorumUnavailableError: ZooKeeper is the metadata store, and does not answer.
            NotReadyError: a process does not start; the message has the process's sentence.
        """
        metadata = await self._metadata.enter_async_context(opened_metadata(self._config.node))
        store = metadata.store
        await claim_arrangement(store, "processes")
        remove_stale_directories()
        run = await self._take_over_run(store, await run_of(store))
        await view_in(store, self._config, "processes")
        await metadata.copy_layout()
        self._directory = self._directory or RunDirectory()
        await self._read_layout(store)
        await want_zones(
            store, lambda nodes: zones_in_turn(nodes, self._layout, self._config.node.zones)
        )
        wanted = await wanted_in(store)
        nodes = needed(wanted.view, wanted.members)
        placed = (*nodes, *self._layout.standbys(nodes))
        addresses = self._addresses(placed, {} if run is None else run.addresses)
        members = None if run is None else run.members
        await publish_run(store, self._config, addresses, self._directory.path, members)
        if store is metadata.file:
            self.metadata_address = self._metadata_address()
            server = MetadataServer(metadata.file, self.metadata_address, self._config.node)
            self._metadata.push_async_callback(server.close)
        else:
            self.metadata_address = published_address(self._config.node, self._directory.path)
        leaving = leaving_engines(wanted.view, wanted.members)
        running = {
            name: of
            for name, of in self._layout.running(n for n in nodes if n not in leaving).items()
            if name not in self._layout.gone
        }
        if run is not None:
            left = [name for name in self._layout.running(run.addresses) if name not in running]
            await _stop_processes(run, left, self._config.node)
        for name, of in running.items():
            if name not in self._left_out:
                self._start_process(name, is_member=any(node in wanted.view.nodes for node in of))
        self._scaling = Scaling(
            metadata,
            wanted.view,
            partial(self._read_layout, store),
            self.processes,
            self._start_process,
            self._addresses,
            self._left_out,
            partial(free_port, self._directory.path),
        )
        self._scaler = asyncio.create_task(self._scaling.run(), name="scaling")
        await self.ready()
        _log.info("cluster ready", processes=len(self.processes))

    async def _take_over_run(
        self, store: MetadataStore, run: RunSettings | None
    ) -> RunSettings | None:
        """If processes of the last run are running, continue that run and return it. If they have
        other settings, stop them instead.

        `remove_stale_directories` ran before. So the directory of a run exists only if one of its
        processes is running.
        """
        self._directory = RunDirectory.of_living(Path(run.directory)) if run else None
        if run is None or self._directory is None:
            return None
        if run.settings == settings_of(self._config):
            return run
        _log.warning("processes of a run with other settings are stopped", run=run.directory)
        layout = await processes_in(store)
        await _stop_processes(run, layout.running(run.addresses), self._config.node)
        self._directory.remove()
        self._directory = None
        return None

    async def _read_layout(self, store: MetadataStore) -> Processes:
        self._layout = await processes_in(store)
        return self._layout

    @property
    def view(self) -> View | None:
        """The newest known installed view; None: `start` has not read it yet."""
        return None if self._scaling is None else self._scaling.view

    async def ready(self) -> None:
        """Wait until the processes of all nodes of the view are ready, at a start or after
        restarts.

        A new primary may find that too many other sequencers lost data, even after its process
        became ready. Then no process can become ready, so this raises the error of the primary's
        process.

        Raises:
            NotReadyError: a process does not start, or ended because data is lost. The message has
                the process's error.
        """
        assert self.view is not None, "after `start`"
        names = [n for n in self._layout.running(self.view.nodes) if n in self.processes]
        waits = [asyncio.create_task(self._ready(name)) for name in names]
        losses = [asyncio.create_task(self.processes[name].wait_for_data_loss()) for name in names]
        ready = asyncio.gather(*waits)
        ends: list[asyncio.Future[Any]] = [ready, *losses]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if lost := next((loss for loss in losses if loss.done()), None):
                raise lost.result()
            await ready
        finally:
            for task in (*waits, *losses):
                task.cancel()
            await asyncio.gather(ready, *losses, return_exceptions=True)

    async def _ready(self, name: str) -> None:
        """Wait until a process is ready, or its nodes have left."""
        try:
            await self.processes[name].ready()
        except NotReadyError:
            if self.view is None or name in self._layout.running(self.view.nodes):
                raise

    async def stop(self) -> None:
        """End all processes. Processes with calls end first, so that their calls can still reach
        all other nodes.

        A process that does not end within `stop_timeout_s` is killed. May be called again.
        """
        if self._scaler is not None:
            self._scaler.cancel()
            await asyncio.gather(self._scaler, return_exceptions=True)
        await stop_in_order(self.processes, self._layout)
        await self._starter.close()
        await self._metadata.aclose()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    @property
    def url(self) -> str:
        """URL of the first engine's gateway; valid when the engine's process is ready."""
        assert self.view is not None, "after `start`"
        engine = self.processes.get(self._layout.of(self.view.engines[0]))
        return engine.detail if engine else ""

    @property
    def run_directory(self) -> Path:
        """The temporary directory of this run; valid after `start`."""
        assert self._directory is not None, "after `start`"
        return self._directory.path

    def _start_process(self, name: str, *, is_member: bool = False) -> None:
        """Start a process. If its nodes are joining (not `is_member`), it is restarted without
        limit: it may be killed, or wait for other nodes, before it is ready.
        """
        assert self._directory is not None, "it was made"
        command = [*NODE_PROGRAM, "--name", name, "--metadata", self.metadata_address]
        control = control_address(self._directory.path, name)
        command += ["--control", str(control), *self._keys_given()]
        process = self.processes[name] = SupervisedProcess(
            name,
            command,
            self._config.node,
            control=control,
            inherited=[self._directory.lock],
            failures_max=_FAILURES_MAX if is_member else sys.maxsize,
            start=self._starter.start,
        )
        process.start()

    def _keys_given(self) -> list[str]:
        keys = self._config.node.messages.node_keys
        return [] if keys is None else ["--keys", str(keys)]

    def _metadata_address(self) -> str:
        messages = self._config.node.messages
        if messages.node_host:
            return _at_port("stream", messages.node_host, messages.node_port)
        return self._address("unix", "metadata")

    def _addresses(
        self, nodes: Collection[NodeId], known: Mapping[NodeId, str]
    ) -> dict[NodeId, str]:
        """Return the address at which each node receives, together with the `known` addresses. New
        ports follow the port of the metadata store.
        """
        messages = self._config.node.messages
        new = self._layout.running(node for node in nodes if node not in known)
        socket, port = _SCHEMES[messages.transport]
        if not messages.node_host:
            added = {name: self._address(socket, name) for name in new}
        else:
            # A known address keeps its port, and is not removed during the run. So ports have no
            # gaps.
            old = len(set(known.values()))
            first = messages.node_port + 1 + old
            last = first + len(new) - 1
            if last > _PORT_MAX:
                raise ConfigError(
                    f"{old + len(new)} processes need the ports after node_port "
                    f"({messages.node_port:,}), and {last:,} is above {_PORT_MAX:,}; set a smaller "
                    "node_port."
                )
            added = {
                name: _at_port(port, messages.node_host, first + place)
                for place, name in enumerate(new)
            }
        return {**known, **{node: added[name] for name, of in new.items() for node in of}}

    def _address(self, scheme: str, name: str) -> str:
        assert self._directory is not None, "it was made"
        path = f"{self._directory.path}/{name}"
        if len(path.encode()) > _SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"The path {path} is too long for a Unix socket; set TMPDIR to a shorter one."
            )
        return f"{scheme}://{path}"


def _at_port(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@asynccontextmanager
async def supervised(
    config: Config, *, left_out: Collection[str] = ()
) -> AsyncIterator[Supervisor]:
    """Run a cluster of processes while the block runs. Errors are those of `Supervisor.start`."""
    supervisor = Supervisor(config, left_out=left_out)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()


async def stop_in_order(processes: Mapping[str, SupervisedProcess], layout: Processes) -> None:
    """Stop processes: first those of compute nodes, then all others.

    Before that, all shared processes end their gateways together.
    """
    shared = set(layout.shared.values())
    await asyncio.gather(*(p.drain() for name, p in processes.items() if name in shared))
    engines = {name for name in processes if kind_of(NodeId(name)) == "engine"}
    for wave in (engines, processes.keys() - engines):
        await asyncio.gather(*(processes[name].stop() for name in wave & processes.keys()))


async def _stop_processes(run: RunSettings, names: Iterable[str], config: NodeConfig) -> int:
    """Stop processes of a run that has no supervisor; return the number of stopped processes.

    Compute nodes are stopped first, so that their calls still reach the other nodes. A shared
    process is stopped at once, so its running calls may fail.
    """
    stopped = 0
    for wave in (True, False):
        left = [
            SupervisedProcess(name, (), config, control=control_address(Path(run.directory), name))
            for name in names
            if (kind_of(NodeId(name)) == "engine") is wave
        ]
        stopped += sum(await asyncio.gather(*(process.end() for process in left)))
    return stopped


def stop_processes(config: NodeConfig) -> int:
    """Stop the processes that a killed supervisor left in `data_dir`; return the number of stopped
    processes.

    Raises:
        DataDirectoryError: a supervisor runs there, or the directory holds no platform.
    """

    async def stopped() -> int:
        if not (config.data_dir / "metadata").is_file():
            raise DataDirectoryError(f"The directory {config.data_dir} holds no platform.")
        async with opened_metadata(config) as metadata:
            run = await run_of(metadata.store)
            directory = RunDirectory.of_living(Path(run.directory)) if run else None
            if run is None or directory is None:
                return 0
            layout = await processes_in(metadata.store)
            count = await _stop_processes(run, layout.running(run.addresses), config)
            directory.remove()
            return count

    return uvloop.run(stopped())


def run_processes(
    config: Config,
    on_ready: Callable[[str], None] | None = None,
    *,
    supervisor_fd: int | None = None,
) -> None:
    """Run a cluster of processes until SIGTERM, SIGINT or SIGHUP (the terminal was closed).

    Args:
        config: configuration, usually from `processes_config`.
        on_ready: called once with the gateway's URL when all processes are ready.
        supervisor_fd: a socket to the program that started this one; the cluster stops cleanly when
            the other end is closed.

    Raises:
        IndilogError: as `Supervisor.start`.
    """
    uvloop.run(_run(config, on_ready, supervisor_fd))


async def _run(
    config: Config, on_ready: Callable[[str], None] | None, supervisor_fd: int | None
) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # such as SIGHUP under nohup
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    link = SupervisorLink(supervisor_fd, None, asked.set)
    supervisor = Supervisor(config)
    starting = asyncio.create_task(supervisor.start())
    stopping = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            if on_ready is not None:
                on_ready(supervisor.url)
            await stopping
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await supervisor.stop()
        link.close()
