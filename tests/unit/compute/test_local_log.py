"""Claims about `compute.local_log` that need no platform: what a session takes from an append."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from compute.engine import Engine
from compute.local_log import LocalLogs
from indilog.config import ClusterConfig
from indilog.ids import NodeId
from indilog.log import Entry, Session
from indilog.runtime.node import NodeShell

pytestmark = pytest.mark.asyncio


async def test_a_session_takes_the_position_of_its_append_and_not_the_engines() -> None:
    """The engine runs ahead of the disk while a sync is under way; the append does not."""
    waiters: list[asyncio.Future[object]] = []
    engine = SimpleNamespace(
        position=9,
        append=lambda *given: waiters.append(given[-1]),
        append_batch=lambda *given: waiters.append(given[-1]),
    )
    shell = SimpleNamespace(wake=lambda _: None)
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
