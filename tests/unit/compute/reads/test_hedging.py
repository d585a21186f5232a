"""Claims about hedged reads (`indilog_compute.reads.hedging`, and what an engine does with it)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import ConfigError
from indilog.base.ids import Instant, NodeId
from indilog.config import node_config
from indilog.roles.role import Effect
from indilog.wire.messages import Direction, ReadRecords, RecordsRead
from indilog_compute.reads.hedging import Hedges
from indilog_compute.reads.operation import Answered
from tests.unit.compute.engine_driver import (
    SHARD,
    TAG,
    A,
    B,
    Driver,
    answers,
    joined,
    sends,
    stored,
)


def hedges(share_max: float = 1.0) -> Hedges:
    return Hedges(share_max=share_max, delay_s_min=0.001, delay_s_max=1.0)


def after(seconds: float) -> Instant:
    return Instant(seconds)


def test_the_delay_follows_the_99th_percentile_of_recent_reads() -> None:
    hedging = hedges()
    for n in range(99):
        hedging.note_duration(0.002 + n * 1e-6)
    assert hedging.delay_s == 1.0, "too few to say"
    for _ in range(3):
        for n in range(200):
            hedging.note_duration(0.010 if n % 50 == 0 else 0.003)
    assert hedging.delay_s == 0.010, "two in a hundred take so long"
    for _ in range(600):
        hedging.note_duration(0.004)
    assert hedging.delay_s == 0.004
    for _ in range(600):
        hedging.note_duration(0.0)
    assert hedging.delay_s == 0.001, "never at once"


def test_the_delay_is_estimated_once_in_32_reads() -> None:
    """An estimate sorts the last 512 reads, which would be much for each of them."""
    hedging = hedges()
    for _ in range(100):
        hedging.note_duration(0.004)
    for _ in range(31):
        hedging.note_duration(0.5)
    assert hedging.delay_s == 0.004
    hedging.note_duration(0.5)
    assert hedging.delay_s == 0.5


def test_an_attempt_is_hedged_once_when_it_takes_longer_than_the_delay() -> None:
    hedging = hedges()
    hedging.note_sent(1, after(0.0))
    hedging.note_sent(2, after(0.5))
    assert hedging.deadline({1, 2}) == after(1.0)
    assert hedging.due(after(0.9), {1, 2}) == []
    assert hedging.due(after(1.0), {1, 2}) == [1]
    assert hedging.deadline({1, 2}) == after(1.5)
    assert hedging.due(after(9.0), {1, 2}) == [2]
    assert hedging.deadline({1, 2}) is None


def test_an_answered_attempt_is_neither_hedged_nor_waited_for() -> None:
    hedging = hedges()
    for request in range(5):
        hedging.note_sent(request, after(0.0))
    assert hedging.deadline({4}) == after(1.0)
    assert hedging.due(after(2.0), {4}) == [4]
    hedging.note_sent(5, after(2.0))
    assert hedging.deadline(set()) is None


@given(
    st.sampled_from([0.0, 0.01, 0.05, 0.3, 1.0]),
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 3)), max_size=60),
)
def test_at_most_the_configured_share_of_slow_attempts_is_hedged(
    share: float, rounds: list[tuple[int, float]]
) -> None:
    hedging = hedges(share)
    now, sent, hedged = 0.0, 0, 0
    for count, pause in rounds:
        for _ in range(count):
            sent += 1
            hedging.note_sent(sent, after(now))
        now += pause
        hedged += len(hedging.due(after(now), range(sent + 1)))
        assert hedged <= share * sent + 1e-6
        assert hedging.hedged == hedged


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="share"):
        node_config(hedged_reads_share_max=1.5)


# --- at an engine


def hedge(driver: Driver) -> list[tuple[NodeId, object]]:
    deadline = driver.engine.deadline()
    assert deadline is not None
    driver.now = deadline
    return [(to, message) for to, message in sends(driver.turn(), ReadRecords)]


def read(request: ReadRecords) -> RecordsRead:
    return RecordsRead(request.request, SHARD, (stored(0),), ())


def unknown(request: ReadRecords) -> RecordsRead:
    return RecordsRead(request.request, SHARD, (), (0,))


def learned(driver: Driver) -> None:
    """Let reads take a millisecond, often enough to be usual."""
    driver.order(200)
    for n in range(200):
        driver.engine.read(Direction.NEXT, TAG, n + 1, 0, n)
    asked = sends(driver.turn(), ReadRecords)
    driver.now += 0.001
    for replica, request in asked:
        assert isinstance(request, ReadRecords)
        record = stored(request.seqnums[0])
        driver.hear(replica, RecordsRead(request.request, SHARD, (record,), ()))


def slow(driver: Driver) -> tuple[NodeId, ReadRecords]:
    learned(driver)
    driver.read(0)
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    return replica, request


def hedging() -> tuple[Driver, NodeId, ReadRecords, NodeId]:
    driver = joined(record_cache_bytes_max=0, hedged_reads_share_max=1.0)
    driver.order(1)
    replica, request = slow(driver)
    ((other, again),) = hedge(driver)
    assert again == request, "the same read, so that either answer ends it"
    return driver, replica, request, other


def test_a_slow_read_is_sent_to_the_other_replica_and_either_answer_ends_it() -> None:
    for late in (False, True):
        driver, replica, request, other = hedging()
        assert {replica, other} == {A, B}
        first, second = (replica, other) if late else (other, replica)
        (answer,) = answers(driver.hear(first, read(request)))
        assert isinstance(answer, Answered)
        assert driver.hear(second, read(request)) == [], "the later one is harmless"


def test_unknown_from_one_replica_waits_for_the_other_that_was_asked() -> None:
    driver, replica, request, other = hedging()
    assert driver.hear(replica, unknown(request)) == []
    (answer,) = answers(driver.hear(other, read(request)))
    assert isinstance(answer, Answered)


def test_a_read_is_lost_only_when_both_replicas_say_unknown() -> None:
    driver, replica, request, other = hedging()
    driver.hear(replica, unknown(request))
    (lost,) = answers(driver.hear(other, unknown(request)))
    assert type(lost).__name__ == "DataLossError"


def test_a_read_is_hedged_once_and_then_repeated_when_no_replica_answers() -> None:
    driver, _, request, _ = hedging()
    effects: list[Effect] = []
    while not effects:
        deadline = driver.engine.deadline()
        assert deadline is not None
        driver.now = max(deadline, driver.now)
        effects = driver.turn()
    ((_, again),) = sends(effects, ReadRecords)
    assert isinstance(again, ReadRecords)
    assert again.request > request.request


def test_without_a_share_no_read_is_hedged() -> None:
    driver = joined(record_cache_bytes_max=0, hedged_reads_share_max=0.0)
    driver.order(1)
    _, request = slow(driver)
    ((_, again),) = hedge(driver)
    assert isinstance(again, ReadRecords)
    assert again.request != request.request, "started again, after the timeout"
    assert driver.engine.status()["progress"]["reads_hedged"] == 0
