"""Claims about finding times and places at one engine (`indilog_compute.reads.order_lookups`)."""

from __future__ import annotations

from indilog.base.errors import QuorumUnavailableError
from indilog.base.log import PlacedSpan
from indilog.roles.role import Effect, Ignore
from indilog.wire.order_lookup_messages import PlacesFound, PlacesLookup, TimeFound, TimeLookup
from indilog_compute.reads.operation import Answered
from tests.unit.compute.engine_driver import (
    PRIMARY,
    SHARD,
    A,
    B,
    Driver,
    answered,
    answers,
    joined,
    sends,
)


def asked(effects: list[Effect]) -> list[tuple[str, TimeLookup]]:
    return [(to, m) for to, m in sends(effects, TimeLookup) if isinstance(m, TimeLookup)]


def asking(position: int = 0) -> tuple[Driver, str, int]:
    driver = joined(resend_s=1, read_timeout_s=3)
    driver.engine.order_lookups.find_time(5_000_000, position, "asker")
    ((node, lookup),) = asked(driver.turn())
    assert lookup.time_us == 5_000_000
    return driver, node, lookup.request


def nothing(request: int, position: int) -> TimeFound:
    return TimeFound(request, 40, position, found=False)


def test_a_time_found_by_a_lagging_storage_node_is_final() -> None:
    driver, node, request = asking(position=9)
    effects = driver.hear(A if node == A else B, TimeFound(request, 17, 3, found=True))
    assert answered(effects) == {"asker": Answered(17, 3)}


def test_nothing_found_by_a_node_that_lags_the_session_is_not_final() -> None:
    driver, node, request = asking(position=9)
    first, second = (A, B) if node == A else (B, A)
    ((other, again),) = asked(driver.hear(first, nothing(request, 8)))
    assert (other, again.request) == (second, request)
    assert driver.hear(second, nothing(request, 8)) == [], "both are behind: not at once again"
    driver.now = 1.0
    assert len(asked(driver.turn())) == 1
    assert answered(driver.hear(first, nothing(request, 9))) == {"asker": Answered(40, 9)}


def test_a_lost_question_goes_to_another_node_and_fails_at_its_timeout() -> None:
    driver, node, request = asking()
    nodes = [node]
    reported: dict[object, object] = {}
    for second in range(1, 4):
        driver.now = float(second)
        effects = driver.turn()
        nodes += [to for to, _ in asked(effects)]
        reported |= answered(effects)
    assert set(nodes) == {A, B}
    assert [type(error) for error in reported.values()] == [QuorumUnavailableError]
    assert driver.hear(A, nothing(request, 0)) == [], "a late answer finds nothing"


def test_foreign_messages_are_ignored_and_a_stop_fails_the_lookup() -> None:
    driver, _, request = asking()
    assert [type(e) for e in driver.hear(PRIMARY, nothing(request, 0))] == [Ignore]
    assert len(answers(driver.engine.abandon())) == 1


def test_a_lookup_fails_after_its_timeout_although_its_next_resend_is_later() -> None:
    driver = joined(resend_s=1, resend_s_max=8, read_timeout_s=4)
    driver.engine.order_lookups.find_time(5_000_000, 0, "asker")
    driver.turn()
    for second in (1.0, 3.0):
        driver.now = second
        assert len(asked(driver.turn())) == 1
    assert driver.engine.order_lookups.deadline() == 4.0, "not at the next resend, 7.0"
    driver.now = 4.0
    assert [type(e) for e in answered(driver.turn()).values()] == [QuorumUnavailableError]


def test_places_come_from_a_storage_node_and_fit_the_question() -> None:
    driver = joined(resend_s=1)
    driver.engine.order_lookups.find_places(10, 20, 0, "asker")
    ((node, lookup),) = sends(driver.turn(), PlacesLookup)
    assert isinstance(lookup, PlacesLookup)
    assert (lookup.start, lookup.end) == (10, 20)
    first = PlacedSpan(10, 14, SHARD, 3, 7)
    following = PlacedSpan(14, 20, SHARD, 9, 8)
    for spans in (
        (),
        (following,),
        (first, following._replace(first=15)),
        (first, following._replace(end=21)),
        (first._replace(localid=-1), following),
    ):
        (ignored,) = driver.hear(node, PlacesFound(lookup.request, 9, found=True, spans=spans))
        assert isinstance(ignored, Ignore)
    assert [type(e) for e in driver.hear(node, TimeFound(lookup.request, 1, 9, found=True))] == [
        Ignore
    ]
    found = driver.hear(node, PlacesFound(lookup.request, 9, found=True, spans=(first, following)))
    assert answered(found) == {"asker": Answered((first, following), 9)}


def test_no_places_from_a_node_that_lags_the_session_is_not_final() -> None:
    driver = joined(resend_s=1)
    driver.engine.order_lookups.find_places(10, 20, 5, "asker")
    ((node, lookup),) = sends(driver.turn(), PlacesLookup)
    assert isinstance(lookup, PlacesLookup)
    ((other, _),) = sends(
        driver.hear(node, PlacesFound(lookup.request, 4, found=False)), PlacesLookup
    )
    assert other != node
    assert answered(driver.hear(other, PlacesFound(lookup.request, 5, found=False))) == {
        "asker": Answered((), 5)
    }
