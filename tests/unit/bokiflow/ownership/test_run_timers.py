"""Each run has one time at which it is executed again, the earliest one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bokiflow.ownership.run_timers import RunTimers

RUNS = st.sampled_from("abc")
TIMES = st.integers(0, 9).map(float)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), RUNS, TIMES),
            st.tuples(st.just("drop"), RUNS, TIMES),
            st.tuples(st.just("pop"), RUNS, TIMES),
            st.tuples(st.just("keep"), RUNS, TIMES),
        ),
        max_size=300,
    )
)
def test_timers_agree_with_a_dictionary(steps: list[tuple[str, str, float]]) -> None:
    timers, model = RunTimers(), dict[str, float]()
    for what, run, at in steps:
        match what:
            case "set":
                timers.set(run, at)
                model[run] = min(at, model.get(run, at))
            case "drop":
                timers.drop(run)
                model.pop(run, None)
            case "keep":
                timers.drop_unless(run.__eq__)
                model = {one: at for one, at in model.items() if one == run}
            case _:
                popped = timers.pop_due(at)
                earliest = min(model.values(), default=10.0)
                assert (popped is not None) == (earliest <= at)
                if popped is not None:
                    assert model.pop(popped) == earliest
        assert timers.next_at() == min(model.values(), default=None)
        assert len(timers) == len(model)


def test_stale_entries_do_not_accumulate() -> None:
    timers = RunTimers()
    for number in range(10_000):
        timers.set("r", 1e9 - number)
    assert len(timers._heap) < 100
