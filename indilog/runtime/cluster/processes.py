"""Decides which processes of a cluster run which nodes (ARCHITECTURE 5, decision 0050).

A process has one journal, in the folder of the data directory that has the name of the process. By
default each node has a process of its own, with the node's name. With `shared_processes`, the nodes
of the first start are spread over that many processes, named `node-0` and so on. Each shared
process gets a node of each kind. So a machine needs one process, and the loss of one process costs
one copy of everything.

A node never moves to another process, because its frames are in its process's journal. So the nodes
of a shared process leave together, and the number of a process is not used again. `cluster_members`
and `layout` store the `Processes`; the supervisor and the nodes read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from indilog.base.errors import ConfigError, NotReadyError
from indilog.base.ids import NodeId
from indilog.kernel.view import Members, View
from indilog.runtime.cluster.membership import (
    ADDED_MAX,
    Kind,
    check_can_change,
    kind_of,
    needed,
    next_version,
    with_nodes,
    without,
)
from indilog.runtime.metadata.store import MetadataStore, Written
from indilog.runtime.metadata.stored_values import decode_stored

PROCESSES_KEY: Final = "processes"
"""The nodes of each shared process (`Processes`); missing: each node has a process of its own."""


class Processes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processes of a cluster.

    Attributes:
        count: number of shared processes that were ever created: `node-0` to
            `node-{count - 1}`. Some may have left.
        shared: the process of each node that shares a process.
        gone: processes that are gone permanently. They are not started again.
    """

    count: int = 0
    shared: dict[NodeId, str] = {}
    gone: tuple[str, ...] = ()

    def of(self, node: NodeId) -> str:
        """Return the process of a node."""
        return self.shared.get(node, node)

    def nodes_of(self, process: str, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """Return the nodes among `nodes` that a process has."""
        return tuple(node for node in nodes if self.of(node) == process)

    def all_of(self, process: str) -> tuple[NodeId, ...]:
        """Return all nodes that share a process. Some may not have joined yet, or have left."""
        return self.nodes_of(process, self.shared)

    def standbys(self, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """Return the sequencers that share a process with one of `nodes`, but are not in `nodes`.
        They run, and may take the place of a leaving sequencer.
        """
        known = set(nodes)
        there = {self.shared[node] for node in known if node in self.shared}
        return tuple(
            node
            for node, process in self.shared.items()
            if process in there and node not in known and kind_of(node) == "sequencer"
        )

    def running(self, nodes: Iterable[NodeId]) -> dict[str, tuple[NodeId, ...]]:
        """Return the processes of `nodes` in the order of their first node, each with its nodes."""
        by_process: dict[str, list[NodeId]] = {}
        for node in nodes:
            by_process.setdefault(self.of(node), []).append(node)
        return {process: tuple(of) for process, of in by_process.items()}


def spread(nodes: Iterable[NodeId], count: int, before: Mapping[NodeId, str]) -> Processes:
    """Spread nodes over `count` processes. Nodes in `before` keep their processes.

    Index nodes of one index shard go to different processes where possible. Apart from that, a node
    goes to the process with the fewest nodes of its kind. Among several such processes, the process
    with the node's own number is preferred.
    """
    shared = dict(before)
    for node in nodes:
        if node in shared:
            continue
        kind, numbers = kind_of(node), [int(n) for n in node.split("-")[1:]]
        preferred = sum(numbers) % count
        best = min(
            range(count),
            key=lambda n: (
                _replicas_at(f"node-{n}", node, shared),
                sum(kind_of(o) == kind for o, at in shared.items() if at == f"node-{n}"),
                (n - preferred) % count,
            ),
        )
        shared[node] = f"node-{best}"
    return Processes(count, shared)


def _replicas_at(process: str, node: NodeId, shared: Mapping[NodeId, str]) -> int:
    """Return how many index nodes of the index shard of `node` a process has."""
    if kind_of(node) != "index":
        return 0
    index_shard = node.rpartition("-")[0] + "-"
    return sum(at == process and other.startswith(index_shard) for other, at in shared.items())


def with_processes(
    members: Members, view: View, processes: Processes, count: int
) -> tuple[Members, Processes]:
    """Return members and processes with `count` shared processes. A new process gets a storage
    node, a compute node, and a sequencer that may replace another sequencer. The processes with the
    greatest numbers leave.

    Args:
        members: the wanted nodes before the change.
        view: the newest installed view.
        processes: the processes before the change.
        count: the new number of shared processes.

    Raises:
        ConfigError: no process is shared, the number is not allowed, or a process cannot leave.
    """
    if not processes.count:
        raise ConfigError(
            "Each node of this cluster has a process of its own: give the numbers of its nodes, "
            "such as --storage-nodes."
        )
    shared = [
        name
        for name in processes.running(_wanted(members, view))
        if name in set(processes.shared.values())
    ]
    shared.sort(key=number_of_process)
    if not 1 <= count <= len(shared) + ADDED_MAX:
        raise ConfigError(
            f"This cluster has {len(shared)} nodes; it can have 1 to {len(shared) + ADDED_MAX} "
            f"after a change, not {count:,}."
        )
    for name in reversed(shared[count:]):
        members = without_process(members, view, processes, name)
    for _ in range(count - len(shared)):
        members, processes = _with_one_more(members, view, processes)
    return members, processes


def _with_one_more(members: Members, view: View, processes: Processes) -> tuple[Members, Processes]:
    check_can_change(view)
    number = processes.count
    roles: tuple[Kind, ...] = ("storage", "engine", "sequencer")
    processes = with_new_process(processes, number, members, view, roles)
    joining = [n for n in processes.all_of(f"node-{number}") if kind_of(n) != "sequencer"]
    changed = with_nodes(members, joining)
    return msgspec.structs.replace(changed, version=next_version(members, view)), processes


def with_new_process(
    processes: Processes, number: int, members: Members, view: View, roles: Iterable[Kind]
) -> Processes:
    """Return `processes` with a new process `node-{number}`, which has a node of each of `roles`.

    A new index node is a further replica of the index shard with the fewest replicas.
    """
    shared = dict(processes.shared)
    for kind in roles:
        if kind == "index":
            fewest = min(
                range(len(members.index_shards)), key=lambda n: len(members.index_shards[n])
            )
            node = _unused_replica(fewest, processes, view, members)
        else:
            node = _unused(kind, number, processes, view, members)
        shared[node] = f"node-{number}"
    return Processes(max(processes.count, number + 1), shared, processes.gone)


def _unused(kind: Kind, number: int, processes: Processes, view: View, members: Members) -> NodeId:
    """Return a name that no node has: with this number, or with the next free number."""
    used = {*processes.shared, *needed(view, members)}
    names = (NodeId(f"{kind}-{n}") for n in itertools.count(number))
    return next(name for name in names if name not in used)


def _unused_replica(shard: int, processes: Processes, view: View, members: Members) -> NodeId:
    """Return a name for a further replica of an index shard."""
    used = {*processes.shared, *needed(view, members)}
    names = (NodeId(f"index-{shard}-{number}") for number in itertools.count())
    return next(name for name in names if name not in used)


def with_replacement(
    members: Members, view: View, processes: Processes, name: str
) -> tuple[Members, Processes]:
    """Return members and processes after the process `name` is gone permanently. Other nodes take
    the place of its nodes. If its nodes are already leaving, no nodes are added.

    Args:
        members: the wanted nodes before the change.
        view: the newest installed view.
        processes: the processes before the change.
        name: a shared process, or a compute node or storage node with a process of its own.

    Raises:
        ConfigError: there is no such process, or it cannot be replaced.
    """
    check_can_change(view)
    if name in processes.shared:
        raise ConfigError(
            f"{name} shares the process {processes.shared[NodeId(name)]} with other nodes: replace "
            "that process."
        )
    if not processes.nodes_of(name, needed(view, members)):
        known = ", ".join(processes.running(needed(view, members)))
        raise ConfigError(f"The cluster has no process {name!r}; it has {known}.")
    if not processes.nodes_of(name, _wanted(members, view)):
        pass  # its nodes are already leaving, and the lost process cannot end its calls
    elif name in processes.shared.values():
        members, processes = _with_one_more(members, view, processes)
        members = without_process(members, view, processes, name)
    else:
        kind = kind_of(NodeId(name))
        if kind not in {"storage", "engine"}:
            raise ConfigError(
                f"{name} is neither a compute node nor a storage node: it starts again with an "
                "empty directory, and fetches what it lacks."
            )
        other = _unused(kind, 0, processes, view, members)
        members = without(with_nodes(members, [other]), view, NodeId(name))
    gone = (*processes.gone, *(() if name in processes.gone else (name,)))
    return members, msgspec.structs.replace(processes, gone=gone)


def without_wanted(processes: Processes, members: Members) -> Processes:
    """Return `processes`, in which processes with a wanted node no longer count as gone."""
    gone = tuple(name for name in processes.gone if not processes.nodes_of(name, members.nodes))
    return msgspec.structs.replace(processes, gone=gone)


def _wanted(members: Members, view: View) -> tuple[NodeId, ...]:
    """Return all wanted nodes, sequencers first."""
    return tuple(dict.fromkeys((*(members.sequencers or view.sequencers), *members.nodes)))


def without_process(members: Members, view: View, processes: Processes, name: str) -> Members:
    """Return `members` without the nodes of a shared process. If these nodes are already leaving,
    return `members` itself.

    An index node or aggregator of the process is replaced by a node with a process of its own. A
    sequencer is replaced by a standby.

    Raises:
        ConfigError: one of its nodes cannot leave.
    """
    of = processes.nodes_of(name, _wanted(members, view))
    for node in of:
        kind = kind_of(node)
        if kind == "index":
            members = _with_other_replica(members, view, processes, node)
        elif kind == "aggregator":
            other = _unused("aggregator", 0, processes, view, members)
            rest = tuple(n for n in members.aggregators if n != node)
            members = msgspec.structs.replace(
                members, aggregators=(*rest, other), version=next_version(members, view)
            )
        elif kind == "sequencer":
            members = with_other_sequencer(members, view, processes, node)
        else:
            members = without(members, view, node)
    return members


def with_other_sequencer(
    members: Members, view: View, processes: Processes, node: NodeId
) -> Members:
    """Return `members` with another sequencer in place of `node`. If `node` is already leaving,
    return `members` itself.

    Raises:
        ConfigError: no remaining process has a sequencer that may take the place of `node`.
    """
    sequencers = members.sequencers or view.sequencers
    if node not in sequencers:
        return members
    check_can_change(view)
    leaving = {processes.of(gone) for gone in (*view.sequencers, node) if gone not in sequencers}
    leaving.add(processes.of(node))
    others = [
        other
        for other in processes.standbys(members.nodes)
        if other not in sequencers and processes.of(other) not in leaving
    ]
    if not others:
        raise ConfigError(
            f"{node} is a sequencer, and no other node can take its place: add one first."
        )
    kept = tuple(
        other if sequencer == node else sequencer
        for sequencer in sequencers
        for other in others[:1]
    )
    return msgspec.structs.replace(members, sequencers=kept, version=next_version(members, view))


def _with_other_replica(
    members: Members, view: View, processes: Processes, node: NodeId
) -> Members:
    """Return `members` with another index node in place of `node`."""
    other = _unused_replica(int(node.split("-")[1]), processes, view, members)
    index_shards = tuple(
        tuple(other if replica == node else replica for replica in replicas)
        for replicas in members.index_shards
    )
    return msgspec.structs.replace(
        members, index_shards=index_shards, version=next_version(members, view)
    )


def check_leave_together(before: Members, after: Members, processes: Processes) -> None:
    """Refuse a change after which only some nodes of a shared process leave. The process would run
    until all its nodes have left.

    Raises:
        ConfigError: a node of a shared process would leave without the other nodes.
    """
    kept = {*after.nodes}
    for node in before.nodes:
        if node in processes.shared and node not in kept:
            name = processes.of(node)
            raise ConfigError(
                f"{node} shares the process {name} with other nodes, so it leaves together with "
                f"them: use `indilog cluster drain {name}`, or change the number of --nodes."
            )


def number_of_process(name: str) -> int:
    """Return the number of a shared process: 2 for `node-2`."""
    return int(name.rpartition("-")[2])


def zones_in_turn(
    nodes: Iterable[NodeId], processes: Processes, labels: Sequence[str]
) -> dict[NodeId, str]:
    """Return the zone of each node. The processes get `labels` in turn, by their numbers."""
    if not labels:
        return {}
    return {node: labels[number_of_process(processes.of(node)) % len(labels)] for node in nodes}


async def processes_in(store: MetadataStore) -> Processes:
    """Return the processes of the cluster.

    Raises:
        DataDirectoryError: another release wrote the record of the processes.
    """
    found = await store.get(PROCESSES_KEY)
    return Processes() if found is None else decode_processes(found.value)


async def claim_processes(
    store: MetadataStore, count: int, nodes: Iterable[NodeId], *, is_new: bool
) -> Processes:
    """Return the processes of the cluster. The first start spreads `nodes` over `count` shared
    processes. With 0, each node has a process of its own.

    Args:
        store: the metadata store.
        count: configured number of shared processes.
        nodes: nodes of the first view.
        is_new: whether the cluster has no view yet.

    Raises:
        ConfigError: the cluster was created with another number of processes.
        NotReadyError: another process starts the cluster at the same time.
    """
    found = await store.get(PROCESSES_KEY)
    if found is None and is_new and count:
        made = spread(nodes, count, {})
        value = msgspec.json.encode(made)
        outcome = await store.compare_and_set(PROCESSES_KEY, value, expected_version=0)
        if not isinstance(outcome, Written):
            raise NotReadyError("Another process starts the cluster; start again.")
        return made
    processes = Processes() if found is None else decode_processes(found.value)
    if bool(processes.count) != bool(count) or processes.count < count:
        raise ConfigError(
            "The data directory was created by a cluster with "
            f"{_described(processes.count)}, not with {_described(count)}; start it like before. "
            "`indilog cluster scale` adds nodes to a running cluster."
        )
    return processes


def decode_processes(value: bytes) -> Processes:
    """Return the processes of the cluster; see `decode_stored`."""
    return decode_stored(value, Processes, "The record of the processes")


def _described(count: int) -> str:
    return f"{count} shared processes" if count else "a process for each node"
