"""Who runs which call: the least loaded, by turns of the applications, and never a deadlock."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from indilog.base.errors import NotReadyError, OverloadedError
from indilog_compute.workers.dispatch import Dispatcher, Shares


class Call(NamedTuple):
    """A call, as the dispatcher sees it."""

    name: str
    application: str = "a"
    is_nested: bool = False


def calls(names: str, application: str = "a") -> list[Call]:
    return [Call(name, application) for name in names]


def nested(name: str, application: str = "a") -> Call:
    return Call(name, application, is_nested=True)


def dispatcher(
    workers: int = 2, slots: int = 2, pending: int = 6, *, is_shared: bool = False
) -> Dispatcher[str, Call]:
    made: Dispatcher[str, Call] = Dispatcher(
        worker_calls_max=slots,
        calls_max=pending,
        shares=Shares(slots=0.75, pending=0.5),
        is_shared=is_shared,
    )
    for index in range(workers):
        made.add(f"w{index}")
    return made


def test_calls_go_to_the_least_loaded_worker() -> None:
    made = dispatcher()
    assert [made.admit(c) for c in calls("1234")] == ["w0", "w1", "w0", "w1"]


def test_a_call_waits_when_every_slot_is_taken_and_starts_when_one_is_free() -> None:
    made = dispatcher()
    one, two, three, four, five, six = calls("123456")
    for call in (one, two, three, four):
        made.admit(call)
    assert made.admit(five) is None
    assert made.admit(six) is None
    assert made.finished("w1", two) == [(five, "w1")]
    assert made.finished("w0", one) == [(six, "w0")]
    assert made.finished("w0", three) == []
    made.check_invariants()


def test_a_call_of_a_running_call_never_waits() -> None:
    made = dispatcher(workers=1, slots=1)
    made.admit(Call("parent"))
    assert made.admit(nested("child")) == "w0"
    assert made.admit(nested("grandchild")) == "w0"


def test_nested_calls_take_no_slots() -> None:
    made = dispatcher(workers=1, slots=1)
    made.admit(Call("parent"))
    made.admit(nested("child"))
    assert made.admit(Call("other")) is None
    assert made.finished("w0", nested("child")) == []
    assert made.finished("w0", Call("parent")) == [(Call("other"), "w0")]
    made.admit(nested("child"))
    assert made.finished("w0", Call("other")) == []
    assert made.admit(Call("beside a nested one")) == "w0"
    made.check_invariants()


def test_calls_beyond_the_bound_are_refused() -> None:
    made = dispatcher(pending=6)
    for call in calls("123456"):
        made.admit(call)
    with pytest.raises(OverloadedError, match="6 calls run or wait on this node") as refused:
        made.admit(Call("7"))
    assert "calls_pending_max" in str(refused.value)
    assert (made.running, made.waiting) == (4, 2)


def test_nested_calls_have_a_bound_of_their_own() -> None:
    made = dispatcher(pending=2)
    made.admit(Call("1"))
    made.admit(Call("2"))
    made.admit(nested("3"))
    made.admit(nested("4"))
    with pytest.raises(OverloadedError):
        made.admit(nested("5"))


def test_calls_wait_for_a_worker_and_nested_ones_are_refused_without_one() -> None:
    made = dispatcher(workers=0)
    assert made.admit(Call("1")) is None
    with pytest.raises(NotReadyError):
        made.admit(nested("2"))
    assert made.add("w0") == [(Call("1"), "w0")]


def test_a_worker_that_is_gone_frees_its_calls_and_takes_no_more() -> None:
    made = dispatcher(slots=1)
    one, two, three = calls("123")
    for call in (one, two, three):
        made.admit(call)
    made.remove("w0")
    assert made.finished("w0", one) == []
    assert made.running == 1
    assert made.add("w2") == [(three, "w2")]
    made.check_invariants()


def test_a_waiting_call_can_be_withdrawn_once() -> None:
    made = dispatcher(workers=0)
    made.admit(Call("1"))
    assert made.withdraw(Call("1"))
    assert not made.withdraw(Call("1"))
    assert made.add("w0") == []


# --- several applications


def test_an_application_alone_uses_all_slots() -> None:
    made = dispatcher(is_shared=False)
    assert None not in [made.admit(c) for c in calls("1234")]


def test_an_application_leaves_slots_to_those_that_run_nothing() -> None:
    made = dispatcher(workers=2, slots=2, pending=8, is_shared=True)
    assert [made.admit(c) for c in calls("1234")] == ["w0", "w1", "w0", None]
    assert made.admit(Call("b", "other")) == "w1"
    made.check_invariants()


def test_an_application_that_runs_nothing_gets_the_last_slot() -> None:
    made = dispatcher(workers=1, slots=1, is_shared=True)
    assert made.admit(Call("1")) == "w0"
    assert made.finished("w0", Call("1")) == []
    assert made.admit(Call("b", "other")) == "w0"


def test_waiting_applications_are_served_round_robin() -> None:
    made = dispatcher(workers=1, slots=1, pending=100, is_shared=True)
    running = Call("first")
    made.admit(running)
    for call in (*calls("1234"), *calls("12", "b"), *calls("1", "c")):
        assert made.admit(call) is None
    order = []
    while following := made.finished("w0", running):
        [(running, _)] = following
        order.append(running.application + running.name)
        made.check_invariants()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_call_that_was_not_begun_is_the_next_of_its_application() -> None:
    made = dispatcher(workers=0, is_shared=True)
    for call in (Call("b", "other"), *calls("12")):
        made.admit(call)
    assert made.put_back([Call("again")]) == []
    assert [call.name for call, _ in made.add("w0")] == ["b", "again"]
    made.check_invariants()


def test_an_application_may_have_pending_a_share_of_what_others_leave() -> None:
    made = dispatcher(workers=0, pending=8, is_shared=True)
    for call in calls("1234"):
        made.admit(call)
    with pytest.raises(OverloadedError, match="4 calls of app a run or wait") as refused:
        made.admit(Call("5"))
    assert "app_pending_share_max" in str(refused.value)
    for call in calls("12", "b"):
        made.admit(call)
    with pytest.raises(OverloadedError, match="2 calls of app b"):
        made.admit(Call("3", "b"))
    assert made.admit(Call("1", "c")) is None


def test_nested_calls_of_one_application_leave_room_for_those_of_others() -> None:
    made = dispatcher(pending=4, is_shared=True)
    for name in "12":
        made.admit(nested(name))
    with pytest.raises(OverloadedError, match="2 calls of app a"):
        made.admit(nested("3"))
    assert made.admit(nested("1", "b")) is not None
    assert made.admit(Call("1")) is not None, "nor do they count as others"


# --- what frees room starts what waits


def test_a_worker_that_is_gone_leaves_room_in_the_share_of_its_application() -> None:
    """Otherwise a call waits beside an idle worker, and nothing looks at it until another ends."""
    made = dispatcher(workers=2, slots=1, is_shared=True)
    one, two = calls("12")
    assert made.admit(one) == "w0"
    assert made.admit(two) is None, "the last slot is for another application"
    assert made.remove("w0") == [(two, "w1")]
    made.check_invariants()


def test_the_last_other_application_that_is_undeployed_leaves_its_share() -> None:
    made = dispatcher(workers=1, slots=2, is_shared=True)
    assert [made.admit(call) for call in calls("12")] == ["w0", None]
    assert made.set_shared(is_shared=False) == [(Call("2"), "w0")]
    made.check_invariants()


def test_calls_that_leave_a_suspended_worker_are_not_overtaken() -> None:
    """The application is at its share; its moved calls start before its waiting ones."""
    made = dispatcher(workers=2, slots=2, pending=100, is_shared=True)
    one, two, three, four = calls("1234")
    assert [made.admit(call) for call in (one, two, three)] == ["w0", "w1", "w0"]
    assert made.admit(four) is None
    made.suspend("w0")
    assert made.put_back([one, three], "w0") == [(one, "w1")]
    assert made.finished("w1", one) == [(three, "w1")]
    assert made.finished("w1", two) == [(four, "w1")]
    made.check_invariants()


def test_nested_calls_are_put_back_at_once_or_not_at_all() -> None:
    made = dispatcher(workers=1, slots=1)
    made.admit(Call("parent"))
    made.admit(nested("child"))
    made.add("w1")
    made.suspend("w0")
    assert made.put_back([Call("parent"), nested("child")], "w0") == [
        (nested("child"), "w1"),
        (Call("parent"), "w1"),
    ]
    made.remove("w0")
    made.remove("w1")
    with pytest.raises(NotReadyError):
        made.put_back([Call("parent"), nested("child")])
    made.check_invariants()
    assert made.waiting == 0


def test_free_slots_are_those_that_a_call_would_get_at_once() -> None:
    made = dispatcher(workers=2, slots=2)
    assert (made.free_slots("a"), made.load) == (4, (0, 4))
    first = calls("123")
    for call in first:
        made.admit(call)
    made.admit(nested("n"))
    assert (made.free_slots("a"), made.load) == (1, (3, 4))
    made.suspend("w1")
    assert (made.free_slots("a"), made.load) == (0, (3, 2))
    made.resume("w1")
    for call in calls("45"):
        made.admit(call)
    assert (made.free_slots("a"), made.load) == (0, (5, 4))
    made.finished("w0", first[0])
    made.finished("w0", first[2])
    assert made.free_slots("a") == 1


def test_free_slots_of_an_application_are_limited_by_its_share() -> None:
    made = dispatcher(workers=2, slots=4, pending=100, is_shared=True)
    for call in calls("12"):
        made.admit(call)
    assert (made.free_slots("a"), made.free_slots("b")) == (4, 4), "0.75 of 8, and 0.75 of 6"
    for call in calls("34567"):
        made.admit(call)
    assert (made.free_slots("a"), made.free_slots("b")) == (0, 1), "0.75 of 2"
    assert made.load == (7, 8)
