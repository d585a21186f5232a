"""The view: an immutable, numbered configuration of the cluster (ARCHITECTURE 3, glossary).

A view names the first replicas of each shard; metalog entries move shards
(`indilog.kernel.placement`). A metalog entry installs the next view while the cluster runs
(`NewView`): compute nodes, storage nodes and index shards join and leave (decision 0049). A start
whose configuration names more storage nodes or another index tier stores the next view before any
node runs.

`indilog_ordering` decides when the next view is installed. Roles read views through a `Placement`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, TypeAlias

import msgspec

from indilog.base.errors import ConfigError
from indilog.base.ids import Epoch, MetalogPosition, NodeId, ShardId, ViewNumber
from indilog.kernel.index_schedule import IndexEra, eras_below, index_shard_at
from indilog.kernel.zones import is_label, spread_over_zones

NO_WRITER: Final = NodeId("")
"""The writer of a shard whose compute node has left."""
FIRST_VIEW: Final = ViewNumber(1)
SHARDS_MAX: Final = 1 << 16
"""Shards that a cluster can have over its life: their numbers have two bytes (thesis 5.1.1)."""
NODES_MAX: Final = 1000
"""Nodes of a view."""
NODE_NAME_MAX: Final = 64
"""Bytes of the name of a node."""


class ShardPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first placement of a shard: its replicas, in order of preference, and its only writer."""

    replicas: tuple[NodeId, ...]
    writer: NodeId
    ended: Epoch = Epoch(0)
    """The epoch of the last writer on the compute node that had the shard before. From the entry
    whose view took the shard from that node, no record of this or an earlier writer is ordered.
    """
    finalized: bool = False
    """Whether it gets no further records, of any writer (decision 0055)."""


class View(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """The nodes of a cluster and their roles. Any of the sequencers may be the primary
    (`TermBegun`); the first sequencer of the first view takes the first term. `index_shards[i]` are
    the replicas of index shard i, including retired ones: an index shard keeps its number
    permanently.

    Lists that follow from the fields, such as `nodes`, are computed once for each view.
    """

    number: ViewNumber
    logspace: int = 0
    sequencers: tuple[NodeId, ...]
    shards: dict[ShardId, ShardPlacement]
    index_shards: tuple[tuple[NodeId, ...], ...]
    aggregators: tuple[NodeId, ...]
    engines: tuple[NodeId, ...]
    index_eras: tuple[IndexEra, ...] = ()
    """Which positions go to which index shard; empty: all index shards, from the beginning."""
    addresses: dict[NodeId, str] = {}
    """Transport endpoints, e.g. `tcp://127.0.0.1:7401`; empty in one process."""
    spares: tuple[NodeId, ...] = ()
    """Storage nodes without a shard in the first placement; they replace lost ones, or get new
    shards.
    """
    left: tuple[NodeId, ...] = ()
    """Storage nodes of the first placement that have left the cluster."""
    homes: tuple[NodeId, ...] = ()
    """The compute node of each slot of tags: it checks the conditional appends with these tags
    (decision 0052). There are as many slots as compute nodes with a shard in the first view. Empty:
    this is the first view, and each of these nodes has one slot.
    """
    members_version: int = 0
    """The version of the wanted members (`Members`) that led to this view."""
    zones: dict[NodeId, str] = {}
    """The zone of each node that has one (`indilog.kernel.zones`)."""
    rebalanced: int = 0
    """The number of the last rebalancing that is complete (`Members.rebalance`)."""

    @cached_property
    def storage_nodes(self) -> tuple[NodeId, ...]:
        """All storage nodes, each once, ascending."""
        used = {node for shard in self.shards.values() for node in shard.replicas}
        return tuple(sorted({*used, *self.spares} - {*self.left}))

    @cached_property
    def moves_shards(self) -> bool:
        """Whether another storage node can replace a lost one. A sole sequencer moves nothing: it
        may lose the entry with its disk.
        """
        return len(self.sequencers) > 1 and len(self.storage_nodes) > 1

    @cached_property
    def index_nodes(self) -> tuple[NodeId, ...]:
        """All index nodes."""
        return tuple(node for replicas in self.index_shards for node in replicas)

    @cached_property
    def conditional_homes(self) -> tuple[NodeId, ...]:
        """The compute node of each slot of tags, which checks conditional appends."""
        with_shard = {placement.writer for placement in self.shards.values()}
        return self.homes or tuple(engine for engine in self.engines if engine in with_shard)

    @cached_property
    def members(self) -> Members:
        """The nodes that may change while the cluster runs."""
        active = self.eras[-1].shards
        index_shards = tuple(self.index_shards[shard] for shard in active)
        return Members(
            self.engines,
            self.storage_nodes,
            index_shards,
            self.aggregators,
            self.members_version,
            self.sequencers,
            self.zones,
            {shard: 0 for shard, placed in self.shards.items() if placed.finalized},
            self.rebalanced,
        )

    @cached_property
    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes."""
        return (
            self.sequencers
            + self.storage_nodes
            + self.index_nodes
            + self.aggregators
            + self.engines
        )

    def shards_of(self, node: NodeId) -> tuple[ShardId, ...]:
        """The shards of which storage node `node` is a replica in the first placement."""
        return tuple(s for s, placement in self.shards.items() if node in placement.replicas)

    def shard_written_by(self, engine: NodeId) -> ShardId | None:
        """The shard that `engine` appends to, if it has one."""
        return next((s for s, placement in self.shards.items() if placement.writer == engine), None)

    @property
    def eras(self) -> tuple[IndexEra, ...]:
        """Which positions go to which index shard (`indilog.kernel.index_schedule`)."""
        return self.index_eras or (IndexEra(0, tuple(range(len(self.index_shards)))),)

    def index_shard_at(self, position: MetalogPosition) -> int:
        """The index shard that gets the index data of `position`."""
        return index_shard_at(self.eras, position)

    def check(self) -> None:
        """Refuse a view that no cluster can run.

        Raises:
            ConfigError: one sentence that names the contradiction.
        """
        if not (self.sequencers and self.shards and self.index_shards):
            raise ConfigError("A view needs a sequencer, a shard and an index shard.")
        if not all(self.index_shards) or not all(p.replicas for p in self.shards.values()):
            raise ConfigError("Every shard and every index shard needs a replica.")
        starts = [era.start for era in self.eras]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise ConfigError("The eras of the index schedule start at 0 and follow one another.")
        known = range(len(self.index_shards))
        for era in self.eras:
            if not era.shards or len({*era.shards} & {*known}) != len(era.shards):
                raise ConfigError("An era of the index schedule names index shards, each once.")
        if len(set(self.nodes)) != len(self.nodes):
            raise ConfigError("A node has one role; a name appears twice in the view.")
        if not all(0 < len(name.encode()) <= NODE_NAME_MAX for name in self.nodes):
            raise ConfigError(f"The name of a node has 1 to {NODE_NAME_MAX} bytes.")
        if len(self.nodes) > NODES_MAX:
            raise ConfigError(f"A view has at most {NODES_MAX:,} nodes.")
        if not all(map(is_label, self.zones.values())):
            raise ConfigError("The label of a zone has 1 to 64 bytes, and no comma.")


class Members(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes that a cluster should have. `index_shards` are the replicas of the index shards
    that get new positions. If `sequencers` is empty, the cluster keeps its present sequencers.

    Each change has a greater `version`. So a primary that knows only older members keeps a view
    that was installed for newer ones.
    """

    engines: tuple[NodeId, ...]
    storage_nodes: tuple[NodeId, ...]
    index_shards: tuple[tuple[NodeId, ...], ...]
    aggregators: tuple[NodeId, ...]
    version: int = 0
    sequencers: tuple[NodeId, ...] = ()
    zones: dict[NodeId, str] = {}
    """The zone of each node that has one. Nodes that are not members may be named, too."""
    finalized: dict[ShardId, int] = {}
    """The shards to finalize, each with a number of cuts. After so many further cuts are committed,
    the shard gets no further records.
    """
    rebalance: int = 0
    """The number of the last wanted rebalancing: replicas are spread evenly over storage nodes and
    zones.
    """

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """All of these nodes."""
        index_nodes = tuple(node for replicas in self.index_shards for node in replicas)
        return self.sequencers + self.storage_nodes + index_nodes + self.aggregators + self.engines


Views: TypeAlias = Sequence[View]
"""The view of a process, as a list of one: there is one view at a time."""


def view_of(
    *,
    sequencers: int = 1,
    storage_nodes: int = 1,
    replicas: int = 1,
    index_shards: int = 2,
    index_replicas: int = 1,
    aggregators: int = 1,
    engines: int = 1,
    addresses: dict[NodeId, str] | None = None,
    zones: Mapping[NodeId, str] | None = None,
) -> View:
    """Lay out the first view: one shard for each engine, its replicas on consecutive storage nodes,
    in different zones where possible.

    Raises:
        ConfigError: fewer storage nodes than replicas, or a count below 1.
    """
    if replicas > storage_nodes:
        raise ConfigError(
            f"{replicas} replicas need as many storage nodes; there are {storage_nodes}."
        )
    nodes = tuple(NodeId(f"storage-{i}") for i in range(storage_nodes))
    zones = zones or {}
    view = View(
        number=FIRST_VIEW,
        sequencers=tuple(NodeId(f"sequencer-{i}") for i in range(sequencers)),
        shards={
            ShardId(e): ShardPlacement(
                replicas=spread_over_zones(_from(nodes, e), replicas, zones),
                writer=NodeId(f"engine-{e}"),
            )
            for e in range(engines)
        },
        index_shards=_index_shards(index_shards, index_replicas),
        aggregators=tuple(NodeId(f"aggregator-{i}") for i in range(aggregators)),
        engines=tuple(NodeId(f"engine-{i}") for i in range(engines)),
        addresses=addresses or {},
        zones=dict(zones),
    )
    used = view.storage_nodes
    view = msgspec.structs.replace(view, spares=tuple(n for n in nodes if n not in used))
    view.check()
    return view


def _from(nodes: tuple[NodeId, ...], first: int) -> tuple[NodeId, ...]:
    """Return all nodes, from number `first` on."""
    start = first % len(nodes)
    return nodes[start:] + nodes[:start]


def view_with(
    view: View,
    members: Members,
    position: MetalogPosition,
    replicas_of: Callable[[ShardId], tuple[NodeId, ...]],
    writer_of: Callable[[ShardId], Epoch],
    *,
    sequencers: tuple[NodeId, ...] | None = None,
    finalize: Collection[ShardId] = (),
    rebalanced: int = 0,
    unusable: Collection[NodeId] = (),
) -> View:
    """Return the view that an entry at `position` installs after `view`, so that it has `members`.
    It is `view` itself if nothing changes yet, or if `view` was installed for newer members.

    A new compute node gets a shard without writer, or a new shard. A new shard is on the storage
    nodes with the fewest shards, in different zones where possible. The shard of a compute node
    that leaves keeps its records, and gets no further ones from that node. The slots of tags of a
    compute node that leaves go to the compute nodes with the fewest slots; all other slots stay. A
    shard that is finalized gets no further records, and its compute node gets a new shard. A
    storage node leaves when it keeps no shard. New index shards get positions after the entry.

    Args:
        view: the newest view.
        members: the nodes that the cluster is to have.
        position: the position of the entry.
        replicas_of: all replicas of a shard now.
        writer_of: the writer of a shard according to the earlier entries; 0: none.
        sequencers: of the new view; one changes at a time (decision 0053). None: as in `view`.
        finalize: shards that get no further records.
        rebalanced: see `View`; the greatest number counts.
        unusable: storage nodes that get a new shard only if there are too few others.

    Raises:
        ConfigError: no cluster can run with these members.
    """
    if members.version < view.members_version:
        return view
    storage_nodes = {*members.storage_nodes}.union(*map(replicas_of, view.shards))
    shards = _shards_with(view, members, finalize, replicas_of, writer_of, unusable)
    index_shards = members.index_shards + view.index_shards[len(members.index_shards) :]
    eras = _eras_with(view.eras, tuple(range(len(members.index_shards))), position + 1)
    at_first = {node for placed in shards.values() for node in placed.replicas}
    following = msgspec.structs.replace(
        view,
        number=ViewNumber(view.number + 1),
        sequencers=sequencers or view.sequencers,
        shards=shards,
        spares=tuple(sorted(storage_nodes - at_first)),
        left=tuple(sorted(at_first - storage_nodes)),
        engines=members.engines,
        index_shards=index_shards,
        index_eras=eras if len(eras) > 1 else view.index_eras,
        aggregators=members.aggregators,
        homes=_homes_with(view.conditional_homes, members.engines),
        members_version=members.version,
        rebalanced=max(view.rebalanced, rebalanced),
    )
    following = _in_zones(following, view.zones | members.zones)
    return view if _has_same_nodes(view, following) else following


def _in_zones(view: View, zones: Mapping[NodeId, str]) -> View:
    """Return the view with the zones of its nodes, checked."""
    there = {node: zones[node] for node in view.nodes if node in zones}
    view = msgspec.structs.replace(view, zones=there)
    view.check()
    return view


def _eras_with(
    eras: tuple[IndexEra, ...], active: tuple[int, ...], start: MetalogPosition
) -> tuple[IndexEra, ...]:
    """Return the eras of the index schedule, so that the index shards `active` get the positions
    from `start` on.
    """
    return eras if eras[-1].shards == active else (*eras, IndexEra(start, active))


def _has_same_nodes(view: View, following: View) -> bool:
    """Whether two views have the same nodes, and were installed for the same version of members."""
    return (
        view.members_version == following.members_version
        and (view.engines, view.storage_nodes) == (following.engines, following.storage_nodes)
        and (view.index_shards, view.eras) == (following.index_shards, following.eras)
        and (view.aggregators, view.sequencers) == (following.aggregators, following.sequencers)
        and (view.zones, view.shards) == (following.zones, following.shards)
        and view.rebalanced == following.rebalanced
    )


def _homes_with(homes: tuple[NodeId, ...], engines: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Return the compute node of each slot. The slot of a node that leaves goes to the node with
    the fewest slots; if several have as few, to the first of these.
    """
    slots = dict.fromkeys(engines, 0)
    for home in homes:
        if home in slots:
            slots[home] += 1
    following = []
    for home in homes:
        if home not in slots:
            home = min(engines, key=slots.__getitem__)  # noqa: PLW2901
            slots[home] += 1
        following.append(home)
    return tuple(following)


def _shards_ended(
    view: View,
    engines: tuple[NodeId, ...],
    finalize: Collection[ShardId],
    writer_of: Callable[[ShardId], Epoch],
) -> dict[ShardId, ShardPlacement]:
    """Return the shards of a view. A shard has no writer if its compute node is not in `engines`,
    or if the shard is in `finalize`.
    """
    shards: dict[ShardId, ShardPlacement] = {}
    for shard, placed in view.shards.items():
        ends = shard in finalize and not placed.finalized
        if placed.writer != NO_WRITER and (ends or placed.writer not in engines):
            shards[shard] = ShardPlacement(placed.replicas, NO_WRITER, writer_of(shard), ends)
        elif ends:
            shards[shard] = msgspec.structs.replace(placed, finalized=True)
        else:
            shards[shard] = placed
    return shards


def _shards_with(
    view: View,
    members: Members,
    finalize: Collection[ShardId],
    replicas_of: Callable[[ShardId], tuple[NodeId, ...]],
    writer_of: Callable[[ShardId], Epoch],
    unusable: Collection[NodeId],
) -> dict[ShardId, ShardPlacement]:
    """Return the shards of a view, so that each of the engines of `members` writes one. An engine
    whose shard is finalized gets a new shard: its epoch may be no greater than that of the earlier
    writer of an existing shard.

    New shards are placed on the storage nodes of `members`. The first replicas of all other shards
    stay in the view: a node that starts with it may replay entries that are older than the moves of
    a shard.
    """
    if not members.engines:
        raise ConfigError("A cluster needs a compute node.")
    shards = _shards_ended(view, members.engines, finalize, writer_of)
    zones = view.zones | members.zones
    for engine in members.engines:
        if all(placed.writer != engine for placed in shards.values()):
            reused = view.shard_written_by(engine) is None
            nodes = sorted(members.storage_nodes, key=lambda node: (node in unusable, node))
            usable = sum(node not in unusable for node in nodes)
            shard, placed = _shard_for_new(
                shards, (nodes[:usable], nodes[usable:]), zones, replicas_of, reused=reused
            )
            shards[shard] = msgspec.structs.replace(placed, writer=engine)
    return shards


def _shard_for_new(
    shards: dict[ShardId, ShardPlacement],
    storage_nodes: Sequence[Sequence[NodeId]],
    zones: Mapping[NodeId, str],
    replicas_of: Callable[[ShardId], tuple[NodeId, ...]],
    *,
    reused: bool,
) -> tuple[ShardId, ShardPlacement]:
    """Return a shard for a compute node: an existing one without writer if `reused`, or a new one.
    A new shard is placed on the storage nodes that have the fewest shards now. Those of the first
    group of `storage_nodes` come before those of the second.
    """
    for shard, placed in sorted(shards.items()):
        if reused and placed.writer == NO_WRITER and not placed.finalized:
            return shard, placed
    if (new := max(shards) + 1) >= SHARDS_MAX:
        raise ConfigError(f"A cluster can have {SHARDS_MAX:,} shards, and has had all of them.")
    load = Counter[NodeId]()
    for shard, placed in shards.items():
        now = replicas_of(shard) or placed.replicas  # a shard of this view was not moved
        load.update(now[: len(placed.replicas)])  # further replicas are given up after a move
    copies = max(len(placed.replicas) for placed in shards.values())
    chosen: tuple[NodeId, ...] = ()
    for nodes in storage_nodes:
        candidates = sorted(nodes, key=lambda node: (load[node], node))
        chosen += spread_over_zones(candidates, copies - len(chosen), zones, chosen)
    if len(chosen) < copies:
        raise ConfigError(f"{copies} replicas need as many storage nodes; there are {len(chosen)}.")
    return ShardId(new), ShardPlacement(chosen, NO_WRITER)


def with_finalized_shards(view: View, shards: Iterable[ShardId]) -> View:
    """Return a first view with these shards. Shards that were not in it are finalized."""
    copies = max(len(placed.replicas) for placed in view.shards.values())
    nodes = view.storage_nodes
    added = {
        shard: ShardPlacement(
            spread_over_zones(_from(nodes, shard), copies, view.zones), NO_WRITER, finalized=True
        )
        for shard in shards
        if shard not in view.shards
    }
    used = {node for placed in added.values() for node in placed.replicas}
    return msgspec.structs.replace(
        view,
        shards=view.shards | added,
        spares=tuple(node for node in view.spares if node not in used),
    )


def with_storage_nodes_of(view: View, wanted: View) -> View:
    """Return the view that follows `view`, with the storage nodes of `wanted`; `view` itself if it
    has all of them. Added storage nodes have no shards at first.
    """
    added = tuple(node for node in wanted.storage_nodes if node not in view.storage_nodes)
    if not added:
        return view
    back = tuple(node for node in added if node in view.left)
    following = msgspec.structs.replace(
        view,
        number=ViewNumber(view.number + 1),
        spares=view.spares + tuple(node for node in added if node not in back),
        left=tuple(node for node in view.left if node not in back),
    )
    following.check()
    return following


def with_index_tier_of(view: View, wanted: View, position: MetalogPosition) -> View:
    """Return the view that follows `view`, with the index tier of `wanted`.

    New index shards get metalog positions from `position` on. Index shards that `wanted` lacks are
    retired: they keep their positions and their nodes. The schedule below `position` does not
    change.
    """
    kept = view.index_shards[len(wanted.index_shards) :]
    active = tuple(range(len(wanted.index_shards)))
    eras = view.eras
    if eras[-1].shards != active:
        eras = (*eras_below(eras, position), IndexEra(position, active))
    following = msgspec.structs.replace(
        view,
        number=ViewNumber(view.number + 1),
        index_shards=wanted.index_shards + kept,
        index_eras=eras,
        aggregators=wanted.aggregators,
    )
    following.check()
    return following


def with_index_shards(view: View, count: int, position: MetalogPosition) -> View:
    """Return the view that follows `view`, with `count` index shards from `position` on.

    If `position` is 0, all positions are distributed again: no index shard is retired, and the
    schedule has one era. If the schedule is the same already, `view` itself is returned.

    Raises:
        ConfigError: `count` is below 1.
    """
    index_shards = _index_shards(count, len(view.index_shards[0]))
    active = tuple(range(count))
    if view.eras[-1].shards == active and (position or len(view.eras) == 1):
        return view
    if position:
        wanted = msgspec.structs.replace(view, index_shards=index_shards)
        return with_index_tier_of(view, wanted, position)
    following = msgspec.structs.replace(
        view,
        number=ViewNumber(view.number + 1),
        index_shards=index_shards,
        index_eras=(IndexEra(0, active),),
    )
    following.check()
    return following


def _index_shards(count: int, replicas: int) -> tuple[tuple[NodeId, ...], ...]:
    return tuple(
        tuple(NodeId(f"index-{shard}-{replica}") for replica in range(replicas))
        for shard in range(count)
    )
