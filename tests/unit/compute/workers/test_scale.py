"""How many workers the load needs: more while calls wait, fewer after half of them sufficed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from indilog_compute.workers.scale import ADD_S, Demand, WorkerScale

STEP_S = 0.1


class Load:
    """A compute node with a clock; workers start at once unless a test says how many start."""

    def __init__(self, least: int = 1, most: int = 4, slots: int = 2, idle_s: float = 30.0) -> None:
        self.scale = WorkerScale(workers_min=least, workers_max=most, slots=slots, idle_s=idle_s)
        self.slots = slots
        self.workers = least
        self.now = 100.0

    def step(self, calls: int, *, starting: int = 0) -> int:
        """Observe so many calls in flight; return the number of workers afterwards."""
        taking = self.workers - starting
        waiting = max(0, calls - taking * self.slots)
        self.workers = self.scale.wanted(Demand(calls, waiting, self.workers, starting), self.now)
        self.now += STEP_S
        return self.workers

    def run(self, calls: int, s: float) -> int:
        """Observe so many calls in flight for some seconds."""
        for _ in range(round(s / STEP_S)):
            self.step(calls)
        return self.workers


def test_calls_that_wait_add_as_many_workers_as_they_need() -> None:
    load = Load()
    assert load.step(6) == 1, "a call may wait for a moment"
    assert load.run(6, ADD_S + STEP_S) == 3


def test_calls_that_wait_only_for_a_moment_add_no_worker() -> None:
    load = Load()
    for _ in range(100):
        load.step(6)
        load.step(2)
    assert load.workers == 1


def test_workers_that_start_are_not_added_twice() -> None:
    load = Load()
    load.run(4, ADD_S + 2 * STEP_S)
    assert load.workers == 2
    assert load.step(4, starting=1) == 2
    assert load.step(6, starting=1) == 3


def test_there_are_never_more_workers_than_the_most() -> None:
    load = Load(most=3)
    assert load.run(1000, 5) == 3


def test_a_worker_is_removed_when_half_of_the_others_sufficed_for_the_idle_time() -> None:
    load = Load(idle_s=30)
    load.run(8, 20)
    assert load.workers == 4
    assert load.run(3, 20) == 4
    assert load.run(3, 30) == 3, "an average of 3 is half of the slots of 3 workers"
    assert load.run(3, 300) == 3, "but more than half of the slots of 2 workers"
    assert load.run(0, 25) == 3
    assert load.run(0, 10) == 2
    assert load.run(0, 40) == 1
    assert load.run(0, 300) == 1


def test_a_burst_during_the_idle_time_keeps_the_workers() -> None:
    load = Load(idle_s=30)
    load.run(8, 5)
    for _ in range(20):
        load.run(0, 25)
        load.run(8, 2)
        assert load.workers == 4


def test_at_a_constant_load_the_number_of_workers_becomes_constant() -> None:
    for calls in range(9):
        load = Load(idle_s=1)
        load.run(calls, 60)
        settled = load.workers
        assert load.run(calls, 60) == settled
        load.run(8, 5)
        load.run(calls, 60)
        assert load.run(calls, 60) == load.run(calls, 60)


def test_the_average_is_the_rate_of_calls_times_their_duration() -> None:
    load = Load()
    for step in range(600):  # 5 calls a second of 0.1 s each
        load.step(1 if step % 2 else 0)
    assert 0.45 < load.scale.average < 0.55


def test_no_worker_is_removed_while_one_starts_or_calls_wait() -> None:
    load = Load(idle_s=0)
    load.run(8, 5)
    for _ in range(100):
        load.step(0, starting=1)
    assert load.workers == 4


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=200),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_the_limits_hold_and_workers_are_removed_one_by_one(
    observed: list[tuple[int, int]], least: int, more: int, slots: int
) -> None:
    load = Load(least, least + more, slots, idle_s=0.3)
    for calls, starting in observed:
        before = load.workers
        after = load.step(calls, starting=min(starting, before))
        assert least <= after <= least + more
        assert after >= before - 1
        if calls > before * slots:
            assert after >= before, "calls wait"
