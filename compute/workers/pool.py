"""Keeping worker processes up: each place is filled again when its process dies, at a growing
distance while it dies at once.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from compute.workers import process
from compute.workers.process import Serve, WorkerProcess
from indilog.calls import Limits
from indilog.errors import NotReadyError

_RESTART_S: Final = 0.1
_RESTART_S_MAX: Final = 5.0
_STABLE_S: Final = 10.0
"""A worker that lived this long is started again at once."""
_START_S: Final = 60.0


class WorkerPool:
    """A fixed number of worker processes.

    Args:
        directory: below which each process has its private directory; emptied at start.
        serve: gets the questions of the workers.
        on_up: awaited when a process can run functions.
        on_lost: called when a process is gone, before its calls fail.

    Attributes:
        restarts: how many processes took the place of one that died.
    """

    def __init__(
        self,
        size: int,
        *,
        directory: Path,
        limits: Limits,
        threads_max: int,
        serve: Serve,
        on_up: Callable[[WorkerProcess], Awaitable[None]],
        on_lost: Callable[[WorkerProcess], None],
    ) -> None:
        self._size = size
        self._directory = directory
        self._limits = limits
        self._threads_max = threads_max
        self._serve = serve
        self._on_up = on_up
        self._on_lost = on_lost
        self._up: dict[int, WorkerProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._all_up = asyncio.Event()
        self._stopping = False
        self.restarts = 0

    @property
    def workers(self) -> tuple[WorkerProcess, ...]:
        """The processes that can run functions now."""
        return tuple(self._up.values())

    async def start(self) -> None:
        """Start all processes and wait until each was up once.

        Raises:
            NotReadyError: they do not start; the log says why.
        """
        shutil.rmtree(self._directory, ignore_errors=True)
        self._tasks = [asyncio.ensure_future(self._keep(index)) for index in range(self._size)]
        try:
            if self._size > 0:
                await asyncio.wait_for(self._all_ready.wait(), _START_S)
                await self._all_up.wait()  # `on_up` has limits of its own
        except TimeoutError:
            await self.stop()
            raise NotReadyError("The function workers do not start; the log says why.") from None

    async def stop(self) -> None:
        """End all processes; when this returns they are gone, and their files too."""
        self._stopping = True
        for worker in list(self._up.values()):
            worker.link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- inside

    async def _keep(self, index: int) -> None:
        restart_s = _RESTART_S
        while not self._stopping:
            started = asyncio.get_running_loop().time()
            await self._live_once(index)
            lived_s = asyncio.get_running_loop().time() - started
            restart_s = _RESTART_S if lived_s > _STABLE_S else min(restart_s * 2, _RESTART_S_MAX)
            await asyncio.sleep(restart_s)
            self.restarts += 1

    async def _live_once(self, index: int) -> None:
        directory = self._directory / f"{index}"
        shutil.rmtree(directory, ignore_errors=True)
        try:
            worker = await process.start(
                index,
                self._limits,
                directory=directory,
                threads_max=self._threads_max,
                serve=self._serve,
                on_lost=self._lost,
            )
        except OSError as error:
            structlog.get_logger().error("worker not started", worker=index, reason=str(error))
            return
        try:
            if await worker.until_ready():
                self._ready.add(index)
                if len(self._ready) == self._size:
                    self._all_ready.set()
                await self._on_up(worker)
                self._is_up(worker)
            await worker.until_lost()
        finally:
            code = await asyncio.shield(asyncio.ensure_future(worker.stopped()))
            if not self._stopping:
                structlog.get_logger().warning(
                    "worker died", worker=index, exit_code=code, place=worker.last_place
                )

    def _is_up(self, worker: WorkerProcess) -> None:
        if worker.link.is_lost:
            return
        self._up[worker.index] = worker
        if len(self._up) == self._size:
            self._all_up.set()

    def _lost(self, worker: WorkerProcess) -> None:
        if self._up.get(worker.index) is worker:
            del self._up[worker.index]
        self._on_lost(worker)
