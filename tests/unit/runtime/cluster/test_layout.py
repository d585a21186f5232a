"""The layout of a cluster over its starts: the index tier may change, nodes that hold data may
not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import uvloop

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId
from indilog.config import ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded
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
