"""Claims about the nodes that a lookup asks."""

from __future__ import annotations

from indilog.base.ids import Instant, NodeId
from indilog.kernel.placement import Placement
from indilog.kernel.view import view_of
from indilog_compute.reads.lookup_routes import LookupRoute, LookupRoutes

T0 = Instant(1000.0)
VIEW = view_of(index_shards=2, index_replicas=2, aggregators=3)
ALONE = view_of(index_shards=2, index_replicas=1, aggregators=1)
DEAD = NodeId("index-0-0")


def routes(aggregation: str = "aggregator") -> LookupRoutes:
    return LookupRoutes(Placement(VIEW), aggregation, pause_s=1.0)  # type: ignore[arg-type]


def chosen(kept: LookupRoutes, requests: range, now: Instant = T0) -> list[LookupRoute]:
    return [kept.choose(request, now) for request in requests]


def test_replicas_and_aggregators_are_chosen_round_robin() -> None:
    found = chosen(routes(), range(6))
    assert [r.replicas for r in found] == [
        ("index-0-0", "index-1-0"),
        ("index-0-1", "index-1-1"),
    ] * 3
    assert [r.aggregator for r in found] == ["aggregator-0", "aggregator-1", "aggregator-2"] * 2


def test_masters_are_the_index_nodes_asked_round_robin() -> None:
    """Thesis 5.2: "Selecting the master is done by the compute node on a per-request basis and in
    round-robin fashion".
    """
    found = chosen(routes("master-slave"), range(4))
    assert all(r.aggregator in r.replicas for r in found)
    assert [r.aggregator for r in found[:2]] == ["index-0-0", "index-1-1"]


def test_both_kinds_of_aggregation_alternate_and_use_all_nodes() -> None:
    found = chosen(routes("both"), range(12))
    assert {r.aggregator for r in found[::2]} == set(VIEW.aggregators)
    assert {r.aggregator for r in found[1::2]} <= set(VIEW.index_nodes)
    assert len({r.aggregator for r in found[1::2]}) == 2


def test_the_retry_of_a_lookup_asks_none_of_the_nodes_that_did_not_answer() -> None:
    kept = routes()
    first = kept.choose(0, T0)
    kept.timed_out(first, Instant(T0 + 1))
    second = kept.choose(2, Instant(T0 + 1))
    assert not set(second.replicas) & set(first.replicas)
    assert second.aggregator != first.aggregator


def test_a_lookup_tries_one_silent_node_and_an_answer_ends_its_silence() -> None:
    kept = routes()
    kept.timed_out(kept.choose(0, T0), Instant(T0 + 1))
    assert kept.silent == 3
    trial = kept.choose(6, Instant(T0 + 2))
    assert trial.replicas == ("index-0-0", "index-1-1")
    kept.answered(trial)
    assert kept.silent == 2


def test_a_silent_node_is_tried_with_growing_pauses_and_only_it_stays_silent() -> None:
    kept = routes()
    kept.timed_out(kept.choose(0, T0), Instant(T0 + 1))
    trial = kept.choose(6, Instant(T0 + 2))
    kept.timed_out(trial, Instant(T0 + 3))
    assert kept.silent == 3, "the nodes asked beside the silent one are not blamed"
    assert kept.choose(6, Instant(T0 + 4.5)).replicas == ("index-0-1", "index-1-0")
    assert DEAD in kept.choose(6, Instant(T0 + 5)).replicas


def test_lookups_in_flight_when_a_node_crashed_log_it_once() -> None:
    kept = routes()
    under_way = [kept.choose(request, T0) for request in range(0, 600, 6)]
    for route in under_way:
        kept.timed_out(route, Instant(T0 + 1))
    assert DEAD in kept.choose(0, Instant(T0 + 2)).replicas


def test_without_another_choice_a_silent_node_is_asked() -> None:
    kept = LookupRoutes(Placement(ALONE), "aggregator", pause_s=1.0)
    route = kept.choose(0, T0)
    kept.timed_out(route, T0)
    assert kept.choose(1, T0)[1:3] == route[1:3]
