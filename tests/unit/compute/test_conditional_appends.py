"""Conditional appends (decision 0043): the home of a tag, and requests to homes, without I/O."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConditionFailedError,
    NotReadyError,
    OverloadedError,
    SealedError,
)
from indilog.base.ids import Epoch, Instant, NodeId, ViewNumber
from indilog.base.log import After
from indilog.config import node_config
from indilog.kernel.metalog import NewView, NewWriters
from indilog.kernel.view import NO_WRITER, ShardPlacement, View
from indilog.roles.role import Answer, AnswerAppends, Effect, Received, Send
from indilog.wire.conditional_messages import (
    ConditionalAnswer,
    ConditionalAppend,
    HomeIs,
    HomeWanted,
)
from indilog.wire.messages import (
    AppendBatch,
    IndexBlock,
    IndexData,
    IndexLookup,
    LookupResult,
    Message,
    ShardStored,
    TailIs,
    TailWanted,
)
from indilog_compute.conditional.home import Conditional
from indilog_compute.conditional.home_requests import HomeRequests, home_of
from indilog_compute.reads.operation import Answered
from indilog_compute.served_requests import ServedRequests
from tests.support.metalog_messages import entries_message
from tests.unit.compute.engine_driver import (
    ENGINE,
    JOIN,
    PRIMARY,
    SHARD,
    A,
    Driver,
    answered,
    joined,
    sends,
)

AT_T = Conditional("orders", After("t"), ((b"x", ("t",)),))
AT_U = Conditional("orders", After("u"), ((b"x", ("u",)),))
OTHER, THIRD, AGGREGATOR = NodeId("engine-1"), NodeId("engine-2"), NodeId("aggregator-0")


def batches(effects: Sequence[Effect]) -> int:
    """Return how many batches are sent to a replica."""
    return sum(to == A for to, _ in sends(effects, AppendBatch))


def checked(driver: Driver, effects: Sequence[Effect]) -> list[Effect]:
    """Answer the questions of checks: about the tail what is ordered, about tags that no record has
    them.
    """
    found: list[Effect] = []
    for _, question in sends(effects, TailWanted):
        assert isinstance(question, TailWanted)
        last = Epoch(min(driver.position, 1))
        tail = TailIs(question.request, driver.position, driver.tail, {SHARD: driver.tail}, last)
        found += driver.hear(PRIMARY, tail)
    lookups = [m for _, m in sends(found, IndexLookup) if isinstance(m, IndexLookup)]
    for request in dict.fromkeys(lookup.request for lookup in lookups):
        result = LookupResult(request, (), (), position=driver.position)
        found += driver.hear(AGGREGATOR, result)
    return found


# --- at the home


def test_the_condition_is_checked_against_the_tail_of_the_primary() -> None:
    driver = joined()
    driver.engine.append_if(AT_T, "mine")
    effects = driver.turn()
    assert (len(sends(effects, TailWanted)), batches(effects)) == (1, 0)
    assert batches(checked(driver, effects)) == 1
    assert [e for e in driver.order(1) if isinstance(e, AnswerAppends)] == [
        AnswerAppends(["mine"], 0, 1)
    ]


def test_the_next_condition_on_a_tag_is_checked_when_the_append_before_it_is_ordered() -> None:
    driver = joined()
    for waiter in ("first", "second"):
        driver.engine.append_if(AT_T, waiter)
    driver.engine.append_if(AT_U, "other")
    effects = driver.turn()
    assert len(sends(effects, TailWanted)) == 1, "the checks of two tags share a question"
    effects = checked(driver, effects)
    assert batches(effects) == 2, "one record with each tag"
    assert not sends(driver.turn(), TailWanted)
    assert sends(driver.order(2, index_data=False), TailWanted)


def test_a_check_does_not_wait_for_records_of_an_earlier_writer() -> None:
    """What the replicas have of it and no entry has ordered will never be ordered."""
    driver = Driver()
    driver.hear(PRIMARY, TailIs(JOIN, 0, 0, {SHARD: 0}, Epoch(0)))
    driver.engine.append_if(AT_T, "mine")
    assert not driver.engine.ready
    driver.position += 1
    named = NewWriters(0, ViewNumber(1), Epoch(1), {SHARD: Epoch(1)})
    assert sends(driver.hear(PRIMARY, entries_message((named,))), TailWanted)
    assert driver.engine.ready


def test_nothing_is_checked_while_an_append_that_timed_out_may_be_ordered_later() -> None:
    driver = joined()
    driver.engine.append_if(AT_T, "mine")
    checked(driver, driver.turn())
    driver.now += 31
    outcome = answered(driver.turn())["mine"]
    assert isinstance(outcome, AppendOutcomeUnknownError)
    driver.engine.append_if(AT_T, "again")
    assert not sends(driver.turn(), TailWanted)
    assert sends(driver.order(1), TailWanted)


def test_a_check_that_takes_too_long_appends_nothing() -> None:
    driver = joined(read_timeout_s=60.0)
    driver.engine.append_if(AT_T, "mine")
    asked = driver.turn()
    assert driver.engine.deadline() is not None
    driver.now += 31
    outcome = answered(driver.turn())["mine"]
    assert isinstance(outcome, NotReadyError)
    assert not batches(checked(driver, asked))
    driver.engine.append_if(AT_T, "again")
    assert sends(driver.turn(), TailWanted)


def test_the_read_of_an_expired_check_ends_unnoticed() -> None:
    """Nothing else is under way then."""
    driver = joined(read_timeout_s=31.5)
    driver.engine.append_if(AT_T, "mine")
    driver.turn()
    driver.now += 31
    assert "mine" in answered(driver.turn())
    driver.now += 1
    assert not answered(driver.turn())


def test_a_node_that_lost_its_shard_refuses() -> None:
    driver = joined()
    driver.engine.append_if(AT_T, "mine")
    asked = driver.turn()
    effects = driver.hear(A, ShardStored(SHARD, Epoch(2), 0))
    assert isinstance(answered(effects)["mine"], SealedError)
    assert not batches(checked(driver, asked))


def test_a_node_that_stops_answers_every_caller() -> None:
    driver = joined()
    driver.engine.append_if(AT_T, "appending")
    checked(driver, driver.turn())
    for waiter, append in (("queued", AT_T), ("checking", AT_U)):
        driver.engine.append_if(append, waiter)
    driver.turn()
    outcomes = answered(driver.engine.abandon())
    assert isinstance(outcomes["appending"], AppendOutcomeUnknownError)
    assert isinstance(outcomes["queued"], NotReadyError)
    assert isinstance(outcomes["checking"], NotReadyError)


def test_waiting_appends_are_bounded() -> None:
    driver = joined(append_pending_max=2)
    for waiter in ("a", "b"):
        driver.engine.append_if(AT_T, waiter)
    with pytest.raises(OverloadedError):
        driver.engine.append_if(AT_T, "c")


# --- requests


def test_tags_are_spread_over_the_slots_and_only_those_of_a_moved_slot_move() -> None:
    nodes = [NodeId(f"engine-{number}") for number in range(4)]
    homes = [home_of(nodes, tag) for tag in range(1, 2001)]
    assert all(400 < homes.count(node) < 600 for node in nodes)
    moved = [home_of([NodeId("engine-9"), *nodes[1:]], tag) for tag in range(1, 2001)]
    expected = [NodeId("engine-9") if home == "engine-0" else home for home in homes]
    assert moved == expected


class Asking:
    """Requests of one node to `OTHER`."""

    def __init__(self) -> None:
        self.requests = HomeRequests(node_config())
        self.now = 0.0
        self.requests.start(AT_T, OTHER, "mine")

    def turn(self, after_s: float = 0.0) -> list[Effect]:
        self.now += after_s
        effects = self.requests.begin(Instant(self.now))
        self.requests.check_invariants()
        return effects

    def answer(self, answer: ConditionalAnswer) -> list[Effect]:
        effects = self.requests.on_answer(OTHER, answer, Instant(self.now))
        self.requests.check_invariants()
        return effects

    def found(self, incarnation: int = 7, sender: NodeId = OTHER) -> list[Effect]:
        return self.requests.on_home(sender, HomeIs(1), Epoch(incarnation), Instant(self.now))


def messages(effects: Sequence[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def test_an_append_is_addressed_to_the_incarnation_of_its_home() -> None:
    asking = Asking()
    assert messages(asking.turn()) == [HomeWanted(1)]
    assert not asking.found(sender=ENGINE)
    sent = ConditionalAppend(1, Epoch(7), "orders", After("t"), ((b"x", ("t",)),))
    assert messages(asking.found()) == [sent]
    assert not asking.found(incarnation=8), "the first answer counts"
    assert messages(asking.turn(1.0)) == [sent]
    done = asking.answer(ConditionalAnswer(1, 5, 40))
    assert done == [AnswerAppends(["mine"], 40, 5)]
    assert not asking.answer(ConditionalAnswer(1, 5, 40))


def test_a_home_that_does_not_answer_has_appended_nothing() -> None:
    asking = Asking()
    asking.turn()
    assert messages(asking.turn(1.0)) == [HomeWanted(1)]
    (outcome,) = [e.outcome for e in asking.turn(30) if isinstance(e, Answer)]
    assert isinstance(outcome, NotReadyError)
    assert not asking.found()


def test_the_outcome_of_an_append_without_an_answer_is_unknown() -> None:
    asking = Asking()
    asking.turn()
    asking.found()
    assert asking.turn(59)
    (outcome,) = [e.outcome for e in asking.turn(2) if isinstance(e, Answer)]
    assert isinstance(outcome, AppendOutcomeUnknownError)


def test_a_failed_condition_comes_with_the_position_at_which_it_is_seen() -> None:
    asking = Asking()
    asking.turn()
    asking.found()
    attributes = {"last_seqnum": 12}
    answer = ConditionalAnswer(1, 9, 0, "ConditionFailedError", "later", attributes)
    (outcome,) = answered(asking.answer(answer)).values()
    assert isinstance(outcome, Answered)
    assert outcome.position == 9
    assert isinstance(outcome.value, ConditionFailedError)
    assert outcome.value.last_seqnum == 12


def follow(asking: Asking, *homes: NodeId) -> list[object]:
    moved = asking.requests.follow(homes, Instant(asking.now))
    asking.requests.check_invariants()
    return [waiter for _, waiter in moved]


def test_an_append_that_was_not_sent_leaves_a_home_that_leaves() -> None:
    asking = Asking()
    asking.requests.start(AT_T, OTHER, "new")
    assert follow(asking, OTHER) == []
    assert follow(asking, THIRD) == ["mine", "new"]
    asking.requests.start(AT_T, OTHER, "asked")
    asking.turn()
    assert follow(asking, THIRD) == ["asked"]
    assert not asking.found()
    assert len(asking.requests) == 0


def test_an_append_that_was_sent_to_a_home_that_leaves_may_be_answered_for_a_while() -> None:
    for answered_in_time in (True, False):
        asking = Asking()
        asking.turn()
        asking.found()
        assert follow(asking, THIRD) == []
        pause = node_config().messages.resend_s_max / 2
        assert answered(asking.turn(pause)) == {}
        if answered_in_time:
            assert asking.answer(ConditionalAnswer(1, 5, 40)) == [AnswerAppends(["mine"], 40, 5)]
            continue
        outcomes = answered(asking.turn(pause))
        assert isinstance(outcomes["mine"], AppendOutcomeUnknownError)


def test_an_append_that_a_home_without_shard_refused_is_asked_again() -> None:
    asking = Asking()
    asking.turn()
    asking.found()
    assert asking.answer(ConditionalAnswer(1, 0, 0, "SealedError", "lost", {})) == []
    assert messages(asking.turn()) == [], "it asks again after a pause"
    assert messages(asking.turn(1.0)) == [HomeWanted(2)], "no copy of the first request matches"
    assert not asking.found(), "the late answer of the first question"
    assert follow(asking, THIRD) == ["mine"]


def test_a_home_that_keeps_refusing_is_believed_after_the_timeout() -> None:
    asking = Asking()
    asking.turn()
    asking.found()
    asking.now += 31
    refused = ConditionalAnswer(1, 0, 0, "SealedError", "lost", {})
    assert isinstance(answered(asking.answer(refused))["mine"], SealedError)


def test_requests_end_with_their_node() -> None:
    asking = Asking()
    asking.turn()
    asking.found()
    asking.requests.start(AT_U, OTHER, "not sent")
    outcomes = answered(asking.requests.abandon(NotReadyError("stopped")))
    assert isinstance(outcomes["mine"], AppendOutcomeUnknownError)
    assert isinstance(outcomes["not sent"], NotReadyError)


def test_a_request_is_executed_once() -> None:
    served = ServedRequests[ConditionalAnswer]()
    assert served.begin(5)
    assert not served.begin(5)
    assert served.answer(5) is None
    served.end(ConditionalAnswer(5, 1, 2))
    assert not served.begin(5)
    assert served.answer(5) == ConditionalAnswer(5, 1, 2)
    for request in range(6, 6 + 4096):
        assert served.begin(request)
    assert served.answer(5) is None
    assert not served.begin(5), "its answer is forgotten, and not that it was executed"
    assert not served.begin(4), "it may have been one of these"


def home_driver() -> Driver:
    """Return the home of all tags, among two compute nodes."""
    from indilog_compute.conditional.conditional_appends import ConditionalAppends

    driver = joined()
    conditional = driver.engine._conditional
    assert isinstance(conditional, ConditionalAppends)
    placement = driver.engine.placement
    engines = (*placement.view.engines, OTHER)
    homes = (ENGINE, ENGINE)
    placement.view = msgspec.structs.replace(placement.view, engines=engines, homes=homes)
    return driver


def hear(driver: Driver, message: Message) -> list[Effect]:
    return driver.turn(Received(OTHER, message, Epoch(3)))


def test_a_home_answers_copies_of_a_request_alike() -> None:
    driver = home_driver()
    assert messages(hear(driver, HomeWanted(1))) == [HomeIs(1)]
    request = ConditionalAppend(1, Epoch(1), "orders", After("t"), ((b"x", ("t",)), (b"y", ())))
    effects = hear(driver, request)
    assert batches(checked(driver, effects)) == 1
    assert not messages(hear(driver, request))
    ((_, answer),) = sends(driver.order(2), ConditionalAnswer)
    assert answer == ConditionalAnswer(1, 1, 0)
    assert messages(hear(driver, request)) == [answer]


def moved_view(view: View, *homes: NodeId) -> NewView:
    """Return the entry of a view in which `homes` have the slots."""
    following = msgspec.structs.replace(view, number=ViewNumber(view.number + 1), homes=homes)
    return NewView(0, ViewNumber(1), Epoch(1), following)


def apply(driver: Driver, entry: NewView) -> list[Effect]:
    position = driver.position
    entry = msgspec.structs.replace(entry, position=position)
    driver.position += 1
    block = IndexBlock(position, driver.tail, (), (), Epoch(1), Epoch(min(position, 1)))
    effects = driver.hear(PRIMARY, entries_message((entry,)))
    return effects + driver.hear(A, IndexData((block,), copy_of=Epoch(1)))


def test_a_new_home_checks_nothing_before_it_has_applied_the_entry_that_makes_it_one() -> None:
    """The sender has applied it. Records of the home before are ordered below the entry."""
    driver = home_driver()
    placement = driver.engine.placement
    placement.view = msgspec.structs.replace(placement.view, homes=(OTHER, OTHER))
    request = ConditionalAppend(1, Epoch(1), "orders", After("t"), ((b"x", ("t",)),))
    assert not sends(hear(driver, request), TailWanted)
    effects = apply(driver, moved_view(placement.view, ENGINE, ENGINE))
    assert batches(checked(driver, effects)) == 1


def test_appends_of_this_node_are_executed_here_when_their_home_has_left() -> None:
    driver = home_driver()
    placement = driver.engine.placement
    placement.view = msgspec.structs.replace(placement.view, homes=(OTHER, OTHER))
    driver.engine.append_if(AT_T, "mine")
    assert messages(driver.turn()) == [HomeWanted(JOIN + 1)]
    effects = apply(driver, moved_view(placement.view, ENGINE, ENGINE))
    assert batches(checked(driver, effects)) == 1
    assert [e for e in driver.order(1) if isinstance(e, AnswerAppends)] == [
        AnswerAppends(["mine"], 0, 2)
    ]


def test_a_home_that_leaves_refuses_what_it_has_not_appended() -> None:
    driver = home_driver()
    request = ConditionalAppend(1, Epoch(1), "orders", After("t"), ((b"x", ("t",)),))
    assert batches(checked(driver, hear(driver, request))) == 1
    queued = ConditionalAppend(2, Epoch(1), "orders", After("t"), ((b"x", ("t",)),))
    hear(driver, queued)
    view = driver.engine.placement.view
    shards = {SHARD: ShardPlacement(view.shards[SHARD].replicas, NO_WRITER, Epoch(1))}
    left = msgspec.structs.replace(view, engines=(OTHER,), shards=shards)
    answers = [
        m for _, m in sends(apply(driver, moved_view(left, OTHER, OTHER)), ConditionalAnswer)
    ]
    kinds = {a.request: a.kind for a in answers if isinstance(a, ConditionalAnswer)}
    assert kinds == {1: "AppendOutcomeUnknownError", 2: "SealedError"}
    assert not messages(hear(driver, HomeWanted(3))), "the next home answers"
