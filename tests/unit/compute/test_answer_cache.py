"""The Answer Cache: answers of the index tier that can never change."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from indilog.base.ids import MAX_SEQNUM, ShardId
from indilog_compute.local_index.answer_cache import AnswerCache
from indilog_compute.local_index.answers import EMPTY, MISS, Found

TAG = 77
TAIL = 100


def found(seqnum: int, shard: int = 1) -> Found:
    return Found(seqnum, ShardId(shard))


def test_a_next_answer_holds_for_every_bound_up_to_its_record() -> None:
    cache = AnswerCache(10)
    cache.learn_next(TAG, 5, 9, ShardId(1))
    assert [cache.find_next(TAG, bound, TAIL) for bound in (4, 5, 9, 10)] == [
        MISS, found(9), found(9), MISS,
    ]  # fmt: skip
    assert cache.find_prev(TAG, 9, TAIL) == found(9)
    assert cache.find_prev(TAG, 8, TAIL) is MISS
    assert cache.find_prev(TAG, 10, TAIL) is MISS


def test_no_record_is_proven_before_the_first_one() -> None:
    cache = AnswerCache(10)
    cache.learn_next(TAG, 0, 9, ShardId(1))
    assert cache.find_prev(TAG, 8, TAIL) is EMPTY
    assert cache.find_prev(TAG, 0, TAIL) is EMPTY


def test_a_prev_answer_holds_up_to_the_tail_of_its_question() -> None:
    cache = AnswerCache(10)
    cache.learn_prev(TAG, 30, 9, ShardId(1), tail=20)
    assert cache.find_prev(TAG, 19, TAIL) == found(9)
    assert cache.find_prev(TAG, 20, TAIL) is MISS  # a record may have been appended since
    cache.learn_prev(TAG, MAX_SEQNUM, 9, ShardId(1), tail=40)
    assert cache.find_prev(TAG, 39, TAIL) == found(9)


def test_records_beyond_the_callers_tail_are_not_answered() -> None:
    cache = AnswerCache(10)
    cache.learn_next(TAG, 5, 9, ShardId(1))
    assert cache.find_next(TAG, 5, 9) is MISS
    assert cache.find_prev(TAG, 9, 9) is MISS
    assert cache.find_next(TAG, 5, 10) == found(9)


def test_zones_around_one_record_are_merged() -> None:
    cache = AnswerCache(10)
    cache.learn_next(TAG, 7, 9, ShardId(1))
    cache.learn_next(TAG, 3, 9, ShardId(1))
    cache.learn_prev(TAG, 15, 9, ShardId(1), TAIL)
    cache.learn_prev(TAG, 12, 9, ShardId(1), TAIL)
    assert len(cache) == 1
    assert cache.find_next(TAG, 3, TAIL) == cache.find_prev(TAG, 15, TAIL) == found(9)


def test_the_least_recently_used_answer_is_evicted_first_and_a_tag_with_its_last() -> None:
    cache = AnswerCache(2)
    cache.learn_next(TAG, 0, 1, ShardId(1))
    cache.learn_next(TAG, 2, 4, ShardId(1))
    assert cache.find_next(TAG, 0, TAIL) == found(1)
    cache.learn_next(8, 0, 5, ShardId(1))
    assert cache.find_next(TAG, 2, TAIL) is MISS
    assert cache.find_next(TAG, 0, TAIL) == found(1)
    cache.learn_next(9, 0, 6, ShardId(1))
    cache.learn_next(9, 7, 8, ShardId(1))
    assert cache.find_next(TAG, 0, TAIL) is MISS
    cache.check_invariants()


def test_a_trimmed_tag_is_forgotten() -> None:
    cache = AnswerCache(10)
    cache.learn_next(TAG, 0, 1, ShardId(1))
    cache.learn_next(TAG, 2, 4, ShardId(1))
    cache.learn_next(8, 0, 5, ShardId(1))
    cache.forget(TAG)
    cache.forget(TAG)
    assert cache.find_next(TAG, 0, TAIL) is MISS
    assert len(cache) == 1
    cache.check_invariants()


@pytest.mark.parametrize("limits", [(0, 1 << 20), (10, 0)])
def test_a_limit_of_zero_caches_nothing(limits: tuple[int, int]) -> None:
    cache = AnswerCache(limits[0], bytes_max=limits[1])
    cache.learn_next(TAG, 0, 1, ShardId(1))
    assert cache.find_next(TAG, 0, TAIL) is MISS
    assert len(cache) == cache.size_bytes == 0


@pytest.mark.parametrize("of_a_tag", [1, 3])
def test_size_bytes_equals_the_used_memory_and_is_bounded(of_a_tag: int) -> None:
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    cache = AnswerCache(1 << 30, bytes_max=2_000_000)
    for n in range(20_000):
        first = 2**40 + 10 * n
        for place in range(of_a_tag):
            cache.learn_next(2**63 + n, first + 3 * place, first + 3 * place + 2, ShardId(1))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1_900_000 < cache.size_bytes <= 2_000_000
    assert 0.9 < cache.size_bytes / (after - before) < 1.6
