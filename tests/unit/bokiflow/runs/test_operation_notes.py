"""Notes about operations that take long (`bokiflow.runs.operation_notes`)."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from bokiflow.runs import waiting
from bokiflow.runs.operation_notes import OperationInProgress
from bokiflow.runs.records import OperationNoted
from indilog import NotReadyError


class Timer:
    """A timer of `Time`."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Time:
    """Time that passes when the test says so. Tasks run at once.

    Attributes:
        now: seconds.
        notes: the notes so far, each with its time.
        is_away: whether appends of notes fail.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.notes: list[tuple[float, OperationNoted]] = []
        self.is_away = False
        self._timers: list[tuple[float, int, Timer, Callable[[], object]]] = []
        self._count = 0

    def call_later(self, seconds: float, call: Callable[[], object]) -> Timer:
        self._count += 1
        timer = Timer()
        heapq.heappush(self._timers, (self.now + seconds, self._count, timer, call))
        return timer

    def start_task(self, asked: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        with pytest.raises(StopIteration):
            asked.send(None)
        return None

    async def append(self, note: OperationNoted) -> None:
        if self.is_away:
            raise NotReadyError("away")
        self.notes.append((self.now, note))

    def pass_to(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            self.now, _, timer, call = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                call()
        self.now = now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(waiting, "monotonic_now", lambda: time.now)
    monkeypatch.setattr(waiting, "call_later", time.call_later)
    monkeypatch.setattr(waiting, "start_task", time.start_task)
    monkeypatch.setattr(waiting, "has_loop", lambda: True)
    return time


def begin(time: Time) -> OperationInProgress:
    return OperationInProgress(1, "3", "pay", "step", time.append, lambda: 1000 + time.now)


def test_a_short_operation_is_not_noted(time: Time) -> None:
    begun = begin(time)
    begun.begin_attempt(1)
    begun.fail_attempt("ValueError: no", 0.1)
    time.pass_to(1.9)
    begun.end()
    time.pass_to(100.0)
    assert time.notes == []
    assert begun.duration_ms == 100_000


def test_a_step_that_hangs_is_noted_once(time: Time) -> None:
    begun = begin(time)
    begun.begin_attempt(1)
    time.pass_to(100_000.0)
    assert time.notes == [(2.0, OperationNoted(1, "3", "pay", "step", 1000.0))]


def test_a_failure_before_a_long_pause_is_noted_at_once(time: Time) -> None:
    begun = begin(time)
    begun.begin_attempt(1)
    time.pass_to(0.5)
    begun.fail_attempt("ValueError: no\n stamps " + "x" * 1000, 60.0)
    [(at, note)] = time.notes
    assert (at, note.failed, note.since, note.next_at) == (0.5, 1, 1000.0, 1060.5)
    assert note.error is not None
    assert note.error.startswith("ValueError: no stamps x")
    assert len(note.error) == 500
    time.pass_to(60.5)
    begun.begin_attempt(2)
    time.pass_to(10_000.0)
    assert len(time.notes) == 1, "it says when the next attempt began"


def test_the_notes_of_a_step_that_fails_for_days_become_rare(time: Time) -> None:
    begun = begin(time)
    days = 10
    for attempt in range(1, days * 1440 + 1):
        begun.begin_attempt(attempt)
        begun.fail_attempt(f"no {attempt}", 60.0)
        time.pass_to(60.0 * attempt)
    ages = [at for at, _ in time.notes]
    assert len(ages) <= days * 24 + 20
    assert all(b - a <= 3600 + 60 for a, b in pairwise(ages))
    assert ages[:6] == [0.0, 60.0, 120.0, 180.0, 300.0, 540.0]


def test_quick_failures_are_noted_when_the_pause_between_notes_has_passed(time: Time) -> None:
    begun = begin(time)
    for attempt in range(1, 101):
        begun.begin_attempt(attempt)
        begun.fail_attempt("no", 0.1)
        time.pass_to(0.1 * attempt)
    begun.begin_attempt(101)
    time.pass_to(1000.0)
    assert [note.failed for _, note in time.notes] == [20, 39, 76, 100]


def test_a_note_that_could_not_be_appended_is_appended_later(time: Time) -> None:
    begun = begin(time)
    time.is_away = True
    time.pass_to(3.0)
    assert time.notes == []
    time.is_away = False
    time.pass_to(5.0)
    assert [at for at, _ in time.notes] == [4.0]
    begun.end()
