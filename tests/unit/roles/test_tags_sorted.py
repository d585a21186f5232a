"""`tags_sorted`: the records of each tag, and the indexes that apply sorted rows."""

from __future__ import annotations

import random
from array import array

import pytest

from indilog.base.ids import ShardId
from indilog.config import NodeConfig
from indilog.roles.tags_sorted import WAITING_MAX, rows_by_tag
from indilog.wire.messages import ShardTags
from indilog_compute.local_index.answers import Matches
from indilog_compute.local_index.local_index import LocalIndex
from indilog_compute.local_index.tag_cache import TagCache
from indilog_index.tag_index import TagIndex

LOG = 7
TAGS = range(100, 110)


def parts_of(chance: random.Random, positions: int) -> list[ShardTags]:
    """Ascending parts, of records with the tag of the log and up to three others, also repeated
    ones.
    """
    parts, first = [], 5
    for _ in range(positions):
        records = [[LOG, *chance.choices(TAGS, k=chance.randrange(4))] for _ in range(20)]
        tags = array("Q", [tag for record in records for tag in record]).tobytes()
        shard = ShardId(chance.choice((0, 1, 65_535)))
        parts.append(ShardTags(shard, first, 20, bytes(map(len, records)), tags))
        first += 20 + chance.randrange(3)
    return parts


def records_of(parts: list[ShardTags]) -> dict[int, list[tuple[int, int]]]:
    """Each tag's seqnums and shards, computed record by record."""
    found: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        tags = iter(array("Q", part.tags))
        for seqnum, count in enumerate(part.tag_counts, part.first_seqnum):
            for tag in {next(tags) for _ in range(count)}:
                found.setdefault(tag, []).append((seqnum, part.shard))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_grouped_by_tag_in_the_order_of_each_tags_last_record(seed: int) -> None:
    parts = parts_of(random.Random(seed), 1 + seed)
    rows = rows_by_tag(parts)
    wanted = records_of(parts)
    assert rows is not None
    seqnums, shards = array("Q", rows.seqnums), array("H", rows.shards)
    groups = list(rows.groups)
    assert {
        tag: list(zip(seqnums[start:end], shards[start:end], strict=True))
        for tag, start, end in groups
    } == wanted
    lasts = [wanted[tag][-1][0] for tag, _, _ in groups]
    assert lasts == sorted(lasts)


def test_few_records_or_records_of_many_tags_are_not_sorted() -> None:
    few = ShardTags(ShardId(0), 0, 4, b"\x01" * 4, array("Q", [LOG] * 4).tobytes())
    assert rows_by_tag([few]) is None
    tags = array("Q", [tag for number in range(100) for tag in (LOG, 1000 + number)]).tobytes()
    assert rows_by_tag([ShardTags(ShardId(0), 0, 100, b"\x02" * 100, tags)]) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_lookup_finds_records_whose_sorting_was_deferred(seed: int) -> None:
    chance = random.Random(seed)
    parts = parts_of(chance, 40)
    index, local = TagIndex(), LocalIndex(NodeConfig(), tail=5)
    for position, part in enumerate(parts):
        index.add(part)
        assert local.apply_block(position, [part]) is None
        if chance.random() < 0.2:
            wanted = records_of(parts[: position + 1])
            for tag, records in wanted.items():
                assert list(zip(*index.next(tag, 0, 1 << 50, 10_000), strict=True)) == records
                held = local.find_range(tag, records[0][0], 10_000)
                assert isinstance(held, Matches)
                assert list(zip(held.seqnums, held.shards, strict=True)) == records
            index.sort_waiting()
            assert index.entries >= sum(map(len, wanted.values()))
    local.check_invariants()


def test_the_number_of_waiting_entries_is_limited() -> None:
    index, local = TagIndex(), LocalIndex(NodeConfig())
    tags = array("Q", [LOG] * 100).tobytes()
    for early in range(2 * WAITING_MAX // 100):
        part = ShardTags(ShardId(0), 100 * early, 100, b"\x01" * 100, tags)
        index.add(part)
        local.apply_block(early, [part])
        assert index._waiting_entries < WAITING_MAX
        assert local._waiting_tags < WAITING_MAX
    empty_from = local.tag_position
    for position in range(empty_from, empty_from + 2 * WAITING_MAX):
        local.apply_block(position, [])
        assert len(local._waiting) < WAITING_MAX


@pytest.mark.parametrize("records", [1, 2])
def test_a_tag_that_was_proven_new_is_complete_after_rows_of_several_positions(
    records: int,
) -> None:
    cache, tag = TagCache(1000, 10), TAGS[0]
    cache.expect(tag, 0)
    cache.learn_first(tag, 0, None)
    log_rows = array("Q", [LOG] * 500)
    new_rows = array("Q", [LOG, tag] * records)
    parts = [
        ShardTags(ShardId(0), 0, 500, b"\x01" * 500, log_rows.tobytes()),
        ShardTags(ShardId(0), 500, records, b"\x02" * records, new_rows.tobytes()),
    ]
    rows = rows_by_tag(parts)
    assert rows is not None, "there are enough rows"
    cache.apply_sorted(rows, 1)
    cache.check_invariants()
    found = cache.find_range(tag, 0, 10)
    assert isinstance(found, Matches)
    assert list(found.seqnums) == [500, 501][:records]


def test_a_small_cache_keeps_its_limits_under_many_rows_at_once() -> None:
    parts = parts_of(random.Random(1), 50)
    cache = TagCache(100, 10)
    rows = rows_by_tag(parts)
    assert rows is not None
    cache.apply_sorted(rows, 49)
    cache.check_invariants()
    wanted = records_of(parts)
    for tag in (LOG, *TAGS):
        held = cache.find_range(tag, wanted[tag][-1][0], 10)
        if isinstance(held, Matches):
            assert list(held.seqnums) == [wanted[tag][-1][0]]
