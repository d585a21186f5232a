"""A fault that lasts is told after pauses that double."""

from __future__ import annotations

from indilog_compute.invocations.notices import Notices


def test_a_fault_that_lasts_is_told_ever_more_rarely_but_once_a_minute() -> None:
    notices = Notices(1.0)
    told = [second for second in range(100, 300) if notices.is_due(float(second))]
    assert told == [100, 101, 103, 107, 115, 131, 163, 223, 283]


def test_the_next_fault_is_told_at_once() -> None:
    notices = Notices(1.0)
    assert [notices.is_due(now) for now in (5.0, 6.0, 7.0)] == [True, True, False]
    notices.over()
    assert [notices.is_due(now) for now in (7.0, 8.0, 9.0)] == [True, True, False]
