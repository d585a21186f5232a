"""A process relies on the first 0.8 of its lease, also if clocks jump or stop."""

from __future__ import annotations

import pytest

from bokiflow.ownership.lease import Lease
from bokiflow.runs import waiting


class Clocks:
    """The clocks of a process; time passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s, self.passed_s = 5000.0, 70.0
        monkeypatch.setattr(waiting, "seconds_now", lambda: self.wall_s)
        monkeypatch.setattr(waiting, "passed_now", lambda: self.passed_s)

    def go_on(self, seconds: float) -> None:
        self.wall_s += seconds
        self.passed_s += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_a_lease_is_relied_on_for_most_of_it(clocks: Clocks) -> None:
    lease = Lease(10)
    assert lease.has_ended(), "no reader knows of it yet"
    lease.renew(waiting.passed_now())
    clocks.go_on(7.9)
    assert not lease.has_ended()
    clocks.go_on(0.2)
    assert lease.has_ended()


def test_an_earlier_heartbeat_noted_later_does_not_shorten_the_lease(clocks: Clocks) -> None:
    lease, early = Lease(10), waiting.passed_now()
    clocks.go_on(4)
    lease.renew(waiting.passed_now())
    lease.renew(early)
    clocks.go_on(4)
    assert not lease.has_ended()


@pytest.mark.parametrize("jump_s", [-3600.0, 366 * 86_400.0])
def test_a_wall_clock_that_jumps_makes_no_lease_longer_or_shorter(
    clocks: Clocks, jump_s: float
) -> None:
    lease = Lease(10)
    lease.renew(waiting.passed_now())
    clocks.wall_s += jump_s
    clocks.go_on(4)
    assert not lease.has_ended()
    clocks.go_on(5)
    assert lease.has_ended()
    lease.renew(waiting.passed_now())
    assert not lease.has_ended(), "and a new heartbeat renews it at once"


def test_a_machine_that_slept_relies_on_no_lease_of_before(clocks: Clocks) -> None:
    lease = Lease(10)
    lease.renew(waiting.passed_now())
    clocks.passed_s += 3600
    assert lease.has_ended()
