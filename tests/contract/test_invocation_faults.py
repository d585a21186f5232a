"""The invocation service while the log refuses appends or is unreachable."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from indilog.base.errors import NotReadyError
from indilog.base.log import Record
from indilog.config import ClusterConfig, NodeConfig
from indilog.testing import MemoryLogs
from indilog_compute.invocations.fault_log import FaultLog
from tests.contract.test_invocations import Node, service_of
from tests.support.hooked_log import HookedLogs, Read

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("fault", [NotReadyError("no room"), RuntimeError("a bug")])
@pytest.mark.parametrize(
    ("part", "what"),
    [("_run_round", "invocations not advanced"), ("_read_on", "invocations not followed")],
)
async def test_a_lasting_fault_is_not_logged_at_every_retry(
    monkeypatch: pytest.MonkeyPatch, part: str, what: str, fault: Exception
) -> None:
    monkeypatch.setattr("indilog_compute.invocations.service._AGAIN_S", 0.001)
    tries = 0
    enough = asyncio.Event()

    async def failing() -> bool:
        nonlocal tries
        tries += 1
        if tries == 20:
            enough.set()
        raise fault

    service = service_of(MemoryLogs(ClusterConfig()), NodeConfig(), Node(), "one")
    service._read_faults, service._round_faults = FaultLog(60.0), FaultLog(60.0)
    monkeypatch.setattr(service, part, failing)
    with capture_logs() as logged:
        await service.start()
        await enough.wait()
        await service.stop()
    assert [line["event"] for line in logged].count(what) == 1


class UnsteadyLogs(HookedLogs):
    """Logs that are unreachable at times: then no record can be read; `failed` counts these
    reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.failed = asyncio.Semaphore(0)

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if records and self.is_away:
            self.failed.release()
            raise NotReadyError("away")
        return records


async def test_a_second_outage_of_the_log_is_logged_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("indilog_compute.invocations.service._AGAIN_S", 0.001)
    logs = UnsteadyLogs()
    service = service_of(logs, NodeConfig(), Node(), "one")
    service._read_faults = FaultLog(60.0)
    with capture_logs() as logged:
        await service.start()
        for _ in range(2):
            logs.failed, logs.is_away = asyncio.Semaphore(0), True
            await service.accept("app.f", b"{}")
            for _ in range(5):
                await logs.failed.acquire()
            logs.is_away = False
            assert await service.status_of("nothing") is None, "it reads up to the tail"
        await service.stop()
    assert [line["event"] for line in logged].count("invocations not followed") == 2
