"""The wanted and the installed members of a cluster, in the metadata store (ARCHITECTURE 11,
decision 0049).

The key `members` holds the wanted nodes of the cluster. Gateways change this key for operators,
through `ClusterMembers`. The supervisor starts and stops processes accordingly
(`indilog.runtime.cluster.scaling`). The key `view` holds the newest installed view. The process of
the primary writes this key after the metalog entry of the view was committed. So the key may be
older than the metalog, but never newer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import msgspec
import structlog

from indilog.base.errors import ConfigError, IndilogError, NotReadyError
from indilog.base.ids import NodeId, ShardId
from indilog.config import Config
from indilog.kernel.view import Members, View
from indilog.runtime.cluster.cluster_state import (
    MEMBERS_KEY,
    VIEW_KEY,
    decode_members,
    decode_view,
    run_of,
)
from indilog.runtime.cluster.membership import (
    NodeCounts,
    in_zones,
    same_members,
    scaled,
    state_of,
    with_finalized,
    with_rebalancing,
    without,
)
from indilog.runtime.cluster.processes import (
    PROCESSES_KEY,
    Processes,
    check_leave_together,
    decode_processes,
    with_processes,
    with_replacement,
    without_process,
    without_wanted,
    zones_in_turn,
)
from indilog.runtime.metadata.store import MetadataStore, Written

_LOOK_S: Final = 0.2
"""Seconds between two checks whether the primary has installed a view."""

Change: TypeAlias = Callable[[Members, View, Processes], tuple[Members, Processes]]
"""Takes the wanted members, the newest view and the processes before a change. Returns the members
and processes after the change.
"""

_log = structlog.get_logger(__name__)


class WantedMembers(NamedTuple):
    """The wanted members of a cluster, and its newest installed view."""

    members: Members
    members_version: int
    """Version of the key `members`; 0: the members are those of the view."""
    view: View
    view_version: int


async def wanted_in(store: MetadataStore) -> WantedMembers:
    """Return the wanted members and the newest installed view.

    Raises:
        NotReadyError: no start has stored a view yet.
        DataDirectoryError: another release wrote the members or the view.
    """
    members, view = await store.get(MEMBERS_KEY), await store.get(VIEW_KEY)
    if view is None:
        raise NotReadyError("The cluster's first process has not published its view yet.")
    installed = decode_view(view.value)
    if members is None:
        return WantedMembers(installed.members, 0, installed, view.version)
    return WantedMembers(decode_members(members.value), members.version, installed, view.version)


async def store_view(store: MetadataStore, view: View) -> bool:
    """Store an installed view, unless the stored view is as new. Return whether it was stored."""
    value = msgspec.json.encode(view)
    while True:
        found = await store.get(VIEW_KEY)
        if found is not None and decode_view(found.value).number >= view.number:
            return False
        version = 0 if found is None else found.version
        outcome = await store.compare_and_set(VIEW_KEY, value, expected_version=version)
        if isinstance(outcome, Written):
            _log.info("view installed", view=view.number)
            return True


async def publish_views(store: MetadataStore, installed: Callable[[], View | None]) -> NoReturn:
    """Store each new view that `installed` returns, until cancelled."""
    stored = 0
    while True:
        await asyncio.sleep(_LOOK_S)
        if (view := installed()) is None or view.number <= stored:
            continue
        try:
            await store_view(store, view)
            stored = view.number
        except IndilogError as error:
            _log.warning("the installed view is not stored yet", reason=str(error))


async def want_zones(
    store: MetadataStore, zones_of: Callable[[Iterable[NodeId]], Mapping[NodeId, str]]
) -> None:
    """Declare the zones of the members, unless the members already have these zones. The primary
    then installs the zones.

    A cluster with one sequencer keeps the zones of its first start.
    """
    while True:
        wanted = await wanted_in(store)
        if len(wanted.view.sequencers) == 1:
            return
        changed = in_zones(wanted.members, wanted.view, zones_of(wanted.members.nodes))
        if changed == wanted.members:
            return
        outcome = await store.compare_and_set(
            MEMBERS_KEY, msgspec.json.encode(changed), expected_version=wanted.members_version
        )
        if isinstance(outcome, Written):
            _log.info("other zones are wanted", zones=sorted({*changed.zones.values()}))
            return


class ClusterMembers:
    """Shows and changes the members of a cluster, for the gateway of the compute node `node`."""

    def __init__(self, store: MetadataStore, config: Config, node: NodeId) -> None:
        self.store = store
        self._config = config
        self._node = node

    async def state(self) -> dict[str, Any]:
        """Return the wanted and the installed nodes."""
        wanted, run = await wanted_in(self.store), await run_of(self.store)
        started = None if run is None else run.members
        return state_of(wanted.members, wanted.view, started, self._node)

    async def scale(self, counts: object) -> dict[str, Any]:
        """Change the numbers of nodes of the cluster; return the state of the cluster.

        Raises:
            ConfigError: the cluster cannot have these numbers; nothing was changed.
        """
        try:
            given = msgspec.convert(counts, NodeCounts)
        except msgspec.ValidationError as error:
            raise ConfigError(f"Nothing was changed: {error}.") from error
        if (count := given.nodes) is not None:
            if given != NodeCounts(nodes=count):
                raise ConfigError(
                    "Nothing was changed: give the number of nodes, or those of single kinds."
                )
            return await self.change(partial(with_processes, count=count))

        def changed(
            members: Members, view: View, processes: Processes
        ) -> tuple[Members, Processes]:
            wanted = scaled(members, view, given, self._config)
            check_leave_together(members, wanted, processes)
            return wanted, processes

        return await self.change(changed)

    async def drain(self, node: str) -> dict[str, Any]:
        """Let one compute node or storage node, or all nodes of a shared process, leave; return the
        state of the cluster.

        Raises:
            ConfigError: there is no such node, or it cannot leave; nothing was changed.
        """

        def left(members: Members, view: View, processes: Processes) -> tuple[Members, Processes]:
            if node in processes.shared.values():
                return without_process(members, view, processes, node), processes
            changed = without(members, view, NodeId(node))
            check_leave_together(members, changed, processes)
            return changed, processes

        return await self.change(left)

    async def finalize(self, shard: int, cuts: int) -> dict[str, Any]:
        """Finalize a shard: it gets no records after `cuts` further cuts have been committed.
        Return the state of the cluster.

        Raises:
            ConfigError: there is no such shard, or the cluster cannot change; nothing was changed.
        """

        def ended(members: Members, view: View, processes: Processes) -> tuple[Members, Processes]:
            return with_finalized(members, view, ShardId(shard), cuts), processes

        return await self.change(ended)

    async def rebalance(self) -> dict[str, Any]:
        """Spread the replicas of shards evenly over storage nodes and zones; return the state of
        the cluster.

        Raises:
            ConfigError: the cluster cannot change; nothing was changed.
        """

        def spread(members: Members, view: View, processes: Processes) -> tuple[Members, Processes]:
            return with_rebalancing(members, view), processes

        return await self.change(spread)

    async def replace(self, name: str) -> dict[str, Any]:
        """If a process is gone permanently, replace its nodes by other nodes. Return the state of
        the cluster.

        Raises:
            ConfigError: there is no such process, or it cannot be replaced; nothing was changed.
        """
        return await self.change(partial(with_replacement, name=name))

    def _zones(self, members: Members, processes: Processes) -> dict[NodeId, str]:
        """Return the zones of the nodes that the configuration of this process names."""
        return zones_in_turn(members.nodes, processes, self._config.node.zones)

    async def change(self, change: Change) -> dict[str, Any]:
        """Change the wanted members and the processes; return the state of the cluster."""
        while True:
            wanted = await wanted_in(self.store)
            before = await self.store.get(PROCESSES_KEY)
            processes = Processes() if before is None else decode_processes(before.value)
            changed, spread = change(wanted.members, wanted.view, processes)
            spread = without_wanted(spread, changed)
            if len(wanted.view.sequencers) > 1:
                changed = in_zones(changed, wanted.view, self._zones(changed, spread))
            if spread != processes:
                # The processes are stored first, so that the supervisor knows the process of the
                # new nodes. If the members are then not changed, no node uses the new process.
                version = 0 if before is None else before.version
                outcome = await self.store.compare_and_set(
                    PROCESSES_KEY, msgspec.json.encode(spread), expected_version=version
                )
                if not isinstance(outcome, Written):
                    continue
            same_graces = changed.finalized == wanted.members.finalized
            same_gone = spread.gone == processes.gone  # if not, the supervisor must act on `gone`
            if same_gone and same_graces and same_members(changed, wanted.members):
                return await self.state()
            outcome = await self.store.compare_and_set(
                MEMBERS_KEY, msgspec.json.encode(changed), expected_version=wanted.members_version
            )
            if isinstance(outcome, Written):
                _log.info("other members are wanted", nodes=list(changed.nodes))
                return await self.state()
