"""The local index: which part answers which question, and how the parts work together."""

from __future__ import annotations

from array import array

import pytest

from indilog.base.ids import EMPTY_TAG, ShardId
from indilog.config import NodeConfig, node_config
from indilog.kernel.metalog import Span
from indilog.wire.messages import Direction, ShardTags
from indilog_compute.local_index import Empty, Found, LocalIndex, Matches, Miss

TAG = 77


def span_of(first: int, length: int, shard: int = 0) -> Span:
    return Span(ShardId(shard), 0, first, length)


def part_of(first: int, length: int, tag: int = TAG, shard: int = 0) -> ShardTags:
    tags = array("Q", [tag] * length).tobytes()
    return ShardTags(ShardId(shard), first, length, bytes([1]) * length, tags)


def index_of(cuts: int, suffix_cuts_max: int = 2) -> LocalIndex:
    """An index that has applied `cuts` cuts of two records; the shard is the cut's number."""
    index = LocalIndex(node_config(suffix_cuts_max=suffix_cuts_max, popularity_entries_max=2))
    for cut in range(cuts):
        index.apply_spans([span_of(2 * cut, 2, shard=cut)])
    return index


def test_the_empty_tag_is_answered_by_the_suffix_from_its_head_on() -> None:
    index = index_of(cuts=4)
    assert index.find_next(EMPTY_TAG, 4) == Found(4, ShardId(2))
    assert index.find_prev(EMPTY_TAG, 100) == Found(7, ShardId(3))
    assert index.find_next(EMPTY_TAG, 8) == Empty()
    assert index.find_range(EMPTY_TAG, 5, 2) == Matches(range(5, 7), [ShardId(2), ShardId(3)])
    assert index.shard_of(7) == 3


def test_below_the_suffix_the_popularity_cache_answers_learned_seqnums() -> None:
    index = index_of(cuts=4)
    assert index.find_next(EMPTY_TAG, 3) == Miss()
    index.learn(3, ShardId(1))
    assert index.find_next(EMPTY_TAG, 3) == Found(3, ShardId(1))
    assert index.find_prev(EMPTY_TAG, 3) == Found(3, ShardId(1))
    assert index.find_next(EMPTY_TAG, 2) == Miss()
    assert index.shard_of(3) == 1
    assert index.shard_of(2) is None
    assert index.find_range(EMPTY_TAG, 3, 1) == Miss()


def test_seqnums_in_the_suffix_are_not_learned() -> None:
    index = index_of(cuts=4)
    index.learn(4, ShardId(2))
    index.learn(7, ShardId(3))
    assert index.status()["popularity_cache"]["entries"] == 0


def test_a_tag_is_answered_by_the_tag_cache_at_its_own_position() -> None:
    index = index_of(cuts=1)
    assert index.find_next(TAG, 0) == Miss()  # the metalog is ahead of the index data
    assert index.apply_block(0, [part_of(0, 2)]) is None
    assert index.tag_position == 1
    assert index.find_next(TAG, 0) == Found(0, ShardId(0))
    assert index.find_prev(TAG, 9) == Found(1, ShardId(0))
    assert index.find_range(TAG, 1, 9) == Matches([1], [ShardId(0)])
    assert index.find_next(TAG, 2) == Empty()


def test_a_position_that_ordered_nothing_counts() -> None:
    index = index_of(cuts=0)
    assert index.apply_block(0, []) is None
    assert index.tag_position == 1


def test_malformed_index_data_changes_nothing_and_gives_the_reason() -> None:
    index = index_of(cuts=2)
    assert index.apply_block(0, [part_of(0, 2)]) is None
    reason = index.apply_block(1, [part_of(2, 1), part_of(1, 1)])
    assert reason is not None
    assert "ascend" in reason
    assert index.tag_position == 1
    assert index.find_next(TAG, 2) == Empty()
    assert index.apply_block(1, [part_of(2, 2)]) is None
    assert index.find_next(TAG, 2) == Found(2, ShardId(0))


def test_index_data_out_of_order_trips_an_assertion() -> None:
    with pytest.raises(AssertionError, match="in order"):
        index_of(cuts=0).apply_block(1, [])


def test_a_local_index_may_start_in_the_middle_of_a_log() -> None:
    index = LocalIndex(NodeConfig(), position=40, tail=100)
    assert index.tag_position == 40
    assert index.find_next(EMPTY_TAG, 99) == Miss()
    assert index.find_next(EMPTY_TAG, 100) == Empty()
    index.apply_spans([span_of(100, 2)])
    assert index.apply_block(40, [part_of(99, 1)]) is not None
    assert index.apply_block(40, [part_of(100, 2)]) is None
    assert index.find_prev(TAG, 200) == Found(101, ShardId(0))
    assert index.find_prev(TAG, 99) == Miss()
    index.learn(5, ShardId(9))
    assert index.find_prev(EMPTY_TAG, 5) == Found(5, ShardId(9))


def test_status_shows_entries_bytes_hits_and_misses_of_each_part() -> None:
    index = index_of(cuts=4)
    index.apply_block(0, [part_of(0, 2)])
    index.learn(0, ShardId(0))
    index.find_next(EMPTY_TAG, 7)
    index.find_next(EMPTY_TAG, 0)
    index.find_next(EMPTY_TAG, 1)
    index.find_next(TAG, 0)
    index.learn_answer(Direction.NEXT, TAG + 1, 0, (1, ShardId(0)), 2)
    index.find_next(TAG + 1, 2)
    status = index.status()
    assert {part: (s["entries"], s["hits"], s["misses"]) for part, s in status.items()} == {
        "suffix": (2, 1, 0),
        "popularity_cache": (1, 1, 1),
        "tag_cache": (2, 1, 1),
        "answer_cache": (1, 0, 1),
    }
    assert status["tag_cache"]["tags"] == 1
    assert all(part["bytes"] > 0 for part in status.values())


def test_without_a_local_index_everything_is_a_miss_and_costs_nothing() -> None:
    index = LocalIndex(node_config(local_index="none"))
    index.apply_spans([span_of(0, 2)])
    index.apply_block(0, [part_of(0, 2)])
    index.learn(0, ShardId(0))
    index.learn_answer(Direction.NEXT, TAG, 0, (0, ShardId(0)), 2)
    index.expect(TAG)
    index.refill(TAG, 2, [0, 1], [ShardId(0)] * 2, complete=True)
    for bound in (0, 1, 2):
        assert index.find_next(EMPTY_TAG, bound) == index.find_prev(EMPTY_TAG, bound) == Miss()
        assert index.find_next(TAG, bound) == index.find_prev(TAG, bound) == Miss()
    assert index.tag_position == 1
    status = index.status()
    assert sum(status[part]["bytes"] for part in status if part != "suffix") == 0
    assert status["suffix"]["entries"] == 0


def test_an_answer_is_not_given_before_the_index_data_reaches_its_record() -> None:
    """Otherwise a session that saw the record at an earlier position would go back."""
    index = index_of(cuts=2)
    index.apply_block(0, [part_of(0, 2, tag=1)])
    index.learn_answer(Direction.NEXT, TAG, 0, (3, ShardId(1)), 4)
    assert index.find_next(TAG, 0) == Miss()
    index.apply_block(1, [part_of(2, 2, tag=1)])
    assert index.find_next(TAG, 0) == Found(3, ShardId(1))


def test_trimmed_records_are_removed_from_the_parts_that_keep_tags() -> None:
    index = index_of(cuts=2)
    index.apply_block(0, [part_of(0, 2)])
    index.apply_block(1, [part_of(2, 2)])
    index.learn_answer(Direction.NEXT, TAG, 0, (0, ShardId(0)), 4)
    index.forget_below(TAG, 2)
    assert index.find_next(TAG, 0) == index.find_next(TAG, 1) == Miss()
    assert index.find_prev(TAG, 1) == Miss()
    assert index.find_next(TAG, 2) == Found(2, ShardId(0))
    index.forget_below(TAG, 4)
    assert index.find_next(TAG, 4) == Miss()
    index.check_invariants()
