"""Appends of a compute node through the owner of a log, and those that it makes for others."""

from __future__ import annotations

import pytest

from indilog.base.errors import (
    NotReadyError,
    OverloadedError,
    QuorumUnavailableError,
    SealedError,
)
from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import node_config
from indilog.roles.role import Answer, Effect, Ignore, Received, Send
from indilog.wire.owner_messages import OwnerAnswer, OwnerAppend, OwnerOutcome
from indilog_compute.owner_appends import OwnerAppends, ReceivedAppend

OWNER, OTHER = NodeId("engine-0"), NodeId("engine-1")
DONE, PENDING, REFUSED = OwnerOutcome.DONE, OwnerOutcome.PENDING, OwnerOutcome.REFUSED


def made(**settings: float) -> OwnerAppends:
    appends = OwnerAppends(
        node_config(
            **{"resend_s": 0.1, "cell_timeout_s": 1.0, "append_timeout_s": 10.0, **settings}
        )
    )
    appends.number_from(100)
    return appends


def asking(**settings: float) -> tuple[OwnerAppends, Effect]:
    """Return the appends of a node after a request, at time 1, and the message."""
    appends = made(**settings)
    appends.send(OWNER, "f", "engine-0/a", b"content", "waiter")
    (sent,) = appends.advance(Instant(1.0))
    assert sent == Send(OWNER, OwnerAppend(101, "f", "engine-0/a", b"content"))
    return appends, sent


def answered(appends: OwnerAppends, answer: OwnerAnswer, *, at: float = 1.0) -> list[Effect]:
    return appends.on_message(Received(OWNER, answer, Epoch(1)), Instant(at))


def append(request: int) -> OwnerAppend:
    return OwnerAppend(request, "f", "engine-0/a", b"content")


def arrive(appends: OwnerAppends, message: OwnerAppend, epoch: int = 1) -> list[Effect]:
    effects = appends.on_message(Received(OTHER, message, Epoch(epoch)), Instant(0.0))
    appends.check_invariants()
    return effects


def test_an_answer_goes_to_its_request() -> None:
    appends, _ = asking()
    stray = Received(OTHER, OwnerAnswer(101, DONE), Epoch(1))
    assert isinstance(appends.on_message(stray, Instant(1.0))[0], Ignore)
    assert answered(appends, OwnerAnswer(101, DONE, b"outcomes")) == [Answer("waiter", b"outcomes")]
    assert answered(appends, OwnerAnswer(101, DONE)) == []
    assert not appends


def test_a_refusal_is_an_error() -> None:
    appends, _ = asking()
    (effect,) = answered(appends, OwnerAnswer(101, REFUSED))
    assert isinstance(effect, Answer)
    assert isinstance(effect.outcome, SealedError)


def test_a_request_is_resent_and_fails_if_the_owner_is_silent() -> None:
    appends, sent = asking()
    assert appends.deadline() == pytest.approx(1.1)
    assert appends.advance(Instant(1.2)) == [sent]
    (failed,) = appends.advance(Instant(2.0))
    assert isinstance(failed, Answer)
    assert isinstance(failed.outcome, QuorumUnavailableError)
    assert appends.deadline() is None


def test_an_owner_that_answers_has_half_of_the_time_of_an_append() -> None:
    appends, _ = asking()
    for tenth in range(15, 60, 5):
        assert answered(appends, OwnerAnswer(101, PENDING), at=tenth / 10) == []
        assert not any(isinstance(e, Answer) for e in appends.advance(Instant(tenth / 10 + 0.4)))
    answered(appends, OwnerAnswer(101, PENDING), at=5.95)
    (failed,) = appends.advance(Instant(6.0))
    assert isinstance(failed, Answer)


def test_a_request_is_executed_once_and_answered_each_time() -> None:
    appends = made()
    received = ReceivedAppend(OTHER, append(7))
    assert appends.take("taker") == []
    assert arrive(appends, append(7)) == [Answer("taker", [received])]
    assert arrive(appends, append(7)) == [Send(OTHER, OwnerAnswer(7, PENDING))]
    appends.answer(received, b"outcomes")
    done = Send(OTHER, OwnerAnswer(7, DONE, b"outcomes"))
    assert appends.advance(Instant(0.0)) == [done]
    assert arrive(appends, append(7)) == [done]
    assert appends.take("taker") == []


def test_requests_wait_for_the_caller_that_serves_them() -> None:
    appends = made()
    assert arrive(appends, append(7)) == arrive(appends, append(8)) == []
    assert [each.message.request for each in appends.take("taker")] == [7, 8]


def test_what_is_given_up_is_refused() -> None:
    appends = made()
    arrive(appends, append(7))
    (received,) = appends.take("taker")
    appends.answer(received, None)
    assert appends.advance(Instant(0.0)) == [Send(OTHER, OwnerAnswer(7, REFUSED))]


def test_a_request_of_an_earlier_incarnation_is_ignored() -> None:
    appends = made()
    arrive(appends, append(20), epoch=2)
    (ignored,) = arrive(appends, append(7), epoch=1)
    assert isinstance(ignored, Ignore)
    assert [each.message.request for each in appends.take("taker")] == [20]


def test_requests_that_are_served_at_once_are_limited() -> None:
    appends = made(cell_requests_max=1)
    arrive(appends, append(7))
    assert arrive(appends, append(8)) == [Send(OTHER, OwnerAnswer(8, PENDING))]
    (received,) = appends.take("taker")
    appends.answer(received, b"")
    assert arrive(appends, append(8)) == [], "a copy is accepted later"
    assert len(appends.take("taker")) == 1


def test_requests_are_limited_and_end_with_the_node() -> None:
    appends = made(lookups_pending_max=1)
    appends.send(OWNER, "f", "a", b"", "first")
    with pytest.raises(OverloadedError):
        appends.send(OWNER, "f", "a", b"", "second")
    appends.take("taker")
    error = NotReadyError("stops")
    assert appends.abandon(error) == [Answer("first", error), Answer("taker", error)]
    assert not appends
