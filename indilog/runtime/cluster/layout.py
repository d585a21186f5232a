"""Creates the layout of a cluster at the first start; later starts may add storage nodes and change
its index tier (ARCHITECTURE 11).

The first layout of shards and replicas is fixed, because they hold the records; metalog entries
move shards (decision 0048), also to storage nodes that were added. The index tier can be derived
from the records. So a start with another configuration may add and retire index shards,
with a new view and a new era of the index schedule (thesis 5.6.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog

from indilog.base.errors import ConfigError, NotReadyError
from indilog.base.ids import MetalogPosition
from indilog.config import Config
from indilog.kernel.metalog import entry_decoded
from indilog.kernel.view import View, view_of, with_index_tier_of, with_storage_nodes_of
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.cluster_state import VIEW_KEY, Arrangement, view_decoded
from indilog.runtime.metadata.store import MetadataStore, Written

log = structlog.get_logger(__name__)


async def view_in(store: MetadataStore, config: Config, arrangement: Arrangement) -> View:
    """Return the newest view of the cluster; the first start lays it out and stores it.

    Called before any node runs. If the configuration asks for more storage nodes, or for another
    index tier, a view with them is stored as the newest. New index shards get the positions after
    the last entry in the journals of the sequencers.

    Raises:
        ConfigError: the data was created with another layout of sequencers, shards or storage
            nodes.
        DataDirectoryError, DataLossError: a sequencer's journal cannot be read.
        NotReadyError: another process has changed the view meanwhile.
    """
    wanted = _wanted(config)
    await store.compare_and_set(VIEW_KEY, msgspec.json.encode(wanted), expected_version=0)
    stored = await store.get(VIEW_KEY)
    assert stored is not None, "this start or an earlier one has set it"
    view = view_decoded(stored.value)
    if not _same_data(view, wanted):
        raise ConfigError(
            "The data directory was created with another layout of the cluster "
            f"({_layout(view)}) than the configuration asks for ({_layout(wanted)}); "
            "use the same, or another directory. Storage nodes may be added, and the index tier "
            "may change."
        )
    following = with_storage_nodes_of(view, wanted)
    if not _same_index_tier(view, wanted):
        position = _journaled_position(_metalog_journals(config, view, arrangement), config)
        following = with_index_tier_of(following, wanted, position)
    if following is view:
        return view
    outcome = await store.compare_and_set(
        VIEW_KEY, msgspec.json.encode(following), expected_version=stored.version
    )
    if not isinstance(outcome, Written):
        raise NotReadyError("Another process changes the layout of the cluster; start again.")
    log.info("layout changed", view=following.number, now=_layout(following))
    return following


def _wanted(config: Config) -> View:
    cluster = config.cluster
    return view_of(
        sequencers=cluster.sequencers,
        storage_nodes=cluster.storage_nodes,
        replicas=cluster.replicas,
        index_shards=cluster.index_shards,
        index_replicas=cluster.index_replicas,
        aggregators=0 if cluster.aggregation == "master-slave" else cluster.aggregators,
        engines=cluster.engines,
    )


def _same_data(view: View, wanted: View) -> bool:
    """Whether sequencers, engines and replicas are as many, and no storage node is missing."""
    return (
        (view.sequencers, view.engines, _replicas(view))
        == (wanted.sequencers, wanted.engines, _replicas(wanted))
    ) and set(view.storage_nodes) <= set(wanted.storage_nodes)


def _replicas(view: View) -> int:
    return len(next(iter(view.shards.values())).replicas)


def _same_index_tier(view: View, wanted: View) -> bool:
    count = len(wanted.index_shards)
    return (
        view.index_shards[:count] == wanted.index_shards
        and view.eras[-1].shards == tuple(range(count))
        and view.aggregators == wanted.aggregators
    )


def _metalog_journals(config: Config, view: View, arrangement: Arrangement) -> list[Path]:
    data_dir = config.node.data_dir
    if arrangement == "embedded":
        return [data_dir / "journal"]
    return [data_dir / sequencer for sequencer in view.sequencers]


def _journaled_position(directories: Iterable[Path], config: Config) -> MetalogPosition:
    """Return the position after the farthest metalog entry that any of these journals holds."""
    # Imported here, because a supervisor reads journals only if the index tier changes, and the
    # import also loads numpy.
    from indilog.runtime.journal.journal import Journal
    from indilog.runtime.journal.segment_scan import Damage

    position = 0
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
                if not isinstance(found, Damage) and found[1] is FrameKind.METALOG:
                    position = max(position, entry_decoded(found[2]).position + 1)
        finally:
            journal.close()
    return position


def _layout(view: View) -> str:
    return (
        f"{len(view.sequencers)} sequencers, {len(view.storage_nodes)} storage nodes, "
        f"{_replicas(view)} replicas, {len(view.index_nodes)} index nodes in "
        f"{len(view.eras[-1].shards)} shards, {len(view.aggregators)} aggregators, "
        f"{len(view.engines)} engines"
    )
