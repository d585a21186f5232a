"""Changes of a cluster's nodes: names, refusals, what is missing, which processes run."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.metalog import NO_INCARNATION
from indilog.kernel.view import Members, View, view_of, view_with
from indilog.runtime.cluster.membership import (
    NodeCounts,
    kind_of,
    missing,
    needed,
    number_of,
    same_members,
    scaled,
    state_of,
    without,
)
from indilog.runtime.cluster.scaling import decided

VIEW = view_of(sequencers=3, storage_nodes=3, replicas=2, engines=2, index_shards=1)
CONFIG = Config(node=node_config(port=8080))


def nodes(*names: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(name) for name in names)


def change(members: Members = VIEW.members, view: View = VIEW, **counts: int) -> Members:
    return scaled(members, view, NodeCounts(**counts), CONFIG)


def installed(members: Members, view: View = VIEW) -> View:
    """Return the view after an entry that installs these members; shards stay where they are."""
    return view_with(
        view, members, 10, lambda shard: view.shards[shard].replicas, lambda _: NO_INCARNATION
    )


def apart(of: Iterable[NodeId]) -> dict[str, tuple[NodeId, ...]]:
    """Return processes with one node each."""
    return {node: (node,) for node in of}


def test_numbers_that_are_left_out_stay() -> None:
    assert same_members(change(), VIEW.members)
    assert same_members(change(storage_nodes=3, compute_nodes=2), VIEW.members)


def test_added_nodes_get_the_smallest_free_numbers() -> None:
    grown = change(compute_nodes=4, storage_nodes=4, index_shards=2, index_replicas=2)
    assert grown.engines == nodes("engine-0", "engine-1", "engine-2", "engine-3")
    assert grown.storage_nodes == nodes("storage-0", "storage-1", "storage-2", "storage-3")
    assert grown.index_shards == (
        nodes("index-0-0", "index-0-1"),
        nodes("index-1-0", "index-1-1"),
    )
    with_gap = without(grown, VIEW, NodeId("engine-2"))
    with_gap = without(with_gap, VIEW, NodeId("storage-1"))
    again = scaled(with_gap, VIEW, NodeCounts(compute_nodes=4, storage_nodes=4), CONFIG)
    assert set(again.engines) == set(grown.engines)
    assert set(again.storage_nodes) == set(grown.storage_nodes)


def test_nodes_with_the_greatest_numbers_leave_first() -> None:
    grown = change(compute_nodes=12, storage_nodes=11)
    shrunk = scaled(grown, VIEW, NodeCounts(compute_nodes=1, storage_nodes=2), CONFIG)
    assert shrunk.engines == nodes("engine-0")
    assert shrunk.storage_nodes == nodes("storage-0", "storage-1")


def test_every_change_has_a_greater_version_than_the_view_and_the_members() -> None:
    grown = change(storage_nodes=4)
    later = scaled(grown, VIEW, NodeCounts(storage_nodes=5), CONFIG)
    drained = without(later, VIEW, NodeId("storage-4"))
    assert VIEW.members_version < grown.version < later.version < drained.version
    view = installed(drained)
    assert change(view.members, view, storage_nodes=6).version > view.members_version


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({"compute_nodes": 0}, "at least one compute node, not 0"),
        ({"storage_nodes": 1}, "2 replicas of each record need as many storage nodes, not 1"),
        ({"storage_nodes": 100}, "adds 97 nodes, each a process of this machine; add at most 32"),
        ({"storage_nodes": 2000}, "at most 1,000 nodes"),
        ({"index_shards": 0}, "at least one index shard, not 0"),
        ({"index_replicas": -1}, "at least one index replica, not -1"),
        ({"index_shards": 40, "index_replicas": 40}, "more than 1,000 nodes"),
        ({"aggregators": 0}, "at least one aggregator, not 0"),
    ],
)
def test_numbers_that_no_cluster_can_have_are_refused(
    counts: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        scaled(VIEW.members, VIEW, NodeCounts(**counts), CONFIG)


def test_a_gateway_port_above_the_last_one_is_refused() -> None:
    config = Config(node=node_config(port=65_534))
    assert len(scaled(VIEW.members, VIEW, NodeCounts(compute_nodes=2), config).engines) == 2
    with pytest.raises(ConfigError, match="65,536 is above 65,535"):
        scaled(VIEW.members, VIEW, NodeCounts(compute_nodes=3), config)


def test_there_are_no_aggregators_where_index_nodes_merge() -> None:
    config = Config(cluster=ClusterConfig(aggregation="master-slave", aggregators=0))
    with pytest.raises(ConfigError, match="there are no aggregators"):
        scaled(VIEW.members, VIEW, NodeCounts(aggregators=2), config)


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ("storage-9", "has no node 'storage-9'; it has sequencer-0,"),
        ("sequencer-1", "sequencer-1 is a sequencer, .* drain the process that runs it"),
        ("index-0-0", "indilog cluster scale --index-shards"),
        ("aggregator-0", "is of the index tier"),
    ],
)
def test_a_node_that_cannot_leave_is_named_with_the_reason(node: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        without(VIEW.members, VIEW, NodeId(node))


def test_the_first_compute_nodes_may_leave_and_one_stays() -> None:
    members = without(VIEW.members, VIEW, NodeId("engine-0"))
    assert members.engines == nodes("engine-1")
    assert "engine-0" in decided(members, VIEW, VIEW, apart(VIEW.nodes)).stop
    with pytest.raises(ConfigError, match="engine-1 is the only compute node that stays"):
        without(members, VIEW, NodeId("engine-1"))


def test_as_many_storage_nodes_as_replicas_stay() -> None:
    left = without(VIEW.members, VIEW, NodeId("storage-0"))
    assert same_members(without(left, VIEW, NodeId("storage-0")), left), "it leaves already"
    with pytest.raises(ConfigError, match="2 replicas"):
        without(left, VIEW, NodeId("storage-1"))


def test_a_cluster_with_one_sequencer_is_not_changed() -> None:
    alone = view_of(storage_nodes=2)
    with pytest.raises(ConfigError, match="one sequencer"):
        scaled(alone.members, alone, NodeCounts(storage_nodes=3), CONFIG)
    with pytest.raises(ConfigError, match="one sequencer"):
        without(alone.members, alone, NodeId("storage-1"))


def test_what_is_missing_is_said_until_the_view_has_the_members() -> None:
    members = change(storage_nodes=4, compute_nodes=3)
    assert missing(VIEW.members, VIEW, None) == []
    assert missing(members, VIEW, members) == [
        "storage-3 has not joined yet.",
        "engine-2 has not joined yet.",
    ]
    assert "is not ready" in missing(members, VIEW, VIEW.members)[0]
    left = without(VIEW.members, VIEW, NodeId("storage-0"))
    [sentence] = missing(left, VIEW, left)
    assert sentence.startswith("storage-0 has not left yet: its shards are copied")
    fewer = change(change(index_shards=2), installed(change(index_shards=2)), index_shards=1)
    assert missing(fewer, installed(change(index_shards=2)), fewer)
    assert state_of(members, installed(members), members, NodeId("engine-0"))["reached"]
    assert not state_of(members, VIEW, members, NodeId("engine-0"))["reached"]


def test_names_have_a_kind_and_a_number() -> None:
    found = [kind_of(NodeId(name)) for name in ("engine-12", "index-1-0", "sequencer-0")]
    assert found == ["engine", "index", "sequencer"]
    for name in ("engine", "engine-", "engine-1-2", "index-1", "x-1", "engine-²", "engine--1"):
        assert kind_of(NodeId(name)) is None
    assert number_of(NodeId("engine-12")) == 12


# --- which processes run


def test_processes_of_new_nodes_start_and_those_that_hold_data_are_awaited() -> None:
    members = change(compute_nodes=3, storage_nodes=4, index_shards=2)
    decision = decided(members, VIEW, VIEW, apart(VIEW.nodes))
    assert set(decision.start) == {"engine-2", "storage-3", "index-1-0"}
    assert set(decision.awaited) == {"storage-3", "index-1-0"}, "an engine is ready only later"
    assert decision.stop == ()


def test_a_process_stops_when_neither_members_nor_view_have_its_node() -> None:
    running = VIEW.nodes
    members = without(VIEW.members, VIEW, NodeId("storage-0"))
    assert decided(members, VIEW, VIEW, apart(running)).stop == (), "the view still has it"
    gone = installed(members)
    moved = dict.fromkeys(VIEW.shards, ("storage-1", "storage-2"))
    view = view_with(
        VIEW, members, 10, lambda shard: nodes(*moved[shard]), lambda _: NO_INCARNATION
    )
    assert "storage-0" in gone.nodes
    assert "storage-0" not in view.nodes
    assert decided(members, view, gone, apart(running)).stop == ("storage-0",)
    assert decided(VIEW.members, view, gone, apart(running)).stop == (), "it is wanted again"


def test_a_compute_node_ends_its_calls_before_the_view_takes_its_shard() -> None:
    grown = installed(change(compute_nodes=3))
    running = needed(grown, grown.members)
    members = without(grown.members, grown, NodeId("engine-2"))
    decision = decided(members, grown, grown, apart(running))
    assert (decision.start, decision.stop, decision.ending) == ((), ("engine-2",), ("engine-2",))
    left = [node for node in running if node != "engine-2"]
    assert decided(members, grown, grown, apart(left)) == ((), (), (), (), ())
    assert missing(members, grown, members) == [
        "engine-2 has not left yet: its running calls finish."
    ]


def test_a_shared_process_ends_its_gateway_before_its_compute_node_leaves() -> None:
    """Its storage node keeps records that are not copied yet."""
    grown = installed(change(compute_nodes=3, storage_nodes=4))
    here = nodes("storage-3", "engine-2")
    running = {**apart(VIEW.nodes), "node-3": here}
    members = VIEW.members
    decision = decided(members, grown, grown, running)
    assert decision == ((), (), ("node-3",), (), ("engine-2",))
    assert decided(members, grown, grown, running, ["node-3"]) == ((), (), (), (), ())
    half = msgspec.structs.replace(grown, engines=VIEW.engines)
    assert decided(members, half, grown, running, ["node-3"]).stop == (), "storage-3 is installed"
    assert decided(members, VIEW, half, running, ["node-3"]).stop == ("node-3",)
    again = msgspec.structs.replace(members, engines=grown.engines)
    assert decided(again, half, grown, running, ["node-3"]).stop == ("node-3",), "to start anew"


def test_a_compute_node_that_left_and_is_wanted_again_gets_a_new_process() -> None:
    grown = installed(change(compute_nodes=3))
    running = needed(grown, grown.members)
    shrunk = installed(change(grown.members, grown, compute_nodes=2), grown)
    again = change(shrunk.members, shrunk, compute_nodes=3)
    decision = decided(again, shrunk, grown, apart(running))
    assert (decision.start, decision.stop) == ((), ("engine-2",))
    left = [node for node in running if node != "engine-2"]
    assert decided(again, shrunk, shrunk, apart(left)).start == ("engine-2",)


def test_a_compute_node_starts_after_those_that_leave_have_ended() -> None:
    """It may get the shard of one of them, and needs a greater epoch."""
    grown = msgspec.structs.replace(VIEW, engines=(*VIEW.engines, NodeId("engine-7")))
    members = msgspec.structs.replace(VIEW.members, engines=(*VIEW.engines, NodeId("engine-8")))
    early = decided(members, grown, grown, apart([*grown.nodes, NodeId("engine-8")]))
    assert (early.start, set(early.stop)) == ((), {"engine-7", "engine-8"})
    assert decided(members, grown, grown, apart(VIEW.nodes)).start == ("engine-8",)


def test_a_process_that_is_gone_ends_and_is_not_started_again() -> None:
    members = without(change(storage_nodes=4), VIEW, NodeId("storage-1"))
    gone = nodes("storage-1")
    assert decided(members, VIEW, VIEW, apart(VIEW.nodes), gone=gone).stop == ("storage-1",)
    running = apart(node for node in VIEW.nodes if node != "storage-1")
    assert decided(members, VIEW, VIEW, running, gone=gone).start == ("storage-3",)
    assert "storage-1" in decided(members, VIEW, VIEW, running).start, "the view still has it"
