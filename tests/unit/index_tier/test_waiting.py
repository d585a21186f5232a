"""Claims about lookups that wait for index data."""

from __future__ import annotations

from indilog.base.ids import Instant, NodeId
from indilog.wire.messages import Direction, IndexLookup
from indilog.wire.tag_messages import TagFirstsWanted
from indilog_index.waiting import WaitingLookup, WaitingLookups

ENGINE, OTHER = NodeId("engine-0"), NodeId("engine-1")
AGGREGATOR = NodeId("aggregator-0")


def lookup(request: int, position: int) -> IndexLookup:
    return IndexLookup(request, Direction.NEXT, 1, 0, 100, position, 1, AGGREGATOR)


def waiting(lookups_max: int = 10) -> WaitingLookups:
    return WaitingLookups(lookups_max=lookups_max, timeout_s=5.0)


def requests(taken: list[WaitingLookup]) -> list[int]:
    return [lookup.request for _, lookup, _ in taken]


def known(_: IndexLookup | TagFirstsWanted) -> bool:
    return True


def test_lookups_leave_in_the_order_of_their_positions_when_these_are_reached() -> None:
    queue = waiting()
    for request, position in ((1, 9), (2, 4), (3, 6)):
        assert queue.put(ENGINE, lookup(request, position), Instant(0.0))
    assert (queue.first_position, queue.end, len(queue)) == (4, 9, 3)
    assert requests(list(queue.take_ready(3, known))) == []
    assert requests(list(queue.take_ready(6, known))) == [2, 3]
    assert requests(list(queue.take_ready(100, known))) == [1]
    assert (queue.first_position, queue.end, len(queue)) == (None, 0, 0)


def test_a_lookup_leaves_when_it_has_waited_long_enough() -> None:
    queue = waiting()
    queue.put(ENGINE, lookup(1, 9), Instant(0.0))
    queue.put(ENGINE, lookup(2, 4), Instant(1.0))
    assert queue.deadline == 5.0
    assert queue.take_expired(Instant(4.9)) == []
    assert requests(list(queue.take_expired(Instant(5.0)))) == [1]
    assert (queue.deadline, queue.end) == (6.0, 4)
    assert requests(list(queue.take_expired(Instant(9.0)))) == [2]
    assert queue.deadline is None


def test_no_more_wait_than_configured() -> None:
    queue = waiting(lookups_max=2)
    assert queue.put(ENGINE, lookup(1, 9), Instant(0.0))
    assert queue.put(ENGINE, lookup(2, 9), Instant(0.0))
    assert not queue.put(ENGINE, lookup(3, 9), Instant(0.0))
    assert len(queue) == 2


def test_a_repeated_lookup_waits_once_and_those_of_two_engines_are_different() -> None:
    queue = waiting(lookups_max=2)
    assert queue.put(ENGINE, lookup(1, 9), Instant(0.0))
    assert queue.put(ENGINE, lookup(1, 9), Instant(1.0))
    assert queue.put(OTHER, lookup(1, 9), Instant(2.0))
    assert queue.put(OTHER, lookup(1, 9), Instant(3.0))
    assert len(queue) == 2
    assert [w.origin for w in queue.take_ready(9, known)] == [ENGINE, OTHER]


def test_a_lookup_whose_position_is_reached_waits_for_its_other_conditions() -> None:
    queue = waiting()
    queue.put(ENGINE, lookup(1, 9), Instant(0.0))
    queue.put(OTHER, lookup(2, 9), Instant(0.0))
    assert requests(queue.take_ready(9, lambda asked: asked.request == 2)) == [2]
    assert queue.has_unconfirmed
    assert queue.end == 0, "no further position is missed"
    queue.wait_for_positions()
    assert (requests(queue.take_ready(8, known)), queue.end) == ([], 9)
    assert requests(queue.take_ready(9, known)) == [1]
