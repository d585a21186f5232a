"""No stop-the-world: deferred work of the local index is bounded per step, and small in all.

Thesis 7.4: "data structures reallocate memory [...] operations are blocked". The tests count
entries touched, not time.
"""

from __future__ import annotations

import random
from array import array

from indilog.base.ids import ShardId
from indilog.kernel.metalog import Span
from indilog.wire.messages import ShardTags
from indilog_compute.local_index.suffix import Suffix
from indilog_compute.local_index.tag_cache import TagCache
from indilog_compute.local_index.tag_rows import Row
from indilog_compute.reads.record_cache import RecordCache

RECORDS = 200
ENTRIES_REBUILT_MAX = 2 * 16_384
"""Entries that growing one dictionary may touch: it takes a millisecond or two."""


class CountingTagCache(TagCache):
    """Counts the partitions that evictions visit, and the tags that they forget."""

    visited = evicted = 0

    def _evict_from(self, partition: dict[int, Row]) -> None:
        before = len(partition)
        super()._evict_from(partition)
        self.visited += 1
        self.evicted += before - len(partition)


def test_an_eviction_forgets_a_bounded_number_and_visits_few_partitions() -> None:
    chance = random.Random(7)
    cache = CountingTagCache(1_000_000, 10_000, bytes_max=16 * 1024 * 1024)
    partitions = len(cache._partitions)
    assert partitions >= 8
    evicted_max = visited_max = 0
    for position in range(1000):
        tags = array("Q", [chance.getrandbits(64) for _ in range(RECORDS)]).tobytes()
        part = ShardTags(ShardId(0), position * RECORDS, RECORDS, b"\x01" * RECORDS, tags)
        evicted, visited = cache.evicted, cache.visited
        cache.apply([part], position)
        evicted_max = max(evicted_max, cache.evicted - evicted)
        visited_max = max(visited_max, cache.visited - visited)
    assert cache.evicted > 90_000
    assert evicted_max <= RECORDS + 512
    assert visited_max <= 3 * partitions
    assert cache.visited < cache.evicted / 10
    assert max(map(len, cache._partitions)) <= ENTRIES_REBUILT_MAX


def test_no_dictionary_of_a_full_tag_cache_of_the_default_size_is_large() -> None:
    for tags_max in (100, 16_384, 60_000, 400_000, 10_000_000):
        cache = TagCache(tags_max, 10_000)
        mean = tags_max / len(cache._partitions)
        assert mean <= ENTRIES_REBUILT_MAX / 2, "far from the limit where tags cluster, too"


class CountingSuffix(Suffix):
    """Counts the members that are moved down."""

    moved = moves = 0

    def _move_down(self) -> None:
        super()._move_down()
        self.moves += 1
        self.moved += len(self)


def test_the_suffix_moves_what_it_keeps_once_in_an_eighth_of_its_length() -> None:
    suffix = CountingSuffix(1000)
    for cut in range(20_000):
        suffix.apply([Span(ShardId(0), 0, cut, 1)])
    assert suffix.moves <= 20_000 / 125
    assert suffix.moved <= 9 * 20_000


def test_the_record_cache_moves_what_it_keeps_rarely() -> None:
    cache = RecordCache(200_000)
    moved = moves = kept = 0
    for number in range(10_000):
        before = len(cache._spans)
        cache.add_span(number, [b"x" * 100], [b"log"], 1.0, 1.0, 103)
        if len(cache._spans) <= before:
            moves += 1
            moved += len(cache._spans)
        kept = max(kept, len(cache._spans))
    assert 0 < moves < 100
    assert moved <= 2 * 10_000
    assert kept < 5_000
