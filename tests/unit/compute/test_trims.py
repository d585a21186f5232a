"""The trims that callers of one engine wait for."""

from __future__ import annotations

from indilog.base.errors import QuorumUnavailableError
from indilog.base.ids import Instant, TagHash
from indilog.config import node_config
from indilog.kernel.metalog import Floor
from indilog.kernel.view import view_of
from indilog.roles.leadership import Leadership
from indilog.roles.metalog_reader import MetalogReader
from indilog.roles.role import Answer, Effect, Send
from indilog.wire.tag_messages import TrimIs, TrimWanted
from indilog_compute.reads.operation import Answered
from indilog_compute.trims import Trims

CONFIG = node_config(resend_s=0.25, resend_s_max=2.0, read_timeout_s=5.0)


def floor(tag: int) -> Floor:
    return Floor(TagHash(tag), 5, of_log=True)


def sent(effects: list[Effect]) -> list[int]:
    """Return the requests that are sent."""
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.request for message in messages if isinstance(message, TrimWanted)]


def answers(effects: list[Effect]) -> dict[object, object]:
    return {effect.waiter: effect.outcome for effect in effects if isinstance(effect, Answer)}


def test_a_lost_trim_is_resent_while_others_start_and_are_answered() -> None:
    trims, reader = Trims(Leadership(view_of()), CONFIG), MetalogReader()
    trims.start(floor(1), "lost")
    (lost,) = sent(trims.advance(0, Instant(0.0)))
    resent = []
    for step in range(1, 50):
        now = Instant(step / 10)
        trims.start(floor(2), step)
        requests = sent(trims.advance(step, now))
        resent += [now for request in requests if request == lost]
        for request in requests:
            if request != lost:
                trims.on_answer(TrimIs(request, step, 9), reader)
    assert resent == [0.3, 0.8, 1.8, 3.8], "the pauses double: 0.25, 0.5, 1 and 2 seconds"


def test_a_trim_that_is_never_answered_fails_after_its_timeout() -> None:
    trims = Trims(Leadership(view_of()), CONFIG)
    trims.start(floor(1), "first")
    trims.advance(0, Instant(0.0))
    trims.start(floor(2), "second")
    trims.advance(0, Instant(1.0))
    failed = answers(trims.advance(0, Instant(5.0)))
    assert [(waiter, type(error)) for waiter, error in failed.items()] == [
        ("first", QuorumUnavailableError)
    ]
    deadline = trims.deadline()
    assert deadline is not None
    assert deadline <= 6.0


def test_a_trim_that_the_primary_placed_is_not_resent_and_waits_for_its_position() -> None:
    trims, reader = Trims(Leadership(view_of()), CONFIG), MetalogReader()
    trims.start(floor(1), "first")
    (request,) = sent(trims.advance(0, Instant(0.0)))
    trims.on_answer(TrimIs(request, 7, 9), reader)
    assert reader.known_end == 7
    assert trims.deadline() == 5.0
    assert trims.advance(6, Instant(3.0)) == []
    assert answers(trims.advance(7, Instant(3.0))) == {"first": Answered(None, 7)}
    assert trims.deadline() is None
