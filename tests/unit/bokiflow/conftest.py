"""The flow `shop`, on logs in memory; tests marked `leaping`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bokiflow import Flow
from bokiflow.runs import waiting
from indilog.testing import MemoryLogs
from tests.support.leaping_loop import LeapingLoop


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loop of a test: of one marked `leaping`, the time jumps."""
    if item.get_closest_marker("leaping"):
        return {"leaping": LeapingLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _clocks_of_the_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let BokiFlow and logs use the clock of the event loop, in a test marked `leaping`."""
    if request.node.get_closest_marker("leaping") is None:
        return

    def now() -> float:
        return 1.7e9 + asyncio.get_running_loop().time()

    for name in ("monotonic_now", "seconds_now", "passed_now"):
        monkeypatch.setattr(waiting, name, now)
    defaults = MemoryLogs.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "clock", now)


@pytest.fixture
def logs() -> MemoryLogs:
    return MemoryLogs()


@pytest.fixture
def flow(logs: MemoryLogs) -> Flow:
    made = Flow("shop")
    made.attach(logs)
    return made
