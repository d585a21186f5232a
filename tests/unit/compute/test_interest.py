"""The tags for which a Tag Cache begins rows: those written at its node, and those that reads asked
for (decision 0038).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from indilog.base.ids import ShardId
from indilog.config import node_config
from indilog.roles.tags_sorted import WAITING_MAX, rows_by_tag
from indilog.wire.messages import ShardTags
from indilog_compute.local_index.answers import EMPTY, MISS, Found, Matches
from indilog_compute.local_index.local_index import LocalIndex
from indilog_compute.local_index.tag_cache import TagCache
from indilog_compute.local_index.tag_rows import First

OWN, OTHER = ShardId(1), ShardId(4)
LOG, TAG, NEVER_READ = 7, 101, 102


def part_of(first: int, *records: Sequence[int], shard: ShardId) -> ShardTags:
    tags = array("Q", [tag for record in records for tag in record]).tobytes()
    return ShardTags(shard, first, len(records), bytes(map(len, records)), tags)


def cache_of(seqnums_max: int = 1000) -> TagCache:
    return TagCache(seqnums_max, 100, own=(OWN,))


def seqnums(cache: TagCache | LocalIndex, tag: int, bound: int) -> list[int] | None:
    """The records of a tag from `bound` on; None: a miss."""
    answer = cache.find_range(tag, bound, 1000)
    return list(answer.seqnums) if isinstance(answer, Matches) else None


def test_tags_of_other_writers_that_no_read_asked_for_take_no_memory() -> None:
    cache = cache_of()
    for position in range(50):
        tags = [[LOG, 1000 + 3 * position + n] for n in range(3)]
        cache.apply([part_of(3 * position, *tags, shard=OTHER)], position)
    assert (len(cache), cache.seqnums_cached, cache.size_bytes) == (0, 0, 0)
    assert cache.find_next(1000, 0) is MISS


def test_the_next_record_of_a_tag_that_a_read_missed_begins_a_row() -> None:
    cache = cache_of()
    cache.apply([part_of(0, [TAG], [NEVER_READ], shard=OTHER)], 0)
    assert cache.find_prev(TAG, 9) is MISS
    cache.apply([part_of(2, [TAG, NEVER_READ], [TAG], shard=OTHER)], 1)
    assert cache.find_prev(TAG, 9) == Found(3, OTHER)
    assert seqnums(cache, TAG, 2) == [2, 3]
    assert cache.find_next(TAG, 0) is MISS, "the record before the miss is not known"
    assert cache.find_prev(NEVER_READ, 9) is MISS


def test_records_of_other_writers_extend_the_rows_of_tags_that_were_written_here() -> None:
    cache = cache_of()
    cache.apply([part_of(0, [TAG], [LOG], shard=OTHER)], 0)
    cache.apply([part_of(2, [TAG], shard=OWN), part_of(3, [LOG, TAG], [TAG], shard=OTHER)], 1)
    assert seqnums(cache, TAG, 2) == [2, 3, 4]
    assert cache.find_next(TAG, 1) is MISS
    assert seqnums(cache, LOG, 0) is None, "no record with it was written here"


def test_another_writers_record_between_question_and_answer_is_not_skipped() -> None:
    cache = cache_of()
    cache.apply([part_of(0, [TAG], shard=OTHER)], 0)
    cache.expect(TAG, 1)
    cache.apply([part_of(1, [TAG], shard=OTHER)], 1)
    cache.apply([part_of(2, [TAG], shard=OWN)], 2)
    cache.learn_first(TAG, 1, First(0, OTHER))
    assert seqnums(cache, TAG, 1) == [1, 2]
    assert cache.find_next(TAG, 0) == Found(0, OTHER)


def test_another_writers_first_record_of_a_new_tag_begins_a_complete_row() -> None:
    cache = cache_of()
    cache.expect(TAG, 0)
    cache.learn_first(TAG, 0, None)
    assert cache.find_next(TAG, 0) is EMPTY
    cache.apply([part_of(0, [LOG, TAG], shard=OTHER)], 0)
    assert seqnums(cache, TAG, 0) == [0]


def test_the_number_of_wanted_tags_is_limited() -> None:
    cache = cache_of(3200)
    for tag in range(1000, 1200):
        assert cache.find_next(tag, 0) is MISS
        cache.check_invariants()
    cache.apply([part_of(0, list(range(1000, 1200)), shard=OTHER)], 0)
    assert [tag for tag in range(1000, 1200) if cache.find_prev(tag, 9) is not MISS] == [
        *range(1100, 1200)
    ], "a 32nd of the tags that it may hold: those that were asked for last"


@pytest.mark.parametrize("seed", range(20))
def test_sorted_rows_and_single_records_give_the_same_answers(seed: int) -> None:
    chance = random.Random(seed)
    tags = range(100, 108)
    apart, together = cache_of(), cache_of()
    position = tail = 0
    for _ in range(6):
        for tag in chance.sample(tags, 2):
            assert apart.find_next(tag, 0) == together.find_next(tag, 0)
        parts = []
        for _ in range(8):
            records = [[LOG, *chance.choices(tags, k=2)] for _ in range(5)]
            shard = OWN if chance.random() < 0.1 else OTHER
            parts.append(part_of(tail, *records, shard=shard))
            tail += 5
        for number, part in enumerate(parts):
            apart.apply([part], position + number)
        position += len(parts)
        rows = rows_by_tag(parts)
        assert rows is not None, "there are enough rows"
        together.apply_sorted(rows, position - 1)
        for cache in (apart, together):
            cache.check_invariants()
        for tag in (LOG, *tags):
            known = [seqnums(cache, tag, tail - 40) for cache in (apart, together)]
            assert known[0] == known[1]


@pytest.mark.parametrize("own", [(), (OWN,)])
def test_a_local_index_begins_rows_for_the_shards_of_its_node(own: tuple[ShardId, ...]) -> None:
    index = LocalIndex(node_config(), own=own)
    for position in range(3):
        part = part_of(position, [LOG, TAG], shard=OWN)
        assert index.apply_block(position, [part]) is None
    assert seqnums(index, TAG, 0) == ([0, 1, 2] if own else None)


def test_without_a_local_index_index_data_is_dropped() -> None:
    index = LocalIndex(node_config(local_index="none"), own=(OWN,))
    tags = [[LOG, TAG]] * (WAITING_MAX // 4)
    for position in range(4):
        part = part_of(position * len(tags), *tags, shard=OWN)
        assert index.apply_block(position, [part]) is None
    assert len(index._waiting) < 4
    assert index.find_next(TAG, 0) is MISS
    assert (index.tag_position, index.tag_tail) == (4, 4 * len(tags))
