"""What a storage node says of the entries that it has applied."""

from __future__ import annotations

from indilog.base.ids import Epoch, ShardId, ViewNumber
from indilog.base.log import PlacedSpan
from indilog.kernel.metalog import NewRecords, NewWriters
from indilog_storage.ordering import Ordering

ZERO, ONE = ShardId(0), ShardId(1)


def applied() -> Ordering:
    """Return an ordering of 9 records: shards 0 and 1, nothing, shard 1, shard 0."""
    ordering = Ordering()
    view, epoch = ViewNumber(1), Epoch(1)
    for position, counts in enumerate(({ZERO: 2, ONE: 3}, {}, {ONE: 3}, {ZERO: 1})):
        ordering.recover(NewRecords(position, view, epoch, counts))
    ordering.recover(NewWriters(4, view, epoch, {ZERO: Epoch(2)}))
    return ordering


def test_places_follow_the_seqnums_over_shards_and_entries() -> None:
    assert applied().places(1, 9, 10) == (
        PlacedSpan(1, 2, ZERO, 1, 0),
        PlacedSpan(2, 5, ONE, 0, 0),
        PlacedSpan(5, 8, ONE, 3, 2),
        PlacedSpan(8, 9, ZERO, 2, 3),
    )


def test_places_end_at_what_is_ordered_at_the_wanted_end_and_at_the_limit() -> None:
    ordering = applied()
    assert ordering.places(7, 100, 10) == (
        PlacedSpan(7, 8, ONE, 5, 2),
        PlacedSpan(8, 9, ZERO, 2, 3),
    )
    assert ordering.places(3, 4, 10) == (PlacedSpan(3, 4, ONE, 1, 0),)
    assert ordering.places(0, 9, 1) == (PlacedSpan(0, 2, ZERO, 0, 0),)
    assert ordering.places(9, 12, 10) == ()
