"""The table of a shard: where its batches are."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indilog.base.ids import ShardId
from indilog.roles.role import Location
from indilog_storage import shard as module
from indilog_storage.batch_reads import DamagedBatch, cold_number
from indilog_storage.shard import COLD_OBJECTS_MAX, GONE, Shard
from tests.unit.storage.replicas import shard_of

RECORDS = 2
"""Of each batch."""


def location_of(number: int) -> Location:
    return Location(1 + number // 5, 100 * number, 90)


@given(fates=st.lists(st.sampled_from(["known", "discarded", "discarded", "lost"]), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_next_known_batch_is_found_after_discarded_and_lost_ones(
    monkeypatch: pytest.MonkeyPatch, fates: list[str]
) -> None:
    """The search takes three rows at a time here; the rows need not be a multiple of that."""
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 3)
    shard = Shard(ShardId(0), leading=True)
    known: list[tuple[int, int, Location]] = []
    for number, fate in enumerate(fates):
        first, end, location = RECORDS * number, RECORDS * (number + 1), location_of(number)
        shard.store(first, end, location)
        if fate == "discarded":
            assert shard.discard(first, location)
        elif fate == "lost":
            assert shard.lose(DamagedBatch(location, readable=True))
        else:
            known.append((first, end, location))
        assert shard.batch_from(0) == (known[0] if known else None)
    for localid in range(RECORDS * len(fates) + 1):
        following = [batch for batch in known if batch[0] >= localid]
        assert shard.batch_from(localid) == (following[0] if following else None)


def test_the_place_in_the_last_object_differs_from_that_of_a_discarded_batch() -> None:
    shard = shard_of((0, 2))
    shard.move(0, 2, COLD_OBJECTS_MAX - 1)
    place = shard.location_of(0)
    assert place is not None
    assert (cold_number(place), cold_number(GONE)) == (COLD_OBJECTS_MAX - 1, COLD_OBJECTS_MAX)


def test_a_batch_that_was_rewritten_is_read_at_its_new_place_unless_it_was_discarded() -> None:
    shard = shard_of((0, 2), (2, 5))
    old, new = shard.location_of(0), Location(7, 64, 9)
    assert old is not None
    assert shard.replace(0, 2, new)
    assert shard.location_of(1) == new
    assert not shard.replace(0, 3, old), "no batch has exactly these records"
    assert shard.discard(0, new)
    assert not shard.replace(0, 2, old)
    assert shard.location_of(0) is None
    shard.check_invariants()
