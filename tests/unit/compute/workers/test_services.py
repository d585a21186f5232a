"""Services in a worker: started once, started again when they fail, ended with their version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio

from indilog.apps.app import SERVICES_MAX, App, Context, Service
from indilog.base.deployed import ServiceState
from indilog.link.worker_messages import ServicesChanged
from indilog.testing import MemoryLogs
from indilog_compute.workers import services
from indilog_compute.workers.loader import LoadedDeployment
from indilog_compute.workers.services import RunningServices


class Worker:
    """A worker's services, what is loaded, and what the node received."""

    def __init__(self, directory: Path) -> None:
        self.deployments: dict[int, LoadedDeployment] = {}
        self.reported: tuple[ServiceState, ...] = ()
        self._news = asyncio.Event()
        self._directory = directory
        self.running = RunningServices(self.deployments, _context, self._tell)

    def load(self, number: int, app: App) -> None:
        self.deployments[number] = LoadedDeployment(app, "demo", self._directory)

    def _tell(self, reported: ServicesChanged) -> None:
        self.reported = reported.services
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await self._news.wait()
                self._news.clear()


def _context(service: Service) -> Context:
    caller = SimpleNamespace()
    return Context(MemoryLogs(), caller, function=service.qualified_name)


@pytest_asyncio.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr(services, "RESTART_S_MIN", 0.001)
    made = Worker(tmp_path)
    yield made
    made.running.run(())


@pytest.mark.asyncio
async def test_a_service_runs_while_its_deployment_is_wanted(worker: Worker) -> None:
    app, running, may_end = App("demo"), asyncio.Event(), asyncio.Event()

    @app.service
    async def drive(ctx: Context) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    worker.load(1, app)
    worker.running.run([1, 2])
    await running.wait()
    assert worker.reported == (ServiceState(1, "drive", "running"),)
    worker.running.run([1])
    for _ in range(5):
        await asyncio.sleep(0)
    worker.running.run([])
    await asyncio.sleep(0)
    assert worker.reported, "it is reported until it has ended"
    may_end.set()
    await worker.until(lambda: not worker.reported)


@pytest.mark.asyncio
async def test_a_service_that_fails_is_restarted_and_its_problem_is_reported(
    worker: Worker,
) -> None:
    app, runs = App("demo"), 0

    @app.service
    async def drive(ctx: Context) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise SystemExit("planted")
        await asyncio.Event().wait()

    worker.load(1, app)
    worker.running.run([1])
    await worker.until(lambda: runs == 2 or (worker.reported[0].state == "running" and runs > 0))
    await worker.until(
        lambda: worker.reported[0].state == "running" and worker.reported[0].failures == 1
    )
    assert worker.reported[0].problem == "SystemExit: planted."


@pytest.mark.asyncio
async def test_a_service_that_returns_is_over(worker: Worker) -> None:
    app = App("demo")

    @app.service
    async def once(ctx: Context) -> None: ...

    worker.load(1, app)
    worker.running.run([1])
    await worker.until(lambda: worker.reported[0].state == "ended")


@pytest.mark.asyncio
async def test_a_service_that_ignores_its_cancellation_is_cancelled_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_CANCEL_AGAIN_S", 0.01)
    app, running, over = App("demo"), asyncio.Event(), asyncio.Event()

    @app.service
    async def stubborn(ctx: Context) -> None:
        for _ in range(3):
            running.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        over.set()

    worker.load(1, app)
    worker.running.run([1])
    await running.wait()
    worker.running.run([])
    await over.wait()


def test_a_service_is_an_async_function_with_a_name_of_its_own() -> None:
    app = App("demo")

    async def drive(ctx: Context) -> None: ...

    app.add_service(drive, name="driver")
    with pytest.raises(ValueError, match="two services named driver"):
        app.add_service(drive, name="driver")
    with pytest.raises(TypeError, match="make <lambda> one"):
        app.add_service(lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="not 'no name'"):
        app.add_service(drive, name="no name")
    for n in range(SERVICES_MAX - 1):
        app.add_service(drive, name=f"n{n}")
    with pytest.raises(ValueError, match="demo has 16 services"):
        app.add_service(drive, name="more")


@pytest.mark.asyncio
async def test_a_service_that_raises_when_it_is_cancelled_is_over(worker: Worker) -> None:
    app, begun, runs = App("demo"), asyncio.Event(), 0

    @app.service
    async def untidy(ctx: Context) -> None:
        nonlocal runs
        runs += 1
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("planted")

    worker.load(1, app)
    worker.running.run([1])
    await begun.wait()
    worker.running.run([])
    await asyncio.gather(*worker.running._stopping)
    assert runs == 1
