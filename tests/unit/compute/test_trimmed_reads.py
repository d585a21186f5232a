"""What an engine says of trims is right as of the position that it says (PITFALLS A22)."""

from __future__ import annotations

import pytest

from compute.log_floors import LogFloors
from compute.operation import PENDING, Answered
from indilog.errors import TrimmedError
from indilog.ids import Epoch, ViewNumber
from indilog.messages import Direction, IndexLookup, MetalogEntries
from indilog.metalog import Floor, Trim
from tests.unit.compute.engine_driver import LOG, PRIMARY, Driver, answers, joined, sends


def trim(driver: Driver, until: int, *, tag: int = LOG) -> None:
    """Apply a trim's entry, but not what belongs to it in the index data."""
    floors = (Floor(tag, until, tag == LOG),)
    entry = Trim(driver.position, ViewNumber(1), Epoch(1), 0, floors)
    driver.position += 1
    driver.hear(PRIMARY, MetalogEntries((entry,)))


def test_who_is_told_that_something_is_trimmed_has_seen_the_trim() -> None:
    driver = joined()
    driver.order(3)
    trim(driver, 2)
    driver.engine.read_page(LOG, 0, 0, 10, "pager", log=LOG)
    (answer,) = answers(driver.turn())
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, TrimmedError)
    assert (driver.engine.tag_position, answer.position) == (1, 2)


@pytest.mark.parametrize("indexed", [0, 2])
def test_a_trim_that_index_data_has_not_come_to_hides_no_record_that_is_left(indexed: int) -> None:
    driver = joined()
    if indexed:
        driver.order(indexed)
    driver.order(2, index_data=False)
    trim(driver, indexed + 1)
    assert driver.engine.read(Direction.PREV, LOG, 9, 0, "reader", log=LOG) is PENDING
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    assert (lookup.position, lookup.limit) == (driver.position, indexed + 2)


def test_a_trim_that_index_data_has_come_to_needs_no_index_tier() -> None:
    floors = LogFloors(8)
    entry = Trim(5, ViewNumber(1), Epoch(1), 0, (Floor(LOG, 2, of_log=True),))
    floors.heard(entry)
    assert not floors.permit(Direction.PREV, LOG, LOG, 9, None)
    floors.reached(5)
    with pytest.raises(TrimmedError):
        floors.permit(Direction.PREV, LOG, LOG, 9, None)
