"""The record cache: own appends in spans, records read one by one, aux data beside them."""

from __future__ import annotations

import random

import pytest

from indilog.base.log import Record
from indilog_compute.reads.record_cache import (
    AUX_BYTES,
    READ_RECORD_BYTES,
    SPAN_RECORD_BYTES,
    RecordCache,
)

NAMES = b"log\x1fsa"


def add_span(cache: RecordCache, first: int, count: int, data_bytes: int = 10) -> None:
    datas = [data_of(first + i, data_bytes) for i in range(count)]
    names = [NAMES] * count
    cache.add_span(first, datas, names, 5.0, 6.0, sum(map(len, datas)) + len(NAMES) * count)
    cache.check_invariants()


def data_of(seqnum: int, data_bytes: int = 10) -> bytes:
    return str(seqnum).encode().ljust(data_bytes, b".")


def record_of(seqnum: int, data_bytes: int = 10, aux: bytes | None = None) -> Record:
    return Record(seqnum, NAMES, data_of(seqnum, data_bytes), 5.0, 6.0, aux)


def held(cache: RecordCache, end: int) -> list[int]:
    return [seqnum for seqnum in range(end) if cache.get(seqnum) is not None]


def span_bytes(count: int, data_bytes: int = 10) -> int:
    return count * (data_bytes + len(NAMES) + SPAN_RECORD_BYTES)


def test_an_own_append_is_returned_unchanged() -> None:
    cache = RecordCache(10_000)
    add_span(cache, 3, 2)
    add_span(cache, 9, 1)
    record = cache.get(4)
    assert record == record_of(4)
    assert record is not None
    assert (record.time, record.ordered_at) == (5.0, 6.0)
    assert (record.aux, record.tags) == (None, ("a",))
    assert held(cache, 12) == [3, 4, 9]


def test_a_record_read_before_is_returned_and_an_unseen_one_is_not() -> None:
    cache = RecordCache(10_000)
    cache.add(record_of(7))
    assert cache.get(7) == record_of(7)
    assert cache.get(8) is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_checking_for_a_record_does_not_count_as_its_use() -> None:
    cache = RecordCache(10_000)
    add_span(cache, 5, 2)
    cache.add(record_of(9))
    assert [s for s in range(12) if cache.holds(s)] == held(cache, 12) == [5, 6, 9]
    before = cache.status()
    assert cache.holds(5)
    assert not cache.holds(8)
    assert cache.status() == before


def test_own_appends_are_evicted_oldest_span_first() -> None:
    cache = RecordCache(span_bytes(4))
    for first in (0, 2, 4):
        add_span(cache, first, 2)
    assert held(cache, 10) == [2, 3, 4, 5]
    assert cache.size_bytes == span_bytes(4)


def test_records_read_are_evicted_least_recently_used_first() -> None:
    size = READ_RECORD_BYTES + 10 + len(NAMES)
    cache = RecordCache(3 * size)
    for seqnum in (1, 2, 3):
        cache.add(record_of(seqnum))
    cache.get(1)
    cache.add(record_of(4))
    cache.check_invariants()
    assert held(cache, 10) == [1, 3, 4]


def test_either_generation_may_use_what_the_other_leaves() -> None:
    cache = RecordCache(span_bytes(100))
    add_span(cache, 0, 50)
    add_span(cache, 50, 50)
    assert len(held(cache, 100)) == 100
    cache.add(record_of(1000))
    cache.check_invariants()
    assert held(cache, 2000) == [*range(50, 100), 1000]  # own appends had more than half


def test_the_generation_with_more_than_half_evicts() -> None:
    size = READ_RECORD_BYTES + 10 + len(NAMES)
    cache = RecordCache(10 * size)
    for seqnum in range(10):
        cache.add(record_of(seqnum))
    add_span(cache, 1000, 4)
    assert held(cache, 10) == list(range(1, 10))
    assert held(cache, 2000)[-4:] == [1000, 1001, 1002, 1003]


def test_a_record_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = RecordCache(1000)
    add_span(cache, 0, 1)
    cache.add(record_of(5))
    add_span(cache, 10, 1, data_bytes=1000)
    cache.add(record_of(20, data_bytes=1000))
    assert held(cache, 30) == [0, 5]


def test_a_limit_of_zero_caches_nothing() -> None:
    cache = RecordCache(0, 0)
    add_span(cache, 0, 3)
    cache.add(record_of(5, aux=b"a"))
    cache.set_aux(5, b"b")
    cache.check_invariants()
    assert held(cache, 10) == []
    assert cache.status()["aux_entries"] == 0


def test_aux_data_comes_with_the_record_and_the_last_one_wins() -> None:
    cache = RecordCache(10_000, 10_000)
    add_span(cache, 0, 2)
    cache.add(record_of(5))
    for seqnum in (1, 5):
        cache.set_aux(seqnum, b"first")
        cache.set_aux(seqnum, b"second")
        record = cache.get(seqnum)
        assert record == record_of(seqnum)
        assert record is not None
        assert record.aux == b"second"
    first = cache.get(0)
    assert first is not None
    assert first.aux is None


def test_setting_aux_data_does_not_change_a_record_handed_out_before() -> None:
    cache = RecordCache(10_000, 10_000)
    cache.add(record_of(5))
    before = cache.get(5)
    cache.set_aux(5, b"new")
    assert before is not None
    assert before.aux is None


def test_aux_data_read_from_storage_is_kept_unless_some_was_set_here() -> None:
    cache = RecordCache(10_000, 10_000)
    cache.set_aux(1, b"own")
    cache.add(record_of(1, aux=b"stored"))
    cache.add(record_of(2, aux=b"stored"))
    kept = [cache.get(1), cache.get(2)]
    assert [record.aux for record in kept if record] == [b"own", b"stored"]


def test_aux_data_is_bounded_and_the_least_recently_used_vanishes() -> None:
    cache = RecordCache(10_000, 2 * (AUX_BYTES + 1))
    add_span(cache, 0, 3)
    cache.set_aux(0, b"a")
    cache.set_aux(1, b"b")
    cache.get(0)
    cache.set_aux(2, b"c")
    cache.check_invariants()
    assert [r.aux for r in map(cache.get, range(3)) if r] == [b"a", None, b"c"]


def test_aux_data_too_large_to_keep_removes_the_older_one() -> None:
    cache = RecordCache(10_000, AUX_BYTES + 5)
    add_span(cache, 0, 1)
    cache.set_aux(0, b"old")
    cache.set_aux(0, bytes(6))
    cache.check_invariants()
    record = cache.get(0)
    assert record is not None
    assert record.aux is None


def test_a_span_below_the_last_one_trips_an_assertion() -> None:
    cache = RecordCache(10_000)
    add_span(cache, 5, 2)
    with pytest.raises(AssertionError, match="ascend"):
        add_span(cache, 6, 1)


def test_status_counts_entries_and_bytes() -> None:
    cache = RecordCache(10_000, 10_000)
    add_span(cache, 0, 2)
    cache.add(record_of(9, aux=b"xy"))
    cache.get(0)
    cache.get(5)
    assert cache.status() == {
        "entries": 3,
        "bytes": span_bytes(2) + READ_RECORD_BYTES + 10 + len(NAMES),
        "aux_entries": 1,
        "aux_bytes": AUX_BYTES + 2,
        "hits": 1,
        "misses": 1,
    }


@pytest.mark.parametrize("seed", range(4))
def test_cached_records_are_right_and_bounded_after_any_operations(seed: int) -> None:
    chance = random.Random(seed)
    cache = RecordCache(chance.choice([700, 5000, 50_000]), chance.choice([0, 500, 5000]))
    aux: dict[int, bytes] = {}
    tail = 0
    for step in range(2000):
        match chance.randrange(4):
            case 0:
                tail += chance.randrange(3)
                count = chance.randrange(1, 6)
                add_span(cache, tail, count)
                tail += count
            case 1:
                cache.add(record_of(chance.randrange(tail + 1)))
            case 2:
                seqnum = chance.randrange(tail + 1)
                aux[seqnum] = str(step).encode()
                cache.set_aux(seqnum, aux[seqnum])
            case _:
                seqnum = chance.randrange(tail + 1)
                record = cache.get(seqnum)
                assert record is None or record == record_of(seqnum)
                assert record is None or record.aux in (None, aux.get(seqnum))
        cache.check_invariants()
