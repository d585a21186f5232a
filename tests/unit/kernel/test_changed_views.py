"""The view that an entry installs for the nodes that the cluster is to have (decision 0049)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indilog.base.errors import ConfigError
from indilog.base.ids import Epoch, NodeId, ShardId, ViewNumber
from indilog.kernel.index_schedule import IndexEra, first_difference
from indilog.kernel.metalog import (
    NO_INCARNATION,
    Base,
    NewView,
    Replicas,
    decode_entry,
    encode_entry,
    is_possible,
)
from indilog.kernel.placement import Placement
from indilog.kernel.view import NO_WRITER, Members, View, view_of, view_with

VIEW = view_of(sequencers=3, storage_nodes=3, replicas=2, engines=2)
POSITION = 40


def names(role: str, count: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(f"{role}-{number}") for number in range(count))


def wanted(view: View = VIEW, **changes: Any) -> Members:  # noqa: ANN401 fields of `Members`
    """The members of a view with changes, of the next version."""
    version: dict[str, Any] = {"version": view.members_version + 1}
    return msgspec.structs.replace(view.members, **(version | changes))


def after(view: View, members: Members) -> View:
    return view_with(view, members, POSITION, Placement(view).replicas, lambda _: NO_INCARNATION)


def test_a_compute_node_that_joins_gets_a_shard_on_the_storage_nodes_with_the_fewest() -> None:
    view = after(VIEW, wanted(engines=names("engine", 3)))
    assert view.shard_written_by(NodeId("engine-2")) == ShardId(2)
    assert view.shards[ShardId(2)].replicas == (NodeId("storage-0"), NodeId("storage-2"))
    assert view.number == VIEW.number + 1


@pytest.mark.parametrize(
    ("moved", "chosen"),
    [
        ({0: (2, 1), 1: (2, 1)}, (0, 3)),
        ({0: (0, 1, 3), 1: (1, 2)}, (3, 0)),  # storage-3 is given up when the copy is complete
    ],
)
def test_a_new_shard_is_on_the_storage_nodes_with_the_fewest_shards_now(
    moved: dict[int, tuple[int, ...]], chosen: tuple[int, ...]
) -> None:
    """Moved shards count where they are, not where they were at first."""
    view = view_of(sequencers=3, storage_nodes=4, replicas=2, engines=2)
    nodes = names("storage", 4)
    placement = Placement(view)
    placement.move(
        {
            ShardId(shard): Replicas(7, tuple(nodes[number] for number in replicas))
            for shard, replicas in moved.items()
        }
    )
    members = wanted(view, engines=names("engine", 3))
    after_move = view_with(view, members, POSITION, placement.replicas, lambda _: NO_INCARNATION)
    assert after_move.shards[ShardId(2)].replicas == tuple(nodes[number] for number in chosen)


def test_the_shard_of_a_compute_node_that_left_is_given_to_the_next_one() -> None:
    three = after(VIEW, wanted(engines=names("engine", 3)))
    two = after(three, wanted(three, engines=names("engine", 2)))
    other = after(two, wanted(two, engines=(*names("engine", 2), NodeId("engine-7"))))
    assert two.shards[ShardId(2)].writer == NO_WRITER
    assert set(two.shards) == set(other.shards) == set(three.shards)
    assert other.shard_written_by(NodeId("engine-7")) == ShardId(2)


def test_the_slots_of_a_compute_node_that_leaves_go_to_those_with_the_fewest() -> None:
    first = view_of(sequencers=3, engines=4)
    grown = after(first, wanted(first, engines=names("engine", 5)))
    assert grown.conditional_homes == first.conditional_homes == names("engine", 4)
    without_0 = after(grown, wanted(grown, engines=names("engine", 5)[1:]))
    assert without_0.homes == tuple(NodeId(f"engine-{n}") for n in (4, 1, 2, 3))
    without_3 = after(
        without_0, wanted(without_0, engines=(NodeId("engine-4"), NodeId("engine-1")))
    )
    assert without_3.homes == tuple(NodeId(f"engine-{n}") for n in (4, 1, 4, 1))
    back = after(without_3, wanted(without_3, engines=(*without_3.engines, NodeId("engine-0"))))
    assert back.homes == without_3.homes, "a slot stays where its node stays"
    alone = after(back, wanted(back, engines=(NodeId("engine-0"),)))
    assert alone.homes == (NodeId("engine-0"),) * 4


def test_a_shard_that_is_taken_away_names_the_writer_that_ended() -> None:
    def writer_of(shard: ShardId) -> Epoch:
        return Epoch(10 + shard)

    replicas = Placement(VIEW).replicas
    members = wanted(engines=(NodeId("engine-1"), NodeId("engine-7")))
    view = view_with(VIEW, members, POSITION, replicas, writer_of)
    placed = view.shards[ShardId(0)]
    assert (placed.writer, placed.ended) == ("engine-7", Epoch(10))
    assert view.shards[ShardId(1)].ended == Epoch(0)
    assert Placement(view).has_ended(ShardId(0), Epoch(10))
    assert not Placement(view).has_ended(ShardId(0), Epoch(11))
    left = view_with(view, wanted(view, engines=(NodeId("engine-1"),)), 50, replicas, writer_of)
    kept = view_with(left, wanted(left, storage_nodes=names("storage", 4)), 60, replicas, writer_of)
    assert left.shards[ShardId(0)] == kept.shards[ShardId(0)]
    assert left.shards[ShardId(0)].writer == NO_WRITER


def test_a_storage_node_leaves_when_it_keeps_no_shard() -> None:
    members = wanted(storage_nodes=(NodeId("storage-0"), NodeId("storage-1"), NodeId("storage-9")))
    kept = after(VIEW, members)
    assert NodeId("storage-2") in kept.storage_nodes
    elsewhere = names("storage", 2)
    free = view_with(kept, members, POSITION, lambda _: elsewhere, lambda _: NO_INCARNATION)
    assert free.storage_nodes == members.storage_nodes
    assert (free.spares, free.left) == ((NodeId("storage-9"),), (NodeId("storage-2"),))
    back = wanted(free, storage_nodes=names("storage", 3))
    assert (
        view_with(free, back, POSITION, lambda _: elsewhere, lambda _: NO_INCARNATION).storage_nodes
        == back.storage_nodes
    )


def test_index_shards_get_positions_after_the_entry() -> None:
    more = view_of(index_shards=4).index_shards
    grown = after(VIEW, wanted(index_shards=more))
    fewer = view_with(
        grown,
        wanted(grown, index_shards=more[:1]),
        90,
        Placement(grown).replicas,
        lambda _: NO_INCARNATION,
    )
    assert grown.eras == (IndexEra(0, (0, 1)), IndexEra(POSITION + 1, (0, 1, 2, 3)))
    assert fewer.eras[-1] == IndexEra(91, (0,))
    assert fewer.index_shards == more, "retired index shards keep their nodes"
    assert first_difference(VIEW.eras, grown.eras) == POSITION + 1


def test_members_older_than_those_of_the_view_change_nothing() -> None:
    members = wanted(engines=names("engine", 3))
    view = after(VIEW, members)
    older = msgspec.structs.replace(VIEW.members, version=0)
    assert after(view, older) is view
    assert after(view, members) is view


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"storage_nodes": names("storage", 1), "engines": names("engine", 3)},
            "2 replicas need as many storage nodes; there are 1.",
        ),
        ({"engines": ()}, "A cluster needs a compute node."),
        ({"index_shards": ()}, "An era of the index schedule names index shards, each once."),
        ({"index_shards": ((),)}, "Every shard and every index shard needs a replica."),
        (
            {"aggregators": names("engine", 1)},
            "A node has one role; a name appears twice in the view.",
        ),
        ({"engines": (NodeId("engine-" + "7" * 60),)}, "The name of a node has 1 to 64 bytes."),
        ({"engines": names("engine", 1001)}, "A view has at most 1,000 nodes."),
    ],
)
def test_members_with_which_no_cluster_can_run_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        after(VIEW, wanted(**changes))
    assert str(refusal.value) == sentence


def test_an_entry_keeps_the_view_and_a_base_has_the_newest() -> None:
    view = after(VIEW, wanted(engines=names("engine", 3)))
    entry = NewView(0, ViewNumber(2), Epoch(1), view)
    assert decode_entry(encode_entry(entry)) == entry
    base = Base().with_entries([entry])
    assert base.view == view
    assert base.is_possible


def test_an_entry_with_a_view_that_no_cluster_can_run_is_not_possible() -> None:
    twice = msgspec.structs.replace(VIEW, aggregators=VIEW.engines)
    long = msgspec.structs.replace(VIEW, engines=(NodeId("e" * 65),))
    for view in (twice, long):
        assert not is_possible(NewView(0, ViewNumber(2), Epoch(1), view))


def test_a_placement_has_the_newest_view_of_the_entries_or_the_first() -> None:
    placement = Placement(VIEW)
    view = after(VIEW, wanted(engines=names("engine", 3)))
    assert placement.install(view)
    assert not placement.install(VIEW)
    assert placement.replicas(ShardId(2)) == view.shards[ShardId(2)].replicas
    placement.restore({}, None)
    assert placement.view == VIEW, "the entry that installed the other one was replaced"


def finalized(view: View, *shards: int, **changes: Any) -> View:  # noqa: ANN401
    ended = [ShardId(shard) for shard in shards]
    members = wanted(view, finalized=dict.fromkeys((*view.members.finalized, *ended), 0), **changes)
    replicas_of = Placement(view).replicas
    return view_with(view, members, POSITION, replicas_of, lambda _: Epoch(4), finalize=ended)


def test_a_finalized_shard_has_no_writer_and_its_compute_node_a_new_shard() -> None:
    view = finalized(VIEW, 0)
    placed = view.shards[ShardId(0)]
    assert (placed.writer, placed.ended, placed.finalized) == (NO_WRITER, Epoch(4), True)
    assert view.shard_written_by(NodeId("engine-0")) == ShardId(2)
    assert view.shards[ShardId(1)] == VIEW.shards[ShardId(1)]
    assert view.members.finalized == {0: 0}
    assert Placement(view).is_finalized(ShardId(0))
    assert after(view, wanted(view)).shards == view.shards, "it stays finalized"


def test_a_finalized_shard_is_not_given_to_the_next_compute_node() -> None:
    view = after(finalized(VIEW, 0), wanted(finalized(VIEW, 0), engines=names("engine", 3)))
    assert view.shard_written_by(NodeId("engine-2")) == ShardId(3)


def test_the_compute_node_of_a_finalized_shard_gets_no_shard_that_had_a_writer() -> None:
    """Its epoch may be smaller than that of the earlier writer."""
    left = after(VIEW, wanted(engines=names("engine", 1)))
    assert left.shards[ShardId(1)].writer == NO_WRITER
    assert finalized(left, 0).shard_written_by(NodeId("engine-0")) == ShardId(2)


def test_a_shard_without_writer_may_be_finalized() -> None:
    left = after(VIEW, wanted(engines=names("engine", 1)))
    view = finalized(left, 1)
    assert view.shards[ShardId(1)].finalized
    assert view.shard_written_by(NodeId("engine-0")) == ShardId(0)


def test_a_finalized_shard_survives_encoding() -> None:
    entry = NewView(POSITION, ViewNumber(1), Epoch(5), finalized(VIEW, 0))
    assert decode_entry(encode_entry(entry)) == entry
    assert is_possible(entry)


def test_a_cluster_has_at_most_65_536_shards() -> None:
    placed = VIEW.shards[ShardId(1)]
    shards = {ShardId(0): VIEW.shards[ShardId(0)], ShardId(65_535): placed}
    with pytest.raises(ConfigError, match="65,536 shards"):
        finalized(msgspec.structs.replace(VIEW, shards=shards), 0)
