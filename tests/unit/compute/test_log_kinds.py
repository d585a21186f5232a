"""When a compute node opens and closes the logs of other kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.ids import NodeId, SeqNum
from indilog.base.log import Log, Session
from indilog.base.retention import Retention
from indilog.config import Config, node_config
from indilog.kernel.view import View
from indilog.roles.node_requests import NodeRequests
from indilog.testing import MemoryLogs
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from indilog_compute.log_kinds.catalog_records import CreatedLog
from indilog_compute.log_kinds.kinds import LogKinds

pytestmark = pytest.mark.asyncio


class OpenedLogs(MemoryLogs):
    """Logs of another kind, which note what is opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.away = "away"
        self.enforced = asyncio.Event()

    async def end(self) -> SeqNum:
        return await self.log("events", Session()).tail()

    @property
    def ended_at(self) -> None:
        return None

    @property
    def failure(self) -> str:
        return ""

    @property
    def position(self) -> int:
        return 0

    async def append_content(self, _owner: str, _content: bytes) -> bytes:
        raise AssertionError("it has no owner")

    async def policies(self) -> dict[str, Retention]:
        self.enforced.set()
        return {}

    @asynccontextmanager
    async def open(self, created: CreatedLog, *, is_new: bool) -> AsyncIterator[OpenedLogs]:
        if is_new:
            yield self
            return
        if created.log == self.away:
            raise NotReadyError("The store does not answer.")
        self.events.append(f"open {created.log}")
        yield self
        self.events.append(f"close {created.log}")


class SharedLogs(MemoryLogs):
    """The `shared` logs of a compute node."""

    def shared(self, name: str, session: Session) -> Log:
        return self.log(name, session)

    def wake_readers(self) -> None:
        return None


async def release_nothing(_created: CreatedLog) -> None:
    raise AssertionError("no segment is freed")


def kinds_over(
    opened: OpenedLogs,
    config: Config,
    *,
    serves: bool,
    logs: SharedLogs | None = None,
    nodes: Sequence[NodeId] = (NodeId("engine-0"),),
) -> LogKinds:
    """Return the kinds of the first node."""
    return LogKinds(
        logs or SharedLogs(), nodes[0],
        view=lambda: cast("View", SimpleNamespace(engines=sorted(nodes))),
        open_logs=opened.open, requests=cast("NodeRequests", SimpleNamespace()),
        release=release_nothing, config=config, has_directory=True, serves=lambda: serves,
    )  # fmt: skip


async def test_a_log_is_opened_by_its_first_use_and_closed_when_its_node_stops() -> None:
    opened = OpenedLogs()
    kinds = kinds_over(opened, Config(), serves=False)
    await kinds.start()
    for name in ("used", "unused"):
        await kinds.create(name, "object-store")
    assert opened.events == []
    log = kinds.log("used", Session())
    assert log is not None
    for _ in range(2):
        await log.append(b"x")
    assert opened.events == ["open used"]
    await kinds.stop()
    assert opened.events == ["open used", "close used"]


async def test_the_status_names_logs_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = OpenedLogs()
    kinds = kinds_over(opened, Config(), serves=False)
    await kinds.start()
    await kinds.create("away", "object-store")
    log = kinds.log("away", Session())
    assert log is not None
    with pytest.raises(NotReadyError):
        await log.append(b"x")
    assert kinds.status()["failing"] == {"away": "The store does not answer."}
    monkeypatch.setattr(opened, "away", "")
    await log.append(b"x")
    assert kinds.status()["failing"] == {}
    await kinds.stop()


async def test_a_log_that_cannot_be_opened_stops_no_retention_of_others() -> None:
    opened = OpenedLogs()
    config = Config(node=node_config(retention_interval_s=0.01))
    kinds = kinds_over(opened, config, serves=True)
    await kinds.start()
    for name in ("away", "there"):
        await kinds.create(name, "object-store")
    async with asyncio.timeout(60):
        await opened.enforced.wait()
    await kinds.stop()


async def test_an_announcement_that_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a creation would wait until the catalog has a further record."""
    logs, names = SharedLogs(), [NodeId("engine-0"), NodeId("engine-1")]
    first, second = (
        kinds_over(OpenedLogs(), Config(), serves=False, logs=logs, nodes=nodes)
        for nodes in (names, names[::-1])
    )
    announce = ReplayedCatalog.announce
    failed: list[SeqNum] = []

    async def fails_once(self: ReplayedCatalog, seqnum: SeqNum) -> None:
        if self._node == second.node and not failed:
            failed.append(seqnum)
            raise AppendOutcomeUnknownError("The sequencers do not answer.")
        await announce(self, seqnum)

    await first.start()
    await second.start()
    monkeypatch.setattr(ReplayedCatalog, "announce", fails_once)
    await first.create("events", "object-store")
    assert failed
    await first.stop()
    await second.stop()
