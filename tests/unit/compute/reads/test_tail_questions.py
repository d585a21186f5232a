"""Fresh reads and `tail()` at one engine: which question to the primary serves which read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from indilog.base.errors import QuorumUnavailableError
from indilog.base.ids import EMPTY_TAG, Instant
from indilog.roles.role import Effect
from indilog.wire.messages import Direction, IndexData, TailIs, TailWanted
from indilog_compute.reads.operation import PENDING, Answered, Tail
from tests.unit.compute.engine_driver import (
    LOG,
    PRIMARY,
    TAG,
    A,
    Driver,
    answered,
    carrying,
    joined,
    sends,
)


def fresh(driver: Driver, waiter: str, tag: int = EMPTY_TAG) -> None:
    answer = driver.engine.read(Direction.NEXT, tag, 0, 0, waiter, fresh=True)
    assert answer is PENDING


def questions(effects: list[Effect]) -> list[int]:
    found = sends(effects, TailWanted)
    assert all(to == PRIMARY for to, _ in found)
    return [message.request for _, message in found if isinstance(message, TailWanted)]


def tail_is(request: int, position: int, tail: int) -> TailIs:
    return TailIs(request, position, tail, {}, time_us=5_000_000)


def test_fresh_reads_of_one_iteration_share_a_question() -> None:
    driver = joined()
    for n in range(100):
        fresh(driver, f"reader {n}")
    driver.engine.read_tail("asker")
    (request,) = questions(driver.turn())
    effects = driver.hear(PRIMARY, tail_is(request, 0, 0))
    assert answered(effects) == {
        **{f"reader {n}": Answered(None, 0) for n in range(100)},
        "asker": Answered(Tail(0, 5_000_000), 0),
    }


def test_a_fresh_read_is_not_served_by_a_question_asked_before_it() -> None:
    driver = joined()
    fresh(driver, "first")
    (early,) = questions(driver.turn())
    fresh(driver, "second")
    fresh(driver, "third")
    assert questions(driver.turn()) == [], "one question is under way at a time"
    effects = driver.hear(PRIMARY, tail_is(early, 0, 0))
    assert list(answered(effects)) == ["first"]
    (late,) = questions(effects)
    assert list(answered(driver.hear(PRIMARY, tail_is(late, 0, 0)))) == ["second", "third"]


def test_a_fresh_read_waits_until_what_was_committed_is_applied_here() -> None:
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "writer")
    driver.turn()
    fresh(driver, "reader", TAG)
    (request,) = questions(driver.turn())
    assert answered(driver.hear(PRIMARY, tail_is(request, 1, 1))) == {}
    assert "reader" not in answered(driver.order(1, index_data=False))
    effects = driver.hear(A, IndexData((driver.block(0, 0, 1),)))
    answer = answered(effects)["reader"]
    assert isinstance(answer, Answered)
    assert answer.position == 1


def test_a_lost_question_is_resent_and_later_reads_wait_for_the_next() -> None:
    """The answer may be to the first sending, which was before the later read came."""
    driver = joined(resend_s=1, read_timeout_s=5)
    fresh(driver, "reader")
    (lost,) = questions(driver.turn())
    deadline = driver.engine.deadline()
    assert deadline is not None
    assert deadline <= Instant(1)
    driver.now = 1.0
    fresh(driver, "later")
    assert questions(driver.turn()) == [lost]
    effects = driver.hear(PRIMARY, tail_is(lost, 0, 0))
    assert list(answered(effects)) == ["reader"]
    (following,) = questions(effects)
    assert answered(driver.hear(PRIMARY, tail_is(lost, 0, 0))) == {}, "repeated"
    assert list(answered(driver.hear(PRIMARY, tail_is(following, 0, 0)))) == ["later"]


def test_fresh_reads_are_served_by_a_primary_that_is_slower_than_questions_are_repeated() -> None:
    driver = joined(resend_s=1, read_timeout_s=5)
    under_way: list[tuple[float, int]] = []
    reported: list[object] = []
    for step in range(40):
        driver.now = step / 4
        fresh(driver, f"reader {step}")
        arrived = [request for at, request in under_way if at <= driver.now]
        under_way = [(at, request) for at, request in under_way if at > driver.now]
        effects = driver.hear(PRIMARY, *(tail_is(request, 0, 0) for request in arrived))
        under_way += [(driver.now + 1.5, request) for request in questions(effects)]
        reported += answered(effects).values()
    assert len(reported) > 20
    assert all(isinstance(answer, Answered) for answer in reported)


def test_the_next_question_is_asked_when_the_one_under_way_has_failed() -> None:
    driver = joined(resend_s=1, read_timeout_s=3)
    fresh(driver, "early")
    asked = questions(driver.turn())
    driver.now = 2.0
    fresh(driver, "late")
    asked += questions(driver.turn())
    reported: list[object] = []
    while (due := driver.engine.deadline()) is not None and due < 20:
        driver.now = max(due, driver.now + 0.01)
        effects = driver.turn()
        asked += questions(effects)
        reported += answered(effects)
    assert reported == ["early", "late"]
    assert len(set(asked)) == 2


def test_a_fresh_read_fails_as_retryable_when_the_primary_is_silent() -> None:
    driver = joined(resend_s=1, read_timeout_s=3)
    fresh(driver, "reader")
    driver.engine.read_tail("asker")
    reported: dict[object, object] = {}
    for second in range(1, 5):
        driver.now = float(second)
        reported |= answered(driver.turn())
    assert {name: type(error) for name, error in reported.items()} == {
        "reader": QuorumUnavailableError,
        "asker": QuorumUnavailableError,
    }
    assert driver.engine.status()["progress"]["reads_pending"] == 0


def test_waiting_fresh_reads_fail_when_the_node_stops() -> None:
    driver = joined()
    fresh(driver, "asked")
    driver.turn()
    fresh(driver, "waiting")
    driver.turn()
    assert set(answered(driver.engine.abandon())) == {"asked", "waiting"}


def test_questions_to_a_silent_primary_have_growing_pauses() -> None:
    driver = joined(resend_s=0.25, resend_s_max=2, read_timeout_s=30)
    fresh(driver, "reader")
    at: list[float] = []
    for _ in range(200):
        at += [driver.now] * len(questions(driver.turn()))
        due = driver.engine.deadline()
        if due is None or due > 20:
            break
        driver.now = max(due, driver.now + 0.01)
    pauses = [later - earlier for earlier, later in pairwise(at)]
    assert pauses[:4] == pytest.approx([0.25, 0.5, 1, 2], abs=0.02)
    assert max(pauses) < 2.1
