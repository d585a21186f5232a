"""Processes of the flow `shop`, which share only the logs, and ways to end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bokiflow import Flow
from bokiflow.flow import RETENTION_S
from indilog.sdk import Logs


class ShopProcess:
    """A process; a test's own adds workflows."""

    def __init__(self, logs: Logs, lease_s: float, retention_s: float = RETENTION_S) -> None:
        self.logs = logs
        self.flow = Flow("shop", lease=lease_s, retention=retention_s)
        self.flow.attach(logs)

    @property
    def name(self) -> str:
        return self.flow.runner.member.name

    @asynccontextmanager
    async def driven(self) -> AsyncIterator[None]:
        """Take over from others meanwhile."""
        driver = asyncio.create_task(self.flow.drive(self.logs))
        yield
        driver.cancel()
        with suppress(asyncio.CancelledError):
            await driver

    async def stop(self) -> None:
        """Leave, and tell the others."""
        await self.flow.runner.stop()

    def kill(self) -> None:
        """End at once, and say nothing."""
        kill(self.flow)


def kill(flow: Flow) -> None:
    """End everything at once, and say nothing."""
    for partition in flow.runner.owned.values():
        partition.is_owned = False
    for task in flow.runner.tasks():
        task.cancel()
    flow.runner.member.leave = _nothing  # type: ignore[method-assign, assignment]


async def _nothing(*_: object) -> None: ...
