"""The clock that a process runs by."""

from __future__ import annotations

from indilog.runtime.node import Clock


class Machine:
    """A wall clock that people set, and a monotonic clock that never jumps."""

    def __init__(self) -> None:
        self.wall_s = 1_000_000.0
        self.passed_s = 50.0

    def clock(self) -> Clock:
        return Clock(lambda: self.wall_s, lambda: self.passed_s)


def test_a_clock_starts_at_the_wall_clock_and_ignores_its_later_jumps() -> None:
    machine = Machine()
    clock = machine.clock()
    assert clock.now() == 1_000_000.0
    for jump_s in (366 * 86_400.0, -2 * 366 * 86_400.0):
        machine.wall_s += jump_s
        machine.passed_s += 2.5
    assert clock.now() == 1_000_005.0


def test_a_new_clock_starts_at_the_current_wall_clock() -> None:
    machine = Machine()
    machine.clock()
    machine.wall_s += 3600.0
    assert machine.clock().now() == 1_003_600.0
