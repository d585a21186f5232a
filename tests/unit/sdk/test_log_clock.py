"""The estimate of a log's time."""

from __future__ import annotations

import pytest

from indilog.sdk.log_clock import LogClock
from indilog.testing import MemoryLog, MemoryLogs


class Monotonic:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 7.0

    def __call__(self) -> float:
        return self.now


def log_at(now: list[float]) -> MemoryLog:
    return MemoryLog("any", logs=MemoryLogs(clock=lambda: now[0]))


def test_log_time_advances_between_records_by_the_monotonic_clock() -> None:
    monotonic = Monotonic()
    clock = LogClock(monotonic)
    clock.read(1000.0)
    monotonic.now += 2.5
    assert clock.now() == 1002.5


def test_a_record_read_late_does_not_set_log_time_back() -> None:
    monotonic = Monotonic()
    clock = LogClock(monotonic)
    clock.read(1000.0)
    monotonic.now += 50.0
    clock.read(1010.0)
    assert clock.now() == 1050.0
    clock.read(2000.0)
    assert clock.now() == 2000.0


@pytest.mark.asyncio
async def test_the_time_of_the_log_corrects_the_estimate_both_ways() -> None:
    monotonic, now = Monotonic(), [1000.0]
    clock = LogClock(monotonic)
    for ahead_s in (50.0, -50.0):
        await clock.ask(log_at(now))
        monotonic.now += 10.0
        now[0] += 10.0 + ahead_s
        await clock.ask(log_at(now))
        assert clock.now() == now[0]


@pytest.mark.asyncio
async def test_log_time_is_asked_for_once_at_the_start() -> None:
    monotonic, now = Monotonic(), [1000.0]
    clock = LogClock(monotonic)
    clock.read(10.0)  # an old one
    await clock.begin(log_at(now))
    assert clock.now() == 1000.0
    now[0] = 5000.0
    await clock.begin(log_at(now))
    assert clock.now() == 1000.0
