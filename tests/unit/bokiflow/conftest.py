"""The flow `shop`, on logs in memory."""

from __future__ import annotations

import pytest

from bokiflow import Flow
from indilog.testing import MemoryLogs


@pytest.fixture
def logs() -> MemoryLogs:
    return MemoryLogs()


@pytest.fixture
def flow(logs: MemoryLogs) -> Flow:
    made = Flow("shop")
    made.attach(logs)
    return made
