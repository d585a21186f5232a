"""The Tag Cache: the newest seqnums of the tags in use, bounded in all and per tag."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Sequence

import pytest

from indilog.base.ids import MAX_SEQNUM, ShardId
from indilog.wire.messages import ShardTags
from indilog_compute.local_index.answers import EMPTY, MISS, Answer, Found, Matches, RangeAnswer
from indilog_compute.local_index.index_parts import malformed
from indilog_compute.local_index.tag_cache import TagCache
from indilog_compute.local_index.tag_rows import First
from tests.support.repeated import repeated

LOG = 7


def found(seqnum: int, shard: int = 0) -> Answer:
    return Found(seqnum, ShardId(shard))


def matches(seqnums: Sequence[int], shards: Sequence[int]) -> RangeAnswer:
    return Matches(seqnums, [ShardId(shard) for shard in shards])


def part_of(first_seqnum: int, *tags: Sequence[int], shard: int = 0) -> ShardTags:
    return ShardTags(
        shard=ShardId(shard),
        first_seqnum=first_seqnum,
        count=len(tags),
        tag_counts=bytes(map(len, tags)),
        tags=array("Q", [tag for of_record in tags for tag in of_record]).tobytes(),
    )


class Feed:
    """Appends records to a cache, one metalog position a call."""

    def __init__(self, seqnums_max: int = 1000, per_tag_max: int = 100, tail: int = 0) -> None:
        self.cache = TagCache(seqnums_max, per_tag_max)
        self.position = 0
        self.tail = tail

    def records(self, *tags: Sequence[int], shard: int = 0) -> None:
        part = part_of(self.tail, *tags, shard=shard)
        assert malformed([part], self.tail) is None
        self.cache.apply([part], self.position)
        self.cache.check_invariants()
        self.position += 1
        self.tail += len(tags)


def held(cache: TagCache, tag: int, tail: int) -> list[int]:
    """The seqnums of `tag` in the cache, found by asking at every bound."""
    known = [cache.find_range(tag, bound, tail) for bound in range(tail)]
    matches = next((answer for answer in known if isinstance(answer, Matches)), None)
    return list(matches.seqnums) if matches else []


def held_at_its_end(feed: Feed, tag: int) -> Sequence[int]:
    """The seqnums of a tag with very many records in the cache, from its newest on down."""
    last = feed.cache.find_prev(tag, MAX_SEQNUM)
    if not isinstance(last, Found):
        return []
    first = last.seqnum
    while feed.cache.find_prev(tag, first - 1) == found(first - 1):
        first -= 1
    return range(first, last.seqnum + 1)


def test_bounds_at_below_above_and_between_records_are_answered() -> None:
    feed = Feed(tail=10)
    feed.records([LOG], [LOG, 1], [LOG], [LOG, 1], shard=3)
    cache = feed.cache
    assert cache.find_next(1, 11) == found(11, 3)
    assert cache.find_next(1, 12) == found(13, 3)
    assert cache.find_next(1, 13) == found(13, 3)
    assert cache.find_next(1, 14) is EMPTY
    assert cache.find_next(1, 10) is MISS
    assert cache.find_prev(1, 10) is MISS
    assert cache.find_prev(1, 11) == found(11, 3)
    assert cache.find_prev(1, 12) == found(11, 3)
    assert cache.find_prev(1, MAX_SEQNUM) == found(13, 3)


def test_a_tag_with_a_single_record_answers_as_any_other() -> None:
    feed = Feed(tail=4)
    feed.records([LOG], [LOG, 1], shard=65_535)
    cache = feed.cache
    assert cache.find_next(1, 4) is MISS
    assert cache.find_prev(1, 4) is MISS
    assert cache.find_range(1, 4, 9) is MISS
    assert cache.find_next(1, 5) == cache.find_prev(1, 5) == found(5, 65_535)
    assert cache.find_range(1, 5, 9) == matches([5], [65_535])
    assert cache.find_next(1, 6) is EMPTY
    assert cache.find_prev(1, 6) == found(5, 65_535)
    assert cache.find_range(1, 6, 9) == matches([], [])


def test_an_unknown_tag_is_a_miss_never_empty() -> None:
    feed = Feed()
    feed.records([LOG])
    assert feed.cache.find_next(99, 0) is MISS
    assert feed.cache.find_prev(99, MAX_SEQNUM) is MISS
    assert feed.cache.find_range(99, MAX_SEQNUM, 1) is MISS


def test_a_page_below_the_head_is_known_only_if_the_first_record_is_all_that_is_wanted() -> None:
    feed = Feed(tail=5)
    feed.cache.expect(1, 5)
    feed.records([1])
    feed.cache.learn_first(1, 5, First(2, ShardId(3)))
    assert feed.cache.find_range(1, 0, 1) == Matches((2,), (ShardId(3),))
    assert feed.cache.find_range(1, 0, 2) is MISS, "records between may have been evicted"
    assert feed.cache.find_range(1, 3, 1) is MISS


def test_ranges_stop_at_the_limit_and_an_empty_one_is_proven() -> None:
    feed = Feed()
    feed.records([1], [1], shard=2)
    feed.records([LOG], [1], shard=5)
    assert feed.cache.find_range(1, 0, 2) == matches([0, 1], [2, 2])
    assert feed.cache.find_range(1, 1, 9) == matches([1, 3], [2, 5])
    assert feed.cache.find_range(1, 4, 9) == matches([], [])


def test_records_of_several_shards_keep_their_shards() -> None:
    cache = TagCache(100, 100)
    parts = [part_of(0, [LOG, 1], [LOG, 2], shard=1), part_of(2, [LOG, 1], shard=4)]
    cache.apply(parts, 0)
    assert cache.find_range(1, 0, 9) == matches([0, 2], [1, 4])
    assert cache.find_range(LOG, 0, 9) == matches([0, 1, 2], [1, 1, 4])


@pytest.mark.parametrize(
    "records",
    [
        [[LOG, 1], [LOG, 1], [LOG, 1]],
        [[LOG, 1, 2], [LOG, 2, 1], [LOG, 1, 3]],
        [[LOG, 1], [LOG, LOG], [LOG, 2]],
        [[LOG, 1, 1], [LOG, 1, 1]],
        [[LOG], [LOG, 1, 2], [], [LOG, 2]],
        [[LOG, 1], [8, 1], [LOG, 2]],
        [[], []],
        [[1, LOG, 2], [1, LOG, 3], [1, LOG, 3]],
        [[5, 5, 5]],
    ],
)
def test_any_shape_of_records_gives_each_tag_its_seqnums_once(records: list[list[int]]) -> None:
    feed = Feed()
    feed.records(*records)
    feed.records(*records)
    twice = records + records
    for tag in range(10):
        assert held(feed.cache, tag, feed.tail) == [s for s, t in enumerate(twice) if tag in t]


def test_after_eviction_the_head_is_a_hit_and_one_below_is_a_miss() -> None:
    feed = Feed(per_tag_max=3)
    for _ in range(5):
        feed.records([1])
        feed.records([LOG])
    cache = feed.cache  # tag 1 is at 0, 2, 4, 6, 8; kept are 4, 6, 8
    assert held(cache, 1, feed.tail) == [4, 6, 8]
    assert cache.find_next(1, 4) == cache.find_prev(1, 4) == found(4)
    assert cache.find_next(1, 3) is MISS  # 4 is the answer, but 3 might have been one
    assert cache.find_prev(1, 3) is MISS  # 2 is the answer, and is not known any more


@pytest.mark.parametrize("per_tag_max", [1, 2, 7, 8, 100])
def test_a_tag_keeps_its_newest_seqnums_and_at_most_an_eighth_more(per_tag_max: int) -> None:
    feed = Feed(seqnums_max=1000, per_tag_max=per_tag_max)
    for _ in range(3 * per_tag_max):
        feed.records([1])
        known = held(feed.cache, 1, feed.tail)
        assert known == list(range(feed.tail - len(known), feed.tail))
        assert min(per_tag_max, feed.tail) <= len(known) <= per_tag_max + per_tag_max // 8
        assert feed.cache.seqnums_cached == len(known)


def test_a_whole_column_larger_than_the_limit_is_cut_at_once() -> None:
    feed = Feed(per_tag_max=10)
    feed.records(*[[LOG]] * 500, shard=2)
    assert held(feed.cache, LOG, feed.tail) == list(range(490, 500))
    assert feed.cache.find_prev(LOG, 500) == found(499, 2)


def test_the_tag_with_the_oldest_last_event_is_evicted_whole() -> None:
    feed = Feed(seqnums_max=6, per_tag_max=6)
    feed.records([1])
    feed.records([1])
    feed.records([2])
    feed.records([3])
    feed.cache.find_prev(1, MAX_SEQNUM)  # a read hit: 2 is the oldest now
    feed.records([4])
    feed.records([3])  # an update: after 2 come 1, 4, 3
    for tag in (5, 6, 7, 8):  # inserts, each one too many but for 7: with 1 went two
        feed.records([tag])
    known = {tag: held(feed.cache, tag, feed.tail) for tag in range(1, 9)}
    assert known == {1: [], 2: [], 3: [3, 5], 4: [], 5: [6], 6: [7], 7: [8], 8: [9]}


@pytest.mark.parametrize("hot", [8, 9, 10, 11])
def test_a_tag_in_use_is_spared_even_if_it_is_alone_in_its_partition(hot: int) -> None:
    feed = Feed(seqnums_max=40_000, per_tag_max=8_000)
    cold = [tag for tag in (4, 5, 6, 7) if tag % 4 != hot % 4]
    for tag in cold:
        feed.records(*[[tag]] * 8_000)
    feed.records(*[[hot]] * 8_000)
    feed.records(*[[cold[0]]] * 8_000)  # in use again, too
    feed.records(*[[cold[1] + 8]] * 8_000)
    feed.records(*[[cold[2] + 8]] * 8_000)
    known = {tag: len(held_at_its_end(feed, tag)) for tag in (hot, *cold)}
    assert known == {hot: 8_000, cold[0]: 8_000, cold[1]: 0, cold[2]: 0}


def test_a_read_of_a_single_record_is_an_event_too() -> None:
    feed = Feed(seqnums_max=3, per_tag_max=3)
    for tag in (1, 2, 3):
        feed.records([tag])
    assert feed.cache.find_next(1, 0) == found(0)
    feed.records([4])
    assert held(feed.cache, 1, feed.tail) == [0]
    assert held(feed.cache, 2, feed.tail) == []


def test_a_miss_is_no_event() -> None:
    feed = Feed(seqnums_max=3, per_tag_max=3, tail=5)
    for tag in (1, 2, 3):
        feed.records([tag])
    assert feed.cache.find_next(1, 0) is MISS
    feed.records([4])
    assert held(feed.cache, 1, feed.tail) == []


def test_an_evicted_tag_that_is_appended_again_begins_a_new_row() -> None:
    feed = Feed(seqnums_max=2, per_tag_max=2)
    for tag in (1, 2, 3, 1):
        feed.records([tag])
    assert feed.cache.find_prev(1, 2) is MISS
    assert feed.cache.find_prev(1, 3) == found(3)


def test_a_large_cache_keeps_its_limit_after_every_position() -> None:
    chance = random.Random(1)
    seqnums_max = 40_000  # several partitions
    feed = Feed(seqnums_max=seqnums_max, per_tag_max=500)
    cache, total = feed.cache, 0
    for _ in range(900):
        tags = [[LOG, chance.getrandbits(64)] for _ in range(100)]
        cache.apply([part_of(feed.tail, *tags)], feed.position)
        feed.position, feed.tail, total = feed.position + 1, feed.tail + 100, total + 100
        assert cache.seqnums_cached <= seqnums_max
    cache.check_invariants()
    assert cache.seqnums_cached > seqnums_max * 0.95
    assert total > 2 * seqnums_max
    assert isinstance(cache.find_prev(LOG, MAX_SEQNUM), Found)  # in use all the time


def test_a_large_cache_forgets_nearly_in_the_order_of_last_access() -> None:
    chance = random.Random(2)
    cache = TagCache(40_000, 500)
    tags = [chance.getrandbits(64) for _ in range(100_000)]
    for position in range(1000):
        first = position * 100
        of_position = [[tag] for tag in tags[first : first + 100]]
        cache.apply([part_of(first, *of_position)], position)
    known = [s for s, tag in enumerate(tags) if cache.find_next(tag, s) is not MISS]
    surely, never = 100_000 - 35_000, 100_000 - 42_000
    assert sum(seqnum >= surely for seqnum in known) == 35_000
    assert not any(seqnum < never for seqnum in known)


@pytest.mark.parametrize("repeats", [1, 10, repeated(2)])
@pytest.mark.parametrize("seqnums_max", [8_000, repeated(12_000), repeated(40_000)])
def test_size_bytes_equals_the_used_memory(repeats: int, seqnums_max: int) -> None:
    """After three times as many records as it holds, in dictionaries that are more or less full."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    cache = TagCache(seqnums_max, 1000)
    chance, tail = random.Random(3), 0
    while tail < 3 * seqnums_max:
        tags = [[chance.getrandbits(64)] for _ in range(100)]
        for _ in range(repeats):
            cache.apply([part_of(tail, *tags)], tail)
            tail += 100
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    cache.check_invariants()
    assert 0.95 < cache.size_bytes / (after - before) < 1.5, f"{repeats} records a tag"


@pytest.mark.parametrize("bytes_max", [5_000, 100_000, repeated(3_000_000)])
@pytest.mark.parametrize("repeats", [1, 3, 40])
def test_bytes_are_bounded_below_the_limit_of_seqnums(bytes_max: int, repeats: int) -> None:
    cache = TagCache(1_000_000, 10_000, bytes_max=bytes_max)
    chance, tail = random.Random(5), 0
    sizes = []
    while tail < max(20_000, 2 * bytes_max // 12):
        tags = [[LOG, chance.getrandbits(64)] for _ in range(20)]
        for _ in range(repeats):
            cache.apply([part_of(tail, *tags)], tail)
            tail += 20
            sizes.append(cache.size_bytes)
    cache.check_invariants()
    assert max(sizes) <= bytes_max
    assert sizes[-1] > bytes_max * 0.5 or bytes_max < 100_000, "the budget is used"


def test_memory_stays_flat_over_new_tags() -> None:
    chance = random.Random(4)
    feed = Feed(seqnums_max=2000, per_tag_max=100)
    sizes = []
    for _ in range(200):
        feed.records(*[[LOG, chance.getrandbits(64)] for _ in range(50)])
        sizes.append(feed.cache.size_bytes)
    assert max(sizes[100:]) <= max(sizes[:100])


@pytest.mark.parametrize(("seqnums_max", "per_tag_max"), [(0, 10), (10, 0), (0, 0)])
def test_a_limit_of_zero_caches_nothing_and_misses_everything(
    seqnums_max: int, per_tag_max: int
) -> None:
    feed = Feed(seqnums_max, per_tag_max)
    feed.records([LOG, 1], [LOG, 2])
    assert (len(feed.cache), feed.cache.seqnums_cached, feed.cache.size_bytes) == (0, 0, 0)
    assert feed.cache.find_next(1, 0) is MISS
    assert feed.cache.find_prev(LOG, 5) is MISS
    assert feed.cache.find_range(LOG, 5, 1) is MISS


def test_a_limit_of_one_holds_the_last_touched_tag_or_nothing() -> None:
    feed = Feed(1, 1)
    for tag in (1, 2, 1, 3):
        feed.records([tag])
        assert feed.cache.seqnums_cached == 1
        assert feed.cache.find_next(tag, feed.tail - 1) == found(feed.tail - 1)


def test_hits_and_misses_are_counted_and_proven_absence_is_a_hit() -> None:
    feed = Feed(tail=1)
    feed.records([1])
    feed.cache.find_next(1, 1)
    feed.cache.find_next(1, 2)
    feed.cache.find_prev(1, 0)
    feed.cache.find_range(2, 0, 1)
    assert (feed.cache.hits, feed.cache.misses) == (2, 2)


@pytest.mark.parametrize(
    "parts",
    [
        [ShardTags(ShardId(0), 5, 2, b"\x01", bytes(8))],
        [ShardTags(ShardId(0), 5, 0, b"", b"")],
        [ShardTags(ShardId(0), 5, 1, b"\x02", bytes(8))],
        [ShardTags(ShardId(0), 5, 1, b"\x01", bytes(7))],
        [ShardTags(ShardId(0), 4, 1, b"\x01", bytes(8))],
        [ShardTags(ShardId(0), -1, 1, b"\x01", bytes(8))],
        [ShardTags(ShardId(65_536), 5, 1, b"\x01", bytes(8))],
        [ShardTags(ShardId(-1), 5, 1, b"\x01", bytes(8))],
        [ShardTags(ShardId(0), MAX_SEQNUM, 1, b"\x01", bytes(8))],
        [part_of(5, [1], [1]), part_of(6, [1])],
        [part_of(7, [1]), part_of(5, [1])],
    ],
)
def test_contradictory_parts_are_reported_as_malformed(parts: list[ShardTags]) -> None:
    assert malformed(parts, tail=5)


def test_well_formed_parts_may_leave_seqnums_out() -> None:
    assert malformed([part_of(5, [1]), part_of(9, [1, 2], [])], tail=5) is None
    assert malformed([], tail=5) is None
