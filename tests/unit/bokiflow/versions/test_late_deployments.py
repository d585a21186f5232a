"""A process whose deployment is older than that of a run leaves the run to others for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import bokiflow
from bokiflow import QueryFailedError, taking
from bokiflow.runs.records import OperationNoted, run_record
from indilog import App
from indilog.client import Client
from indilog.sdk import DeployedVersion
from indilog.testing import MemoryLogs
from tests.unit.bokiflow.processes import ShopProcess, kill

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


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


def both_loaded(one: Process, two: Process) -> dict[str, App]:
    """Return the applications of two deployments of one process, by their code."""
    apps = {"1" * 16: one.flow._app, "2" * 16: two.flow._app}
    return {code: app for code, app in apps.items() if isinstance(app, App)}


async def test_a_run_whose_code_is_kept_but_not_loaded_waits_and_says_why() -> None:
    """It continues with that code when it is loaded, and does not move to the newest one."""
    logs = MemoryLogs()
    begins, old, new = Process(logs, 1), Process(logs, 1), Process(logs, 2)
    await begins.order.start(id="run")
    kill(begins.flow)
    apps = both_loaded(old, new)
    newest = apps["2" * 16]
    newest.deployed = DeployedVersion(
        2, "2" * 16, newest, {"2" * 16: newest}, {"1" * 16: "The code does not load here."}
    )
    async with new.driven():
        run = Client(logs).run(newest, "run")
        await run.signal("go")
        async with asyncio.timeout(30):
            while not any(wait.what == "its code" for wait in (await run.show()).waits):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        found = await run.show()
        assert (found.run.version, found.moved) == (1, None)
        assert found.waits[0].error == "The code does not load here."
        with pytest.raises(QueryFailedError, match="The code does not load here"):
            await new.order.handle("run").query("any")
        await asyncio.sleep(0.5)
        notes = [r for r in await logs.log("shop/flow").read_range("flow:run", 0)
                 if isinstance(run_record(r.data), OperationNoted)]  # fmt: skip
        assert len(notes) == 1, "a retry notes nothing new"
        for app, version in ((apps["1" * 16], 1), (newest, 2)):
            app.deployed = DeployedVersion(version, f"{version}" * 16, newest, apps)
        assert await new.order.handle("run").result(timeout=30) == 1
        assert (await run.show()).moved is None


async def test_a_run_whose_code_is_not_kept_moves_to_the_newest() -> None:
    logs = MemoryLogs()
    begins, new = Process(logs, 1), Process(logs, 2)
    await begins.order.start(id="run")
    kill(begins.flow)
    async with new.driven():
        await new.order.handle("run").signal("go")
        assert await new.order.handle("run").result(timeout=30) == 2
