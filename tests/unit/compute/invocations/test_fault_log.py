"""A lasting fault is logged after pauses that double."""

from __future__ import annotations

from indilog_compute.invocations.fault_log import FaultLog


def test_a_lasting_fault_is_logged_at_growing_intervals_up_to_a_minute() -> None:
    fault = FaultLog(1.0)
    reported = [second for second in range(100, 300) if fault.is_due(float(second))]
    assert reported == [100, 101, 103, 107, 115, 131, 163, 223, 283]


def test_the_next_fault_is_logged_at_once() -> None:
    fault = FaultLog(1.0)
    assert [fault.is_due(now) for now in (5.0, 6.0, 7.0)] == [True, True, False]
    fault.end()
    assert [fault.is_due(now) for now in (7.0, 8.0, 9.0)] == [True, True, False]
