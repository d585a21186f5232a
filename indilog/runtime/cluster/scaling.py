"""Starts and stops the processes of nodes that join and leave a running cluster (ARCHITECTURE 11,
decision 0049).

The supervisor watches the wanted members and the installed view. A new node joins in these steps,
so that no node sends to a peer that it cannot reach:

1. The address of the node is added to the record of the run, which all processes follow.
2. The process of the node starts. The roles of a storage node, an index node or an aggregator run
   at once.
3. When the roles of all new nodes of these three kinds run, the members are added to the record of
   the run. All processes follow the record, and the primary installs the view. A new compute node
   can become ready only after that.

If a compute node leaves, its process is stopped before the view is installed. Without its shard,
its running calls could not append. If the compute node shares the process with other nodes, the
process ends only its gateway and continues. A process without a compute node is stopped when
neither the wanted members nor the installed view contain one of its nodes. Each step can be
repeated, so the supervisor may be killed between any two steps. `Supervisor` runs one `Scaling`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import structlog

from indilog.base.errors import IndilogError
from indilog.base.ids import NodeId
from indilog.kernel.view import Members, View
from indilog.runtime.cluster.cluster_members import WantedMembers, wanted_in
from indilog.runtime.cluster.cluster_state import MEMBERS_KEY, VIEW_KEY, RunSettings, change_run
from indilog.runtime.cluster.following import RETRY_S
from indilog.runtime.cluster.membership import kind_of, leaving_engines, needed
from indilog.runtime.cluster.metadata_opening import OpenedMetadata
from indilog.runtime.cluster.processes import Processes
from indilog.runtime.cluster.supervised_process import SupervisedProcess

_log = structlog.get_logger(__name__)


class Decision(NamedTuple):
    """The next actions of the supervisor."""

    start: tuple[NodeId, ...]
    """Nodes whose processes start."""
    stop: tuple[str, ...]
    """Processes to stop."""
    drain: tuple[str, ...]
    """Processes whose gateways are to end, while their other nodes continue."""
    awaited: tuple[NodeId, ...]
    """New nodes whose roles must run before the view is installed."""
    ending: tuple[NodeId, ...]
    """Leaving compute nodes, which must end before the view is installed."""


def decided(
    members: Members,
    installed: View,
    before: View,
    processes: Mapping[str, Sequence[NodeId]],
    drained: Collection[str] = (),
    gone: Collection[NodeId] = (),
) -> Decision:
    """Return which processes to start, to stop and to drain.

    Args:
        members: the wanted members.
        installed: the newest installed view.
        before: the view that was installed at the last decision.
        processes: the running processes, with their nodes.
        drained: the processes whose gateways have ended.
        gone: nodes whose processes are gone permanently.
    """
    leaving = leaving_engines(installed, members)
    ending = tuple(
        node
        for name, of in processes.items()
        if name not in drained
        for node in of
        if node in leaving
    )
    # A new compute node may get the shard of a leaving one. A shard's new writer needs a greater
    # epoch than the previous writer. So the new node starts after the leaving node has ended.
    waiting = set(members.engines) - set(installed.engines) if ending else set()
    nodes = [
        node
        for node in needed(installed, members)
        if node not in leaving and node not in waiting and node not in gone
    ]
    # If a compute node left and is wanted again, it needs a new incarnation to get a shard. So its
    # process is stopped and started again. A shared process is restarted only for this reason.
    left = set(before.engines) - set(installed.engines)
    here = set(installed.nodes)
    there = {node for of in processes.values() for node in of}

    def stops(of: Sequence[NodeId]) -> bool:
        again = left if len(of) == 1 else left & set(members.engines)
        return not set(of) & set(nodes) or bool(again & set(of))

    stop = tuple(name for name, of in processes.items() if stops(of))
    return Decision(
        start=tuple(node for node in nodes if node not in there),
        stop=stop,
        drain=tuple(
            name for name, of in processes.items() if name not in stop and set(of) & set(ending)
        ),
        awaited=tuple(n for n in members.nodes if n not in here and kind_of(n) != "engine"),
        ending=ending,
    )


class Scaling:
    """Follows the wanted members of a running cluster.

    Args:
        metadata: the metadata store.
        view: the installed view at the start.
        layout: returns which processes run which nodes.
        processes: the processes of the cluster. `Scaling` adds and removes processes here.
        start: starts the process with this name.
        addresses: takes nodes and the known addresses; returns the addresses of all these nodes.
        left_out: processes that another program runs.
        on_left: called with each node that has left, when its process has ended.

    Attributes:
        view: the newest known installed view.
    """

    def __init__(  # noqa: PLR0917 what the supervisor has
        self,
        metadata: OpenedMetadata,
        view: View,
        layout: Callable[[], Awaitable[Processes]],
        processes: dict[str, SupervisedProcess],
        start: Callable[[str], None],
        addresses: Callable[[Collection[NodeId], dict[NodeId, str]], dict[NodeId, str]],
        left_out: Collection[str],
        on_left: Callable[[NodeId], None],
    ) -> None:
        self._metadata = metadata
        self._store = metadata.store
        self._read_layout = layout
        self._layout = Processes()
        self._processes = processes
        self._start = start
        self._addresses = addresses
        self._left_out = left_out
        self._on_left = on_left
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """The processes that are being stopped."""
        self._draining: dict[str, asyncio.Task[None]] = {}
        """The processes whose gateways are ending."""
        self.view = view

    async def run(self) -> NoReturn:
        """Start and stop processes until cancelled."""
        while True:
            try:
                wanted = await wanted_in(self._store)
                awaited = await self._follow(wanted)
                await self._wait_for_change(wanted, awaited)
            except (IndilogError, OSError) as error:
                _log.warning("the cluster cannot be changed for now", reason=str(error))
                await asyncio.sleep(RETRY_S)

    async def _follow(self, wanted: WantedMembers) -> list[NodeId]:
        """Start and stop processes; return the new nodes whose processes are not ready yet."""
        before, self.view = self.view, wanted.view
        if before != wanted.view:
            await self._metadata.copy_layout()
        self._layout = await self._read_layout()
        known = needed(wanted.view, wanted.members)
        running = {name: self._layout.nodes_of(name, known) for name in self._processes}
        drained = [name for name, process in self._processes.items() if process.is_drained]
        gone = [node for node in known if self._layout.of(node) in self._layout.gone]
        decision = decided(wanted.members, wanted.view, before, running, drained, gone)
        for name in decision.stop:
            if name not in self._leaving:
                self._leaving[name] = asyncio.create_task(self._stop(name))
        for name in decision.drain:
            if name not in self._draining:
                _log.info("calls end", process=name)
                task = asyncio.create_task(self._processes[name].drain())
                self._draining[name] = task
        new = self._layout.running(decision.start)
        started = [name for name in new if name not in self._left_out]
        if started:
            joining = [node for name in started for node in new[name]]
            added = [*joining, *self._layout.standbys(joining)]
            await change_run(self._store, self._with_addresses_of(added))
        for name in started:
            _log.info("process added", process=name, nodes=new[name])
            self._start(name)
        awaited = [node for node in decision.awaited if not self._is_up(node)]
        if not awaited and not decision.ending and wanted.members_version > 0:
            await change_run(
                self._store, lambda run: msgspec.structs.replace(run, members=wanted.members)
            )
        return awaited

    def _with_addresses_of(self, nodes: Collection[NodeId]) -> Callable[[RunSettings], RunSettings]:
        def change(run: RunSettings) -> RunSettings:
            addresses = self._addresses(nodes, run.addresses)
            return msgspec.structs.replace(run, addresses=addresses)

        return change

    def _is_up(self, node: NodeId) -> bool:
        name = self._layout.of(node)
        return name in self._left_out or (
            name not in self._leaving
            and (process := self._processes.get(name)) is not None
            and process.is_up
        )

    async def _stop(self, name: str) -> None:
        """Stop a process whose nodes have left."""
        _log.info("process leaves", process=name)
        await self._processes[name].stop()
        del self._processes[name]
        for node in self._layout.nodes_of(name, (NodeId(name), *self._layout.shared)):
            self._on_left(node)

    async def _wait_for_change(self, wanted: WantedMembers, awaited: Collection[NodeId]) -> None:
        """Wait until the members or the view have changed, an awaited process is ready, or a
        process has ended.
        """
        watches: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._store.watch(MEMBERS_KEY, after=wanted.members_version)),
            asyncio.create_task(self._store.watch(VIEW_KEY, after=wanted.view_version)),
            *(
                asyncio.create_task(process.up())
                for name in self._layout.running(awaited)
                if (process := self._processes.get(name)) is not None and not process.has_failed
            ),
        ]
        try:
            await asyncio.wait(
                {*watches, *self._leaving.values(), *self._draining.values()},
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        for tasks in (self._leaving, self._draining):
            for name in [name for name, task in tasks.items() if task.done()]:
                tasks.pop(name).result()
