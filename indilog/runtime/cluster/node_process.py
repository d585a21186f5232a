"""Runs one node in its own process: finds its cluster through the metadata store, and runs its role
until it must stop (ARCHITECTURE 5, "Cluster").

The supervisor starts `python -m indilog.node --name storage-0 --metadata
unix:///tmp/indilog-x/metadata`. `node_running` runs a node inside another program, such as a
benchmark that is itself the compute node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
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
from indilog.base.telemetry import configure_logging
from indilog.config import KIB, Config, NodeConfig, node_config
from indilog.kernel.view import Members
from indilog.runtime.cluster.assembly import (
    gateway_running,
    installed_view,
    joined,
    logs_of,
    retention_enforced,
    role_of,
    status_of_nodes,
    wait_for_metalog,
)
from indilog.runtime.cluster.cluster_members import ClusterMembers, publish_views
from indilog.runtime.cluster.cluster_state import RUN_KEY, NodeStart, node_start, run_decoded
from indilog.runtime.cluster.data_directory import directory_usable, journal_lost
from indilog.runtime.cluster.following import followed, running
from indilog.runtime.cluster.gateway_port import keep_port, port_of
from indilog.runtime.cluster.membership import kind_of
from indilog.runtime.cluster.metadata_address import metadata_at
from indilog.runtime.cluster.status_files import publish_status
from indilog.runtime.cluster.supervisor_link import SupervisorLink
from indilog.runtime.cluster.terms import standing_for_primary, term_at_start, terms_followed
from indilog.runtime.descriptors import raise_limit
from indilog.runtime.journal.journal import Journal
from indilog.runtime.metadata.store import MetadataStore, Versioned
from indilog.runtime.node import NodeShell
from indilog.runtime.transport.stream_transport import StreamTransport
from indilog.runtime.transport.transport import REFUSED_PEER, GrowingTransport
from indilog.runtime.transport.zmq_transport import ZmqTransport

_UNUSED_SEGMENT_BYTES: Final = 64 * KIB
"""Size of a journal's segments if the node's role persists nothing, because segment files are
written in advance.
"""

_TRANSPORTS: Final[Mapping[str, type[StreamTransport | ZmqTransport]]] = {
    "stream": StreamTransport,
    "zmq": ZmqTransport,
}

_log = structlog.get_logger(__name__)


class RunningNode(NamedTuple):
    """A node that runs on this loop."""

    shell: NodeShell
    start: NodeStart
    transport: GrowingTransport
    store: MetadataStore


@asynccontextmanager
async def node_running(
    name: NodeId,
    metadata: str,
    on_fatal: Callable[[BaseException], None],
    keys: Path | None = None,
) -> AsyncIterator[RunningNode]:
    """Run the node `name` of the cluster whose metadata store is at `metadata`.

    `keys` is the directory with the keys of this node, which a store at a TCP port requires.

    The node is recovered from its journal when the block begins, and synced and closed when it
    ends.

    Raises:
        ConfigError: the cluster has no such node.
        DataDirectoryError: its directory is in use, of a newer format, or damaged.
        NotReadyError, QuorumUnavailableError: the cluster's first process is not reachable.
    """
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(metadata_at(metadata, keys))
        start = await node_start(store)
        config, view = start.config, start.view
        role = role_of(name, [view], config)
        undo = stack.enter_context(contextlib.ExitStack())
        journal = _journal_of(name, start)
        undo.callback(journal.close)
        lost = await journal_lost(store, name, journal)
        term = await term_at_start(store, view.sequencers, [name], start.epoch)
        loop = asyncio.get_running_loop()
        transport = _TRANSPORTS[config.node.messages.transport](
            start.addresses[name], start.addresses, loop, config
        )
        undo.callback(transport.close)
        shell = NodeShell(
            {name: role},
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
        run = _RunFollower(shell, transport)
        await stack.enter_async_context(followed(store, RUN_KEY, run.on_changed))
        if name in view.sequencers:
            lost_s = config.node.ordering.primary_lost_s
            standing = standing_for_primary(store, name, view.sequencers, start.epoch, lost_s)
            await stack.enter_async_context(standing)
            views = publish_views(store, lambda: installed_view(shell))
            await stack.enter_async_context(running(views))
        yield RunningNode(shell, start, transport, store)


class _RunFollower:
    """Notifies a node of what the supervisor changes while the node runs: addresses of new nodes,
    and then the members, so that the node has the addresses when it sends to new nodes.
    """

    def __init__(self, shell: NodeShell, transport: GrowingTransport) -> None:
        self._shell = shell
        self._transport = transport
        self._members: Members | None = None

    def on_changed(self, found: Versioned) -> None:
        """Handle the record of the run."""
        if (run := run_decoded(found.value)) is None:
            return  # of another release, whose supervisor replaces this process
        self._transport.add_peers(run.addresses)
        if run.members is not None and run.members != self._members:
            self._members = run.members
            self._shell.want_members(run.members)


def _journal_of(name: NodeId, start: NodeStart) -> Journal:
    config = start.config
    persists = kind_of(name) in ("sequencer", "storage")
    directory = config.node.data_dir / name
    with directory_usable(directory):
        return Journal.open(
            directory,
            segment_bytes=config.node.journal.segment_bytes if persists else _UNUSED_SEGMENT_BYTES,
            durability=config.cluster.durability,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one node until SIGTERM, or until its supervisor ends before the node is ready. Then end
    the process.
    """
    parser = argparse.ArgumentParser("indilog.node", description="Run one node of a cluster.")
    parser.add_argument("--name", required=True, help="the node's name in the view")
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
    stop = asyncio.Event()
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    supervisor = SupervisorLink(given.supervisor_fd, given.control, stop.set)
    name = NodeId(given.name)
    serving = asyncio.create_task(_serve(name, given, supervisor, stop, fail))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        faulthandler.dump_traceback_later(NodeConfig().processes.stop_timeout_s, exit=True)
        if not supervisor.was_ready:
            serving.cancel()  # asked to stop before it was ready
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


async def _serve(
    name: NodeId,
    given: argparse.Namespace,
    supervisor: SupervisorLink,
    stop: asyncio.Event,
    fail: Callable[[BaseException], None],
) -> None:
    """Run the node until `stop`; a compute node also runs its gateway and workers."""
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(node_running(name, given.metadata, fail, given.keys))
        detail = ""
        await stack.enter_async_context(
            publish_status(node.start.directory, name, lambda: _status_of(node.shell))
        )
        await wait_for_metalog(node.shell)  # may take long; the status shows it
        if (logs := logs_of(node.shell, name, node.start.config)) is not None:
            await joined(logs)
            configured = node.start.config.node.gateway.port
            port, port_is = port_of(node.start.directory, name, configured)
            config = _config_of_engine(name, node.start, port)
            await stack.enter_async_context(retention_enforced(logs, config))
            detail = await stack.enter_async_context(
                gateway_running(
                    node.shell,
                    logs,
                    config,
                    platform_dir=node.start.config.node.data_dir,
                    run=node.start.directory,
                    port_is=port_is,
                    members=ClusterMembers(node.store, node.start.config, name),
                )
            )
            if (listens_on := urlsplit(detail).port) is not None:
                keep_port(node.start.directory, name, listens_on)
        supervisor.ready(detail, hang_s=node.start.config.node.processes.hang_s)
        await stop.wait()


def _status_of(shell: NodeShell) -> dict[str, Mapping[str, Any]]:
    """Return the status of the roles, and of the journal and the transport that they share."""
    journal = {
        "journal_damaged": shell.metrics.damaged,
        "journal_corrected": shell.metrics.corrected,
        "refused_peers": shell.metrics.dropped.get(REFUSED_PEER, 0),
    }
    return {node: {**status, **journal} for node, status in status_of_nodes(shell).items()}


def _config_of_engine(name: NodeId, start: NodeStart, port: int) -> Config:
    """Give each engine of this machine its own directory and port."""
    node = start.config.node
    own = node_config(node, data_dir=node.data_dir / name, port=port)
    return dataclasses.replace(start.config, node=own)
