"""Runs a process of a cluster (ARCHITECTURE 5, "Cluster"). The process finds the cluster through
the metadata store, and runs its nodes until it must stop.

The supervisor starts `python -m indilog.node --name storage-0 --metadata
unix:///tmp/indilog-x/metadata`. `--name` is the name of the process. A process with a single node
has the name of this node; several nodes may also share a process
(`indilog.runtime.cluster.processes`). `node_running` runs a process inside another program, such as
a benchmark that is itself the compute node.

A process of several nodes stops in two steps, because the other processes need its nodes to finish
their calls. The first SIGTERM ends its gateway and workers, and the second SIGTERM ends the
process. `assembly` creates the roles, which run in a `NodeShell`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import structlog
import uvloop

from indilog.base.errors import DataLossError, IndilogError
from indilog.base.ids import NodeId
from indilog.base.release import __version__
from indilog.base.telemetry import configure_logging
from indilog.config import KIB, NodeConfig
from indilog.kernel.view import Members
from indilog.runtime.cluster.assembly import (
    calls_served,
    installed_view,
    load_gateway,
    logs_of,
    peers_of,
    role_of,
    sequencer_of,
    status_of_nodes,
    wait_for_metalog,
)
from indilog.runtime.cluster.cluster_members import ClusterMembers, publish_views, wanted_in
from indilog.runtime.cluster.cluster_state import RUN_KEY, NodeStart, decode_run, node_start
from indilog.runtime.cluster.data_directory import directory_usable, journal_lost
from indilog.runtime.cluster.following import followed, running
from indilog.runtime.cluster.gateway_port import keep_port, port_of
from indilog.runtime.cluster.membership import kind_of, needed
from indilog.runtime.cluster.metadata_address import metadata_at
from indilog.runtime.cluster.status_files import StatusBoard, StatusFiles, publish_status
from indilog.runtime.cluster.supervisor_link import SupervisorLink
from indilog.runtime.cluster.terms import standing_for_primary, term_at_start, terms_followed
from indilog.runtime.descriptors import raise_limit
from indilog.runtime.garbage import collect_rarely
from indilog.runtime.journal.journal import Journal
from indilog.runtime.metadata.store import MetadataStore, Versioned
from indilog.runtime.node import NodeShell
from indilog.runtime.transport.stream_transport import StreamTransport
from indilog.runtime.transport.transport import REFUSED_PEER, GrowingTransport
from indilog.runtime.transport.zmq_transport import ZmqTransport

_UNUSED_SEGMENT_BYTES: Final = 64 * KIB
"""Size of the segments of a journal to which no role of the process writes. The size is small,
because segment files are filled with zeros in advance.
"""

_TRANSPORTS: Final[Mapping[str, type[StreamTransport | ZmqTransport]]] = {
    "stream": StreamTransport,
    "zmq": ZmqTransport,
}

_log = structlog.get_logger(__name__)


class RunningNode(NamedTuple):
    """The running nodes of a process, and what they use."""

    shell: NodeShell
    nodes: tuple[NodeId, ...]
    start: NodeStart
    transport: GrowingTransport
    store: MetadataStore
    addresses: Callable[[], Mapping[NodeId, str]]
    """Returns where each node receives now."""


@asynccontextmanager
async def node_running(
    name: str,
    metadata: str,
    on_fatal: Callable[[BaseException], None],
    keys: Path | None = None,
) -> AsyncIterator[RunningNode]:
    """Run the process `name` of the cluster whose metadata store is at `metadata`.

    `keys` is the directory with the keys of this process, which a store at a TCP port requires.

    Raises:
        NotReadyError, QuorumUnavailableError: the metadata store does not answer, or the supervisor
            has not published the cluster's view yet.
        ConfigError, DataDirectoryError: as `nodes_running`.
    """
    async with metadata_at(metadata, keys) as store:
        start = await node_start(store)
        nodes = await _nodes_of(name, start, store)
        async with nodes_running(name, nodes, start, store, on_fatal) as node:
            yield node


@asynccontextmanager
async def nodes_running(
    name: str,
    nodes: tuple[NodeId, ...],
    start: NodeStart,
    store: MetadataStore,
    on_fatal: Callable[[BaseException], None],
) -> AsyncIterator[RunningNode]:
    """Run the `nodes` of the process `name` while the block runs.

    The nodes are recovered from their journal when the block begins, and synced and closed when it
    ends.

    Raises:
        ConfigError: the cluster has no such process.
        DataDirectoryError: the process's directory is in use, of a newer format, or damaged.
        QuorumUnavailableError: the metadata store does not answer.
    """
    async with AsyncExitStack() as stack:
        config, view = start.config, start.view
        if len(nodes) > 1 and any(kind_of(node) == "engine" for node in nodes):
            load_gateway()
        roles = {node: role_of(node, [view], config) for node in nodes}
        undo = stack.enter_context(contextlib.ExitStack())
        journal = _journal_of(name, nodes, start)
        undo.callback(journal.close)
        lost = await journal_lost(store, name, journal)
        term = await term_at_start(store, view.sequencers, nodes, start.epoch)
        loop = asyncio.get_running_loop()
        transport = _TRANSPORTS[config.node.messages.transport](
            start.addresses[nodes[0]], start.addresses, loop, config
        )
        undo.callback(transport.close)
        shell = NodeShell(
            roles,
            [view],
            config,
            journal=journal,
            snapshots=config.node.data_dir / "snapshots",
            transport=transport,
            epoch=start.epoch,
            on_fatal=on_fatal,
        )
        shell.metrics.dropped = transport.counts.dropped  # scraped with the node's other numbers
        undo.pop_all()
        stack.push_async_callback(shell.close)
        with directory_usable(config.node.data_dir / name):
            shell.start(journal_lost=lost, term=term)
        await stack.enter_async_context(terms_followed(store, shell.begin_term))
        run = _RunFollower(shell, transport, start.addresses)
        await stack.enter_async_context(followed(store, RUN_KEY, run.on_changed))
        for node in nodes:
            await _stand_for_primary(node, shell, start, store, stack)
        yield RunningNode(shell, nodes, start, transport, store, lambda: run.addresses)


async def _stand_for_primary(
    node: NodeId, shell: NodeShell, start: NodeStart, store: MetadataStore, stack: AsyncExitStack
) -> None:
    """If `node` is a sequencer, let it become the primary when the primary is lost. If it is the
    primary, publish the views that it installs.
    """
    if (role := sequencer_of(shell, node)) is None:
        return
    lost_s = start.config.node.ordering.primary_lost_s
    standing = standing_for_primary(
        store,
        node,
        lambda: role.sequencers,
        start.epoch,
        lost_s,
        lambda: role.is_outside,
    )
    await stack.enter_async_context(standing)
    views = publish_views(store, lambda: installed_view(shell))
    await stack.enter_async_context(running(views))


async def _nodes_of(process: str, start: NodeStart, store: MetadataStore) -> tuple[NodeId, ...]:
    """Return the nodes of a process: its nodes in the newest view, its wanted nodes that have not
    joined yet, and a sequencer that may join later.
    """
    members = (await wanted_in(store)).members
    of = start.processes.nodes_of(process, needed(start.view, members))
    return (*of, *start.processes.standbys(of)) or (NodeId(process),)


class _RunFollower:
    """Notifies the nodes of a process of changes that the supervisor makes while they run.

    It passes on the addresses of new nodes before the members, because nodes send messages to new
    members at once.
    """

    def __init__(
        self, shell: NodeShell, transport: GrowingTransport, addresses: Mapping[NodeId, str]
    ) -> None:
        self.addresses = addresses
        self._shell = shell
        self._transport = transport
        self._members: Members | None = None

    def on_changed(self, found: Versioned) -> None:
        """Handle a new record of the run."""
        if (run := decode_run(found.value)) is None:
            return  # the supervisor of another release wrote the record; it replaces this process
        self.addresses = run.addresses
        self._transport.add_peers(run.addresses)
        if run.members is not None and run.members != self._members:
            self._members = run.members
            self._shell.want_members(run.members)


def _journal_of(process: str, nodes: Sequence[NodeId], start: NodeStart) -> Journal:
    config = start.config
    persists = any(kind_of(node) in ("sequencer", "storage") for node in nodes)
    directory = config.node.data_dir / process
    with directory_usable(directory):
        return Journal.open(
            directory,
            segment_bytes=config.node.journal.segment_bytes if persists else _UNUSED_SEGMENT_BYTES,
            durability=config.cluster.durability,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a process of a cluster until SIGTERM. If its supervisor ends before the process is ready,
    the process also ends.
    """
    parser = argparse.ArgumentParser("indilog.node", description="Run a process of a cluster.")
    parser.add_argument("--name", required=True, help="name of the process, or of its one node")
    parser.add_argument("--metadata", required=True, help="address of the metadata store")
    parser.add_argument("--keys", type=Path, help="directory with the keys of this node")
    parser.add_argument("--supervisor-fd", type=int, help="socket to the process that started it")
    parser.add_argument("--control", type=Path, help="where the next supervisor may adopt it")
    given = parser.parse_args(arguments)
    configure_logging()
    structlog.contextvars.bind_contextvars(node=given.name)
    raise_limit()
    sys.exit(uvloop.run(_run(given)))


async def _run(given: argparse.Namespace) -> int:
    """Run a node until it ends, and return the exit status (sysexits.h)."""
    stop = _Stop()
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        stop.now()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.asked)
    supervisor = SupervisorLink(given.supervisor_fd, given.control, stop.now)
    serving = asyncio.create_task(_serve(given, supervisor, stop, fail))
    stopping = asyncio.create_task(stop.serving.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not supervisor.was_ready:
            serving.cancel()  # the process was asked to stop before it was ready
        faulthandler.dump_traceback_later(NodeConfig().processes.stop_timeout_s, exit=True)
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        if failures:
            supervisor.failed(str(failures[0]))
    except (IndilogError, OSError) as error:
        _log.error("node cannot start", error=str(error))
        supervisor.failed(str(error))
        failures.append(error)
        retryable = isinstance(error, IndilogError) and error.retryable
        if not isinstance(error, DataLossError):
            return os.EX_TEMPFAIL if retryable else os.EX_USAGE
    finally:
        stopping.cancel()
        supervisor.close()
    if any(isinstance(failure, DataLossError) for failure in failures):
        return os.EX_DATAERR
    return os.EX_SOFTWARE if failures else os.EX_OK


class _Stop:
    """The requests to stop a process.

    Attributes:
        serving: set when gateways and workers are to end.
        all: set when the whole process is to end.
    """

    def __init__(self) -> None:
        self.serving = asyncio.Event()
        self.all = asyncio.Event()

    def asked(self) -> None:
        """Handle a signal. The first signal ends the gateways, and the second ends the process."""
        (self.all if self.serving.is_set() else self.serving).set()

    def now(self) -> None:
        """End the process."""
        self.serving.set()
        self.all.set()


async def _serve(
    given: argparse.Namespace,
    supervisor: SupervisorLink,
    stop: _Stop,
    fail: Callable[[BaseException], None],
) -> None:
    """Run the nodes of the process until `stop`. A compute node also runs its gateway and workers.

    If the process has several nodes, its gateway ends at `stop.serving`. Its nodes run until
    `stop.all`, or until the supervisor has ended.
    """
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(
            node_running(given.name, given.metadata, fail, given.keys)
        )
        board = StatusFiles(node.start.directory)
        await stack.enter_async_context(
            publish_status(board, node.nodes, lambda: status_of_process(node.shell))
        )
        supervisor.up()
        await wait_for_metalog(node.shell)  # may take long; the status shows it
        async with AsyncExitStack() as gateways:
            urls = [await _gateway_of(name, node, board, gateways) for name in node.nodes]
            detail = next((url for url in urls if url), "")
            collect_rarely()
            supervisor.ready(detail, hang_s=node.start.config.node.processes.hang_s)
            await stop.serving.wait()
        if len(node.nodes) > 1 and supervisor.drained():
            faulthandler.cancel_dump_traceback_later()
            await stop.all.wait()
            faulthandler.dump_traceback_later(NodeConfig().processes.stop_timeout_s, exit=True)


async def _gateway_of(
    name: NodeId, node: RunningNode, board: StatusBoard, stack: AsyncExitStack
) -> str:
    """Run the gateway and the workers of a compute node; return its URL. For another kind of node,
    return an empty text.
    """
    start = node.start
    if (logs := logs_of(node.shell, name, start.config)) is None:
        return ""
    port = port_of(start.directory, name, start.config.node.gateway.port)
    members = ClusterMembers(node.store, start.config, name)
    peers = peers_of(logs, start.config.node.data_dir)
    serving = calls_served(
        node.shell, logs, start.config, port, board=board, members=members, peers=peers
    )
    url = await stack.enter_async_context(serving)
    if (listens_on := urlsplit(url).port) is not None:
        keep_port(start.directory, name, listens_on)
    return url


def status_of_process(shell: NodeShell) -> dict[str, Mapping[str, Any]]:
    """Return the status of each role. It includes the release, and counts of the journal and the
    transport, which all roles of the process share.
    """
    shared = {
        "release": __version__,
        "journal_damaged": shell.metrics.damaged,
        "journal_corrected": shell.metrics.corrected,
        "refused_peers": shell.metrics.dropped.get(REFUSED_PEER, 0),
    }
    return {node: {**status, **shared} for node, status in status_of_nodes(shell).items()}
