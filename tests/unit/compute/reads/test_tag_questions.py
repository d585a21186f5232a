"""Questions of an engine to the index tier for its Tag Cache, and its use of the answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from indilog.base.ids import MAX_SEQNUM, NodeId, ShardId, log_tag, tag_hash
from indilog.base.log import Record
from indilog.roles.role import Effect, Ignore
from indilog.wire.messages import (
    Direction,
    IndexLookup,
    LookupResult,
    ReadRecords,
    RecordsRead,
)
from indilog.wire.tag_messages import NO_RECORD, NOT_KNOWN, TagFirsts, TagFirstsWanted
from indilog_compute.reads.operation import PENDING, Answered
from tests.unit.compute.engine_driver import A, Driver, answers, carrying, joined, sends, stored

INDEX = (NodeId("index-0-0"), NodeId("index-1-0"))
AGGREGATOR = NodeId("aggregator-0")
SHARD = ShardId(0)
LOG, TAG = log_tag("orders"), tag_hash("orders", "x")


def appended(driver: Driver, tag: int = TAG) -> list[TagFirstsWanted]:
    """Append a record; return what the index tier is asked in this turn."""
    driver.engine.append(b"d", carrying(LOG, tag), "writer")
    wanted = [message for _, message in sends(driver.turn(), TagFirstsWanted)]
    assert all(isinstance(message, TagFirstsWanted) for message in wanted)
    return wanted  # type: ignore[return-value]


def firsts(wanted: TagFirstsWanted, index_shard: int, *seqnums: int) -> TagFirsts:
    shards = array("H", [0] * len(seqnums)).tobytes()
    return TagFirsts(wanted.request, index_shard, array("Q", seqnums).tobytes(), shards)


def order(driver: Driver, *tags: int) -> None:
    """Let one record with LOG and these tags be ordered, and its index data come."""
    driver.order(1, index_data=False)
    block = driver.block(driver.position - 1, driver.tail - 1, 1)
    part = block.parts[0]
    from msgspec.structs import replace

    from indilog.wire.messages import IndexData

    part = replace(part, tag_counts=bytes([1 + len(tags)]), tags=array("Q", (LOG, *tags)).tobytes())
    driver.hear(A, IndexData((replace(block, parts=(part,)),)))


def status(driver: Driver, part: str, figure: str) -> int:
    return driver.engine.status()[part][figure]


def lookups(effects: Sequence[Effect]) -> list[IndexLookup]:
    return [m for _, m in sends(effects, IndexLookup) if isinstance(m, IndexLookup)]


def extended(**settings: float) -> Driver:
    return joined(join_at=(3, 40), local_index="extended", **settings)  # type: ignore[arg-type]


def read_on_the_spot(driver: Driver, bound: int, direction: Direction = Direction.NEXT) -> object:
    return driver.engine.read(direction, TAG, bound, 0, "reader")


def test_an_append_with_unknown_tags_asks_every_index_shard_about_all_of_them_once() -> None:
    driver = extended()
    driver.engine.append(b"d", carrying(LOG, TAG), "writer")
    asked = sends(driver.turn(), TagFirstsWanted)
    assert {node for node, _ in asked} == set(INDEX)
    (message,) = {message for _, message in asked}
    assert isinstance(message, TagFirstsWanted)
    assert array("Q", message.tags).tolist() == [LOG, TAG]
    assert (message.limit, message.position) == (40, 3)
    assert appended(driver) == []
    order(driver, TAG)
    assert appended(driver) == []


def test_by_default_no_question_is_sent_whether_a_tag_is_new() -> None:
    driver = joined()
    assert appended(driver) == []


def test_an_engine_without_a_tag_cache_asks_nothing() -> None:
    driver = extended(
        tag_cache_seqnums_max=0, tag_cache_seqnums_per_tag_max=0, refill_after_misses=1
    )
    assert appended(driver) == []
    assert {message.count for message in missing(driver)} == {1}


@pytest.mark.parametrize("answer_comes", ["before the index data", "after it"])
def test_a_tag_that_is_new_is_known_from_its_first_record_on(answer_comes: str) -> None:
    driver = extended()
    wanted = appended(driver)
    if answer_comes == "after it":
        order(driver, TAG)
    for shard, message in enumerate(wanted):
        driver.hear(INDEX[shard], firsts(message, shard, 7, NO_RECORD))
    if answer_comes == "before the index data":
        order(driver, TAG)
    record = read_on_the_spot(driver, 0)
    assert isinstance(record, Record)
    assert record.seqnum == 40
    assert read_on_the_spot(driver, 39, Direction.PREV) is None
    assert read_on_the_spot(driver, 41) is None
    assert status(driver, "tag_cache", "misses") == 0


def test_the_first_record_of_a_tag_that_is_not_new_is_known() -> None:
    driver = extended()
    one, two = appended(driver)
    order(driver, TAG)
    driver.hear(INDEX[0], firsts(one, 0, NO_RECORD, 9))
    driver.hear(INDEX[1], firsts(two, 1, NO_RECORD, 6))
    assert read_on_the_spot(driver, 0) is PENDING  # found: the record is asked of storage
    asked = [m for _, m in sends(driver.turn(), ReadRecords) if isinstance(m, ReadRecords)]
    assert [message.seqnums for message in asked] == [(6,)]
    assert read_on_the_spot(driver, 5, Direction.PREV) is None
    assert read_on_the_spot(driver, 7) is PENDING
    assert lookups(driver.turn()), "between the first and the head nothing is known"


def test_until_all_index_shards_have_answered_nothing_is_known() -> None:
    driver = extended()
    one, two = appended(driver)
    order(driver, TAG)
    driver.hear(INDEX[0], firsts(one, 0, NO_RECORD, NO_RECORD))
    driver.hear(INDEX[0], firsts(one, 0, NO_RECORD, NO_RECORD))
    assert status(driver, "tag_questions", "pending") == 2
    assert read_on_the_spot(driver, 0) is PENDING
    driver.hear(INDEX[1], firsts(two, 1, NO_RECORD, NOT_KNOWN))
    assert status(driver, "tag_questions", "pending") == 0
    assert lookups(driver.turn()) == []
    assert read_on_the_spot(driver, 5) is PENDING, "one index shard could not say"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ((NO_RECORD,), "tags that were not asked about"),
        ((NO_RECORD, 40), "outside the range"),
        ((), "tags that were not asked about"),
    ],
)
def test_an_impossible_answer_is_ignored(columns: tuple[int, ...], reason: str) -> None:
    driver = extended()
    one, _ = appended(driver)
    (ignored,) = driver.hear(INDEX[0], firsts(one, 0, *columns))
    assert isinstance(ignored, Ignore)
    assert reason in ignored.reason
    assert driver.hear(A, firsts(one, 0, NO_RECORD, NO_RECORD)) == []
    assert status(driver, "tag_questions", "pending") == 2


def test_a_question_without_an_answer_is_dropped() -> None:
    driver = extended(lookup_timeout_s=1.0)
    one, two = appended(driver)
    deadline = driver.engine.deadline()
    assert deadline is not None
    assert deadline <= 1.0
    driver.now = 1.0
    driver.turn()
    assert status(driver, "tag_questions", "given_up") == 2
    assert status(driver, "tag_questions", "pending") == 0
    order(driver, TAG)
    for shard, message in enumerate((one, two)):
        driver.hear(INDEX[shard], firsts(message, shard, NO_RECORD, NO_RECORD))
    assert read_on_the_spot(driver, 0) is PENDING


def test_a_tag_whose_question_was_dropped_is_asked_about_again() -> None:
    driver = extended(lookup_timeout_s=1.0)
    assert len(appended(driver)) == 2
    assert appended(driver) == []
    driver.now = 1.0
    driver.turn()
    assert len(appended(driver)) == 2


def test_no_more_tags_are_asked_about_at_once_than_configured() -> None:
    driver = extended(new_tags_pending_max=3)
    driver.engine.append(b"d", carrying(LOG, 2, 3, 4, 5), "writer")
    (message, _) = (message for _, message in sends(driver.turn(), TagFirstsWanted))
    assert isinstance(message, TagFirstsWanted)
    assert array("Q", message.tags).tolist() == [LOG, 2, 3]
    assert appended(driver, tag=6) == []


# --- refills


def missing(driver: Driver, tag: int = TAG) -> list[IndexLookup]:
    """Read at the tail; return the lookups."""
    driver.engine.read(Direction.PREV, tag, MAX_SEQNUM, 0, "reader")
    return lookups(driver.turn())


def refill_of(asked: list[IndexLookup]) -> IndexLookup:
    (refill,) = {message for message in asked if message.count > 1}
    return refill


def test_the_newest_records_of_a_tag_that_missed_twice_are_fetched_and_then_known() -> None:
    driver = joined(join_at=(3, 40), refill_seqnums_max=3)
    assert {message.count for message in missing(driver)} == {1}
    refill = refill_of(missing(driver))
    assert (refill.direction, refill.bound, refill.count) == (Direction.PREV, MAX_SEQNUM, 3)
    assert (refill.limit, refill.position) == (40, 3)
    order(driver, TAG)
    driver.hear(AGGREGATOR, LookupResult(refill.request, (30, 20, 10), (SHARD,) * 3))
    assert status(driver, "tag_cache", "entries") == 5  # LOG at 40, TAG at 10, 20, 30, 40
    for bound, asked in ((11, 20), (30, 30), (10, 10)):
        assert read_on_the_spot(driver, bound) is PENDING
        (message,) = {m for _, m in sends(driver.turn(), ReadRecords)}
        assert isinstance(message, ReadRecords)
        assert message.seqnums == (asked,)
    assert read_on_the_spot(driver, 9) is PENDING
    assert {message.count for message in lookups(driver.turn())} == {1}, "there may be older ones"


def test_a_tag_with_fewer_records_than_fetched_is_known_whole_and_an_absent_one_as_absent() -> None:
    driver = joined(join_at=(3, 40), refill_seqnums_max=3)
    for seqnums in ((10,), ()):
        tag = TAG if seqnums else 9
        missing(driver, tag)
        refill = refill_of(missing(driver, tag))
        shards = (SHARD,) * len(seqnums)
        driver.hear(AGGREGATOR, LookupResult(refill.request, seqnums, shards))
    assert driver.engine.read(Direction.PREV, TAG, 9, 0, "reader") is None
    assert driver.engine.read(Direction.NEXT, TAG, 11, 0, "reader") is None
    assert driver.engine.read(Direction.PREV, 9, MAX_SEQNUM, 0, "reader") is None
    assert status(driver, "tag_questions", "refills") == 2


def test_refills_are_bounded_in_rate_and_in_number() -> None:
    driver = joined(refill_after_misses=1, refills_per_s_max=2, refills_pending_max=3)
    driver.now = 10.0
    found = [len({m.request for m in missing(driver, tag) if m.count > 1}) for tag in range(2, 7)]
    assert found == [1, 1, 0, 0, 0]
    driver.now = 10.9
    found = [len({m.request for m in missing(driver, tag) if m.count > 1}) for tag in range(7, 10)]
    assert found == [1, 0, 0]
    assert status(driver, "tag_questions", "pending") == 3


def test_a_rate_of_zero_switches_refills_off() -> None:
    driver = joined(refill_after_misses=1, refills_per_s_max=0)
    assert {message.count for message in missing(driver)} == {1}


@pytest.mark.parametrize(
    "result",
    [((40,), (0,)), ((10, 20), (0, 0)), ((20, 10), (0,)), ((4, 3, 2, 1), (0,) * 4), ((5,), (-1,))],
)
def test_a_refill_that_contradicts_what_was_asked_is_ignored(
    result: tuple[tuple[int, ...], tuple[ShardId, ...]],
) -> None:
    driver = joined(join_at=(3, 40), refill_seqnums_max=3, refill_after_misses=1)
    refill = refill_of(missing(driver))
    (ignored,) = driver.hear(AGGREGATOR, LookupResult(refill.request, *result))
    assert isinstance(ignored, Ignore)
    assert status(driver, "tag_cache", "entries") == 0


# --- what answers leave behind


def answered_lookup(driver: Driver, bound: int, seqnum: int) -> None:
    assert read_on_the_spot(driver, bound) is PENDING
    request = lookups(driver.turn())[0].request
    driver.hear(A, RecordsRead(request, SHARD, (stored(seqnum),), ()))


def test_an_answer_that_can_never_change_is_not_asked_for_again() -> None:
    driver = joined(join_at=(3, 40))
    answered_lookup(driver, 0, 7)
    for bound in (0, 3, 7):
        record = read_on_the_spot(driver, bound)
        assert isinstance(record, Record)
        assert record.seqnum == 7
    assert read_on_the_spot(driver, 6, Direction.PREV) is None
    assert status(driver, "answer_cache", "hits") == 4
    assert read_on_the_spot(driver, 8) is PENDING


def test_a_record_at_the_bound_that_is_cached_needs_no_index() -> None:
    driver = joined(local_index="none")  # type: ignore[arg-type]
    driver.engine.append(b"mine", carrying(LOG, TAG), "writer")
    driver.turn()
    order(driver, TAG)
    assert read_on_the_spot(driver, 0) is PENDING
    (answer,) = answers(driver.turn())
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, Record)
    assert (answer.value.seqnum, answer.value.data) == (0, b"mine")
    assert driver.engine.read(Direction.NEXT, 12345, 0, 0, "reader") is PENDING
    assert lookups(driver.turn()), "it has not the tag asked for"
    assert status(driver, "index_tier", "from_cache") == 1


def test_an_engine_with_many_cached_records_asks_for_seqnums_first() -> None:
    """That takes 3 message delays if the record is cached and 5 if not, instead of 4: faster above
    one half.
    """
    driver = joined(local_index="none")  # type: ignore[arg-type]
    driver.engine.append(b"mine", carrying(LOG, TAG), "writer")
    driver.turn()
    order(driver, TAG)
    first: list[bool] = []
    for _ in range(40):
        read_on_the_spot(driver, MAX_SEQNUM, Direction.PREV)
        lookup = lookups(driver.turn())[0]
        first.append(lookup.names_first)
        if lookup.names_first:
            reported = driver.hear(AGGREGATOR, LookupResult(lookup.request, (0,), (SHARD,)))
            assert sends(reported, ReadRecords) == []
        else:
            reported = driver.hear(A, RecordsRead(lookup.request, SHARD, (stored(0),), ()))
        (answer,) = answers(reported)
        assert isinstance(answer, Answered)
    assert first == sorted(first)
    assert 20 < first.index(True) < 30
    for seqnum in range(1, 30):  # now about records that are not here
        order(driver, TAG)
        read_on_the_spot(driver, MAX_SEQNUM, Direction.PREV)
        lookup = lookups(driver.turn())[0]
        first.append(lookup.names_first)
        if not lookup.names_first:
            break
        reported = driver.hear(AGGREGATOR, LookupResult(lookup.request, (seqnum,), (SHARD,)))
        assert len(sends(reported, ReadRecords)) == 1
    assert first[-1] is False
