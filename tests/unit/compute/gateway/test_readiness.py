"""Readiness is found out by an append, not by what processes say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from indilog.base.errors import DiskFullError, NotReadyError
from indilog.base.log import Entry, Log, Session
from indilog.testing import MemoryLogs
from indilog_compute.gateway.readiness import PROBE_LOG, AppendProbe
from tests.support.hooked_log import HookedLog

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Hooked(HookedLog):
    """Counts appends; each waits until `answered` is set, or raises `error`."""

    def __init__(self) -> None:
        super().__init__(PROBE_LOG, logs=MemoryLogs())
        self.answered = asyncio.Event()
        self.answered.set()
        self.error: Exception | None = None
        self.appends = 0

    async def before_append(self, entries: Sequence[Entry]) -> None:
        self.appends += 1
        await self.answered.wait()
        if self.error is not None:
            raise self.error


class Source:
    """Gives one log."""

    def __init__(self) -> None:
        self.hooked = Hooked()

    def log(self, name: str, session: Session) -> Log:
        assert name == PROBE_LOG
        return self.hooked


async def test_an_append_that_is_acknowledged_means_ready() -> None:
    assert await AppendProbe(Source(), timeout_s=10).failure() is None


async def test_an_append_that_is_not_acknowledged_in_time_means_not_ready() -> None:
    source = Source()
    source.hooked.answered.clear()
    failure = await AppendProbe(source, timeout_s=0.01).failure()
    assert failure is not None
    assert "not acknowledged within 0.01 s" in failure


async def test_concurrent_readiness_checks_share_one_append() -> None:
    source = Source()
    probe = AppendProbe(source, timeout_s=10)
    assert await asyncio.gather(*(probe.failure() for _ in range(100))) == [None] * 100
    assert source.hooked.appends == 1


async def test_a_refused_append_means_not_ready_and_is_quoted() -> None:
    source = Source()
    source.hooked.error = NotReadyError("The platform has stopped; open it again.")
    failure = await AppendProbe(source, timeout_s=10).failure()
    assert failure == "An append is refused: The platform has stopped; open it again."


async def test_a_full_disk_means_ready_because_reads_are_served() -> None:
    source = Source()
    source.hooked.error = DiskFullError("There is no disk space left.")
    assert await AppendProbe(source, timeout_s=10).failure() is None
