"""The module `time` as seen by a platform in this process, with clocks that a test moves."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from indilog.runtime import node
from indilog_compute.invocations import service


class MovedTime:
    """Replaces the module `time`.

    Attributes:
        wall_s: seconds by which the wall clock is ahead.
        passed_s: seconds that have passed beyond the real ones, for the machine and the log.
    """

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.passed_s = 0.0

    def time(self) -> float:
        """Return the time of the wall clock."""
        return time.time() + self.wall_s

    def clock_gettime(self, clock: int) -> float:
        """Return the time since the machine booted."""
        assert clock == time.CLOCK_BOOTTIME
        return time.clock_gettime(clock) + self.passed_s

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any name of the module
        return getattr(time, name)


def moved_time(monkeypatch: pytest.MonkeyPatch) -> MovedTime:
    """Let platforms in this process, and their services, use a `MovedTime`."""
    moved = MovedTime()
    for module in (service, node):
        monkeypatch.setattr(module, "time", moved)
    passed = partial(moved.clock_gettime, time.CLOCK_BOOTTIME)
    monkeypatch.setattr(node.Clock.__init__, "__defaults__", (time.time, passed))
    return moved
