"""Starts and stops the processes of nodes that join and leave a running cluster (ARCHITECTURE 11,
decision 0049).

The supervisor watches the wanted members and the installed view. A new node joins in these steps,
so that no node sends to a peer that it cannot reach:

1. The record of the run gets its address, which all processes learn.
2. Its process starts. A storage node, an index node or an aggregator is ready at once.
3. When all processes of the new nodes of these three kinds are ready, the record of the run gets
   the members. All processes learn them, and the primary installs the view. A new compute node can
   only then become ready.

The process of a compute node that leaves is stopped first: without its shard, its running calls
could not append. The processes of other nodes are stopped when neither the wanted members nor the
installed view has the node. Each step can be repeated, so the supervisor may be killed between any
two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

import msgspec
import structlog

from indilog.base.errors import IndilogError
from indilog.base.ids import NodeId
from indilog.kernel.view import Members, View
from indilog.runtime.cluster.cluster_members import Wanted, wanted_in
from indilog.runtime.cluster.cluster_state import MEMBERS_KEY, VIEW_KEY, Run, change_run
from indilog.runtime.cluster.following import RETRY_S
from indilog.runtime.cluster.membership import kind_of, leaving_engines, needed
from indilog.runtime.cluster.metadata_opening import OpenedMetadata
from indilog.runtime.cluster.supervised_process import SupervisedProcess

_log = structlog.get_logger(__name__)


class Decision(NamedTuple):
    """What the supervisor does next."""

    start: tuple[NodeId, ...]
    stop: tuple[NodeId, ...]
    awaited: tuple[NodeId, ...]
    """New nodes whose processes must be ready before the view is installed."""
    ending: tuple[NodeId, ...]
    """Nodes that leave, and whose processes must end before the view is installed."""


def decided(
    members: Members, installed: View, before: View, processes: Collection[NodeId]
) -> Decision:
    """Return which processes to start and to stop.

    Args:
        members: the wanted members.
        installed: the newest installed view.
        before: the view that was installed when this was decided last.
        processes: nodes that have a process.
    """
    leaving = leaving_engines(installed, members)
    ending = tuple(node for node in processes if node in leaving)
    # A new compute node may get the shard of one that leaves. So it starts after that one has
    # ended: a writer needs a greater epoch than the one before.
    waiting = set(members.engines) - set(installed.engines) if ending else set()
    nodes = [
        node for node in needed(installed, members) if node not in leaving and node not in waiting
    ]
    # A compute node that left and is wanted again needs a new incarnation to get a shard.
    left = set(before.engines) - set(installed.engines)
    here = set(installed.nodes)
    return Decision(
        start=tuple(node for node in nodes if node not in processes),
        stop=tuple(node for node in processes if node not in nodes or node in left),
        awaited=tuple(n for n in members.nodes if n not in here and kind_of(n) != "engine"),
        ending=ending,
    )


class Scaling:
    """Follows the wanted members of a running cluster.

    Args:
        metadata: the metadata store.
        view: the installed view at the start.
        processes: the processes of the cluster; nodes are added and removed.
        start: starts the process of a node.
        addresses: returns the addresses of nodes, given those that are known.
        left_out: nodes whose processes another program runs.
        on_left: called when the process of a node that left has ended.

    Attributes:
        view: the newest installed view that is known.
    """

    def __init__(
        self,
        metadata: OpenedMetadata,
        view: View,
        processes: dict[NodeId, SupervisedProcess],
        start: Callable[[NodeId], None],
        addresses: Callable[[Collection[NodeId], dict[NodeId, str]], dict[NodeId, str]],
        left_out: Collection[NodeId],
        on_left: Callable[[NodeId], None],
    ) -> None:
        self._metadata = metadata
        self._store = metadata.store
        self._processes = processes
        self._start = start
        self._addresses = addresses
        self._left_out = left_out
        self._on_left = on_left
        self._leaving: dict[NodeId, asyncio.Task[None]] = {}
        """The nodes whose processes are being stopped."""
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

    async def _follow(self, wanted: Wanted) -> list[NodeId]:
        """Start and stop processes; return the new nodes whose processes are not ready yet."""
        before, self.view = self.view, wanted.view
        if before != wanted.view:
            await self._metadata.copy_layout()
        decision = decided(wanted.members, wanted.view, before, self._processes)
        for node in decision.stop:
            if node not in self._leaving:
                self._leaving[node] = asyncio.create_task(self._stop(node))
        new = [node for node in decision.start if node not in self._left_out]
        if new:
            await change_run(self._store, self._with_addresses_of(new))
        for node in new:
            _log.info("node added", node=node)
            self._start(node)
        awaited = [node for node in decision.awaited if not self._is_up(node)]
        if not awaited and not decision.ending and wanted.members_version > 0:
            await change_run(
                self._store, lambda run: msgspec.structs.replace(run, members=wanted.members)
            )
        return awaited

    def _with_addresses_of(self, nodes: Collection[NodeId]) -> Callable[[Run], Run]:
        def change(run: Run) -> Run:
            addresses = self._addresses(nodes, run.addresses)
            return msgspec.structs.replace(run, addresses=addresses)

        return change

    def _is_up(self, node: NodeId) -> bool:
        return node in self._left_out or (
            node not in self._leaving
            and (process := self._processes.get(node)) is not None
            and process.is_ready
        )

    async def _stop(self, node: NodeId) -> None:
        """Stop the process of a node that left."""
        _log.info("node left", node=node)
        await self._processes[node].stop()
        del self._processes[node]
        self._on_left(node)

    async def _wait_for_change(self, wanted: Wanted, awaited: Collection[NodeId]) -> None:
        """Wait until there are other members or a new view, an awaited process is ready, or a
        process has ended.
        """
        watches: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._store.watch(MEMBERS_KEY, after=wanted.members_version)),
            asyncio.create_task(self._store.watch(VIEW_KEY, after=wanted.view_version)),
            *(
                asyncio.create_task(process.ready())
                for node in awaited
                if (process := self._processes.get(node)) is not None and not process.has_failed
            ),
        ]
        try:
            await asyncio.wait(
                {*watches, *self._leaving.values()}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        for node in [node for node, task in self._leaving.items() if task.done()]:
            self._leaving.pop(node).result()
