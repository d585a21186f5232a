"""Compute nodes tell each other that logs have grown (`indilog_compute.log_growth`)."""

from __future__ import annotations

import pytest

from indilog.base.errors import NotReadyError, OverloadedError
from indilog.base.ids import Instant, NodeId
from indilog.config import node_config
from indilog.roles.role import Answer, Send
from indilog.wire.growth_messages import GrowthWanted, LogGrew
from indilog_compute.log_growth import LogGrowth

ONE, TWO = NodeId("engine-1"), NodeId("engine-2")
START = Instant(0.0)


def made(**settings: float) -> LogGrowth:
    growth = LogGrowth(node_config(**settings))
    growth.number_from(100)
    return growth


def test_the_first_answer_ends_a_wait() -> None:
    growth = made()
    growth.wait([ONE, TWO], "f", 7, "reader")
    wanted = GrowthWanted(101, "f", 7)
    assert growth.advance(START) == [Send(ONE, wanted), Send(TWO, wanted)]
    assert growth.on_message(TWO, LogGrew(101), START) == [Answer("reader", True)]
    assert growth.on_message(ONE, LogGrew(101), START) == []
    assert (growth.deadline(), len(growth)) == (None, 0)
    growth.check_invariants()


def test_a_wait_that_was_sent_needs_no_work_until_it_ends() -> None:
    growth = made()
    growth.wait([ONE], "f", 7, "reader")
    assert len(growth) == 1
    growth.advance(START)
    assert (len(growth), growth.deadline()) == (0, 1.0)
    growth.check_invariants()


def test_a_wait_without_an_answer_ends_after_a_second() -> None:
    growth = made()
    growth.wait([ONE], "f", 7, "reader")
    growth.advance(START)
    assert growth.deadline() == 1.0
    assert growth.advance(Instant(0.9)) == []
    assert growth.advance(Instant(1.0)) == [Answer("reader", False)]
    assert growth.on_message(ONE, LogGrew(101), Instant(1.1)) == []


def test_a_node_is_answered_once_when_the_log_has_grown() -> None:
    growth = made()
    assert growth.on_message(ONE, GrowthWanted(5, "f", 7), START) == []
    assert growth.on_message(TWO, GrowthWanted(6, "f", 8), START) == []
    assert not growth.grew("f", 7)
    assert not growth.grew("g", 9)
    assert growth.grew("f", 8)
    assert growth.advance(START) == [Send(ONE, LogGrew(5))]
    assert not growth.grew("f", 8)
    assert growth.grew("f", 9)
    assert growth.advance(START) == [Send(TWO, LogGrew(6))]
    growth.check_invariants()


def test_a_node_is_answered_at_once_if_the_log_has_grown_before() -> None:
    growth = made()
    growth.position_of = {"f": 8}.get
    assert growth.on_message(ONE, GrowthWanted(5, "f", 7), START) == [Send(ONE, LogGrew(5))]
    assert growth.on_message(ONE, GrowthWanted(6, "f", 8), START) == []


def test_the_newest_request_of_a_node_replaces_the_one_before() -> None:
    growth = made(lookups_pending_max=1)
    growth.on_message(ONE, GrowthWanted(5, "f", 7), START)
    growth.on_message(ONE, GrowthWanted(6, "f", 9), START)
    assert not growth.grew("f", 9)
    assert growth.grew("f", 10)
    assert growth.advance(START) == [Send(ONE, LogGrew(6))]


def test_requests_are_bounded_and_forgotten_after_two_seconds() -> None:
    growth = made(lookups_pending_max=1)
    growth.on_message(ONE, GrowthWanted(5, "f", 7), START)
    growth.on_message(TWO, GrowthWanted(6, "f", 7), Instant(1.9))
    growth.check_invariants()
    assert growth.grew("f", 8)
    assert growth.advance(START) == [Send(ONE, LogGrew(5))]
    growth.on_message(ONE, GrowthWanted(7, "f", 8), Instant(2.0))
    growth.on_message(TWO, GrowthWanted(8, "g", 8), Instant(4.0))
    growth.check_invariants()
    assert not growth.grew("f", 9)
    assert growth.grew("g", 9)


def test_waits_are_bounded_and_fail_when_the_node_stops() -> None:
    growth = made(lookups_pending_max=1)
    growth.wait([ONE], "f", 7, "reader")
    with pytest.raises(OverloadedError, match="1 readers wait"):
        growth.wait([ONE], "g", 7, "other")
    error = NotReadyError("stopped")
    assert growth.abandon(error) == [Answer("reader", error)]
    assert growth.abandon(error) == []
