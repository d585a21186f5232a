"""The Suffix: a chain of cuts that knows the shard of every recent seqnum."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from indilog.base.ids import MAX_SEQNUM, ShardId
from indilog.kernel.metalog import Span
from indilog_compute.local_index.answers import EMPTY, MISS, Answer, Found, Matches, RangeAnswer
from indilog_compute.local_index.suffix import DISTANCE_MAX, Suffix

Counts = dict[int, int]


def found(seqnum: int, shard: int) -> Answer:
    return Found(seqnum, ShardId(shard))


def matches(seqnums: Sequence[int], shards: Sequence[int]) -> RangeAnswer:
    return Matches(seqnums, [ShardId(shard) for shard in shards])


def spans_of(tail: int, counts: Counts) -> list[Span]:
    spans = []
    for shard, count in sorted(counts.items()):
        spans.append(Span(ShardId(shard), 0, tail, count))
        tail += count
    return spans


def suffix_of(*cuts: Counts, cuts_max: int = 100, tail: int = 0) -> Suffix:
    suffix = Suffix(cuts_max, tail)
    for counts in cuts:
        suffix.apply(spans_of(suffix.tail, counts))
        suffix.check_invariants()
    return suffix


def test_a_seqnum_belongs_to_the_shard_of_the_next_upper_bound() -> None:
    suffix = suffix_of({0: 2, 1: 1}, {2: 3}, {0: 1, 2: 2})
    shards = [0, 0, 1, 2, 2, 2, 0, 2, 2]
    for seqnum, shard in enumerate(shards):
        assert suffix.find_next(seqnum) == found(seqnum, shard)
        assert suffix.find_prev(seqnum) == found(seqnum, shard)
        assert suffix.shard_of(seqnum) == shard


def test_the_empty_log_is_proven_empty_in_both_directions() -> None:
    suffix = Suffix(10)
    assert suffix.find_next(0) is EMPTY
    assert suffix.find_prev(MAX_SEQNUM) is EMPTY
    assert suffix.find_range(0, 10) == matches(range(0), [])
    assert suffix.shard_of(0) is None


def test_beyond_the_tail_next_is_empty_and_prev_is_the_last_record() -> None:
    suffix = suffix_of({3: 2})
    for bound in (2, 3, MAX_SEQNUM):
        assert suffix.find_next(bound) is EMPTY
        assert suffix.find_prev(bound) == found(1, 3)
        assert suffix.find_range(bound, 5) == matches(range(bound, bound), [])


def test_below_the_head_everything_is_a_miss() -> None:
    suffix = suffix_of({0: 2}, {1: 3}, {2: 1}, cuts_max=2)
    assert (suffix.head, suffix.tail, len(suffix)) == (2, 6, 2)
    assert suffix.find_next(1) is MISS
    assert suffix.find_prev(1) is MISS
    assert suffix.find_range(1, 3) is MISS
    assert suffix.shard_of(1) is None
    assert suffix.find_next(2) == found(2, 1)
    assert suffix.find_prev(2) == found(2, 1)


def test_a_start_in_the_middle_knows_nothing_below_and_the_future_above() -> None:
    suffix = Suffix(10, tail=50)
    assert suffix.find_next(49) is MISS
    assert suffix.find_next(50) is EMPTY
    assert suffix.find_prev(49) is MISS
    assert suffix.find_prev(60) is MISS  # record 49 exists; where, is not known
    suffix.apply(spans_of(50, {4: 2}))
    assert suffix.find_prev(60) == found(51, 4)
    assert suffix.find_prev(49) is MISS


def test_a_limit_of_zero_caches_nothing_and_misses_everything() -> None:
    suffix = suffix_of({0: 2}, {1: 2}, cuts_max=0)
    assert (suffix.head, suffix.tail, len(suffix)) == (4, 4, 0)
    for bound in range(6):
        assert suffix.find_next(bound) is MISS
        assert suffix.find_prev(bound) is MISS
        assert suffix.find_range(bound, 1) is MISS
        assert suffix.shard_of(bound) is None


def test_a_shard_that_ordered_nothing_and_an_empty_cut_leave_no_trace() -> None:
    suffix = suffix_of({0: 0, 1: 2, 2: 0}, {}, {3: 0})
    assert len(suffix) == 1
    assert suffix.find_next(0) == found(0, 1)
    assert suffix.find_next(2) is EMPTY


def test_a_range_ends_at_the_limit_or_at_the_tail() -> None:
    suffix = suffix_of({0: 2, 1: 1}, {2: 3}, {0: 1, 2: 2})
    assert suffix.find_range(1, 4) == matches(range(1, 5), [0, 1, 2, 2])
    assert suffix.find_range(4, 100) == matches(range(4, 9), [2, 2, 0, 2, 2])
    assert suffix.find_range(2, 1) == matches(range(2, 3), [1])


@pytest.mark.parametrize(
    "counts",
    [
        {7: 200_000},
        {0: 1, 5: DISTANCE_MAX},
        {0: 1, 5: DISTANCE_MAX + 1},
        {0: 70_000, 1: 70_000, 2: 1},
        dict.fromkeys(range(6), 40_000),
        {0: 1, 1: 65_535, 2: 1, 3: 65_536, 4: 2},
    ],
)
def test_a_cut_wider_than_two_bytes_is_found_at_every_edge(counts: Counts) -> None:
    suffix = suffix_of({9: 3}, counts, {8: 1})
    upper = 3
    for shard, count in sorted(counts.items()):
        for seqnum in {upper, upper + count // 2, upper + count - 1}:
            assert suffix.find_next(seqnum) == found(seqnum, shard)
        assert suffix.find_range(upper, count) == matches(
            range(upper, upper + count), [shard] * count
        )
        upper += count
    assert suffix.find_next(upper) == found(upper, 8)


def test_distances_at_the_edge_of_two_bytes_stay_in_one_member() -> None:
    assert len(suffix_of({0: 1, 1: DISTANCE_MAX})) == 1
    assert len(suffix_of({0: 1, 1: DISTANCE_MAX + 1})) == 2
    assert len(suffix_of({0: 1_000_000})) == 1


def test_the_members_of_a_wide_cut_count_toward_the_limit() -> None:
    suffix = suffix_of(dict.fromkeys(range(6), 40_000), cuts_max=2)
    assert len(suffix) == 2
    assert suffix.find_next(suffix.head - 1) is MISS
    assert suffix.find_next(suffix.head) == found(suffix.head, suffix.head // 40_000)


@pytest.mark.parametrize("cuts_max", [1, 2, 63, 64, 65, 1000])
def test_eviction_moves_the_arrays_down_and_changes_no_answer(cuts_max: int) -> None:
    chance = random.Random(cuts_max)
    suffix = Suffix(cuts_max)
    shards: list[int] = []
    heads: list[int] = []
    for _ in range(3 * max(cuts_max, 100)):
        counts = {s: chance.randint(1, 3) for s in chance.sample(range(6), chance.randint(1, 6))}
        heads.append(len(shards))
        suffix.apply(spans_of(len(shards), counts))
        shards += [shard for shard in sorted(counts) for _ in range(counts[shard])]
        head = heads[-cuts_max] if len(heads) > cuts_max else 0
        assert suffix.head == head
        assert suffix.find_next(head - 1) is MISS
        for seqnum in {head, (head + len(shards)) // 2, len(shards) - 1}:
            assert suffix.find_next(seqnum) == found(seqnum, shards[seqnum])
    suffix.check_invariants()


def test_memory_stays_flat_over_many_cuts() -> None:
    suffix = Suffix(1000)
    sizes = []
    for cut in range(20_000):
        suffix.apply([Span(ShardId(0), 0, cut, 1)])
        sizes.append(suffix.size_bytes)
    assert max(sizes[10_000:]) <= max(sizes[:10_000])
    assert max(sizes) < 1000 * 20 * 1.5


def test_a_gap_between_cuts_trips_an_assertion() -> None:
    with pytest.raises(AssertionError, match="without gaps"):
        suffix_of({0: 2}).apply([Span(ShardId(0), 2, 3, 1)])


def test_hits_and_misses_are_counted() -> None:
    suffix = suffix_of({0: 1}, {0: 1}, cuts_max=1)
    suffix.find_next(1)
    suffix.find_next(2)
    suffix.find_prev(0)
    suffix.shard_of(1)
    assert (suffix.hits, suffix.misses) == (3, 1)


@pytest.mark.parametrize("shards", [1, 3, 200])
@pytest.mark.parametrize("bytes_max", [8_000, 100_000])
def test_a_byte_limit_may_hold_fewer_cuts_than_the_limit_of_cuts(
    bytes_max: int, shards: int
) -> None:
    suffix = Suffix(1 << 30, bytes_max=bytes_max)
    tail = 0
    for _ in range(20_000 // shards + 50):
        cut = [Span(ShardId(shard), 0, tail + shard, 1) for shard in range(shards)]
        tail += shards
        suffix.apply(cut)
        assert suffix.size_bytes <= bytes_max
    suffix.check_invariants()
    assert suffix.size_bytes > bytes_max * 0.6
    for seqnum in range(suffix.head, tail, 7):
        assert suffix.find_next(seqnum) == Found(seqnum, ShardId(seqnum % shards))


def test_a_cut_that_is_larger_than_all_bytes_is_not_kept() -> None:
    suffix = Suffix(10, bytes_max=2_000)
    suffix.apply([Span(ShardId(shard), 0, shard, 1) for shard in range(2_000)])
    suffix.check_invariants()
    assert suffix.find_next(1_999) is MISS
    assert suffix.find_next(2_000) is EMPTY
    suffix.apply([Span(ShardId(7), 0, 2_000, 1)])
    assert suffix.find_next(2_000) == Found(2_000, ShardId(7))


def test_a_byte_limit_of_zero_holds_nothing() -> None:
    suffix = Suffix(10, bytes_max=0)
    suffix.apply([Span(ShardId(0), 0, 0, 5)])
    suffix.check_invariants()
    assert suffix.find_next(4) is MISS
    assert len(suffix) == 0
