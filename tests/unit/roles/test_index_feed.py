"""`IndexFeed`: positions are returned in order, once and complete, and waiting ones are bounded in
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import ShardId
from indilog.kernel.index_schedule import NO_POSITION, IndexPositions, PositionRange
from indilog.roles.index_feed import IndexFeed
from indilog.wire.messages import IndexBlock, ShardTags

A, B = ShardId(0), ShardId(1)
EVERY_THIRD = IndexPositions([PositionRange(1, NO_POSITION, 3)])


def part(shard: ShardId, *, tags: int = 1, first: int = 0) -> ShardTags:
    return ShardTags(shard, first, 1, bytes([tags % 256]), bytes(8 * tags))


def block(
    position: int, *shards: ShardId, productive: Sequence[ShardId] = (A,), tags: int = 1
) -> IndexBlock:
    parts = tuple(part(shard, tags=tags) for shard in shards)
    return IndexBlock(position, position + 1, tuple(productive), parts)


def feed(
    position: int = 0,
    *,
    positions: IndexPositions | None = None,
    positions_max: int = 100,
    bytes_max: int = 1 << 30,
) -> IndexFeed:
    given = {} if positions is None else {"positions": positions}
    return IndexFeed(position, positions_max=positions_max, bytes_max=bytes_max, **given)


def taken(feed: IndexFeed) -> list[int]:
    return [ready.position for ready in feed.take()]


def test_positions_are_returned_in_order_for_any_order_of_arrival() -> None:
    one = feed()
    one.put([block(2, A), block(1, A)])
    assert taken(one) == []
    assert (one.behind, one.end) == (True, 3)
    one.put([block(0, A)])
    assert taken(one) == [0, 1, 2]
    assert (one.behind, one.end, one.position) == (False, 3, 3)


def test_a_position_waits_for_all_its_shards_and_returns_them_ascending() -> None:
    one = feed()
    one.put([block(0, B, productive=(A, B))])
    assert taken(one) == []
    one.put([block(0, A, productive=(A, B))])
    [ready] = one.take()
    assert [part.shard for part in ready.parts] == [A, B]
    assert ready.tail == 1


def test_a_position_that_ordered_nothing_is_ready_without_parts() -> None:
    one = feed()
    one.put([block(0, productive=())])
    assert taken(one) == [0]


def test_the_first_of_two_parts_of_a_shard_counts_and_foreign_shards_do_not() -> None:
    one = feed()
    one.put([block(0, A, B, productive=(A, B), tags=1)])
    one.put([block(0, A, tags=2)])
    [ready] = one.take()
    assert [len(part.tags) for part in ready.parts] == [8, 8]
    one.put([block(1, B)])
    assert taken(one) == []


def test_positions_already_taken_or_of_another_feed_are_ignored() -> None:
    one = feed(2, positions=EVERY_THIRD)
    assert one.position == 4
    one.put([block(position, A) for position in (1, 2, 3, 5, 6)])
    assert not one.behind
    one.put([block(7, A), block(4, A)])
    assert taken(one) == [4, 7]
    assert one.position == 10


def test_take_stops_before_its_end() -> None:
    one = feed()
    one.put([block(0, A), block(1, A)])
    assert [ready.position for ready in one.take(1)] == [0]
    assert taken(one) == [1]


def test_positions_beyond_the_horizon_are_dropped() -> None:
    one = feed(positions=EVERY_THIRD, positions_max=2)
    assert one.horizon == 7
    one.put([block(7, A), block(4, A)])
    assert one.end == 5


def test_a_rejected_block_counts_as_missing_again() -> None:
    one = feed()
    one.put([block(0, A), block(1, A)])
    for ready in one.take():
        one.reject(ready)
        break
    assert taken(one) == []
    one.put([block(0, A)])
    assert taken(one) == [0, 1]


def test_over_the_byte_limit_the_farthest_positions_are_dropped_first() -> None:
    one = feed(bytes_max=100_000)
    one.put([block(position, A, tags=1000) for position in range(1, 11)])
    assert one.end == 11
    one.put([block(position, A, tags=1000) for position in range(11, 14)])
    assert 2 < one.end < 8
    one.put([block(0, A)])
    kept = taken(one)
    assert kept == list(range(kept[-1] + 1))
    assert 3 <= len(kept) < 8


def test_the_next_position_is_kept_at_any_size() -> None:
    one = feed(bytes_max=1000)
    one.put([block(0, A, productive=(A, B), tags=1000), block(1, A)])
    assert one.end == 1
    one.put([block(0, B, productive=(A, B), tags=1000)])
    assert taken(one) == [0]


def test_bytes_of_taken_positions_are_no_longer_counted() -> None:
    one = feed(bytes_max=30_000)
    for position in range(1000):
        one.put([block(position, A, tags=1000)])
        assert taken(one) == [position]
    one.put([block(1001, A, tags=1000)])
    assert one.behind


positions = st.integers(0, 11)
arrivals = st.lists(st.tuples(positions, st.sets(st.sampled_from([A, B]))), max_size=60)


@given(arrivals, st.integers(0, 5000))
def test_any_order_loss_and_repetition_yields_a_prefix_and_lost_positions_can_be_resent(
    arrived: list[tuple[int, set[ShardId]]], bytes_max: int
) -> None:
    one = feed(bytes_max=bytes_max)
    out: list[int] = []
    for position, shards in arrived:
        one.put([block(position, *shards, productive=(A, B), tags=20)])
        for ready in one.take():
            assert {part.shard for part in ready.parts} == {A, B}
            out.append(ready.position)
    assert out == list(range(len(out)))
    while len(out) < 12:  # a request from the next position makes progress
        before = len(out)
        one.put(
            [block(position, A, B, productive=(A, B), tags=20) for position in range(before, 12)]
        )
        out += taken(one)
        assert len(out) > before
    assert out == list(range(12))
