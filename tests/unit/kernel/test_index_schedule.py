"""The index shard of each metalog position, against a walk over all positions."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import ConfigError
from indilog.kernel.index_schedule import (
    EVERY_POSITION,
    NO_POSITION,
    IndexEra,
    IndexPositions,
    index_shard_at,
    last_below,
    previous_of,
)
from indilog.kernel.view import view_of, with_index_tier_of

SHARDS = 5
END = 60


@st.composite
def schedules(draw: st.DrawFn) -> tuple[IndexEra, ...]:
    starts = [0, *draw(st.lists(st.integers(1, END - 10), unique=True, max_size=4).map(sorted))]
    shards = st.lists(st.integers(0, SHARDS - 1), unique=True, min_size=1).map(tuple)
    return tuple(IndexEra(start, draw(shards)) for start in starts)


def owners(eras: tuple[IndexEra, ...]) -> list[int]:
    """The owner of each position: round robin over the index shards of the era."""
    found: list[int] = []
    for position in range(3 * END):
        shards = eras[0].shards
        for era in eras:
            if position >= era.start:
                shards = era.shards
        found.append(shards[position % len(shards)])
    return found


@given(eras=schedules())
def test_every_position_has_one_index_shard(eras: tuple[IndexEra, ...]) -> None:
    owner = owners(eras)
    positions = [IndexPositions.of(eras, shard) for shard in range(SHARDS)]
    for position in range(END):
        assert index_shard_at(eras, position) == owner[position]
        assert [position in own for own in positions] == [
            s == owner[position] for s in range(SHARDS)
        ]


@given(eras=schedules(), start=st.integers(0, END), count=st.integers(0, 20))
def test_the_positions_of_an_index_shard_are_walked_in_order(
    eras: tuple[IndexEra, ...], start: int, count: int
) -> None:
    owner = owners(eras)
    for shard in range(SHARDS):
        own = [p for p in range(start, 3 * END) if owner[p] == shard]
        positions = IndexPositions.of(eras, shard)
        retired = shard not in eras[-1].shards
        assert (positions.end < NO_POSITION) == retired
        assert positions.first_from(start) == (own[0] if own else NO_POSITION)
        if len(own) > count or retired:
            expected = own[count] if len(own) > count else NO_POSITION
            assert positions.after(start, count) == expected
        first, end, step = positions.range_from(start)
        if own:
            assert [p for p in own if p < end] == list(range(first, min(end, 3 * END), step))


def test_an_engine_follows_every_position() -> None:
    assert EVERY_POSITION.range_from(7) == (7, NO_POSITION, 1)
    assert EVERY_POSITION.after(7, 3) == 10


def test_a_change_of_index_shards_keeps_the_owners_of_earlier_positions() -> None:
    view = view_of(index_shards=3)
    more = with_index_tier_of(view, view_of(index_shards=4), 10)
    fewer = with_index_tier_of(more, view_of(index_shards=1), 20)
    assert (more.number, fewer.number) == (2, 3)
    assert fewer.index_shards == view_of(index_shards=4).index_shards
    assert [fewer.index_shard_at(p) for p in (9, 10, 11, 19, 20, 21)] == [0, 2, 3, 3, 0, 0]


def test_a_change_replaces_an_earlier_change_at_the_same_position() -> None:
    more = with_index_tier_of(view_of(index_shards=3), view_of(index_shards=4), 10)
    again = with_index_tier_of(more, view_of(index_shards=2), 10)
    assert again.eras == (IndexEra(0, (0, 1, 2)), IndexEra(10, (0, 1)))


@pytest.mark.parametrize(
    "eras",
    [
        (IndexEra(1, (0,)),),
        (IndexEra(0, (0,)), IndexEra(0, (1,))),
        (IndexEra(0, (0,)), IndexEra(9, (1,)), IndexEra(5, (0,))),
        (IndexEra(0, ()),),
        (IndexEra(0, (0, 0)),),
        (IndexEra(0, (2,)),),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(eras: tuple[IndexEra, ...]) -> None:
    with pytest.raises(ConfigError, match="index schedule"):
        msgspec.structs.replace(view_of(index_shards=2), index_eras=eras).check()


def test_the_position_before_is_the_last_one_of_the_same_index_shard() -> None:
    eras = (IndexEra(0, (0, 1)), IndexEra(5, (2, 0, 1)), IndexEra(9, (2,)))
    for position in range(15):
        shard = index_shard_at(eras, position)
        earlier = [p for p in range(position) if index_shard_at(eras, p) == shard]
        assert previous_of(eras, position) == max(earlier, default=-1)
    assert [last_below(eras, shard, 15) for shard in range(4)] == [7, 8, 14, -1]
