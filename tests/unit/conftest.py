"""Tests marked `leaping`: the time of their event loop jumps to the next timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import bokiqueue.waiting
import bokistream.waiting
import bokiviews.replica
from bokiflow.locks import lock
from bokiflow.runs import waiting
from indilog.testing import MemoryLogs
from tests.support.leaping_loop import LeapingLoop

_CLOCKS = (
    (waiting, "monotonic_now"),
    (waiting, "seconds_now"),
    (waiting, "passed_now"),
    (lock, "seconds_now"),
    (bokiqueue.waiting, "seconds_now"),
    (bokistream.waiting, "seconds_now"),
    (bokiviews.replica, "seconds_now"),
)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loop of a test."""
    if item.get_closest_marker("leaping"):
        return {"leaping": LeapingLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _clocks_of_the_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let libraries and logs in memory use the clock of the event loop, in a marked test."""
    if request.node.get_closest_marker("leaping") is None:
        return

    def now() -> float:
        return 1.7e9 + asyncio.get_running_loop().time()

    for module, name in _CLOCKS:
        monkeypatch.setattr(module, name, now)
    defaults = MemoryLogs.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "clock", now)
