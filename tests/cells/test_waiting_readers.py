"""Readers that wait on one compute node for records that another one appends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from indilog.runtime.cluster.assembly import embedded
from indilog_cells import log
from tests.cells.test_order_first import kinds_of
from tests.cells.test_owned_logs import logs_of, three

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("kind", ["owned", "order-first", "object-store"])
async def test_a_reader_is_woken_by_an_append_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(log, "_POLL_S", 1000.0)  # the reader does not look by itself
    monkeypatch.setattr(log, "_POLL_S_MAX", 1000.0)
    async with embedded(three(tmp_path, engines=2)) as platform:
        await kinds_of(platform)[0].create("events", kind)
        reading, appending = logs_of(platform)
        await appending.append(b"0", tags=["t"])
        for number in range(1, 4):
            waiting = asyncio.create_task(reading.read_next("t", number, wait=60.0))
            if number > 1:
                await asyncio.sleep(0.05)  # the node knows of the reader before the append
            await appending.append(b"%d" % number, tags=["t"])
            async with asyncio.timeout(30.0):
                found = await waiting
            assert found is not None
            assert found.data == b"%d" % number
