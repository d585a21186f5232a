"""Who runs which call: the least loaded, first come first served, and never a deadlock."""

from __future__ import annotations

import pytest

from compute.workers.dispatch import Dispatcher
from indilog.errors import NotReadyError, OverloadedError


def dispatcher(workers: int = 2, slots: int = 2, calls: int = 6) -> Dispatcher[str, str]:
    made: Dispatcher[str, str] = Dispatcher(worker_calls_max=slots, calls_max=calls)
    for index in range(workers):
        made.add(f"w{index}")
    return made


def test_calls_go_to_the_least_loaded_worker() -> None:
    made = dispatcher()
    assert [made.admit(c, nested=False) for c in "abcd"] == ["w0", "w1", "w0", "w1"]


def test_a_call_waits_when_every_slot_is_taken_and_starts_when_one_is_free() -> None:
    made = dispatcher()
    for call in "abcd":
        made.admit(call, nested=False)
    assert made.admit("e", nested=False) is None
    assert made.admit("f", nested=False) is None
    assert made.finished("w1") == "e"
    assert made.finished("w0") == "f"
    assert made.finished("w0") is None
    made.check_invariants()


def test_a_call_of_a_running_call_never_waits() -> None:
    made = dispatcher(workers=1, slots=1)
    made.admit("parent", nested=False)
    assert made.admit("child", nested=True) == "w0"
    assert made.admit("grandchild", nested=True) == "w0"


def test_a_slot_that_a_nested_call_took_over_the_limit_goes_to_nobody() -> None:
    made = dispatcher(workers=1, slots=1)
    made.admit("parent", nested=False)
    made.admit("child", nested=True)
    assert made.admit("other", nested=False) is None
    assert made.finished("w0") is None
    assert made.finished("w0") == "other"


def test_calls_beyond_the_bound_are_refused() -> None:
    made = dispatcher(calls=6)
    for call in "abcdef":
        made.admit(call, nested=False)
    with pytest.raises(OverloadedError, match="try again later"):
        made.admit("g", nested=False)
    assert (made.running, made.waiting) == (4, 2)


def test_nested_calls_have_a_bound_of_their_own() -> None:
    made = dispatcher(calls=2)
    made.admit("a", nested=False)
    made.admit("b", nested=False)
    made.admit("c", nested=True)
    made.admit("d", nested=True)
    with pytest.raises(OverloadedError):
        made.admit("e", nested=True)


def test_calls_wait_for_a_worker_and_nested_ones_are_refused_without_one() -> None:
    made = dispatcher(workers=0)
    assert made.admit("a", nested=False) is None
    with pytest.raises(NotReadyError):
        made.admit("b", nested=True)
    assert made.add("w0") == ["a"]


def test_a_worker_that_is_gone_frees_its_calls_and_takes_no_more() -> None:
    made = dispatcher(slots=1)
    for call in "abc":
        made.admit(call, nested=False)
    made.remove("w0")
    assert made.finished("w0") is None
    assert made.running == 1
    assert made.add("w2") == ["c"]
    made.check_invariants()


def test_a_waiting_call_can_be_withdrawn_once() -> None:
    made = dispatcher(workers=0)
    made.admit("a", nested=False)
    assert made.withdraw("a")
    assert not made.withdraw("a")
    assert made.add("w0") == []
