"""The placement of shards (`indilog.kernel.placement`)."""

from __future__ import annotations

from indilog.base.ids import NodeId, ShardId
from indilog.kernel.metalog import Replicas
from indilog.kernel.placement import Placement
from indilog.kernel.view import view_of

A, B, C = (NodeId(f"storage-{number}") for number in range(3))
SHARD = ShardId(0)


def placed() -> Placement:
    return Placement(view_of(storage_nodes=3, replicas=2))


def test_a_shard_is_where_the_view_has_it_until_an_entry_moves_it() -> None:
    placement = placed()
    before = placement.replicas(SHARD), placement.counting(SHARD), placement.since(SHARD)
    placement.move({SHARD: Replicas(7, (B, C, A))})
    after = placement.replicas(SHARD), placement.counting(SHARD), placement.since(SHARD)
    assert before == ((A, B), (A, B), -1)
    assert after == ((B, C, A), (B, C), 7)
    assert placement.shards_of(A) == placement.shards_of(C) == (SHARD,)
    assert placement.replicas(ShardId(9)) == placement.counting(ShardId(9)) == ()


def test_an_older_entry_than_the_known_one_moves_nothing() -> None:
    placement = placed()
    placement.move({SHARD: Replicas(7, (B, C))})
    placement.move({SHARD: Replicas(6, (A, C))})
    assert placement.replicas(SHARD) == (B, C)


def test_counting_replicas_announce_facts_that_belong_to_no_shard() -> None:
    placement = placed()
    before = placement.announcers
    placement.move({SHARD: Replicas(7, (C, B, A))})
    assert (before, placement.announcers) == ((A, B), (B, C))
