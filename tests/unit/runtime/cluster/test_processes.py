"""Which processes run which nodes, and how shared processes join and leave."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from indilog.base.errors import ConfigError, DataDirectoryError
from indilog.base.ids import NodeId
from indilog.config import NodeConfig
from indilog.kernel.metalog import NO_INCARNATION
from indilog.kernel.view import Members, View, view_of, view_with
from indilog.runtime.cluster.membership import NodeCounts, scaled
from indilog.runtime.cluster.processes import (
    Processes,
    check_leave_together,
    claim_processes,
    decode_processes,
    processes_in,
    spread,
    with_processes,
    with_replacement,
    without_process,
    without_wanted,
    zones_in_turn,
)
from indilog.runtime.cluster.supervisor import processes_config, shared_defaults
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore

VIEW = view_of(
    sequencers=3, storage_nodes=3, replicas=3, index_shards=2, index_replicas=2, aggregators=2,
    engines=3,
)  # fmt: skip
SHARED = spread(VIEW.nodes, 3, {})


def names(*given: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(name) for name in given)


def installed(members: Members, view: View = VIEW) -> View:
    return view_with(
        view, members, 10, lambda shard: view.shards[shard].replicas, lambda _: NO_INCARNATION
    )


def test_each_shared_process_gets_a_node_of_each_kind() -> None:
    assert SHARED.running(VIEW.nodes) == {
        "node-0": names(
            "sequencer-0", "storage-0", "index-0-0", "index-1-1", "aggregator-0", "engine-0"
        ),
        "node-1": names("sequencer-1", "storage-1", "index-0-1", "aggregator-1", "engine-1"),
        "node-2": names("sequencer-2", "storage-2", "index-1-0", "engine-2"),
    }


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("index_shards", [1, 2, 5])
def test_no_process_has_two_replicas_if_there_are_enough(count: int, index_shards: int) -> None:
    replicas = min(count, 3)
    view = view_of(
        sequencers=3, storage_nodes=7, replicas=2, index_shards=index_shards,
        index_replicas=replicas, engines=5,
    )  # fmt: skip
    processes = spread(view.nodes, count, {})
    for nodes in view.index_shards:
        assert len({processes.of(node) for node in nodes}) == replicas
    for kind in (view.storage_nodes, view.engines, view.sequencers):
        sizes = [len(processes.nodes_of(f"node-{n}", kind)) for n in range(count)]
        assert max(sizes) - min(sizes) <= 1


def test_a_node_that_is_not_shared_has_a_process_of_its_own() -> None:
    assert SHARED.of(NodeId("storage-9")) == "storage-9"
    assert Processes().running(VIEW.nodes) == {node: (node,) for node in VIEW.nodes}


def test_a_new_process_gets_a_storage_node_and_a_compute_node() -> None:
    members, processes = with_processes(VIEW.members, VIEW, SHARED, 4)
    assert processes.nodes_of("node-3", members.nodes) == names("storage-3", "engine-3")
    assert members.version > VIEW.members_version
    grown = installed(members)
    back, same = with_processes(grown.members, grown, processes, 3)
    assert (set(back.nodes), same) == (set(VIEW.members.nodes), processes)


def test_a_new_process_takes_no_name_that_a_node_has_or_had() -> None:
    members = scaled(VIEW.members, VIEW, NodeCounts(storage_nodes=4), processes_config())
    view = installed(members)
    members, processes = with_processes(members, view, SHARED, 4)
    assert processes.nodes_of("node-3", members.nodes) == names("storage-4", "engine-3")
    left, processes = with_processes(members, view, processes, 3)
    again, processes = with_processes(left, view, processes, 4)
    assert processes.nodes_of("node-4", again.nodes) == names("storage-5", "engine-4")


@pytest.mark.parametrize("count", [0, -1, 36, 10**9])
def test_impossible_numbers_of_processes_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="This cluster has 3 nodes; it can have 1 to 35"):
        with_processes(VIEW.members, VIEW, SHARED, count)


def test_a_cluster_with_a_process_for_each_node_has_no_processes_to_count() -> None:
    with pytest.raises(ConfigError, match="Each node of this cluster has a process of its own"):
        with_processes(VIEW.members, VIEW, Processes(), 4)


def test_nodes_of_the_index_tier_are_replaced_when_their_process_leaves() -> None:
    """Here a process that has nothing that must stay."""
    processes = spread(names("index-1-1", "aggregator-1"), 1, {})
    members = without_process(VIEW.members, VIEW, processes, "node-0")
    assert members.index_shards == (
        names("index-0-0", "index-0-1"),
        names("index-1-0", "index-1-2"),
    )
    assert members.aggregators == names("aggregator-0", "aggregator-2")
    assert without_process(members, VIEW, processes, "node-0") == members


def test_a_process_with_a_sequencer_stays() -> None:
    with pytest.raises(ConfigError, match="sequencer-1 is a sequencer"):
        without_process(VIEW.members, VIEW, SHARED, "node-1")
    with pytest.raises(ConfigError, match="sequencer-2 is a sequencer"):
        with_processes(VIEW.members, VIEW, SHARED, 2)


def test_nodes_of_a_shared_process_leave_together() -> None:
    fewer = msgspec.structs.replace(VIEW.members, index_shards=VIEW.members.index_shards[:1])
    with pytest.raises(ConfigError, match=r"index-1-0 shares the process node-2 .* drain node-2"):
        check_leave_together(VIEW.members, fewer, SHARED)
    check_leave_together(VIEW.members, fewer, Processes())
    check_leave_together(VIEW.members, VIEW.members, SHARED)


@pytest.mark.asyncio
async def test_the_first_start_fixes_the_processes(tmp_path: Path) -> None:
    with EmbeddedMetadataStore(tmp_path / "metadata", NodeConfig()) as store:
        assert await processes_in(store) == Processes()
        made = await claim_processes(store, 3, VIEW.nodes, is_new=True)
        assert made == SHARED
        assert await claim_processes(store, 3, (), is_new=True) == SHARED, "a crash in between"
        assert await claim_processes(store, 2, (), is_new=False) == SHARED, "more were added"
        assert await processes_in(store) == SHARED
        for count, words in ((0, "a process for each node"), (4, "4 shared processes")):
            with pytest.raises(ConfigError, match=f"3 shared processes, not with {words}"):
                await claim_processes(store, count, VIEW.nodes, is_new=False)


@pytest.mark.asyncio
async def test_a_cluster_with_a_process_for_each_node_keeps_them(tmp_path: Path) -> None:
    with EmbeddedMetadataStore(tmp_path / "metadata", NodeConfig()) as store:
        assert await claim_processes(store, 0, VIEW.nodes, is_new=True) == Processes()
        with pytest.raises(ConfigError, match="a process for each node, not with 3 shared"):
            await claim_processes(store, 3, VIEW.nodes, is_new=False)


def test_processes_of_another_release_are_refused() -> None:
    with pytest.raises(DataDirectoryError, match="The record of the processes"):
        decode_processes(b'{"count": "three"}')


def test_three_processes_survive_the_loss_of_one() -> None:
    cluster = processes_config(shared=3).cluster
    assert (cluster.sequencers, cluster.replicas, cluster.ack_quorum) == (3, 3, 2)
    assert (cluster.index_replicas, cluster.aggregators, cluster.engines) == (2, 2, 3)
    assert shared_defaults(1)["cluster"]["sequencers"] == 1
    for count in (0, 4097):
        with pytest.raises(ConfigError, match="A cluster has 1 to"):
            shared_defaults(count)


def test_the_sequencer_of_a_new_process_takes_the_place_of_one_that_leaves() -> None:
    members, processes = with_processes(VIEW.members, VIEW, SHARED, 4)
    assert "sequencer-3" not in members.nodes
    assert processes.standbys(processes.nodes_of("node-3", members.nodes)) == names("sequencer-3")
    view = installed(members)
    left = without_process(members, view, processes, "node-0")
    assert left.sequencers == names("sequencer-3", "sequencer-1", "sequencer-2")
    assert without_process(left, view, processes, "node-0") == left, "it leaves already"
    with pytest.raises(ConfigError, match="sequencer-1 is a sequencer, and no other node can"):
        without_process(left, view, processes, "node-1")


def test_processes_get_zones_in_turn_by_their_numbers() -> None:
    processes = spread(VIEW.nodes, 3, {})
    zones = zones_in_turn(VIEW.nodes, processes, ("east", "west"))
    assert zones.keys() == set(VIEW.nodes)
    for node, zone in zones.items():
        assert zone == ("west" if processes.of(node) == "node-1" else "east")
    assert zones_in_turn((NodeId("storage-5"),), Processes(), ("a", "b", "c")) == {"storage-5": "c"}
    assert zones_in_turn(VIEW.nodes, processes, ()) == {}


def test_another_process_takes_the_place_of_one_that_is_gone() -> None:
    processes = spread(VIEW.nodes, 3, {})
    members, replaced = with_replacement(VIEW.members, VIEW, processes, "node-1")
    assert replaced.gone == ("node-1",)
    assert not processes.nodes_of("node-1", members.nodes)
    new = replaced.nodes_of("node-3", members.nodes)
    assert {"storage-3", "engine-3"} <= set(new)
    assert len(members.storage_nodes) == len(VIEW.storage_nodes)
    for name, sentence in (
        ("storage-1", "replace that process"),
        ("node-9", "no process 'node-9'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            with_replacement(VIEW.members, VIEW, processes, name)


def test_a_node_with_a_process_of_its_own_is_replaced_by_one_with_another_name() -> None:
    members, replaced = with_replacement(VIEW.members, VIEW, Processes(), "storage-0")
    assert replaced == Processes(gone=("storage-0",))
    assert "storage-0" not in members.storage_nodes
    assert len(members.storage_nodes) == len(VIEW.storage_nodes)
    with pytest.raises(ConfigError, match="neither a compute node nor a storage node"):
        with_replacement(VIEW.members, VIEW, Processes(), "sequencer-0")


def test_a_process_is_not_gone_any_more_if_its_node_is_wanted_again() -> None:
    processes = Processes(gone=("storage-0", "storage-9"))
    assert without_wanted(processes, VIEW.members).gone == ("storage-9",)


def test_a_process_that_leaves_and_cannot_end_its_calls_is_only_given_up() -> None:
    processes = spread(VIEW.nodes, 3, {})
    more, processes = with_processes(VIEW.members, VIEW, processes, 4)
    left = without_process(more, VIEW, processes, "node-1")
    members, replaced = with_replacement(left, VIEW, processes, "node-1")
    assert members.nodes == left.nodes
    assert replaced.gone == ("node-1",)
    assert replaced.count == processes.count
