"""A reader that waits for a tag is woken by index data with the tag, and by no other."""

from __future__ import annotations

import sys
from array import array

import pytest

from indilog.base.ids import ShardId
from indilog.kernel.lost_ranges import LostRange
from indilog.roles.index_feed import ReadyBlock
from indilog.wire.messages import ShardTags
from indilog_compute.reads.watches import Watches

WATCHED = 0x0102030405060708


def block(*tags: int, lost: tuple[LostRange, ...] = ()) -> ReadyBlock:
    """Return index data of one record with these tags."""
    data = array("Q", tags).tobytes()
    return ReadyBlock(0, 1, [ShardTags(ShardId(0), 0, 1, bytes([len(tags)]), data, lost)])


@pytest.mark.parametrize("others", [0, 2, 500])
@pytest.mark.parametrize("place", [0, 1, 99, 199])
def test_a_watched_tag_is_found_among_many_and_by_many_watches(others: int, place: int) -> None:
    watches = Watches(1000)
    watches.add(WATCHED, 0, "watcher")
    for number in range(others):
        watches.add(10_000 + number, 0, number)
    tags = list(range(1, 200))
    tags.insert(place, WATCHED)
    assert watches.fired_by(block(*tags)) == ["watcher"]
    assert watches.fired_by(block(*tags)) == []
    assert len(watches) == others


@pytest.mark.parametrize("others", [0, 500])
def test_tag_bytes_that_begin_inside_another_tag_are_no_match(others: int) -> None:
    watches = Watches(1000)
    watches.add(WATCHED, 0, "watcher")
    for number in range(others):
        watches.add(10_000 + number, 0, number)
    packed = WATCHED.to_bytes(8, sys.byteorder)
    split = array("Q", bytes(4) + packed + bytes(4) + bytes(8 * 40)).tolist()
    assert watches.fired_by(block(*split)) == []
    assert watches.fired_by(block(*split, WATCHED)) == ["watcher"]


def test_a_lost_record_wakes_all_since_it_may_have_had_any_tag() -> None:
    watches = Watches(10)
    watches.add(WATCHED, 0, "watcher")
    assert watches.fired_by(block(5, lost=(LostRange(0, 1),))) == ["watcher"]
