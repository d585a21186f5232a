"""`indilog_compute.local_log` without a platform: positions of sessions, waiting reads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from indilog.base.ids import Epoch, NodeId, log_tag
from indilog.base.log import Entry, Session
from indilog.config import ClusterConfig
from indilog.runtime.node import NodeShell
from indilog.wire.messages import IndexBlock, IndexData, ShardTags
from indilog_compute.engine import Engine
from indilog_compute.local_log import LocalLogs
from tests.unit.compute.engine_driver import ENGINE, SHARD, A, joined

pytestmark = pytest.mark.asyncio


async def test_a_session_takes_the_position_of_its_append_and_not_the_engines() -> None:
    """The engine runs ahead of the disk while a sync is under way; the append does not."""
    waiters: list[asyncio.Future[object]] = []
    engine = SimpleNamespace(
        position=9,
        append=lambda *given: waiters.append(given[-1]),
        append_batch=lambda *given: waiters.append(given[-1]),
    )
    shell = SimpleNamespace(wake=lambda _: None, hasten=lambda _: None)
    logs = LocalLogs(
        cast("NodeShell", shell), NodeId("engine-0"), cast("Engine", engine), ClusterConfig()
    )
    session = Session()
    log = logs.log("orders", session)
    appending = asyncio.create_task(log.append(b"x", tags=["t"]))
    await asyncio.sleep(0)
    waiters.pop().set_result((4, 3))
    assert (await appending, session.position) == (4, 3)
    together = asyncio.create_task(log.append_batch([Entry(b"x"), Entry(b"y")]))
    await asyncio.sleep(0)
    waiters.pop().set_result((5, 6))
    assert (await together, session.position) == ([5, 6], 6)


async def test_a_waiting_read_makes_an_idle_engine_check_for_lost_entries() -> None:
    """A29: the read itself is answered at once, so that nothing else calls the engine."""
    driver = joined()
    driver.order(1, index_data=False)
    tags = ShardTags(SHARD, 0, 1, b"\x01", log_tag("orders").to_bytes(8, "little"))
    driver.hear(A, IndexData((IndexBlock(0, 1, (SHARD,), (tags,), Epoch(1)),)))
    driver.now += 1
    driver.turn()
    assert driver.engine.deadline() is None
    woken: list[NodeId] = []
    shell = SimpleNamespace(wake=woken.append, hasten=woken.append, holding=False, ended=False)
    logs = LocalLogs(cast("NodeShell", shell), ENGINE, driver.engine, ClusterConfig())
    waiting = asyncio.create_task(logs.log("orders").read_next(bound=1, wait=60))
    await asyncio.sleep(0)
    assert driver.engine.status()["progress"]["reads_pending"] == 0
    assert woken == [ENGINE]
    driver.turn()
    assert driver.engine.deadline() is not None
    further = asyncio.create_task(logs.log("orders").read_next(bound=1, wait=60))
    await asyncio.sleep(0)
    assert len(driver.engine.watches) == 2
    assert woken == [ENGINE], "the engine checks by itself, once for all waiting reads"
    for one in (waiting, further):
        one.cancel()
    await asyncio.gather(waiting, further, return_exceptions=True)
