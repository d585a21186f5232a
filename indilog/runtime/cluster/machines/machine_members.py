"""Lets nodes join and leave a cluster on several machines (decision 0057).

No supervisor starts and stops processes. So each process changes its own part of the members that
the primary is to install (`RunSettings.members`). A process that joins adds its nodes when they
run. A process that leaves removes its nodes when its gateway has ended. If a process is gone and an
operator has asked to drain it, the other processes remove its nodes. `machine_process` calls the
functions here, and its gateway uses `MachineMembers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, NoReturn

import msgspec
import structlog

from indilog.base.errors import ConfigError, IndilogError
from indilog.base.ids import NodeId
from indilog.kernel.view import Members, View
from indilog.runtime.cluster.cluster_members import (
    ClusterMembers,
    WantedMembers,
    want_zones,
    wanted_in,
)
from indilog.runtime.cluster.cluster_state import MEMBERS_KEY, VIEW_KEY, RunSettings, change_run
from indilog.runtime.cluster.following import RETRY_S
from indilog.runtime.cluster.machines.status_keys import StatusKeys
from indilog.runtime.cluster.membership import (
    check_can_change,
    in_zones,
    kind_of,
    needed,
    next_version,
    with_nodes,
    without,
    without_nodes,
)
from indilog.runtime.cluster.processes import Processes, with_other_sequencer
from indilog.runtime.cluster.status_files import INTERVAL_S
from indilog.runtime.metadata.store import MetadataStore, Written

_log = structlog.get_logger(__name__)


class MachineMembers(ClusterMembers):
    """Shows and changes the members of a cluster on several machines.

    Args:
        store: the metadata store.
        config: configuration of this machine.
        node: the compute node whose gateway uses this object.
    """

    def _zones(self, members: Members, processes: Processes) -> dict[NodeId, str]:  # noqa: ARG002
        """Return no zones, because each machine declares its own zone."""
        return {}

    async def scale(self, counts: object) -> dict[str, Any]:  # noqa: ARG002 - whatever they are
        """Refuse, because the processes of other machines are started there.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "Nodes of this cluster join when they are started: run `indilog node` on another "
            "machine; `indilog cluster drain` lets a node leave."
        )

    async def finalize(self, shard: int, cuts: int) -> dict[str, Any]:
        """See `ClusterMembers.finalize`."""
        await super().finalize(shard, cuts)
        return await self._installing()

    async def rebalance(self) -> dict[str, Any]:
        """See `ClusterMembers.rebalance`."""
        await super().rebalance()
        return await self._installing()

    async def _installing(self) -> dict[str, Any]:
        """Let the primary install the wanted settings that need no new nodes. Return the state of
        the cluster.
        """
        wanted = await wanted_in(self.store)
        await change_run(self.store, lambda run: _installing(run, wanted))
        return await self.state()

    async def replace(self, name: str) -> dict[str, Any]:
        """Refuse, because processes of other machines are started there.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"Run `indilog node` on another machine, then `indilog cluster drain {name}`: a "
            "machine that is silent is given up."
        )

    async def drain(self, node: str) -> dict[str, Any]:
        """Let all nodes of a process leave; return the state of the cluster.

        Raises:
            ConfigError: there is no such process, or it cannot leave; nothing was changed.
        """

        def left(members: Members, view: View, processes: Processes) -> tuple[Members, Processes]:
            leaving = _nodes_to_leave(node, members, view, processes)
            return _without(members, view, processes, leaving), processes

        return await self.change(left)


def _nodes_to_leave(
    name: str, members: Members, view: View, processes: Processes
) -> tuple[NodeId, ...]:
    known = (*view.sequencers, *needed(view, members))
    if of := processes.nodes_of(name, known):
        return of
    if name in processes.shared:
        raise ConfigError(
            f"{name} is in the process {processes.of(NodeId(name))}, and leaves together with it: "
            f"use `indilog cluster drain {processes.of(NodeId(name))}`."
        )
    there = ", ".join(processes.running(known))
    raise ConfigError(f"The cluster has no node {name!r}; it has {there}.")


def _without(
    members: Members, view: View, processes: Processes, leaving: Collection[NodeId]
) -> Members:
    """Return `members` without some nodes.

    Raises:
        ConfigError: no other node has an index shard, or an aggregator, that these nodes have; or a
            node cannot leave.
    """
    check_can_change(view)
    for node in leaving:
        if kind_of(node) == "sequencer":
            members = with_other_sequencer(members, view, processes, node)
        elif kind_of(node) in {"storage", "engine"}:
            members = without(members, view, node)
    changed = without_nodes(members, leaving)
    lacking = next((n for n, of in enumerate(changed.index_shards) if not of), None)
    if lacking is not None:
        raise ConfigError(
            f"No other node has index shard {lacking}; start another node first: it gets a replica."
        )
    if members.aggregators and not changed.aggregators:
        raise ConfigError("No other node has an aggregator; start another node first.")
    return msgspec.structs.replace(changed, version=next_version(members, view))


async def want_joined(store: MetadataStore, nodes: Collection[NodeId], zone: str = "") -> None:
    """Declare that the cluster is to have these nodes, in this zone. The nodes must already run in
    this process. The primary then installs the next view.

    Raises:
        ConfigError: the cluster cannot change.
        QuorumUnavailableError: the metadata store does not answer.
    """
    while True:
        wanted = await wanted_in(store)
        changed = with_nodes(wanted.members, nodes)
        if zone:
            changed = in_zones(changed, wanted.view, dict.fromkeys(nodes, zone))
        if changed == wanted.members:
            break
        check_can_change(wanted.view)
        changed = msgspec.structs.replace(
            changed, version=next_version(wanted.members, wanted.view)
        )
        outcome = await store.compare_and_set(
            MEMBERS_KEY, msgspec.json.encode(changed), expected_version=wanted.members_version
        )
        if isinstance(outcome, Written):
            break
    wanted = await wanted_in(store)
    await change_run(store, lambda run: _installing(run, wanted, joined=nodes))


async def want_zone(store: MetadataStore, nodes: Collection[NodeId], zone: str) -> None:
    """Declare the zone of nodes that are members. An empty zone changes nothing."""
    if not zone:
        return
    await want_zones(store, lambda members: dict.fromkeys({*members} & {*nodes}, zone))
    wanted = await wanted_in(store)
    await change_run(store, lambda run: _installing(run, wanted))


async def install_without(store: MetadataStore, nodes: Collection[NodeId]) -> None:
    """Let the primary install a view without these nodes. Their calls must have ended."""
    wanted = await wanted_in(store)
    await change_run(store, lambda run: _installing(run, wanted, left=nodes))


async def remove_gone(store: MetadataStore, board: StatusKeys) -> NoReturn:
    """Let the primary install views without the leaving nodes that are silent, until cancelled.

    The process of a silent node cannot report that its calls have ended. A node may become silent
    before or after an operator asks to drain it.
    """
    while True:
        try:
            await remove_silent(store, board)
        except IndilogError as error:
            _log.warning("nodes that are gone are not removed now", reason=str(error))
        await asyncio.sleep(INTERVAL_S)


async def remove_silent(store: MetadataStore, board: StatusKeys) -> None:
    """Do one round of `remove_gone`.

    Raises:
        QuorumUnavailableError: the metadata store does not answer.
    """
    wanted = await wanted_in(store)
    leaving = sorted({*wanted.view.nodes} - {*wanted.members.nodes})
    if not leaving:
        return
    await board.look()
    if gone := board.read(leaving).silent:
        _log.warning("nodes that are gone leave", nodes=gone)
        await install_without(store, gone)


def _installing(
    run: RunSettings,
    wanted: WantedMembers,
    *,
    joined: Collection[NodeId] = (),
    left: Collection[NodeId] = (),
) -> RunSettings:
    """Return the record of the run with new members for the primary to install: the members before,
    without the nodes `left` and with the nodes `joined`.
    """
    base = wanted.view.members if run.members is None else run.members
    changed = with_nodes(without_nodes(base, left), joined)
    # A standby sequencer has run since its process joined. So it may replace a sequencer at once.
    changed = msgspec.structs.replace(
        changed,
        sequencers=wanted.members.sequencers,
        zones=wanted.members.zones,
        finalized=wanted.members.finalized,
        rebalance=wanted.members.rebalance,
    )
    if changed == base:
        return run
    version = max(base.version, next_version(wanted.members, wanted.view))
    changed = msgspec.structs.replace(changed, version=version + 1)
    return msgspec.structs.replace(run, members=changed)


class Membership:
    """Follows whether the nodes of this process are members of the cluster.

    Attributes:
        leaving: set when none of the nodes is a wanted member.
        left: set when, in addition, the installed view has none of the nodes.
    """

    def __init__(self, store: MetadataStore, nodes: Collection[NodeId]) -> None:
        self._store = store
        self._nodes = frozenset(nodes)
        self.leaving = asyncio.Event()
        self.left = asyncio.Event()

    async def follow(self) -> NoReturn:
        """Watch the wanted members and the view, until cancelled."""
        while True:
            try:
                wanted = await self.look()
                await self._changed(wanted)
            except IndilogError as error:
                _log.warning("changes of the cluster are not followed", reason=str(error))
                await asyncio.sleep(RETRY_S)

    async def look(self) -> WantedMembers:
        """Read the wanted members and the view, and set `leaving` and `left`."""
        wanted = await wanted_in(self._store)
        if not self._nodes & {*wanted.members.nodes}:
            self.leaving.set()
            if not self._nodes & {*wanted.view.nodes}:
                self.left.set()
        return wanted

    async def _changed(self, wanted: WantedMembers) -> None:
        watches = [
            asyncio.create_task(self._store.watch(MEMBERS_KEY, after=wanted.members_version)),
            asyncio.create_task(self._store.watch(VIEW_KEY, after=wanted.view_version)),
        ]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
