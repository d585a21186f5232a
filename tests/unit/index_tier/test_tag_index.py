"""Claims about the tag index."""

from __future__ import annotations

from array import array

import pytest

from indilog.base.ids import EMPTY_TAG, MAX_SEQNUM, ShardId
from indilog.wire.messages import ShardTags
from indilog_index.tag_index import TagIndex

LOG, OTHER_LOG = 1000, 2000


def part(first: int, *records: tuple[int, ...], shard: int = 0) -> ShardTags:
    """Consecutive records from `first` on, each with its tags."""
    return ShardTags(
        ShardId(shard),
        first,
        len(records),
        bytes(map(len, records)),
        array("Q", [tag for record in records for tag in record]).tobytes(),
    )


def index_of(*parts: ShardTags) -> TagIndex:
    index = TagIndex()
    for each in parts:
        index.add(each)
    return index


def two_shards() -> TagIndex:
    """Seqnums 2, 3 in shard 0; 4, 5 in shard 7; 9 in shard 0; tag 5 at 2, 5 and 9."""
    return index_of(
        part(2, (LOG, 5), (LOG,)),
        part(4, (LOG,), (LOG, 5), shard=7),
        part(9, (LOG, 5)),
    )


def test_next_finds_the_first_at_or_after_the_bound() -> None:
    index = two_shards()
    found = [index.next(5, bound, 100, 1)[0] for bound in (0, 2, 3, 5, 6, 9, 10)]
    assert found == [(2,), (2,), (5,), (5,), (9,), (9,), ()]


def test_prev_finds_the_last_at_or_before_the_bound() -> None:
    index = two_shards()
    found = [index.prev(5, bound, 100, 1)[0] for bound in (1, 2, 4, 5, 8, 9, MAX_SEQNUM)]
    assert found == [(), (2,), (2,), (5,), (5,), (9,), (9,)]


def test_nothing_at_or_above_the_limit_is_found() -> None:
    index = two_shards()
    assert index.next(5, 6, 9, 1) == ((), ())
    assert index.prev(5, 100, 9, 1) == ((5,), (7,))
    assert index.next(EMPTY_TAG, 4, 4, 5) == ((), ())
    assert index.prev(EMPTY_TAG, 100, 5, 2) == ((4, 3), (7, 0))


def test_several_are_found_best_first_with_the_shard_of_each() -> None:
    index = two_shards()
    assert index.next(5, 0, 100, 2) == ((2, 5), (0, 7))
    assert index.next(5, 0, 100, 9) == ((2, 5, 9), (0, 7, 0))
    assert index.prev(5, 100, 100, 2) == ((9, 5), (0, 7))


def test_the_empty_tag_finds_every_record_and_no_gap() -> None:
    index = two_shards()
    assert index.next(EMPTY_TAG, 3, 100, 9) == ((3, 4, 5, 9), (0, 7, 7, 0))
    assert index.prev(EMPTY_TAG, 8, 100, 3) == ((5, 4, 3), (7, 7, 0))
    assert index.next(EMPTY_TAG, 6, 9, 1) == ((), ())
    assert index.prev(EMPTY_TAG, 1, 100, 1) == ((), ())


def test_an_unknown_tag_has_no_records() -> None:
    assert two_shards().next(6, 0, 100, 5) == ((), ())
    assert two_shards().prev(6, 100, 100, 5) == ((), ())


@pytest.mark.parametrize(
    "records",
    [
        [(LOG,), (LOG,), (LOG,)],
        [(LOG,), (OTHER_LOG,), (LOG,)],
        [(LOG, 5), (LOG, 6), (LOG, 5)],
        [(LOG, 5), (OTHER_LOG, 5), (LOG, 6)],
        [(LOG, 5, 6), (LOG, 6, 7), (LOG, 7, 5)],
        [(LOG, 5), (LOG,), (OTHER_LOG, 6, 7)],
        [(), (), ()],
        [(), (5,), ()],
    ],
)
def test_every_tag_finds_its_records_in_parts_of_any_shape(
    records: list[tuple[int, ...]],
) -> None:
    """Parts with one tag per record, with equally many, and with a common first tag are added
    differently.
    """
    index = index_of(part(0, (LOG, 5)), part(1, *records))
    for tag in (LOG, OTHER_LOG, 5, 6, 7):
        expected = [0] if tag in (LOG, 5) else []
        expected += [seqnum for seqnum, tags in enumerate(records, 1) if tag in tags]
        assert index.next(tag, 0, 100, 9)[0] == tuple(expected)


def test_a_tag_that_a_record_has_twice_finds_it_once() -> None:
    """Two texts may have one hash; the record would then be found twice."""
    index = index_of(
        part(0, (LOG, 5, 5), (LOG, 6, 6)), part(2, (LOG, LOG), (LOG, 5)), part(4, (5, 5, 6))
    )
    assert index.next(5, 0, 100, 9)[0] == (0, 3, 4)
    assert index.next(6, 0, 100, 9)[0] == (1, 4)
    assert index.next(LOG, 0, 100, 9)[0] == (0, 1, 2, 3)


def test_consecutive_records_of_one_shard_share_a_span() -> None:
    index = index_of(
        part(0, (LOG,)), part(1, (LOG,)), part(2, (LOG,), shard=1), part(9, (LOG,), shard=1)
    )
    assert index.spans == 3


def test_counts_and_bytes_grow_with_what_is_added() -> None:
    index = two_shards()
    assert (index.entries, index.tags, index.spans, index.end) == (8, 2, 3, 10)
    waiting = two_shards()
    assert waiting.memory_bytes >= index.memory_bytes > TagIndex().memory_bytes


def test_a_part_that_goes_back_trips_an_assertion() -> None:
    with pytest.raises(AssertionError):
        two_shards().add(part(3, (LOG,)))
