"""Ranges of lost records (`indilog.kernel.lost_ranges`), against a set of seqnums."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.kernel.lost_ranges import LostRange, LostRanges, within

RANGES = st.lists(
    st.builds(
        lambda start, size: LostRange(start, start + size), st.integers(0, 60), st.integers(1, 9)
    )
)


def seqnums_of(ranges: LostRanges) -> set[int]:
    return {seqnum for one in ranges for seqnum in range(*one)}


@given(RANGES, st.integers(0, 80), st.integers(0, 80))
def test_the_lost_records_of_a_range_equal_those_of_a_set(
    added: list[LostRange], start: int, end: int
) -> None:
    ranges = LostRanges(added, ranges_max=100)
    ranges.check_invariants()
    lost = {seqnum for one in added for seqnum in range(*one)}
    assert seqnums_of(ranges) == lost
    asked = lost & set(range(start, end))
    found = list(ranges.ascending(start, end))
    assert {seqnum for one in found for seqnum in range(*one)} == asked
    assert list(ranges.descending(start, end)) == found[::-1]
    assert all(one.start < one.end for one in found)
    assert all(before.end < after.start for before, after in pairwise(found))
    assert ranges.any(start, end) is bool(asked)


@given(RANGES, st.integers(1, 5))
def test_above_the_limit_more_records_count_as_lost_and_never_fewer(
    added: list[LostRange], ranges_max: int
) -> None:
    ranges = LostRanges(added, ranges_max=ranges_max)
    ranges.check_invariants()
    assert seqnums_of(ranges) >= {seqnum for one in added for seqnum in range(*one)}


def test_at_the_limit_the_two_nearest_ranges_are_merged() -> None:
    ranges = LostRanges([LostRange(0, 1), LostRange(10, 11), LostRange(14, 15)], ranges_max=3)
    assert len(ranges) == 3
    ranges.add(LostRange(30, 31))
    assert list(ranges) == [LostRange(0, 1), LostRange(10, 15), LostRange(30, 31)]


@pytest.mark.parametrize(
    ("ranges", "possible"),
    [
        ([], True),
        ([(5, 6), (7, 9)], True),
        ([(4, 6)], False),
        ([(7, 11)], False),
        ([(6, 6)], False),
        ([(7, 8), (5, 6)], False),
    ],
)
def test_a_message_contains_only_lost_ranges_of_its_own_records(
    ranges: list[tuple[int, int]], *, possible: bool
) -> None:
    assert within([LostRange(*one) for one in ranges], 5, 10) is possible
