"""Runs workers inside this process, for tests (docs/guides/testing.md). Functions run on the test's
event loop, so breakpoints work, and a test can replace objects that functions use.

Such a worker uses the same `WorkerRunner` as a worker process. Its link is a pair of links in
memory, which carries the same bytes as a socket. The end of such a worker only cancels its calls.
A call that blocks the event loop cannot be cancelled, and blocks the whole platform.
`indilog.runtime.cluster.assembly` passes `InProcessWorkers.start` to `FunctionHost`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from indilog.apps.app import App
from indilog.base.deployed import ServiceState, code_digest
from indilog.base.errors import DeployError
from indilog.config.function_groups import FunctionsConfig
from indilog.link.link import Link
from indilog.link.link import Serve as ServeLink
from indilog.link.link_messages import LINK_VERSION, Greeting, Limits, Question, Welcome
from indilog.link.link_pair import link_pair
from indilog_compute.workers.claims import NodeClaims, WorkerClaims, claims_memory
from indilog_compute.workers.host import FunctionHost
from indilog_compute.workers.loader import LoadedDeployment, check_app, load
from indilog_compute.workers.process import STOP_S, Serve, Worker, handle_message
from indilog_compute.workers.runner import WorkerRunner

_LOADED: Final = itertools.count(1)
"""Numbers the imported deployments of all platforms in this process."""
_GIVEN: Final = "app.py"
"""Path of the only source of an application that a test gives as an object. The text of this source
is the key of the object.
"""


class GivenApps:
    """Applications that a test gives as objects, not as sources."""

    def __init__(self) -> None:
        self._apps: dict[str, App] = {}
        self._keys = itertools.count(1)

    def sources(self, app: App) -> dict[str, str]:
        """Return sources that represent `app`; only the workers of this process can load them."""
        key = f"# application {app.name}, object {next(self._keys)} of a test\n"
        self._apps[key] = app
        return {_GIVEN: key}

    def load(
        self, deployment: int, name: str | None, sources: Mapping[str, str], directory: Path
    ) -> LoadedDeployment:
        """Return a given application; import any other sources, as `loader.load` does."""
        app = self._apps.get(sources.get(_GIVEN, ""))
        if app is None:
            return load(next(_LOADED), name, sources, directory)
        if not (app.functions or app.operations):
            raise DeployError(
                f"App {app.name} has no functions; decorate at least one with @app.function."
            )
        check_app(app)
        package = f"given_{deployment}"
        return LoadedDeployment(app, package, directory / package, code_digest(sources))


class InProcessWorker:
    """A worker that runs in this process: a `Worker`."""

    def __init__(self, index: int, claims: NodeClaims, runner: WorkerRunner) -> None:
        self.index = index
        self.link: Link
        self.claims = claims
        self.deployments: set[int] = set()
        self.threads_left = 0
        self.is_memory_used_up = False
        self.services: tuple[ServiceState, ...] = ()
        self.last_place: str | None = None
        self.was_ended_by_others = False
        self._runner = runner
        self._over = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    async def until_ready(self) -> bool:
        """Return True, because the worker can run functions at once."""
        return True

    async def until_lost_or_replaced(self) -> None:
        """Wait until the link is lost, or `replace` was called."""
        await self._over.wait()

    def replace(self) -> None:
        """Mark the worker for replacement; this ends `until_lost_or_replaced`."""
        self._over.set()

    def kill(self) -> None:
        """Cancel the worker's calls and services, and close its link."""
        self.link.close()
        self._over.set()
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._runner.stop())

    def abort(self) -> None:
        """End the worker in the same way as `kill`."""
        self.kill()

    async def stopped(self, *, within_s: float = STOP_S) -> int:
        """End the worker; wait up to `within_s` seconds until its calls and services have ended.
        Return 0 as the exit code.
        """
        self.kill()
        assert self._ending is not None, "`kill` starts it"
        await asyncio.wait({self._ending}, timeout=within_s)
        return 0


class InProcessWorkers:
    """Starts workers in this process.

    Args:
        scope: the `Log.scope` of the platform's logs, which the logs of the functions also get.

    Attributes:
        given: the applications that a test gives as objects.
    """

    def __init__(self, scope: object) -> None:
        self._scope = scope
        self.given = GivenApps()
        self._runners: list[WorkerRunner] = []

    async def stop(self) -> None:
        """Cancel all calls and services, and wait until they have ended. The links of the workers
        still work, so the calls and services can write to the log before they end.
        """
        await asyncio.gather(*(runner.stop() for runner in self._runners))

    async def start(
        self,
        index: int,
        limits: Limits,
        *,
        directory: Path,
        threads_max: int,
        functions: FunctionsConfig,  # noqa: ARG002 - output, environment and memory are this process's
        serve: Serve,
        on_lost: Callable[[Worker], None],
        on_report: Callable[[Worker], None] = lambda _: None,
    ) -> InProcessWorker:
        """Return a new worker: a `StartWorker`.

        Raises:
            OSError: the directory, or shared memory, cannot be created.
        """
        memory = claims_memory()
        try:
            claims, worker_claims = NodeClaims(memory), WorkerClaims(memory)
        finally:
            os.close(memory)
        os.makedirs(directory, mode=0o700)  # noqa: PTH103 - as short as a call of the system
        runner = WorkerRunner(
            directory,
            threads_max=threads_max,
            claims=worker_claims,
            load=self.given.load,
            scope=self._scope,
        )
        self._runners.append(runner)
        worker = InProcessWorker(index, claims, runner)

        def served(_link: Link, call: int, message: Question | Greeting) -> None:
            handle_message(worker, call, message, serve, on_report)

        def lost(_link: Link) -> None:
            worker.replace()
            on_lost(worker)

        worker.link, _ = link_pair(
            served,
            runner.serve,
            message_bytes_max=limits.message_bytes_max,
            on_lost=lost,
            on_lost_back=lambda _: None,
        )
        worker.link.tell(Welcome(LINK_VERSION, limits))
        return worker


def client_link(host: FunctionHost, serve: ServeLink, on_lost: Callable[[Link], None]) -> Link:
    """Return a client's link to `host`, in memory. `serve` answers the messages of the host;
    `on_lost` is called when the link is lost.
    """
    server = host.client_server()
    theirs, ours = link_pair(
        server.serve,
        serve,
        message_bytes_max=host.limits.message_bytes_max,
        on_lost=lambda _: server.close(),
        on_lost_back=on_lost,
        is_of_client=True,
    )
    theirs.tell(Welcome(LINK_VERSION, host.limits))
    return ours
