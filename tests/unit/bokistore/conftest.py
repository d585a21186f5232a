"""A log of objects in memory, a store on it, and the clock of its records."""

from __future__ import annotations

import pytest

from bokistore import Store, collection, decisions
from indilog.testing import MemoryLog, MemoryLogs
from tests.unit.bokistore.processes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> MemoryLog:
    return MemoryLog("objects", logs=MemoryLogs(clock=clock))


@pytest.fixture
def store(log: MemoryLog) -> Store:
    return Store(log)


@pytest.fixture
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect up to any record, not only up to whole cells of 1,024 records."""
    monkeypatch.setattr(collection, "CELL", 1)
    monkeypatch.setattr(decisions, "CELL", 1)
