"""The stepper tries every order of calls, and only orders of calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from indilog.sdk.event import Event
from indilog.testing import MemoryLog
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped


async def write_twice(log: SteppedLog, data: bytes) -> list[int]:
    return [await log.append(data), await log.append(data)]


def run(choose: Choose) -> tuple[bytes, ...]:
    log = MemoryLog("x")
    stepped = [SteppedLog(log), SteppedLog(log)]
    results = run_stepped([write_twice(stepped[0], b"a"), write_twice(stepped[1], b"b")], choose)
    assert [one.appended for one in stepped] == results
    return tuple(log.logs.record(n).data for n in range(4))  # type: ignore[union-attr]


def test_every_order_of_two_executions_appears() -> None:
    assert {b"".join(order) for order in interleavings(run)} == {
        b"aabb", b"abab", b"abba", b"baab", b"baba", b"bbaa",
    }  # fmt: skip


def test_too_many_interleavings_are_refused() -> None:
    with pytest.raises(AssertionError, match="more than 3"):
        list(interleavings(run, runs_max=3))


def test_the_same_choices_give_the_same_run() -> None:
    def last(ready: Sequence[int]) -> int:
        return ready[-1]

    assert run(last) == run(last) == (b"b", b"b", b"a", b"a")


def test_an_error_of_one_execution_ends_the_run() -> None:
    async def fail(log: SteppedLog) -> None:
        await log.tail()
        raise ValueError("planted")

    log = SteppedLog(MemoryLog("x"))
    with pytest.raises(ValueError, match="planted"):
        run_stepped([fail(log), fail(log)], lambda ready: ready[0])


@pytest.mark.parametrize("first", [0, 1])
def test_an_execution_waiting_for_an_event_resumes_after_another_sets_it(first: int) -> None:
    event, story = Event(), list[str]()

    async def waits() -> None:
        story.append("waits")
        await event.wait()
        story.append("continues")

    async def sets() -> None:
        story.append("sets")
        event.set()

    run_stepped([waits(), sets()], lambda ready: first if first in ready else ready[0])
    assert story == (["waits", "sets", "continues"], ["sets", "waits", "continues"])[first]


def test_a_deadlock_of_executions_is_detected() -> None:
    async def waits() -> None:
        await Event().wait()

    with pytest.raises(AssertionError, match="all coroutines wait"):
        run_stepped([waits(), waits()], lambda ready: ready[0])
