"""Claims about reads while a replica does not answer (`indilog_compute.reads.silent_nodes`)."""

from __future__ import annotations

from indilog.base.ids import Instant, NodeId
from indilog.wire.messages import ReadRecords, RecordsRead
from indilog_compute.reads.silent_nodes import SilentNodes
from tests.unit.compute.engine_driver import (
    SHARD,
    A,
    B,
    Driver,
    joined,
    sends,
    stored,
)

TIMEOUT_S = 1.1
"""A little more than `lookup_timeout_s`."""


def not_hedging() -> Driver:
    driver = joined(record_cache_bytes_max=0, hedged_reads_share_max=0.0)
    driver.order(1)
    return driver


def asked(driver: Driver) -> tuple[NodeId, ReadRecords]:
    ((to, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    return to, request


def answered(driver: Driver, to: NodeId, request: ReadRecords) -> None:
    driver.hear(to, RecordsRead(request.request, SHARD, (stored(0),), ()))


def readers(driver: Driver, count: int) -> list[NodeId]:
    """Read the record so many times, one read after another; return the nodes that were asked."""
    found = []
    for _ in range(count):
        driver.read(0)
        to, request = asked(driver)
        answered(driver, to, request)
        found.append(to)
    return found


def silent(driver: Driver) -> tuple[NodeId, NodeId, ReadRecords]:
    """Let a read time out at one replica, and the other answer it; return both."""
    driver.read(0)
    first, unanswered = asked(driver)
    driver.now += TIMEOUT_S
    other, request = asked(driver)
    answered(driver, other, request)
    return first, other, unanswered


def test_a_read_without_an_answer_goes_to_the_other_replica() -> None:
    for before in range(4):
        driver = not_hedging()
        readers(driver, before)
        first, other, _ = silent(driver)
        assert {first, other} == {A, B}


def test_a_replica_that_did_not_answer_is_asked_once_after_a_pause_that_doubles() -> None:
    driver = not_hedging()
    first, other, _ = silent(driver)
    assert readers(driver, 4) == [other] * 4
    driver.now += TIMEOUT_S
    again, _, _ = silent(driver)
    driver.now += TIMEOUT_S
    assert (again, readers(driver, 4)) == (first, [other] * 4)
    driver.now += TIMEOUT_S
    assert first in readers(driver, 2)


def test_a_late_answer_ends_the_silence() -> None:
    driver = not_hedging()
    first, other, unanswered = silent(driver)
    answered(driver, first, unanswered)
    assert set(readers(driver, 2)) == {first, other}


def test_replicas_that_are_all_silent_are_asked_in_rotation() -> None:
    driver = not_hedging()
    driver.read(0)
    found = []
    for _ in range(6):
        found.append(asked(driver)[0])
        driver.now += TIMEOUT_S
    assert found == found[:2] * 3
    assert set(found) == {A, B}


def test_an_earlier_question_that_times_out_does_not_lengthen_the_pause() -> None:
    replicas = SilentNodes(1.0)
    replicas.timed_out((A,), Instant(0.0), Instant(1.0))
    replicas.timed_out((A,), Instant(0.5), Instant(1.5))
    assert replicas.pick((A, B), 0, Instant(1.9)) == (B, False)
    assert replicas.pick((A, B), 0, Instant(2.0)) == (A, True)
