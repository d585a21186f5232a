"""The layout of a cluster over its starts: the index tier may change, nodes that hold data may
not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import uvloop

from indilog.base.errors import ConfigError
from indilog.base.ids import Epoch, NodeId, ViewNumber
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.metalog import NewView, encode_entry
from indilog.kernel.view import View
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog.runtime.cluster.cluster_members import wanted_in
from indilog.runtime.cluster.cluster_state import MEMBERS_KEY, VIEW_KEY
from indilog.runtime.cluster.layout import view_in
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog_index.index_node import IndexNode

RECORDS = 40


def config_in(directory: Path, **cluster: int | str) -> Config:
    """Small caches, so that reads go to the index tier."""
    node = node_config(
        data_dir=directory, suffix_cuts_max=1, popularity_entries_max=0, tag_cache_seqnums_max=0,
        tag_cache_seqnums_per_tag_max=0, record_cache_bytes_max=0, index_snapshot_entries_min=25,
    )  # fmt: skip
    return Config(cluster=msgspec.convert(cluster, ClusterConfig), node=node)


async def appended(platform: Platform) -> None:
    log = platform.logs.log("orders")
    for n in range(RECORDS):
        await log.append(b"%d" % n, tags=["even" if n % 2 == 0 else "odd"])


async def seqnums(platform: Platform, tag: str) -> list[int]:
    log = platform.logs.log("orders")
    found, bound = [], 0
    while (record := await log.read_next(tag, bound)) is not None:
        found.append(record.seqnum)
        bound = record.seqnum + 1
    return found


def index_node(platform: Platform, name: str) -> IndexNode:
    role = platform.shell.roles[NodeId(name)]
    assert isinstance(role, IndexNode)
    return role


def test_adding_and_removing_index_shards_between_starts_loses_no_record(tmp_path: Path) -> None:
    """A retired index shard gets no further positions and answers for its own. Index nodes write
    snapshots throughout, and no node uses a snapshot of another schedule.
    """

    async def story() -> None:
        seen: list[int] = []
        for index_shards in (2, 4, 1, 1, 3):
            config = config_in(tmp_path, index_shards=index_shards, index_replicas=1)
            async with embedded(config) as platform:
                await appended(platform)
                seen.append(platform.view.number)
                evens = await seqnums(platform, "even")
                assert evens == list(range(0, RECORDS * len(seen), 2))
                active = platform.view.eras[-1].shards
                assert active == tuple(range(index_shards))
                for shard, (node,) in enumerate(platform.view.index_shards):
                    has_new = index_node(platform, node).tail > RECORDS * (len(seen) - 1)
                    assert has_new == (shard in active)
        assert seen == [1, 2, 3, 3, 4]

    uvloop.run(story())


def test_index_replicas_and_aggregators_may_change_between_starts(tmp_path: Path) -> None:
    async def story() -> None:
        changes: list[dict[str, int | str]] = [
            {"index_replicas": 2, "aggregators": 2},
            {"index_replicas": 1, "aggregation": "master-slave"},
            {"index_replicas": 2, "aggregation": "both"},
        ]
        for starts, change in enumerate(changes, 1):
            async with embedded(config_in(tmp_path, **change)) as platform:
                await appended(platform)
                assert len(platform.view.eras) == 1
                assert await seqnums(platform, "odd") == list(range(1, RECORDS * starts, 2))

    uvloop.run(story())


@pytest.mark.parametrize(
    "change", [{"storage_nodes": 2, "replicas": 2}, {"sequencers": 3}, {"engines": 2}]
)
def test_a_changed_layout_of_the_data_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    async def story() -> None:
        async with embedded(config_in(tmp_path)):
            pass
        with pytest.raises(ConfigError, match="another layout"):
            async with embedded(config_in(tmp_path, **change)):
                pass

    uvloop.run(story())


def test_storage_nodes_may_be_added_and_not_removed(tmp_path: Path) -> None:
    async def story() -> None:
        async with embedded(config_in(tmp_path)) as platform:
            await appended(platform)
        async with embedded(config_in(tmp_path, storage_nodes=2)) as platform:
            assert platform.view.number == 2
            assert platform.view.spares == (NodeId("storage-1"),)
            assert await seqnums(platform, "odd") == list(range(1, RECORDS, 2))
        with pytest.raises(ConfigError, match=r"asks for \(1 sequencers, 1 storage nodes,"):
            async with embedded(config_in(tmp_path)):
                pass

    uvloop.run(story())


# --- the configuration, and changes while the cluster ran


async def put(store: EmbeddedMetadataStore, key: str, value: object) -> None:
    store.replace(key, msgspec.json.encode(value))


def scaled_view(view: View, **changes: object) -> View:
    return msgspec.structs.replace(view, number=ViewNumber(view.number + 1), **changes)


async def started(store: EmbeddedMetadataStore, directory: Path, **cluster: int) -> View:
    config = config_in(directory, **{"sequencers": 3, "storage_nodes": 2, "replicas": 2} | cluster)
    return await view_in(store, config, "processes")


def test_a_start_with_the_same_configuration_keeps_what_scaling_changed(tmp_path: Path) -> None:
    async def story() -> None:
        with EmbeddedMetadataStore(tmp_path / "metadata", node_config()) as store:
            first = await started(store, tmp_path)
            members = msgspec.structs.replace(
                first.members, engines=(NodeId("engine-0"), NodeId("engine-1")), version=1
            )
            grown = scaled_view(first, engines=members.engines, spares=(NodeId("storage-2"),))
            await put(store, VIEW_KEY, grown)
            await put(store, MEMBERS_KEY, members)
            assert await started(store, tmp_path) == grown
            assert (await wanted_in(store)).members == members

    uvloop.run(story())


def test_only_what_the_configuration_changed_is_applied_to_a_scaled_cluster(
    tmp_path: Path,
) -> None:
    """The drained node is not added again; the members follow the configuration, or the next
    primary would undo it.
    """

    async def story() -> None:
        with EmbeddedMetadataStore(tmp_path / "metadata", node_config()) as store:
            first = await started(store, tmp_path, storage_nodes=3)
            members = msgspec.structs.replace(
                first.members,
                storage_nodes=(NodeId("storage-0"), NodeId("storage-1")),
                engines=(NodeId("engine-0"), NodeId("engine-1")),
                version=4,
            )
            await put(store, VIEW_KEY, scaled_view(first, spares=(), engines=members.engines))
            await put(store, MEMBERS_KEY, members)
            view = await started(store, tmp_path, storage_nodes=4, index_shards=3)
            assert view.number == 4
            assert view.storage_nodes == ("storage-0", "storage-1", "storage-3")
            assert view.engines == members.engines
            assert len(view.eras[-1].shards) == 3
            wanted = (await wanted_in(store)).members
            assert wanted.storage_nodes == view.storage_nodes
            assert wanted.index_shards == view.members.index_shards
            assert wanted.engines == members.engines
            assert wanted.version > members.version
            assert await started(store, tmp_path, storage_nodes=4, index_shards=3) == view

    uvloop.run(story())


@pytest.mark.parametrize("change", [{"engines": 2}, {"storage_nodes": 1, "replicas": 1}])
def test_a_scaled_cluster_is_no_reason_to_accept_another_layout(
    tmp_path: Path, change: dict[str, int]
) -> None:
    async def story() -> None:
        with EmbeddedMetadataStore(tmp_path / "metadata", node_config()) as store:
            first = await started(store, tmp_path)
            engines = (NodeId("engine-0"), NodeId("engine-1"))
            await put(store, VIEW_KEY, scaled_view(first, engines=engines))
            with pytest.raises(ConfigError, match="indilog cluster scale"):
                await started(store, tmp_path, **change)

    uvloop.run(story())


def test_a_view_that_only_the_journals_have_is_not_overtaken(tmp_path: Path) -> None:
    """The processes ended before the installed view was stored; a configured change follows it."""

    async def story() -> None:
        with EmbeddedMetadataStore(tmp_path / "metadata", node_config()) as store:
            first = await started(store, tmp_path)
            newest = scaled_view(scaled_view(first), spares=(NodeId("storage-7"),))
            directory = tmp_path / "sequencer-1"
            journal = Journal.open(directory, segment_bytes=1 << 20, durability="fsync")
            assert not list(journal.recover())
            entry = encode_entry(NewView(0, newest.number, Epoch(1), newest))
            journal.write(stream_of(NodeId("sequencer-1")), FrameKind.METALOG, entry)
            journal.sync()
            journal.close()
            view = await started(store, tmp_path, storage_nodes=3)
            assert view.number == newest.number + 1
            assert set(view.storage_nodes) >= {"storage-2", "storage-7"}

    uvloop.run(story())
