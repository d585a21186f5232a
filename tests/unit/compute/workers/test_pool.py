"""Worker processes are kept running, also if one of them does not start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from indilog.config import node_config
from indilog_compute.workers import process
from indilog_compute.workers.in_process import InProcessWorkers
from indilog_compute.workers.pool import WorkerPool
from indilog_compute.workers.process import Worker
from tests.support.link_pair import LIMITS

pytestmark = pytest.mark.asyncio


async def nothing(_: Worker) -> None: ...


async def test_a_worker_that_does_not_become_ready_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing limited the wait, so the node had one worker less."""
    monkeypatch.setattr(process, "START_S", 0.05)
    workers, started = InProcessWorkers(None), list[Any]()

    async def start(*given: Any, **named: Any) -> Worker:  # noqa: ANN401
        worker: Any = await workers.start(*given, **named)
        if not started:
            worker.until_ready = asyncio.Event().wait
        started.append(worker)
        made: Worker = worker
        return made

    pool = WorkerPool(
        node_config(workers=1, data_dir=tmp_path, restart_s_min=0.001),
        directory=tmp_path / "workers",
        limits=LIMITS,
        start=start,
        serve=lambda *_: None,
        on_up=nothing,
        on_lost=lambda _: None,
        drained=nothing,
    )
    pool.resize(1)
    async with asyncio.timeout(20):
        while not pool.workers:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
    assert pool.workers == (started[1],)
    assert started[0].link.is_lost
    await pool.stop()
    await workers.stop()
