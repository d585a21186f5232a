"""The Popularity Cache: an LRU of single seqnums."""

from __future__ import annotations

import gc
import tracemalloc

from indilog.base.ids import ShardId
from indilog_compute.local_index.answers import MISS, Found
from indilog_compute.local_index.popularity_cache import PopularityCache


def cache_of(entries_max: int, *seqnums: int) -> PopularityCache:
    cache = PopularityCache(entries_max)
    for seqnum in seqnums:
        cache.learn(seqnum, ShardId(seqnum % 4))
    cache.check_invariants()
    return cache


def test_only_the_same_seqnum_is_a_hit() -> None:
    cache = cache_of(10, 5)
    assert cache.find(5) == Found(5, ShardId(1))
    assert cache.find(4) is MISS
    assert cache.find(6) is MISS


def test_shard_zero_is_a_hit_too() -> None:
    assert cache_of(1, 4).find(4) == Found(4, ShardId(0))


def test_the_least_recently_used_is_forgotten() -> None:
    cache = cache_of(2, 1, 2)
    cache.find(1)
    cache.learn(3, ShardId(3))
    assert cache.find(2) is MISS
    assert cache.find(1) == Found(1, ShardId(1))
    assert cache.find(3) == Found(3, ShardId(3))


def test_the_cache_never_holds_more_than_its_limit() -> None:
    cache = cache_of(3, *range(100))
    assert len(cache) == 3
    assert cache.size_bytes == cache_of(3, 1, 2, 3).size_bytes


def test_a_limit_of_zero_caches_nothing() -> None:
    cache = cache_of(0, 1, 2)
    assert len(cache) == 0
    assert cache.find(1) is MISS


def test_hits_and_misses_are_counted() -> None:
    cache = cache_of(2, 1)
    cache.find(1)
    cache.shard_of(1)
    cache.find(2)
    assert (cache.hits, cache.misses) == (2, 1)


def test_counted_bytes_are_bounded_and_equal_the_used_memory() -> None:
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    cache = PopularityCache(1 << 30, bytes_max=1_000_000)
    for seqnum in range(2**40, 2**40 + 20_000):
        cache.learn(seqnum, ShardId(seqnum % 300))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 900_000 < cache.size_bytes <= 1_000_000
    assert 0.7 < cache.size_bytes / (after - before) < 1.6
    assert len(PopularityCache(10, bytes_max=0)) == 0
