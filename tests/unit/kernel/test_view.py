"""Views (`indilog.kernel.view`)."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId
from indilog.kernel.view import View, view_of


def test_the_default_view_is_one_of_everything_and_two_index_shards() -> None:
    view = view_of()
    assert view.nodes == (
        "sequencer-0", "storage-0", "index-0-0", "index-1-0", "aggregator-0", "engine-0"
    )  # fmt: skip


def test_replicas_of_a_shard_are_on_different_nodes() -> None:
    view = view_of(storage_nodes=3, replicas=3, engines=4)
    for placement in view.shards.values():
        assert len(set(placement.replicas)) == 3


def test_first_replicas_are_spread_over_the_storage_nodes() -> None:
    view = view_of(storage_nodes=3, replicas=2, engines=3)
    assert {p.replicas[0] for p in view.shards.values()} == set(view.storage_nodes)


def test_each_engine_writes_its_own_shard() -> None:
    view = view_of(engines=3)
    assert [view.shard_written_by(engine) for engine in view.engines] == [0, 1, 2]
    assert view.shard_written_by(NodeId("engine-9")) is None


def test_a_storage_node_keeps_the_shards_that_name_it() -> None:
    view = view_of(storage_nodes=2, replicas=1, engines=4)
    assert view.shards_of(NodeId("storage-0")) == (0, 2)
    assert view.shards_of(NodeId("engine-0")) == ()


def test_index_data_goes_round_robin_by_position() -> None:
    # Thesis 5.3.1.
    view = view_of(index_shards=3)
    assert [view.index_shard_at(position) for position in range(5)] == [0, 1, 2, 0, 1]


def test_more_replicas_than_storage_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 replicas"):
        view_of(storage_nodes=2, replicas=3)


@pytest.mark.parametrize("part", ["sequencers", "index_shards", "engines"])
def test_a_view_without_one_of_its_parts_is_refused(part: str) -> None:
    with pytest.raises(ConfigError):
        view_of(**{part: 0})  # type: ignore[arg-type]


def test_a_node_with_two_roles_is_refused() -> None:
    view = view_of()
    twice = msgspec.structs.replace(view, aggregators=(NodeId("engine-0"),))
    with pytest.raises(ConfigError, match="twice"):
        twice.check()


def test_a_view_survives_an_encoding_round_trip() -> None:
    view = view_of(storage_nodes=2, replicas=2, addresses={NodeId("engine-0"): "tcp://x:1"})
    assert msgspec.json.decode(msgspec.json.encode(view), type=View) == view


def test_the_nodes_of_a_view_are_computed_once_and_for_that_view_alone() -> None:
    view = view_of(storage_nodes=3, replicas=3)
    assert view.nodes is view.nodes
    following = msgspec.structs.replace(view, engines=(NodeId("engine-7"),))
    assert set(following.nodes) - set(view.nodes) == {NodeId("engine-7")}
