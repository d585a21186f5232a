"""The due times of schedules."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indilog.apps.schedule import check_schedule, due_between, next_due
from indilog.base.deployed import ScheduleSpec

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
MINUTE = 60.0


def every(expression: str, timezone: str = "UTC") -> ScheduleSpec:
    return ScheduleSpec("f", expression, timezone)


def times(spec: ScheduleSpec, *utc: str) -> list[str]:
    """Return the due times between two of `utc`, in the schedule's zone."""
    start, end = (datetime.fromisoformat(t).replace(tzinfo=UTC).timestamp() for t in utc)
    found = due_between(spec, start, end, most=100)
    return [datetime.fromtimestamp(t, UTC).isoformat()[:16] for t in found]


def test_the_next_due_time_is_after_the_one_before() -> None:
    spec = every("*/5 * * * *")
    assert next_due(spec, NOON) == NOON + 5 * MINUTE
    assert next_due(spec, NOON - 0.001) == NOON
    assert next_due(every("0 0 1 1 *"), NOON) == datetime(2027, 1, 1, tzinfo=UTC).timestamp()


def test_due_times_between_two_include_the_second_and_are_the_last_ones() -> None:
    spec = every("* * * * *")
    minutes = [NOON + n * MINUTE for n in range(1, 4)]
    assert due_between(spec, NOON, NOON + 3 * MINUTE, most=10) == minutes
    assert due_between(spec, NOON, NOON + 3.5 * MINUTE, most=10) == minutes
    assert due_between(spec, NOON, NOON + 3 * MINUTE, most=2) == minutes[1:]
    assert due_between(spec, NOON, NOON + 59.9, most=2) == []


def test_a_time_zone_moves_with_its_clock() -> None:
    daily = every("30 2 * * *", "Europe/Berlin")
    assert times(daily, "2026-03-27T12:00", "2026-03-30T12:00") == [
        "2026-03-28T01:30",
        "2026-03-29T01:00",
        "2026-03-30T00:30",
    ]
    assert times(daily, "2026-10-24T12:00", "2026-10-26T12:00") == [
        "2026-10-25T00:30",
        "2026-10-26T01:30",
    ]


@given(
    st.sampled_from(["*/7 * * * *", "30 2 * * *", "0 */3 * * *", "15 1-4 * * sun", "0 0 29 2 *"]),
    st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"]),
    st.integers(1_700_000_000, 1_800_000_000),
    st.integers(0, 9 * 86_400),
)
@example("30 2 * * *", "Europe/Berlin", 1_774_656_000, 3 * 86_400)  # 2026-03-28
@example("30 2 * * *", "Europe/Berlin", 1_792_800_000, 3 * 86_400)  # 2026-10-24
def test_due_times_found_backwards_equal_those_found_forwards(
    expression: str, zone: str, after: int, span_s: int
) -> None:
    spec = every(expression, zone)
    until = after + span_s
    ahead: list[float] = []
    due = next_due(spec, after)
    while due is not None and due <= until:
        ahead.append(due)
        due = next_due(spec, due)
    assert all(one < other for one, other in pairwise(ahead))
    assert due_between(spec, after, until, most=10_000) == ahead


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (every("61 * * * *"), "'61 * * * *' is no schedule: bad minute; its fields are minute (0-"),
        (every("* * * *"), "A schedule has five fields (minute, hour, day of month, month, day of"),
        (every("* * * * * *"), "A schedule has five fields"),
        (every("0 0 30 2 *"), "'0 0 30 2 *' is no schedule: it is never due, no month"),
        (every("0 0 32 2 *"), "'0 0 32 2 *' is no schedule: bad day-of-month; its fields are"),
        (every("0 0 31 13 *"), "'0 0 31 13 *' is no schedule: bad month; its fields are"),
        (every("0 0 * * *", "Mars/Base"), "'Mars/Base' is no time zone that this"),
        (every("0 0 * * *", "../etc"), "'../etc' is no time zone"),
        (ScheduleSpec("f", "0 0 * * *", "UTC", "x"), "catch_up is none, last or all, not"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_invalid_schedule_is_refused_in_one_sentence(spec: ScheduleSpec, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        check_schedule(spec)
