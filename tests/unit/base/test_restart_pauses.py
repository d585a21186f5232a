"""The pauses before restarts."""

from __future__ import annotations

from indilog.base.restart_pauses import RestartPauses


def test_pauses_double_up_to_the_longest() -> None:
    pauses = RestartPauses(0.5, 3.0)
    assert [pauses.after(0.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_stable_run_the_pauses_begin_with_the_shortest_again() -> None:
    pauses = RestartPauses(1.0, 4.0)
    assert [pauses.after(lived_s) for lived_s in (0.0, 4.0, 4.1, 0.0)] == [1.0, 2.0, 1.0, 2.0]


def test_how_long_a_stable_run_lasts_may_differ_from_the_longest_pause() -> None:
    pauses = RestartPauses(1.0, 4.0, stable_s=60.0)
    assert [pauses.after(lived_s) for lived_s in (0.0, 59.0, 61.0)] == [1.0, 2.0, 1.0]
