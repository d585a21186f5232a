"""Fresh reads and `tail()` at one engine: which question to the primary serves whom."""

from __future__ import annotations

from compute.operation import PENDING, Answered
from indilog.errors import QuorumUnavailableError
from indilog.ids import EMPTY_TAG, Instant
from indilog.messages import Direction, IndexData, TailIs, TailWanted
from indilog.roles import Effect
from tests.unit.compute.engine_driver import (
    LOG,
    NAMES,
    PRIMARY,
    TAG,
    A,
    Driver,
    answered,
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
    return TailIs(request, position, tail, {})


def test_fresh_reads_of_one_turn_share_a_question() -> None:
    driver = joined()
    for n in range(100):
        fresh(driver, f"reader {n}")
    driver.engine.read_tail("asker")
    (request,) = questions(driver.turn())
    effects = driver.hear(PRIMARY, tail_is(request, 0, 0))
    assert answered(effects) == {
        **{f"reader {n}": Answered(None, 0) for n in range(100)},
        "asker": Answered(0, 0),
    }


def test_a_fresh_read_is_not_served_by_a_question_asked_before_it_came() -> None:
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
    driver.engine.append(b"one", (LOG, TAG), NAMES, "writer")
    driver.turn()
    fresh(driver, "reader", TAG)
    (request,) = questions(driver.turn())
    assert answered(driver.hear(PRIMARY, tail_is(request, 1, 1))) == {}
    assert "reader" not in answered(driver.order(1, index_data=False))
    effects = driver.hear(A, IndexData((driver.block(0, 0, 1),)))
    answer = answered(effects)["reader"]
    assert isinstance(answer, Answered)
    assert answer.position == 1


def test_a_lost_question_is_asked_again_and_an_answer_to_the_first_finds_nothing() -> None:
    driver = joined(resend_s=1, read_timeout_s=5)
    fresh(driver, "reader")
    (lost,) = questions(driver.turn())
    deadline = driver.engine.deadline()
    assert deadline is not None
    assert deadline <= Instant(1)
    driver.now = 1.0
    fresh(driver, "later")
    (again,) = questions(driver.turn())
    assert answered(driver.hear(PRIMARY, tail_is(lost, 0, 0))) == {}
    effects = driver.hear(PRIMARY, tail_is(again, 0, 0))
    assert list(answered(effects)) == ["reader", "later"]


def test_a_fresh_read_fails_as_retryable_when_the_primary_is_silent() -> None:
    driver = joined(resend_s=1, read_timeout_s=3)
    fresh(driver, "reader")
    driver.engine.read_tail("asker")
    told: dict[object, object] = {}
    for second in range(1, 5):
        driver.now = float(second)
        told |= answered(driver.turn())
    assert {name: type(error) for name, error in told.items()} == {
        "reader": QuorumUnavailableError,
        "asker": QuorumUnavailableError,
    }
    assert driver.engine.status()["progress"]["reads_pending"] == 0


def test_fresh_reads_that_wait_are_told_when_the_node_stops() -> None:
    driver = joined()
    fresh(driver, "asked")
    driver.turn()
    fresh(driver, "waiting")
    driver.turn()
    assert set(answered(driver.engine.abandon())) == {"asked", "waiting"}
