"""Computes the `Members` (wanted nodes) of a cluster after a change by an operator (decision 0049).

The functions here only compute. `cluster_members` stores their results, the supervisor starts and
stops processes, and the primary installs the view.

The name of a node has its kind and its number: `engine-2`, `storage-0`, `index-1-0` (index shard 1,
replica 0), `aggregator-0`. A node that is added gets the smallest free number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId, ShardId
from indilog.config import Config
from indilog.kernel.view import NODES_MAX, Members, View

ADDED_MAX: Final = 32
"""Largest number of nodes that one change may add. Each node may start a process here."""
_PORT_MAX: Final = 65_535

Kind: TypeAlias = Literal["sequencer", "storage", "index", "aggregator", "engine"]
_KINDS: Final[tuple[Kind, ...]] = ("sequencer", "storage", "index", "aggregator", "engine")


class NodeCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wanted numbers of nodes, by kind; None: the present number.

    `nodes` is the number of shared processes; each runs several nodes
    (`indilog.runtime.cluster.processes`). `nodes` excludes all other numbers, and `scaled` ignores
    it.
    """

    nodes: int | None = None
    compute_nodes: int | None = None
    storage_nodes: int | None = None
    index_shards: int | None = None
    index_replicas: int | None = None
    aggregators: int | None = None


def kind_of(node: NodeId) -> Kind | None:
    """Return the kind of the node with this name; None: no node can have such a name."""
    prefix, _, number = node.partition("-")
    numbers = number.split("-")
    parts = 2 if prefix == "index" else 1
    if len(numbers) != parts or not all(n.isascii() and n.isdigit() for n in numbers):
        return None
    return next((kind for kind in _KINDS if kind == prefix), None)


def number_of(node: NodeId) -> int:
    """Return the number at the end of a node's name: 2 for `engine-2`."""
    return int(node.rpartition("-")[2])


def same_members(one: Members, other: Members) -> bool:
    """Return whether two `Members` have the same nodes in any order, the same zones, the same
    finalized shards, and the same number of the last rebalancing.

    Versions and the cuts of finalized shards are not compared. `Members` without sequencers mean
    that the cluster keeps its sequencers; then sequencers are not compared.
    """
    differs = set(one.sequencers) != set(other.sequencers)
    if differs and one.sequencers and other.sequencers:
        return False
    if one.finalized.keys() != other.finalized.keys() or one.rebalance != other.rebalance:
        return False
    there = {*one.nodes}
    if any(one.zones.get(node) != other.zones.get(node) for node in there):
        return False
    return one.index_shards == other.index_shards and all(
        set(mine) == set(others)
        for mine, others in (
            (one.engines, other.engines),
            (one.storage_nodes, other.storage_nodes),
            (one.aggregators, other.aggregators),
        )
    )


def next_version(members: Members, view: View) -> int:
    """Return a version for changed members, above the versions of `members` and of `view`."""
    return max(members.version, view.members_version) + 1


def needed(view: View, members: Members) -> tuple[NodeId, ...]:
    """Return the nodes of the installed view, and then the wanted nodes that it lacks."""
    return tuple(dict.fromkeys((*view.nodes, *members.nodes)))


def leaving_engines(view: View, members: Members) -> frozenset[NodeId]:
    """Return the compute nodes of the installed view that `members` lacks."""
    return frozenset(view.engines) - frozenset(members.engines)


def scaled(members: Members, view: View, counts: NodeCounts, config: Config) -> Members:
    """Return `members` with other numbers of nodes. The nodes with the greatest numbers leave.

    Args:
        members: the wanted nodes before the change.
        view: the newest installed view.
        counts: the new numbers.
        config: the configuration of the cluster.

    Raises:
        ConfigError: the cluster cannot have these numbers, or cannot change while it runs.
    """
    check_can_change(view)
    changed = Members(
        version=next_version(members, view),
        engines=_engines(members, counts.compute_nodes),
        storage_nodes=_storage_nodes(members, view, counts.storage_nodes),
        index_shards=_index_shards(members, counts.index_shards, counts.index_replicas),
        aggregators=_aggregators(members, counts.aggregators, config),
        sequencers=members.sequencers,
        zones=members.zones,
        finalized=members.finalized,
        rebalance=members.rebalance,
    )
    _check_size(changed, members, view)
    _check_ports(changed.engines, config.node.gateway.port)
    return changed


def without(members: Members, view: View, node: NodeId) -> Members:
    """Return `members` without one compute node or storage node. If the node is already leaving,
    return `members` itself.

    Raises:
        ConfigError: there is no such node, it cannot leave, or the cluster cannot change while it
            runs.
    """
    check_can_change(view)
    known = needed(view, members)
    if node not in known:
        raise ConfigError(f"The cluster has no node {node!r}; it has {', '.join(known)}.")
    if node in view.sequencers:
        raise ConfigError(
            f"{node} is a sequencer, which cannot leave alone. In clusters of `indilog up --nodes` "
            "and `indilog node`, drain the process that runs it."
        )
    kind = kind_of(node)
    if kind == "engine":
        engines = tuple(engine for engine in members.engines if engine != node)
        if not engines:
            raise ConfigError(f"{node} is the only compute node that stays; add another one first.")
        return msgspec.structs.replace(
            members, engines=engines, version=next_version(members, view)
        )
    if kind == "storage":
        left = tuple(storage for storage in members.storage_nodes if storage != node)
        _check_replicas(len(left), view)
        return msgspec.structs.replace(
            members, storage_nodes=left, version=next_version(members, view)
        )
    raise ConfigError(
        f"{node} is of the index tier: change it by numbers, such as `indilog cluster scale "
        "--index-shards`."
    )


def with_nodes(members: Members, nodes: Iterable[NodeId]) -> Members:
    """Return `members` with further nodes, of any kind except sequencers. The version stays the
    same.
    """
    for node in nodes:
        if node in members.nodes:
            continue
        kind = kind_of(node)
        if kind == "engine":
            members = msgspec.structs.replace(members, engines=(*members.engines, node))
        elif kind == "storage":
            storage_nodes = tuple(sorted((*members.storage_nodes, node)))
            members = msgspec.structs.replace(members, storage_nodes=storage_nodes)
        elif kind == "aggregator":
            members = msgspec.structs.replace(members, aggregators=(*members.aggregators, node))
        elif kind == "index":
            shard = int(node.split("-")[1])
            index_shards = tuple(
                (*replicas, node) if number == shard else replicas
                for number, replicas in enumerate(members.index_shards)
            )
            members = msgspec.structs.replace(members, index_shards=index_shards)
    return members


def without_nodes(members: Members, nodes: Collection[NodeId]) -> Members:
    """Return `members` without these nodes. The version stays the same."""

    def rest(of: Iterable[NodeId]) -> tuple[NodeId, ...]:
        return tuple(node for node in of if node not in nodes)

    return Members(
        engines=rest(members.engines),
        storage_nodes=rest(members.storage_nodes),
        index_shards=tuple(map(rest, members.index_shards)),
        aggregators=rest(members.aggregators),
        version=members.version,
        sequencers=members.sequencers,
        zones={node: zone for node, zone in members.zones.items() if node not in nodes},
        finalized=members.finalized,
        rebalance=members.rebalance,
    )


def in_zones(members: Members, view: View, zones: Mapping[NodeId, str]) -> Members:
    """Return `members` in which each node in `zones` has its zone in `zones`.

    Other nodes keep their zones. If nothing changes, `members` itself is returned.
    """
    changed = {**members.zones, **zones}
    if changed == members.zones:
        return members
    return msgspec.structs.replace(members, zones=changed, version=next_version(members, view))


def with_finalized(members: Members, view: View, shard: ShardId, cuts: int) -> Members:
    """Return `members` in which `shard` is finalized: it gets no records after `cuts` further cuts
    have been committed. If the shard is already finalized, or its finalization after this number of
    cuts is already wanted, `members` itself is returned.

    Raises:
        ConfigError: there is no such shard, or the cluster cannot change while it runs.
    """
    check_can_change(view)
    if (placed := view.shards.get(shard)) is None:
        shards = ", ".join(map(str, sorted(view.shards)))
        raise ConfigError(f"The cluster has no shard {shard}; it has {shards}.")
    if placed.finalized or members.finalized.get(shard) == cuts:
        return members
    finalized = {**members.finalized, shard: cuts}
    return msgspec.structs.replace(
        members, finalized=finalized, version=next_version(members, view)
    )


def with_rebalancing(members: Members, view: View) -> Members:
    """Return `members` that ask for a rebalancing, which spreads the replicas of shards evenly.
    While an earlier rebalancing is incomplete, `members` itself is returned.

    Raises:
        ConfigError: the cluster cannot change while it runs.
    """
    check_can_change(view)
    if members.rebalance > view.rebalanced:
        return members
    return msgspec.structs.replace(
        members, rebalance=view.rebalanced + 1, version=next_version(members, view)
    )


def missing(members: Members, view: View, started: Members | None) -> list[str]:
    """Return sentences about the difference between the installed view and `members`.

    Args:
        members: the wanted nodes.
        view: the newest installed view.
        started: the newest members whose processes have all been started; None: no members yet.
    """
    here, wanted = set(view.members.nodes), set(members.nodes)
    wanted.update(() if members.sequencers else view.sequencers)
    ready = set() if started is None else set(started.nodes)
    sentences = [
        f"{node} has not joined yet."
        if node in ready
        else f"{node} has not joined yet: its process, or that of another new node, is not ready."
        for node in members.nodes
        if node not in here
    ]
    storage_nodes = set(view.storage_nodes)
    for node in view.members.nodes:
        if node in wanted:
            continue
        why = ""
        if node in storage_nodes:
            why = ": its shards are copied to other nodes"
        elif node in view.engines:
            why = ": its running calls finish"
        elif node in view.sequencers:
            why = ": sequencers are replaced one at a time"
        sentences.append(f"{node} has not left yet{why}.")
    sentences += [
        f"Shard {shard} is not finalized yet."
        for shard in sorted(members.finalized)
        if shard in view.shards and not view.shards[shard].finalized
    ]
    if members.rebalance > view.rebalanced:
        sentences.append("Shards are moved to other storage nodes: their records are copied.")
    if not sentences and any(
        members.zones.get(node) != view.zones.get(node) for node in members.nodes
    ):
        sentences.append("Some zones are not installed yet.")
    # If storage nodes are lost, the primary finalizes their shards without a change of `members`.
    # So the finalized shards are left out of the comparison.
    installed = msgspec.structs.replace(view.members, finalized=members.finalized)
    if not sentences and not same_members(members, installed):
        sentences.append("The index shards that get new positions have not changed yet.")
    return sentences


def state_of(
    members: Members, view: View, started: Members | None, gateway: NodeId
) -> dict[str, Any]:
    """Return the wanted and the installed nodes as plain values, for people. `gateway` is the
    compute node whose gateway answers.
    """
    lacks = missing(members, view, started)
    return {
        "view": view.number,
        "reached": not lacks,
        "missing": lacks,
        "wanted": _described(members, view),
        "installed": _described(view.members, view),
        "gateway": gateway,
    }


def _described(members: Members, view: View) -> Mapping[str, object]:
    return {
        "sequencers": list(members.sequencers or view.sequencers),
        "compute_nodes": list(members.engines),
        "storage_nodes": list(members.storage_nodes),
        "index_shards": [list(replicas) for replicas in members.index_shards],
        "aggregators": list(members.aggregators),
    }


def _engines(members: Members, count: int | None) -> tuple[NodeId, ...]:
    if count is None:
        return members.engines
    if count < 1:
        raise ConfigError(f"There is at least one compute node, not {count}.")
    return _resized(members.engines, count, "engine")


def _storage_nodes(members: Members, view: View, count: int | None) -> tuple[NodeId, ...]:
    if count is None:
        return members.storage_nodes
    _check_replicas(count, view)
    return tuple(sorted(_resized(members.storage_nodes, count, "storage")))


def _aggregators(members: Members, count: int | None, config: Config) -> tuple[NodeId, ...]:
    if count is None:
        return members.aggregators
    if config.cluster.aggregation == "master-slave":
        raise ConfigError(
            'aggregation is "master-slave": index nodes merge the answers, and there are no '
            "aggregators."
        )
    if count < 1:
        raise ConfigError(f"There is at least one aggregator, not {count}.")
    return _resized(members.aggregators, count, "aggregator")


def _index_shards(
    members: Members, shards: int | None, replicas: int | None
) -> tuple[tuple[NodeId, ...], ...]:
    if shards is None and replicas is None:
        return members.index_shards
    shards = len(members.index_shards) if shards is None else shards
    replicas = len(members.index_shards[0]) if replicas is None else replicas
    if shards < 1 or replicas < 1:
        what, count = ("index shard", shards) if shards < 1 else ("index replica", replicas)
        raise ConfigError(f"There is at least one {what}, not {count}.")
    if shards * replicas > NODES_MAX:
        raise ConfigError(
            f"{replicas:,} replicas of {shards:,} index shards are more than {NODES_MAX:,} nodes."
        )
    return tuple(
        tuple(NodeId(f"index-{shard}-{replica}") for replica in range(replicas))
        for shard in range(shards)
    )


def _resized(nodes: Iterable[NodeId], count: int, kind: Kind) -> tuple[NodeId, ...]:
    """Return the `count` nodes with the smallest numbers. If there are fewer, add new nodes."""
    if count > NODES_MAX:
        raise ConfigError(f"A cluster has at most {NODES_MAX:,} nodes, not {count:,} of a kind.")
    kept = sorted(nodes, key=number_of)[:count]
    used = {number_of(node) for node in kept}
    free = (number for number in range(2 * NODES_MAX) if number not in used)
    return (*kept, *(NodeId(f"{kind}-{next(free)}") for _ in range(count - len(kept))))


def check_can_change(view: View) -> None:
    """Refuse to change a running cluster with only one sequencer.

    Such a sequencer installs no view, because the entry may be lost with its disk (decision 0049).

    Raises:
        ConfigError: the cluster has one sequencer.
    """
    if len(view.sequencers) == 1:
        raise ConfigError(
            "This cluster has one sequencer, so its nodes cannot change while it runs. Set "
            "storage_nodes and index_shards for the next start, or create a cluster with "
            "sequencers = 3."
        )


def _check_replicas(count: int, view: View) -> None:
    replicas = max(len(placed.replicas) for placed in view.shards.values())
    if count < replicas:
        raise ConfigError(
            f"{replicas} replicas of each record need as many storage nodes, not {count}."
        )


def _check_size(changed: Members, members: Members, view: View) -> None:
    added = set(changed.nodes) - set(needed(view, members))
    if len(added) > ADDED_MAX:
        raise ConfigError(
            f"This adds {len(added):,} nodes, each a process of this machine; add at most "
            f"{ADDED_MAX} at once."
        )
    if (count := len(needed(view, changed))) > NODES_MAX:
        raise ConfigError(f"A cluster has at most {NODES_MAX:,} nodes; this needs {count:,}.")


def _check_ports(engines: Iterable[NodeId], port: int) -> None:
    if port and (last := port + max(map(number_of, engines))) > _PORT_MAX:
        raise ConfigError(
            f"Compute node N has the gateway port {port:,} + N, and {last:,} is above "
            f"{_PORT_MAX:,}; start with a smaller port."
        )
