"""A process whose deployment is older than that of a run leaves the run to others for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import bokiflow
from bokiflow import taking
from indilog import App
from indilog.sdk import DeployedVersion
from indilog.testing import MemoryLogs
from tests.unit.bokiflow.processes import ShopProcess, kill

pytestmark = pytest.mark.asyncio


class Process(ShopProcess):
    """A process of one deployment of an application."""

    def __init__(self, logs: MemoryLogs, version: int) -> None:
        self.logs = logs
        app = App("shop")
        code = f"{version}" * 16
        app.deployed = DeployedVersion(version, code, app, {code: app})
        self.flow = bokiflow.Flow(app, lease=0.2, partitions=2)
        self.flow.attach(logs)

        @self.flow.workflow
        async def order(wf: bokiflow.Workflow) -> int:
            await wf.signal("go")
            return version

        self.order = order


@asynccontextmanager
async def orphaned(logs: MemoryLogs) -> AsyncIterator[tuple[Process, bokiflow.Handle[int]]]:
    """Start a run with deployment 2 and end its process. Then a process of deployment 1 drives."""
    new, old = Process(logs, 2), Process(logs, 1)
    await new.order.start(id="run")
    kill(new.flow)
    async with old.driven():
        yield old, old.order.handle("run")


async def test_a_run_of_a_later_deployment_is_left_to_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taking, "_GIVES_WAY_MAX", 1_000)
    logs = MemoryLogs()
    async with orphaned(logs) as (old, handle):
        await handle.signal("go")
        async with asyncio.timeout(30):
            while "run" not in old.flow.runner.taking._failures:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with Process(logs, 2).driven():
            await old.stop()
            assert await handle.result(timeout=30) == 2
            assert (await handle.status()).version == 2


async def test_a_run_whose_deployment_does_not_come_continues_with_older_code() -> None:
    """Otherwise it would wait without end, for example if the deployments were lost."""
    async with orphaned(MemoryLogs()) as (_, handle):
        await handle.signal("go")
        assert await handle.result(timeout=30) == 1
        assert (await handle.status()).version == 1


async def test_code_of_an_earlier_deployment_starts_runs_in_the_newest_ones_executor() -> None:
    """An executor of its own would claim partitions, and execute runs with the older code."""
    logs = MemoryLogs()
    old, new = Process(logs, 1), Process(logs, 2)
    before, after = old.flow._app, new.flow._app
    assert isinstance(before, App)
    assert isinstance(after, App)
    loaded = {"1" * 16: before, "2" * 16: after}
    before.deployed = DeployedVersion(1, "1" * 16, after, loaded)
    after.deployed = DeployedVersion(2, "2" * 16, after, loaded)
    async with new.driven():
        handle = await old.order.start()
        assert old.flow.runner is new.flow.runner
        await handle.signal("go")
        assert await handle.result(timeout=30) == 1
        assert (await handle.status()).version == 1
