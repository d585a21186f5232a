"""When a compute node opens and closes the logs of other kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from indilog.base.ids import NodeId
from indilog.base.retention import Retention
from indilog.config import Config
from indilog.kernel.view import view_of
from indilog.testing import MemoryLogs
from indilog.wire.cell_messages import CellAnswer, CellQuestion
from indilog_compute.log_kinds.catalog import CreatedLog
from indilog_compute.log_kinds.kinds import LogKinds

pytestmark = pytest.mark.asyncio


class OpenedLogs(MemoryLogs):
    """Logs of another kind, which note what is opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    async def policies(self) -> dict[str, Retention]:
        return {}

    @asynccontextmanager
    async def open(self, created: CreatedLog) -> AsyncIterator[OpenedLogs]:
        self.events.append(f"open {created.log}")
        yield self
        self.events.append(f"close {created.log}")


async def test_a_log_is_opened_by_its_first_use_and_closed_when_its_node_stops() -> None:
    opened, view = OpenedLogs(), view_of()

    async def asked(_node: NodeId, _question: CellQuestion) -> CellAnswer:
        raise AssertionError("no log has cells on storage nodes")

    kinds = LogKinds(
        MemoryLogs(), view.engines[0], view=lambda: view, open_logs=opened.open, ask_cells=asked,
        config=Config(), has_directory=True, serves=lambda: False,
    )  # fmt: skip
    await kinds.start()
    for name in ("used", "unused"):
        await kinds.create(name, "object-store")
    assert opened.events == []
    log = kinds.log("used")
    assert log is not None
    for _ in range(2):
        await log.append(b"x")
    assert opened.events == ["open used"]
    await kinds.stop()
    assert opened.events == ["open used", "close used"]
