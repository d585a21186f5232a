"""The service that runs invocations while the log takes nothing."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from compute.invocations.notices import Notices
from indilog.config import ClusterConfig, NodeConfig
from indilog.errors import NotReadyError
from indilog.testing import MemoryLogs
from tests.contract.test_invocations import Node, service_of

pytestmark = pytest.mark.asyncio


async def test_a_fault_that_lasts_is_not_told_at_every_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compute.invocations.service._AGAIN_S", 0.001)
    tries = 0
    enough = asyncio.Event()

    async def failing() -> bool:
        nonlocal tries
        tries += 1
        if tries == 20:
            enough.set()
        raise NotReadyError("no room")

    service = service_of(MemoryLogs(ClusterConfig()), NodeConfig(), Node(), "one")
    service._notices = Notices(60.0)
    monkeypatch.setattr(service, "_round", failing)
    with capture_logs() as told:
        await service.start()
        await enough.wait()
        await service.stop()
    assert [line["event"] for line in told].count("invocations not advanced") == 1
