"""The claims of the IndiLog thesis (2022) that this project keeps, each with its sentence.

Section 5.1: local indexes. Where we do better or differ, the test says so and holds what we do.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from indilog.base.ids import EMPTY_TAG, MAX_SEQNUM, Epoch, ShardId, ViewNumber
from indilog.config import node_config
from indilog.kernel.metalog import MetalogReplay, NewRecords, Span
from indilog.wire.messages import ShardTags
from indilog_compute.local_index import Answer, Empty, Found, LocalIndex, Matches, Miss
from indilog_compute.local_index.popularity_cache import PopularityCache
from indilog_compute.local_index.suffix import Suffix
from indilog_compute.local_index.tag_cache import TagCache

TAG_1, TAG_2, TAG_3 = 1, 2, 3


def found(seqnum: int, shard: int) -> Answer:
    return Found(seqnum, ShardId(shard))


class Log:
    """A log that a local index follows: every append is one metalog entry."""

    def __init__(self, **limits: int) -> None:
        self.index = LocalIndex(node_config(**limits))
        self.replay = MetalogReplay()

    def append(self, records: dict[int, Sequence[Sequence[int]]]) -> None:
        """Order records: of each shard, the tags of each."""
        counts = {ShardId(shard): len(tags) for shard, tags in records.items()}
        position = self.replay.position
        entry = NewRecords(position, ViewNumber(1), Epoch(1), counts)
        spans = self.replay.apply(entry)
        self.index.apply_spans(spans)
        parts = [part_of(span, records[span.shard]) for span in spans if span.length]
        assert self.index.apply_block(position, parts) is None
        self.index.check_invariants()


def part_of(span: Span, records: Sequence[Sequence[int]]) -> ShardTags:
    tags = array("Q", [tag for of_record in records for tag in of_record]).tobytes()
    return ShardTags(span.shard, span.first_seqnum, span.length, bytes(map(len, records)), tags)


def suffix_of(*cuts: dict[int, int], cuts_max: int = 100) -> Suffix:
    suffix = Suffix(cuts_max)
    for counts in cuts:
        tail, spans = suffix.tail, []
        for shard in sorted(counts):
            spans.append(Span(ShardId(shard), 0, tail, counts[shard]))
            tail += counts[shard]
        suffix.apply(spans)
    return suffix


def figure_5_2() -> TagCache:
    """The Tag Cache of figure 5.2a.

    The figure gives seqnum 7 to shard 1 under tag 1 and to shard 0 under tag 2. It gives two shards
    to the only record of tag 3. A record is on one shard, so here 7 is on shard 1 and 5 on shard 2.
    """
    tags = {3: [TAG_2], 4: [TAG_1], 5: [TAG_3], 6: [TAG_1], 7: [TAG_1, TAG_2], 8: [TAG_2]}
    tags |= {9: [TAG_1], 10: [TAG_1], 11: [TAG_2]}
    shards = {3: 1, 4: 1, 5: 2, 6: 0, 7: 1, 8: 0, 9: 2, 10: 0, 11: 2}
    cache = TagCache(100, 100)
    for position, seqnum in enumerate(tags):
        span = Span(ShardId(shards[seqnum]), 0, seqnum, 1)
        cache.apply([part_of(span, [tags[seqnum]])], position)
    return cache


# --- 5.1 Local indexes


def test_5_1_local_indexes_are_optional() -> None:
    """'tasks on a compute node lacking a local index can execute normally by contacting the index
    tier'.
    """
    log = Log(
        suffix_cuts_max=0, popularity_entries_max=0,
        tag_cache_seqnums_max=0, tag_cache_seqnums_per_tag_max=0,
    )  # fmt: skip
    log.append({0: [[TAG_1], [TAG_1]]})
    log.index.learn(0, ShardId(0))
    for tag in (EMPTY_TAG, TAG_1, TAG_2):
        for bound in (0, 1, 2, MAX_SEQNUM):
            assert log.index.find_next(tag, bound) == Miss()
            assert log.index.find_prev(tag, bound) == Miss()
            assert log.index.find_range(tag, bound, 10) == Miss()


def test_5_1_local_indexes_are_bounded_however_long_the_log() -> None:
    """'The size-bounded property is important because it ensures that a predictable amount of
    memory remains available to the serverless tasks'.
    """
    log = Log(
        suffix_cuts_max=100, popularity_entries_max=50,
        tag_cache_seqnums_max=300, tag_cache_seqnums_per_tag_max=40,
    )  # fmt: skip
    bytes_held = []
    for step in range(1000):
        log.append({step % 3: [[TAG_1, 100 + 2 * step], [TAG_1, 101 + 2 * step]]})
        log.index.learn(step, ShardId(step % 3))
        bytes_held.append(sum(part["bytes"] for part in log.index.status().values()))
    assert max(bytes_held[500:]) <= max(bytes_held[:500])
    assert log.index.status()["suffix"]["entries"] == 100
    assert log.index.status()["popularity_cache"]["entries"] == 50
    assert log.index.status()["tag_cache"]["entries"] <= 300


def test_5_1_the_index_knows_the_whole_log() -> None:
    """'contain information about the entire shared log, not only about the sequence numbers
    appended locally'.
    """
    log = Log()
    log.append({0: [[TAG_1]], 1: [[TAG_1], [TAG_2]], 2: [[TAG_1]]})
    matches = log.index.find_range(TAG_1, 0, 10)
    assert matches == Matches([0, 1, 3], [ShardId(0), ShardId(1), ShardId(2)])


def test_5_1_the_empty_tag_covers_every_record_and_a_custom_tag_its_own() -> None:
    """'the sequence numbers corresponding to the empty tag are always consecutive. [...] the
    sequence numbers corresponding to custom tags need not be consecutive'.
    """
    log = Log()
    log.append({0: [[TAG_1], [TAG_2]], 1: [[TAG_1], []]})
    everything = log.index.find_range(EMPTY_TAG, 0, 10)
    assert isinstance(everything, Matches)
    assert list(everything.seqnums) == [0, 1, 2, 3]
    of_tag = log.index.find_range(TAG_1, 0, 10)
    assert isinstance(of_tag, Matches)
    assert list(of_tag.seqnums) == [0, 2]


# --- 5.1.1 Suffix


def test_5_1_1_the_oldest_entries_are_evicted() -> None:
    """'The suffix is bounded in size; the oldest entries are evicted when a threshold size is
    reached'.
    """
    suffix = suffix_of({0: 1}, {1: 2}, {0: 3}, cuts_max=2)
    assert suffix.find_next(0) == Miss()
    assert [suffix.find_next(seqnum) for seqnum in (1, 5)] == [found(1, 1), found(5, 0)]


def test_5_1_1_all_receivers_derive_the_same_order() -> None:
    """'for each metalog update all new sequence numbers of records persisted on a storage shard
    which comes after another storage shard in the order are greater'.
    """
    counts = {ShardId(2): 2, ShardId(0): 1, ShardId(1): 3}
    entry = NewRecords(0, ViewNumber(1), Epoch(1), counts)
    reversed_entry = NewRecords(0, ViewNumber(1), Epoch(1), dict(reversed(counts.items())))
    spans = MetalogReplay().apply(entry)
    assert spans == MetalogReplay().apply(reversed_entry)
    assert [(span.shard, span.first_seqnum) for span in spans] == [(0, 0), (1, 1), (2, 4)]


def test_5_1_1_a_seqnum_belongs_to_the_higher_upper_bound() -> None:
    """'A sequence number that lies between two upper bounds belongs to the higher one'.

    Figure 5.1: 'The new metalog update contains progress from storage shard 0 and 1 which
    replicated 4 and 3 new log records, respectively.'
    """
    suffix = suffix_of({0: 2, 1: 1, 2: 4}, {0: 4, 1: 3})
    shards = [0, 0, 1, 2, 2, 2, 2, 0, 0, 0, 0, 1, 1, 1]
    assert [suffix.shard_of(seqnum) for seqnum in range(14)] == shards


def test_5_1_1_each_metalog_update_extends_the_chain() -> None:
    """'From the metalog updates the Suffix builds a chain. Each metalog update extends the
    chain'.
    """
    suffix = suffix_of({0: 2, 1: 1}, {2: 5})
    assert len(suffix) == 2
    assert (suffix.head, suffix.tail) == (0, 8)


def test_5_1_1_only_productive_shards_are_stored() -> None:
    """'Productive storage shards are those shards that replicated new log records in a metalog
    update'.
    """
    few, many = Suffix(1000), Suffix(1000)
    for cut in range(1000):
        few.apply([Span(ShardId(1), 0, cut, 1)])
        many.apply([Span(ShardId(s), 0, cut + (s > 1), int(s == 1)) for s in range(40)])
    assert many.size_bytes == few.size_bytes


def test_5_1_1_between_head_and_tail_there_is_no_miss() -> None:
    """'An index lookup within the head and the tail is always a hit because the suffix is
    contiguous. An index lookup with a sequence number lower than the head is a miss'.
    """
    suffix = suffix_of({0: 3, 1: 2}, {1: 1}, {0: 1, 2: 1}, {1: 2}, cuts_max=3)
    assert [suffix.find_next(seqnum) for seqnum in range(suffix.head)] == [Miss()] * 5
    inside = range(suffix.head, suffix.tail)
    assert all(isinstance(suffix.find_next(seqnum), Found) for seqnum in inside)
    assert all(isinstance(suffix.find_prev(seqnum), Found) for seqnum in inside)


def test_5_1_1_beyond_the_tail_a_record_cannot_exist() -> None:
    """Algorithm 1, lines 5 to 7: 'if B > Tail then Return index cannot exist'. A read of the
    previous record finds the last one there.
    """
    suffix = suffix_of({0: 3})
    assert suffix.find_next(3) == Empty()
    assert suffix.find_prev(3) == found(2, 0)


def test_5_1_1_a_cut_of_four_shards_costs_24_bytes() -> None:
    """'the Suffix consumes only 8B+4*(2B+2B)=24B per metalog round. The Suffix consumes 94% less
    memory compared to a naïve design.' (4 * 10 * (8B + 2B) = 400B).

    Flat arrays need to know where a member begins: 8 bytes more, so 92 % less.
    """
    cuts = 1000
    suffix = suffix_of(*[dict.fromkeys(range(4), 10)] * cuts, cuts_max=cuts)
    arrays = suffix._keys, suffix._distances, suffix._shards
    assert sum(len(column) * column.itemsize for column in arrays) == 24 * cuts
    assert len(suffix._ends) * suffix._ends.itemsize == 8 * cuts
    assert suffix.size_bytes < (24 + 8) * cuts * 9 / 8 + 500  # arrays grow by an eighth ahead


def test_5_1_1_a_distance_needs_two_bytes_even_where_a_cut_is_wider() -> None:
    """'The distance between two upper bounds within a metalog update is always very small and a 2B
    integer sufficient' - where it is not, the cut becomes several members.
    """
    suffix = suffix_of({0: 10, 1: 100_000, 2: 100_000, 3: 5})
    assert [suffix.shard_of(s) for s in (9, 10, 100_009, 100_010, 200_009, 200_010)] == [
        0, 1, 1, 2, 2, 3,
    ]  # fmt: skip


# --- 5.1.2 Popularity Cache


def test_5_1_2_it_holds_what_is_below_the_head_of_the_suffix() -> None:
    """'holds the storage shards for the sequence numbers less than the head of the Suffix of the
    most recent reads accessed via any tag on the node hosting this index'.
    """
    log = Log(suffix_cuts_max=1)
    log.append({0: [[TAG_1]]})
    log.append({1: [[TAG_1]]})
    log.index.learn(0, ShardId(0))
    log.index.learn(1, ShardId(1))
    assert log.index.status()["popularity_cache"]["entries"] == 1
    assert log.index.find_next(EMPTY_TAG, 0) == found(0, 0)


def test_5_1_2_hits_of_the_suffix_do_not_fill_it() -> None:
    """'The cache gets filled with read results that were index lookup misses. The Popularity Cache
    is not filled with index hits from the Suffix'.
    """
    log = Log(suffix_cuts_max=1)
    log.append({0: [[TAG_1]]})
    assert log.index.find_next(EMPTY_TAG, 0) == found(0, 0)
    log.append({1: [[TAG_1]]})
    assert log.index.find_next(EMPTY_TAG, 0) == Miss()


def test_5_1_2_after_a_single_miss_lookups_are_local_again() -> None:
    """'after a single miss all the following index lookups are captured again locally by the
    Popularity Cache'.
    """
    log = Log(suffix_cuts_max=1)
    for shard in (0, 1, 2):
        log.append({shard: [[TAG_1]]})
    assert log.index.find_next(EMPTY_TAG, 0) == Miss()
    log.index.learn(0, ShardId(0))  # what the index tier answered
    assert [log.index.find_next(EMPTY_TAG, 0) for _ in range(3)] == [found(0, 0)] * 3


def test_5_1_2_it_is_a_bounded_lru_cache() -> None:
    """'It is implemented as a size-bounded LRU cache'."""
    cache = PopularityCache(2)
    for seqnum in (10, 20):
        cache.learn(seqnum, ShardId(0))
    cache.find(10)
    cache.learn(30, ShardId(0))
    answers = [cache.find(seqnum) for seqnum in (10, 20, 30)]
    assert answers == [found(10, 0), Miss(), found(30, 0)]


@pytest.mark.parametrize("direction", ["find_next", "find_prev"])
def test_5_1_2_only_point_hits_the_same_in_both_directions(direction: str) -> None:
    """'It can only have point hits (Alg2:2) [...] Lookup semantics for ReadNext and ReadPrevious
    are identical'.
    """
    log = Log(suffix_cuts_max=1)
    for shard in (0, 1, 2, 3):
        log.append({shard: [[TAG_1]]})
    log.index.learn(1, ShardId(1))
    find = getattr(log.index, direction)
    assert [find(EMPTY_TAG, bound) for bound in (0, 1, 2)] == [Miss(), found(1, 1), Miss()]


# --- 5.1.3 Tag Cache


def test_5_1_3_an_unknown_tag_is_a_miss() -> None:
    """Algorithm 3, lines 2 to 4: 'if t not in Tag Cache then Return index miss'. 'a compute node
    cannot know without additional information whether a tag was used before or is new'.
    """
    assert figure_5_2().find_next(99, 0) == Miss()
    assert figure_5_2().find_prev(99, MAX_SEQNUM) == Miss()


def test_5_1_3_below_the_head_is_a_miss() -> None:
    """Algorithm 3, lines 6 to 8: 'if B < head of Suffix then Return index miss'."""
    cache = figure_5_2()
    assert [cache.find_next(TAG_1, bound) for bound in (0, 3)] == [Miss(), Miss()]
    assert [cache.find_prev(TAG_1, bound) for bound in (0, 3)] == [Miss(), Miss()]
    assert cache.find_next(TAG_1, 4) == cache.find_prev(TAG_1, 4) == found(4, 1)


def test_5_1_3_above_the_tail_a_record_cannot_exist() -> None:
    """Algorithm 3, lines 9 to 11: 'if B > tail of Suffix then Return index cannot exist'."""
    cache = figure_5_2()
    assert cache.find_next(TAG_1, 10) == found(10, 0)
    assert cache.find_next(TAG_1, 11) == Empty()
    assert cache.find_next(TAG_3, 6) == Empty()


def test_5_1_3_the_lowest_upper_bound_is_the_answer() -> None:
    """Algorithm 3, line 13: 'Get index i of sequence number s for which s is lowest upper bound of
    B'.
    """
    cache = figure_5_2()
    answers = [cache.find_next(TAG_1, bound) for bound in range(4, 11)]
    assert answers == [
        found(4, 1), found(6, 0), found(6, 0), found(7, 1), found(9, 2), found(9, 2), found(10, 0),
    ]  # fmt: skip
    assert cache.find_prev(TAG_2, 10) == found(8, 0)


def test_5_1_3_every_event_renews_the_last_access() -> None:
    """'An event (insert, update, read hit) that accesses the tag overwrites the timestamp with the
    current metalog position.' 'the last access time is used to evict those tags completely that
    have not been recently had their timestamp updated'.
    """
    log = Log(tag_cache_seqnums_max=5, tag_cache_seqnums_per_tag_max=5)
    for tag in (TAG_1, TAG_2, TAG_3):
        log.append({0: [[tag]]})
    log.append({0: [[TAG_1]]})  # update
    log.index.find_next(TAG_2, 1)  # read hit
    log.append({0: [[4]]})  # insert
    log.append({0: [[5]]})  # one too many: tag 3 had no event since its own insert
    assert log.index.find_next(TAG_3, 2) == Miss()
    log.append({0: [[6]]})  # the next one to go is tag 1, with both of its records
    assert log.index.find_next(TAG_1, 0) == log.index.find_next(TAG_1, 3) == Miss()
    assert log.index.find_next(TAG_2, 1) == found(1, 0)


def test_5_1_3_a_tag_is_limited_and_forgets_its_oldest() -> None:
    """'If the suffix of a tag exceeds the limit, older sequence numbers get evicted'."""
    log = Log(tag_cache_seqnums_max=100, tag_cache_seqnums_per_tag_max=4)
    for _ in range(10):
        log.append({0: [[TAG_1]]})
    assert log.index.find_prev(TAG_1, 5) == Miss()
    assert log.index.find_range(TAG_1, 6, 10) == Matches([6, 7, 8, 9], [ShardId(0)] * 4)


# --- 5.4 Read path, the part of the local index


def test_5_4_which_part_is_searched() -> None:
    """Algorithm 6, lines 2 to 11: 'if t is Empty Tag then if B >= head of Suffix then Search in
    Suffix else Search in Popularity Cache [...] Search in Tag Cache'.
    """
    log = Log(suffix_cuts_max=1)
    log.append({0: [[TAG_1]]})
    log.append({1: [[TAG_2]]})
    log.index.find_next(EMPTY_TAG, 1)
    log.index.find_next(EMPTY_TAG, 0)
    log.index.find_next(TAG_1, 0)
    counted = {name: (part["hits"], part["misses"]) for name, part in log.index.status().items()}
    assert counted == {
        "suffix": (1, 0), "popularity_cache": (0, 1), "tag_cache": (1, 0), "answer_cache": (0, 0),
    }  # fmt: skip
