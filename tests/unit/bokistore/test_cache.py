"""The process's cache: it is bounded, and returns the latest view up to a bound."""

from __future__ import annotations

import gc
import weakref

import pytest

from bokistore.cache import ViewCache, cache_of
from bokistore.records import ObjectView
from indilog.testing import MemoryLogs


def view(seqnum: int, size: int = 10) -> ObjectView:
    return ObjectView(seqnum, seqnum, b"x" * size, 0)


def test_the_cache_returns_the_latest_view_up_to_a_bound() -> None:
    cache = ViewCache()
    for seqnum in (5, 9, 2):
        cache.keep_view("log", "a", view(seqnum))
    for bound, expected in ((1, None), (2, 2), (4, 2), (5, 5), (8, 5), (9, 9), (99, 9)):
        kept = cache.view("log", "a", bound)
        assert (kept and kept.seqnum) == expected
    assert cache.view("log", "b", 99) is None
    assert cache.view("other", "a", 99) is None


def test_the_oldest_views_of_an_object_are_evicted_first() -> None:
    cache = ViewCache()
    for seqnum in range(10):
        cache.keep_view("log", "a", view(seqnum))
    assert cache.view("log", "a", 5) is None
    assert cache.view("log", "a", 6) is not None


def test_a_view_stored_again_replaces_the_previous_one() -> None:
    cache = ViewCache()
    cache.keep_view("log", "a", view(3, size=10))
    before = cache.bytes
    cache.keep_view("log", "a", view(3, size=30))
    assert cache.bytes == before + 20


@pytest.mark.parametrize("limit", [{"objects_max": 3}, {"bytes_max": 3 * 210}])
def test_the_least_recently_used_object_is_evicted_first(limit: dict[str, int]) -> None:
    cache = ViewCache(**limit)
    for name in "abc":
        cache.keep_view("log", name, view(1))
    cache.view("log", "a", 9)
    cache.keep_view("log", "d", view(1))
    assert [name for name in "abcd" if cache.view("log", name, 9)] == ["a", "c", "d"]
    assert (len(cache), cache.bytes) == (3, 3 * 210)


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache = ViewCache(bytes_max=0)
    cache.keep_view("log", "a", view(1))
    assert (len(cache), cache.bytes) == (0, 0)


def test_cached_decisions_are_bounded() -> None:
    cache = ViewCache(decisions_max=2)
    for seqnum in (1, 2, 3):
        cache.keep_decision("log", seqnum, committed=seqnum == 2)
    assert [cache.decision("log", seqnum) for seqnum in (1, 2, 3)] == [None, True, False]


def test_stores_of_one_platform_share_a_cache() -> None:
    logs = MemoryLogs()
    shared = cache_of(logs.log("a"))
    assert cache_of(logs.log("b")) is shared
    assert cache_of(MemoryLogs().log("a")) is not shared


def test_a_cache_is_freed_with_its_platform() -> None:
    logs = MemoryLogs()
    kept = weakref.ref(cache_of(logs.log("a")))
    assert kept() is not None
    del logs
    gc.collect()
    assert kept() is None
