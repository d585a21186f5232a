"""The clock that stamps metalog entries (decision 0025)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import Instant
from indilog_ordering.entry_clock import EntryClock

DAY_S = 86_400.0
GAP_S_MAX = 30 * DAY_S
LAST_S = 1_000_000_000.0


def started(wall_s: float, last_s: float = LAST_S) -> EntryClock:
    return EntryClock(int(last_s * 1e6), Instant(wall_s), GAP_S_MAX)


@pytest.mark.parametrize("down_s", [0.0, 0.25, 6.0, DAY_S, 29 * DAY_S, GAP_S_MAX])
def test_time_passes_while_no_primary_runs(down_s: float) -> None:
    clock = started(LAST_S + down_s)
    assert clock.now_us == int((LAST_S + down_s) * 1e6)
    assert clock.behind_s == 0.0


@pytest.mark.parametrize("ahead_s", [GAP_S_MAX + 1, 366 * DAY_S, 9e9])
def test_a_wall_clock_that_is_too_far_ahead_is_ignored(ahead_s: float) -> None:
    clock = started(LAST_S + ahead_s)
    assert clock.now_us == int(LAST_S * 1e6)
    assert clock.behind_s == ahead_s
    clock.advance(Instant(LAST_S + ahead_s + 2.5))
    assert clock.now_us == int((LAST_S + 2.5) * 1e6)


@pytest.mark.parametrize("back_s", [0.001, 3600.0, 366 * DAY_S])
def test_a_wall_clock_that_went_back_neither_stops_nor_decreases_time(back_s: float) -> None:
    clock = started(LAST_S - back_s)
    assert clock.now_us == int(LAST_S * 1e6)
    clock.advance(Instant(LAST_S - back_s + 2.5))
    assert clock.now_us == pytest.approx((LAST_S + 2.5) * 1e6, abs=1)


def test_a_log_without_records_begins_at_the_wall_clock() -> None:
    assert started(LAST_S, last_s=0.0).now_us == int(LAST_S * 1e6)


def test_a_start_with_the_clock_a_year_ahead_leaves_no_trace_after_the_next_one() -> None:
    wrong = started(LAST_S + 366 * DAY_S)
    wrong.advance(Instant(LAST_S + 366 * DAY_S + 6.0))
    right = EntryClock(wrong.now_us, Instant(LAST_S + 10.0), GAP_S_MAX)
    assert right.now_us == int((LAST_S + 10.0) * 1e6)


@given(
    starts=st.lists(
        st.tuples(st.floats(-4e7, 4e7), st.lists(st.floats(0.0, 1e4), max_size=4)), max_size=8
    )
)
def test_time_never_goes_back_and_keeps_pace_with_any_wall_clock(
    starts: list[tuple[float, list[float]]],
) -> None:
    last_us, wall_s = int(LAST_S * 1e6), LAST_S
    for jump_s, steps in starts:
        wall_s += jump_s
        clock = EntryClock(last_us, Instant(wall_s), GAP_S_MAX)
        assert last_us <= clock.now_us <= last_us + GAP_S_MAX * 1e6
        begun_us, passed_s = clock.now_us, 0.0
        for step_s in steps:
            passed_s += step_s
            clock.advance(Instant(wall_s + passed_s))
            assert abs(clock.now_us - begun_us - passed_s * 1e6) <= 2
        wall_s, last_us = wall_s + passed_s, clock.now_us
