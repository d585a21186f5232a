"""An engine's answers about trims are right as of the position that they carry (PITFALLS A22)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from indilog.base.errors import TrimmedError
from indilog.base.ids import EMPTY_TAG, Epoch, NodeId, ViewNumber, tag_columns, tag_hash
from indilog.base.log import Record
from indilog.kernel.metalog import Floor, Trim
from indilog.roles.role import Effect
from indilog.wire.messages import (
    Direction,
    IndexBlock,
    IndexData,
    IndexLookup,
    LookupResult,
)
from indilog_compute.reads.log_floors import LogFloors
from indilog_compute.reads.operation import PENDING, Answered, Operation
from tests.support.metalog_messages import entries_message
from tests.unit.compute.engine_driver import LOG, PRIMARY, A, Driver, answers, joined, sends

AGGREGATOR = NodeId("aggregator-0")


def trim(driver: Driver, until: int, *, tag: int = LOG) -> None:
    """Apply a trim's entry, but not its index data."""
    floors = (Floor(tag, until, tag == LOG),)
    entry = Trim(driver.position, ViewNumber(1), Epoch(1), 0, floors)
    driver.position += 1
    driver.hear(PRIMARY, entries_message((entry,)))


def test_a_session_with_a_trimmed_error_has_seen_the_trim() -> None:
    driver = joined()
    driver.order(3)
    trim(driver, 2)
    driver.engine.read_page(LOG, 0, 0, 10, "pager", log=LOG)
    (answer,) = answers(driver.turn())
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, TrimmedError)
    assert (driver.engine.tag_position, answer.position) == (1, 2)


@pytest.mark.parametrize("indexed", [0, 2])
def test_a_trim_ahead_of_the_index_data_hides_no_remaining_record(indexed: int) -> None:
    driver = joined()
    if indexed:
        driver.order(indexed)
    driver.order(2, index_data=False)
    trim(driver, indexed + 1)
    assert driver.engine.read(Direction.PREV, LOG, 9, 0, "reader", log=LOG) is PENDING
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    assert (lookup.position, lookup.limit) == (driver.position, indexed + 2)


def test_a_trim_covered_by_the_index_data_needs_no_index_tier() -> None:
    floors = LogFloors(8)
    entry = Trim(5, ViewNumber(1), Epoch(1), 0, (Floor(LOG, 2, of_log=True),))
    floors.apply(entry)
    assert not floors.permit(Direction.PREV, LOG, LOG, 9, None)
    floors.pop_reached(5)
    with pytest.raises(TrimmedError):
        floors.permit(Direction.PREV, LOG, LOG, 9, None)


def with_a_cached_record(*tags: str) -> Driver:
    """Return a driver whose engine has appended one record of log `orders` with these tags."""
    driver = joined()
    driver.engine.append(b"d", tag_columns("orders", tags), "writer")
    driver.turn()
    driver.order(1)
    return driver


def whole_read(driver: Driver) -> object:
    return driver.engine.read(Direction.NEXT, EMPTY_TAG, 0, 0, "reader", log=LOG)


@pytest.mark.parametrize("tags", [(), ("x",), ("x", "trimmed")])
def test_a_trim_of_one_tag_keeps_reads_of_other_records_local(tags: tuple[str, ...]) -> None:
    driver = with_a_cached_record(*tags)
    for tag in (tag_hash("orders", "trimmed"), tag_hash("jobs", "x")):
        trim(driver, 1, tag=tag)
    assert isinstance(whole_read(driver), Record)


def test_a_record_that_is_trimmed_in_all_its_tags_is_not_answered_from_the_cache() -> None:
    driver = with_a_cached_record("x", "y")
    trim(driver, 1, tag=tag_hash("orders", "x"))
    assert isinstance(whole_read(driver), Record)
    trim(driver, 1, tag=tag_hash("orders", "y"))
    assert whole_read(driver) is PENDING


def test_any_record_below_a_forgotten_floor_may_be_trimmed() -> None:
    floors = LogFloors(2)
    names = tag_columns("orders", ("old",))[1]
    for number, until in enumerate((5, 20, 30)):
        tag = tag_hash("orders", "old") if number == 0 else 1000 + number
        floors.apply(Trim(number, ViewNumber(1), Epoch(1), number, (Floor(tag, until, False),)))
    assert floors.may_be_dead(4, names)
    assert not floors.may_be_dead(5, names)
    assert floors.may_be_trimmed(4, 4711), "it may be the forgotten tag"
    assert not floors.may_be_trimmed(5, 4711)
    assert floors.may_be_trimmed(29, 1002)


def lookup_in(effects: Sequence[Effect]) -> IndexLookup:
    lookup = sends(effects, IndexLookup)[0][1]
    assert isinstance(lookup, IndexLookup)
    return lookup


def result(lookup: IndexLookup, *, floor: int, position: int) -> LookupResult:
    return LookupResult(lookup.request, (), (), floor, 0, position)


@pytest.mark.parametrize("direction", Direction)
def test_a_read_waits_for_a_floor_beyond_the_applied_metalog(direction: Direction) -> None:
    driver = joined(join_at=(4, 40))
    driver.engine.read(direction, 99, 10, 0, "reader")
    early = lookup_in(driver.turn())
    assert answers(driver.hear(AGGREGATOR, result(early, floor=20, position=5))) == []
    trim(driver, 20, tag=99)
    again = lookup_in(driver.hear(A, IndexData((IndexBlock(4, 40, (), (), Epoch(1)),))))
    assert again.position == 5
    (answer,) = answers(driver.hear(AGGREGATOR, result(again, floor=20, position=5)))
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, TrimmedError)
    assert (answer.value.first_seqnum, answer.position) == (20, 5)


def test_trims_of_other_tags_do_not_delay_a_read_without_limit() -> None:
    driver = joined(join_at=(4, 40))
    driver.engine.read(Direction.PREV, 99, 30, 0, "reader")
    early = lookup_in(driver.turn())
    assert answers(driver.hear(AGGREGATOR, result(early, floor=20, position=5))) == []
    trim(driver, 20, tag=99)
    again = lookup_in(driver.hear(A, IndexData((IndexBlock(4, 40, (), (), Epoch(1)),))))
    (answer,) = answers(driver.hear(AGGREGATOR, result(again, floor=20, position=9)))
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, TrimmedError)
    assert answer.position == 5


def test_a_floor_higher_than_the_awaited_one_does_not_hold_at_earlier_positions() -> None:
    def asked(direction: Direction, bound: int) -> Operation:
        operation = Operation(direction, 99, bound, 0, "reader")
        operation.reflects = 4
        assert operation.trimmed_error(TrimmedError(20), 5) is None
        assert operation.position == 5
        operation.reflects = 5
        return operation

    reported = asked(Direction.NEXT, 10).trimmed_error(TrimmedError(25), 6)
    assert reported is not None
    assert reported.first_seqnum == 20, "the floor of the earlier position is already proven"
    last = asked(Direction.PREV, 30)
    assert last.trimmed_error(TrimmedError(25), 6) is None
    assert last.position == 6


def test_a_logs_floor_beyond_the_applied_metalog_is_not_learned() -> None:
    driver = joined(join_at=(4, 40))
    driver.engine.read(Direction.PREV, LOG, 30, 0, "reader", log=LOG)
    early = lookup_in(driver.turn())
    late = LookupResult(early.request, (), (), 20, 20, 5)
    assert answers(driver.hear(AGGREGATOR, late)) == []
    assert driver.engine.read(Direction.NEXT, LOG, 3, 0, "other", log=LOG) is PENDING
