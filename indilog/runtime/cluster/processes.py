"""Which processes of a cluster run which nodes (ARCHITECTURE 5, decision 0050).

A process has one journal, in the folder of the data directory that has the name of the process. By
default each node has a process of its own, with the node's name. With `shared_processes`, the nodes
of the first start are spread over that many processes, `node-0` and so on: each gets a node of each
kind. So a machine needs one process, and the loss of one process costs one copy of everything. A
node never moves to another process, because its frames are in that process's journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from indilog.base.errors import ConfigError, DataDirectoryError, NotReadyError
from indilog.base.ids import NodeId
from indilog.runtime.cluster.membership import kind_of
from indilog.runtime.metadata.store import MetadataStore, Written

PROCESSES_KEY: Final = "processes"
"""The nodes of each shared process (`Processes`); missing: each node has a process of its own."""


class Processes(msgspec.Struct, frozen=True):
    """The processes of a cluster.

    Attributes:
        count: number of shared processes: `node-0` up to the one before `node-{count}`.
        shared: the process of each node that shares one.
    """

    count: int = 0
    shared: dict[NodeId, str] = {}

    def of(self, node: NodeId) -> str:
        """Return the process of a node."""
        return self.shared.get(node, node)

    def nodes_of(self, process: str, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """Return which of `nodes` a process has."""
        return tuple(node for node in nodes if self.of(node) == process)

    def running(self, nodes: Iterable[NodeId]) -> dict[str, tuple[NodeId, ...]]:
        """Return the processes of `nodes`, in the order of their first node, with these nodes."""
        by_process: dict[str, list[NodeId]] = {}
        for node in nodes:
            by_process.setdefault(self.of(node), []).append(node)
        return {process: tuple(of) for process, of in by_process.items()}


def spread(nodes: Iterable[NodeId], count: int, before: Mapping[NodeId, str]) -> Processes:
    """Spread nodes over `count` processes, besides those that have a process `before`.

    A node goes to the process with the fewest nodes of its kind, but index nodes of one index shard
    to different ones where possible. Among equals, to the process that has its number.
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


async def processes_in(store: MetadataStore) -> Processes:
    """Return the processes of the cluster.

    Raises:
        DataDirectoryError: another release wrote them.
    """
    found = await store.get(PROCESSES_KEY)
    return Processes() if found is None else processes_decoded(found.value)


async def claim_processes(
    store: MetadataStore, count: int, nodes: Iterable[NodeId], *, is_new: bool
) -> Processes:
    """Return the processes of the cluster. The first start spreads `nodes` over `count` shared
    processes; 0: each has its own.

    Args:
        store: the metadata store.
        count: of the configuration.
        nodes: nodes of the first view.
        is_new: whether the cluster has no view yet.

    Raises:
        ConfigError: the cluster was created with another number of processes.
        NotReadyError: another program changes them.
    """
    found = await store.get(PROCESSES_KEY)
    if found is None and is_new and count:
        made = spread(nodes, count, {})
        value = msgspec.json.encode(made)
        outcome = await store.compare_and_set(PROCESSES_KEY, value, expected_version=0)
        if not isinstance(outcome, Written):
            raise NotReadyError("Another process starts the cluster; start again.")
        return made
    processes = Processes() if found is None else processes_decoded(found.value)
    if bool(processes.count) != bool(count) or processes.count < count:
        raise ConfigError(
            "The data directory was created by a cluster with "
            f"{_described(processes.count)}, not with {_described(count)}; start it like before. "
            "`indilog cluster scale` adds nodes to a running cluster."
        )
    return processes


def processes_decoded(value: bytes) -> Processes:
    """Return the processes that the metadata store keeps.

    Raises:
        DataDirectoryError: another release wrote them, in a form that this release does not know.
    """
    try:
        return msgspec.json.decode(value, type=Processes)
    except msgspec.DecodeError as error:
        raise DataDirectoryError(
            f"The processes of the cluster are not understood ({error}); were they written by "
            "another release? Use that one, or choose another directory."
        ) from error


def _described(count: int) -> str:
    return f"{count} shared processes" if count else "a process for each node"
