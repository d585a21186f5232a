"""Creates the layout of a cluster at the first start. Later starts may add storage nodes and change
the index tier (ARCHITECTURE 11).

A start does not change which replicas hold a shard, because they hold its records. Only metalog
entries move shards (decision 0048), for example to added storage nodes. The index tier can be
derived from the records. So a start with another configuration may add and retire index shards.
Such a change needs a new view and a new era of the index schedule (thesis 5.6.3).

Nodes also join and leave while the cluster runs (decision 0049). So the stored view may differ from
the configuration. A start therefore compares the configuration with the configuration of the last
start (the key `configured`), and applies only the differences to the view. `assembly`, the
supervisor and `machines.registration` call `view_in` before any node runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import structlog
import uvloop

from indilog.base.errors import ConfigError, NotReadyError
from indilog.base.ids import Epoch, MetalogPosition, NodeId, ShardId
from indilog.config import Config
from indilog.kernel.metalog import NewView, decode_entry
from indilog.kernel.view import (
    Members,
    View,
    view_of,
    with_finalized_shards,
    with_index_tier_of,
    with_storage_nodes_of,
)
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.cluster_state import (
    CONFIGURED_KEY,
    EPOCH_KEY,
    MEMBERS_KEY,
    VIEW_KEY,
    Arrangement,
    Layout,
    claim_arrangement,
    decode_members,
    decode_view,
)
from indilog.runtime.cluster.membership import next_version, same_members
from indilog.runtime.cluster.metadata_opening import opened_metadata
from indilog.runtime.cluster.processes import claim_processes, processes_in, zones_in_turn
from indilog.runtime.metadata.store import MetadataStore, Versioned, Written

log = structlog.get_logger(__name__)


async def view_in(store: MetadataStore, config: Config, arrangement: Arrangement) -> View:
    """Return the newest view of the cluster. The first start creates and stores the first view.

    Called before any node runs. If the configuration equals the configuration of the last start,
    the stored view is returned. Nodes may have been added and drained since then. If the
    configuration was changed to more storage nodes or another index tier, a view with this change
    is stored as the newest. New index shards get the positions after the last entry in the journals
    of the sequencers.

    Raises:
        ConfigError: the data was created with another number of sequencers or replicas. Or the
            configuration was changed to other compute nodes or fewer storage nodes.
        DataDirectoryError, DataLossError: a sequencer's journal cannot be read.
        NotReadyError: another process has changed the view meanwhile.
    """
    wanted = wanted_view(config)
    if arrangement != "embedded":
        is_new = await store.get(VIEW_KEY) is None
        count = config.cluster.shared_processes
        processes = await claim_processes(store, count, wanted.nodes, is_new=is_new)
        if arrangement == "processes":
            zones = zones_in_turn(wanted.nodes, processes, config.node.zones)
            wanted = wanted_view(config, zones)
    await store.compare_and_set(VIEW_KEY, msgspec.json.encode(wanted), expected_version=0)
    stored, configured = await store.get(VIEW_KEY), await store.get(CONFIGURED_KEY)
    assert stored is not None, "this start or an earlier one has set it"
    view = decode_view(stored.value)
    # An earlier release did not store the configured members, and its views did not change while
    # the cluster ran.
    before = view.members if configured is None else decode_members(configured.value)
    _check_same_data(view, before, wanted)
    if configured is not None and same_members(before, wanted.members):
        return view
    following = await _reconfigure(store, config, arrangement, stored, before)
    # `configured` is set last. So after a crash between the steps, the next start repeats them all.
    version = 0 if configured is None else configured.version
    value = msgspec.json.encode(wanted.members)
    await _set(store, CONFIGURED_KEY, value, version)
    return following


def make_metadata(
    config: Config, arrangement: Arrangement, epoch: Epoch, shards: Iterable[ShardId] = ()
) -> View:
    """Write the metadata file of a new data directory, and return the view of its platform. Another
    program writes the journals of the directory (decision 0045).

    A shard of `shards` is finalized if no compute node of the platform writes it. Every epoch that
    the platform takes is greater than `epoch`.

    Raises:
        DataDirectoryError: the directory cannot be used.
    """

    async def made() -> View:
        async with opened_metadata(config.node) as metadata:
            await claim_arrangement(metadata.store, arrangement)
            metadata.file.raise_sequence(EPOCH_KEY, epoch)
            view = await view_in(metadata.store, config, arrangement)
            view = with_finalized_shards(view, shards)
            metadata.file.replace(VIEW_KEY, msgspec.json.encode(view))
            return view

    return uvloop.run(made())


async def _reconfigure(
    store: MetadataStore,
    config: Config,
    arrangement: Arrangement,
    stored: Versioned,
    before: Members,
) -> View:
    """Store and return the view after a change of the configuration. `before` are the configured
    members at the last start.
    """
    wanted, view = wanted_view(config), decode_view(stored.value)
    tier_changed = (before.index_shards, before.aggregators) != (
        wanted.members.index_shards, wanted.aggregators,
    )  # fmt: skip
    tier_differs = tier_changed and not _same_index_tier(view, wanted)
    added = [node for node in wanted.storage_nodes if node not in before.storage_nodes]
    if tier_differs or any(node not in view.storage_nodes for node in added):
        # The metalog may have installed newer views that the processes did not store before they
        # ended.
        layout = Layout(view, arrangement, await processes_in(store))
        journals = [config.node.data_dir / name for name in layout.journals(view.sequencers)]
        position, newest = _journaled(journals, config)
        if newest is not None and newest.number > view.number:
            view = newest
        spares = msgspec.structs.replace(wanted, shards={}, spares=tuple(added))
        following = with_storage_nodes_of(view, spares)
        if tier_differs:
            following = with_index_tier_of(following, wanted, position)
        await _set(store, VIEW_KEY, msgspec.json.encode(following), stored.version)
        log.info("layout changed", view=following.number, now=_layout(following))
        view = following
    if (members := await store.get(MEMBERS_KEY)) is not None:
        asked = decode_members(members.value)
        changed = Members(
            engines=asked.engines,
            storage_nodes=tuple(sorted({*asked.storage_nodes, *added})),
            index_shards=wanted.members.index_shards if tier_changed else asked.index_shards,
            aggregators=wanted.aggregators if tier_changed else asked.aggregators,
            version=next_version(asked, view),
            sequencers=asked.sequencers,
            zones=asked.zones,
            finalized=asked.finalized,
            rebalance=asked.rebalance,
        )
        await _set(store, MEMBERS_KEY, msgspec.json.encode(changed), members.version)
    return view


async def _set(store: MetadataStore, key: str, value: bytes, version: int) -> None:
    outcome = await store.compare_and_set(key, value, expected_version=version)
    if not isinstance(outcome, Written):
        raise NotReadyError("Another process changes the layout of the cluster; start again.")


def wanted_view(config: Config, zones: Mapping[NodeId, str] | None = None) -> View:
    """Return the first view of a cluster, with the zones of its nodes."""
    cluster = config.cluster
    return view_of(
        sequencers=cluster.sequencers,
        storage_nodes=cluster.storage_nodes,
        replicas=cluster.replicas,
        index_shards=cluster.index_shards,
        index_replicas=cluster.index_replicas,
        aggregators=0 if cluster.aggregation == "master-slave" else cluster.aggregators,
        engines=cluster.engines,
        zones=zones,
    )


def _check_same_data(view: View, before: Members, wanted: View) -> None:
    """Refuse a configuration with other sequencers, compute nodes or replicas than at the last
    start, or with fewer storage nodes.
    """
    sequencers = before.sequencers or view.sequencers
    same = (sequencers, before.engines, _replicas(view)) == (
        wanted.sequencers, wanted.engines, _replicas(wanted),
    )  # fmt: skip
    if not same or not set(before.storage_nodes) <= set(wanted.storage_nodes):
        raise ConfigError(
            "The data directory was created with another layout of the cluster "
            f"({_layout(view)}) than the configuration asks for ({_layout(wanted)}); "
            "use the same, or another directory. Storage nodes may be added, and the index tier "
            "may change; `indilog cluster scale` changes the nodes of a running cluster."
        )


def _replicas(view: View) -> int:
    return len(next(iter(view.shards.values())).replicas)


def _same_index_tier(view: View, wanted: View) -> bool:
    count = len(wanted.index_shards)
    return (
        view.index_shards[:count] == wanted.index_shards
        and view.eras[-1].shards == tuple(range(count))
        and view.aggregators == wanted.aggregators
    )


def _journaled(directories: Iterable[Path], config: Config) -> tuple[MetalogPosition, View | None]:
    """Return the position after the last metalog entry in any of these journals, and the newest
    view in the entries; None: no entry has a view.
    """
    # Imported here, because the import also loads numpy, and a supervisor reads journals only if
    # the layout changes.
    from indilog.runtime.journal.journal import Journal
    from indilog.runtime.journal.segment_scan import Damage

    position, newest = 0, None
    for directory in directories:
        if not directory.exists():
            continue
        journal = Journal.open(
            directory,
            segment_bytes=config.node.journal.segment_bytes,
            durability=config.cluster.durability,
        )
        try:
            for found in journal.recover():
                if isinstance(found, Damage) or found[1] is not FrameKind.METALOG:
                    continue
                entry = decode_entry(found[2])
                position = max(position, entry.position + 1)
                if isinstance(entry, NewView) and (
                    newest is None or entry.following.number > newest.number
                ):
                    newest = entry.following
        finally:
            journal.close()
    return position, newest


def _layout(view: View) -> str:
    return (
        f"{len(view.sequencers)} sequencers, {len(view.storage_nodes)} storage nodes, "
        f"{_replicas(view)} replicas, {len(view.index_nodes)} index nodes in "
        f"{len(view.eras[-1].shards)} shards, {len(view.aggregators)} aggregators, "
        f"{len(view.engines)} engines"
    )
