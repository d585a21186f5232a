"""Runs services in a worker process. A service is a coroutine of an application. It runs while the
version of the application is deployed, and is restarted when it fails (docs/API.md, "Services").
`WorkerRunner` calls `RunningServices`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from indilog.apps.app import Context, Service
from indilog.base.deployed import ServiceActivity, ServiceState
from indilog.base.memory_errors import note_error
from indilog.base.restart_pauses import RestartPauses
from indilog.link.worker_messages import ServicesChanged
from indilog_compute.workers.loader import LoadedDeployment
from indilog_compute.workers.output import output_of

RESTART_S_MIN: Final = 0.1
RESTART_S_MAX: Final = 30.0
_STABLE_S: Final = 60.0
"""A service that ran for this many seconds before it failed is restarted after the shortest pause.
"""
_CANCEL_AGAIN_S: Final = 1.0
"""Seconds after which a cancelled service that still runs is cancelled again."""
_PROBLEM_CHARACTERS_MAX: Final = 500


class _Running:
    """One service of one deployment in this process.

    Args:
        on_change: called when the service's state changes.
    """

    def __init__(
        self,
        deployment: int,
        loaded: LoadedDeployment,
        service: Service,
        context: Callable[[Service], Context],
        on_change: Callable[[], None],
    ) -> None:
        self.state = ServiceState(deployment, service.name, "running")
        self._deployment = deployment
        self._loaded = loaded
        self._service = service
        self._context = context
        self._on_change = on_change
        self._failures = 0
        self._kept = asyncio.get_running_loop().create_task(self._keep())

    async def stopped(self) -> None:
        """Cancel the service repeatedly until it has ended."""
        while not self._kept.done():
            self._kept.cancel()
            await asyncio.wait({self._kept}, timeout=_CANCEL_AGAIN_S)
            if not self._kept.done():
                structlog.get_logger().warning(
                    "service continues although it was cancelled",
                    service=self._service.qualified_name,
                )

    async def _keep(self) -> None:
        pauses = RestartPauses(RESTART_S_MIN, RESTART_S_MAX, stable_s=_STABLE_S)
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            problem = await self._run_once()
            if problem is None:
                self._is_now("ended")
                return
            self._failures += 1
            self._is_now("waiting", problem)
            await asyncio.sleep(pauses.after(loop.time() - began))
            self._is_now("running", problem)

    async def _run_once(self) -> str | None:
        """Run the service until it ends. Return its problem; None: the service returned."""
        with output_of(self._loaded.app.name):
            return await self._run_in_context()

    async def _run_in_context(self) -> str | None:
        context = self._context(self._service)
        context.begin()
        try:
            await self._service.body(context)
        except BaseException as error:  # user code may raise any exception
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                return self._problem(error)
            if not isinstance(error, asyncio.CancelledError):
                structlog.get_logger().warning(
                    "service raised when it was cancelled",
                    service=self._service.qualified_name,
                    reason=f"{type(error).__name__}: {error}"[:_PROBLEM_CHARACTERS_MAX],
                )
            raise asyncio.CancelledError from error
        finally:
            context.end()
        return None

    def _problem(self, error: BaseException) -> str:
        note_error(error)
        place = self._loaded.place(error)
        structlog.get_logger().error(
            "service failed", service=self._service.qualified_name, place=place, exc_info=error
        )
        text = self._loaded.with_author_names(" ".join(f"{type(error).__name__}: {error}".split()))
        where = f"{place}: " if place else ""
        return f"{where}{text[:_PROBLEM_CHARACTERS_MAX].rstrip('.: ')}."

    def _is_now(self, state: ServiceActivity, problem: str = "") -> None:
        self.state = ServiceState(
            self._deployment, self._service.name, state, self._failures, problem
        )
        self._on_change()


class RunningServices:
    """The services that run in this process.

    Args:
        deployments: the deployments that are loaded in this process, by number.
        context: creates the context of a service.
        tell: sends the state of the services to the compute node, also of those that have not
            ended since they were cancelled.
    """

    def __init__(
        self,
        deployments: Mapping[int, LoadedDeployment],
        context: Callable[[Service], Context],
        tell: Callable[[ServicesChanged], None],
    ) -> None:
        self._deployments = deployments
        self._context = context
        self._tell = tell
        self._running: dict[int, list[_Running]] = {}
        self._stopping: dict[asyncio.Task[None], _Running] = {}

    def run(self, wanted: Iterable[int]) -> None:
        """Run the services of exactly the deployments `wanted`, as far as they are loaded here.
        Services that already run continue. The others are cancelled, and reported until they have
        ended.
        """
        numbers = [number for number in wanted if number in self._deployments]
        for number in [n for n in self._running if n not in numbers]:
            for running in self._running.pop(number):
                self._stop(running)
        for number in numbers:
            if number not in self._running:
                self._running[number] = self._started(number, self._deployments[number])
        self._report()

    async def stopped(self) -> None:
        """Cancel all services, and wait until they have ended."""
        self.run(())
        if self._stopping:
            await asyncio.wait(self._stopping)

    def _started(self, number: int, loaded: LoadedDeployment) -> list[_Running]:
        return [
            _Running(number, loaded, service, self._context, self._report)
            for service in loaded.app.services.values()
        ]

    def _stop(self, running: _Running) -> None:
        task = asyncio.get_running_loop().create_task(running.stopped())
        self._stopping[task] = running
        task.add_done_callback(self._on_stopped)

    def _on_stopped(self, task: asyncio.Task[None]) -> None:
        del self._stopping[task]
        self._report()

    def _report(self) -> None:
        running = (one for ones in self._running.values() for one in ones)
        states = tuple(one.state for one in (*running, *self._stopping.values()))
        self._tell(ServicesChanged(states))
