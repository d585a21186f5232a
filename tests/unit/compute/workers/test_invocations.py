"""Results of asynchronous invocations: bounded, the least recently asked for forgotten first."""

from __future__ import annotations

from compute.workers.invocations import Invocation, Invocations, State
from indilog.calls import Failed, Returned


def ended(kept: Invocations, id: str) -> Invocation:  # noqa: A002
    invocation = Invocation(id, "app.f")
    kept.add(invocation)
    kept.ended(invocation, Returned(0, b"1"))
    return invocation


def test_an_invocation_is_found_while_it_runs_and_when_it_is_over() -> None:
    kept = Invocations(10)
    invocation = Invocation("a", "app.f")
    kept.add(invocation)
    assert kept.get("a") is invocation
    assert not invocation.is_over
    kept.ended(invocation, Failed("ValueError", "No.", {}))
    assert kept.get("a") is invocation
    assert invocation.state is State.FAILED
    assert kept.get("b") is None


def test_only_the_last_results_are_kept() -> None:
    kept = Invocations(2)
    for id_ in "abc":
        ended(kept, id_)
    assert [kept.get(id_) is not None for id_ in "abc"] == [False, True, True]
    assert len(kept) == 2


def test_asking_for_a_result_keeps_it_longer() -> None:
    kept = Invocations(2)
    ended(kept, "a")
    ended(kept, "b")
    kept.get("a")
    ended(kept, "c")
    assert [kept.get(id_) is not None for id_ in "abc"] == [True, False, True]


def test_what_runs_is_never_forgotten() -> None:
    kept = Invocations(1)
    kept.add(Invocation("runs", "app.f"))
    for id_ in "abc":
        ended(kept, id_)
    assert kept.get("runs") is not None
    assert kept.open == 1


def test_those_who_wait_are_told_once() -> None:
    kept = Invocations(1)
    invocation = Invocation("a", "app.f")
    kept.add(invocation)
    told: list[int] = []
    invocation.waiting.append(lambda: told.append(1))
    kept.ended(invocation, Returned(0, b"1"))
    assert told == [1]
    assert invocation.waiting == []
