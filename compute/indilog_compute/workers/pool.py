"""Keeps worker processes running.

A process that ends is replaced. If it ended soon after its start, its replacement starts after a
pause, which grows each time. The number of processes may change (`resize`).

`process` starts a single worker. `FunctionHost` uses `WorkerPool`; `CallRouter` sends calls to the
workers.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from indilog.base.errors import NotReadyError
from indilog.base.restart_pauses import RestartPauses
from indilog.config import NodeConfig
from indilog.link.link_messages import Limits
from indilog_compute.workers.process import (
    START_S,
    STOP_S,
    Serve,
    StartWorker,
    Worker,
    ready_in_time,
)

_STOPPING_S: Final = 0.5
"""Seconds after `WorkerPool.stop` until a worker that has not ended is killed."""


class WorkerPool:
    """A number of worker processes.

    A process is also replaced if a thread of it still runs `worker_stop_s` seconds after the
    thread's call has ended. The old process gets no further calls, and ends after its last running
    call. Each worker index has at most one such old process besides the new one.

    Args:
        node: settings with the limits.
        directory: contains a private directory for each process; emptied when the pool starts.
        limits: the limits that the workers must know.
        start: starts a process.
        serve: gets the questions of the workers.
        on_up: awaited with a new process that can run functions; loads the applications.
        on_lost: called when a process is lost, before its calls fail.
        drained: awaited with an old process; stops sending calls to the process, and returns when
            its calls have ended.

    Attributes:
        restarts: number of restarts after a process has ended or had to be replaced.
    """

    def __init__(
        self,
        node: NodeConfig,
        *,
        directory: Path,
        limits: Limits,
        start: StartWorker,
        serve: Serve,
        on_up: Callable[[Worker], Awaitable[None]],
        on_lost: Callable[[Worker], None],
        drained: Callable[[Worker], Awaitable[None]],
    ) -> None:
        self._node = node
        self._size_at_start = node.functions.workers
        self._directory = directory
        self._limits = limits
        self._start_worker = start
        self._serve = serve
        self._on_up = on_up
        self._on_lost = on_lost
        self._drained = drained
        self._up: dict[int, Worker] = {}
        self._draining: dict[int, asyncio.Task[None]] = {}
        self._started = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wanted: set[int] = set()
        """Indexes of the workers that are kept running, without removed workers that still finish
        their calls.
        """
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._all_up = asyncio.Event()
        self._stopping = False
        self.restarts = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The processes that can run functions now."""
        return tuple(self._up.values())

    @property
    def size(self) -> int:
        """Number of workers that are kept running, including those that start."""
        return len(self._wanted)

    def resize(self, size: int) -> None:
        """Keep `size` workers running. A removed worker gets no further calls, and ends after its
        last running call.

        Only workers that take calls can be removed. If there are too few of them, the pool stays
        larger, and a later call of `resize` must remove the remaining workers.
        """
        while len(self._wanted) < size and not self._stopping:
            self._add()
        while len(self._wanted) > size and self._remove_one():
            pass

    async def start(self) -> None:
        """Start all processes, and wait until every process was ready once and all take calls.

        Raises:
            NotReadyError: the processes do not start; the log says why.
        """
        shutil.rmtree(self._directory, ignore_errors=True)
        self.resize(self._size_at_start)
        try:
            if self._size_at_start > 0:
                async with asyncio.timeout(START_S):
                    await self._all_ready.wait()
                await self._all_up.wait()  # `on_up` limits its own time
        except TimeoutError:
            await self.stop()
            raise NotReadyError("The function workers do not start; the log says why.") from None

    async def stop(self) -> None:
        """End all processes. When this method returns, they have exited, and their files are
        removed.
        """
        self._stopping = True
        for worker in list(self._up.values()):
            worker.link.close()
        tasks = [*self._tasks.values(), *self._draining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- internal

    def _add(self) -> None:
        """Start a worker under the smallest index that no process has."""
        used = self._tasks.keys() | self._draining.keys()
        index = next(index for index in itertools.count() if index not in used)
        self._wanted.add(index)
        self._tasks[index] = task = asyncio.ensure_future(self._keep(index))
        task.add_done_callback(lambda _: self._tasks.pop(index))

    def _remove_one(self) -> bool:
        """Let the removable worker with the greatest index finish its calls and end; False: no
        worker is removable.
        """
        removable = self._up.keys() - self._draining.keys()
        if not removable:
            return False
        index = max(removable)
        self._wanted.discard(index)
        self._up.pop(index).replace()
        return True

    async def _keep(self, index: int) -> None:
        clock, processes = asyncio.get_running_loop().time, self._node.processes
        pauses = RestartPauses(processes.restart_s_min, processes.restart_s_max)
        while not self._stopping:
            started = clock()
            await self._live_once(index)
            if index not in self._wanted:
                return
            await asyncio.sleep(pauses.after(clock() - started))
            self.restarts += 1

    async def _live_once(self, index: int) -> None:
        """Run one process until it is lost or must be replaced."""
        directory = self._directory / f"{index}-{next(self._started)}"
        try:
            worker = await self._start_worker(
                index,
                self._limits,
                directory=directory,
                threads_max=2 * self._node.functions.worker_calls_max,
                functions=self._node.functions,
                serve=self._serve,
                on_lost=self._lost,
                on_report=self._on_report,
            )
        except OSError as error:
            structlog.get_logger().error("worker not started", worker=index, reason=str(error))
            return
        try:
            if await ready_in_time(worker):
                self._ready.add(index)
                if len(self._ready) == self._size_at_start:
                    self._all_ready.set()
                await self._on_up(worker)
                self._is_up(worker)
            await worker.until_lost_or_replaced()
        except BaseException:
            await self._ended(worker, directory)
            raise
        if worker.link.is_lost:
            await self._ended(worker, directory)
        else:
            self._draining[index] = asyncio.ensure_future(self._drain(worker, directory))

    async def _drain(self, worker: Worker, directory: Path) -> None:
        try:
            await self._drained(worker)
        finally:
            await self._ended(worker, directory)
            del self._draining[worker.index]

    async def _ended(self, worker: Worker, directory: Path) -> None:
        """End a process, and remove its files."""
        within_s = _STOPPING_S if self._stopping else STOP_S
        code = await asyncio.shield(asyncio.ensure_future(worker.stopped(within_s=within_s)))
        shutil.rmtree(directory, ignore_errors=True)
        if self._stopping:
            return
        if worker.index not in self._wanted:
            structlog.get_logger().info("worker removed", worker=worker.index, exit_code=code)
            return
        structlog.get_logger().warning(
            "worker ended", worker=worker.index, exit_code=code, place=worker.last_place
        )

    def _is_up(self, worker: Worker) -> None:
        if worker.link.is_lost:
            return
        self._up[worker.index] = worker
        if len(self._up) == self._size_at_start:
            self._all_up.set()

    def _lost(self, worker: Worker) -> None:
        if self._up.get(worker.index) is worker:
            del self._up[worker.index]
        self._on_lost(worker)

    def _on_report(self, worker: Worker) -> None:
        if worker.is_memory_used_up:
            self._replace(worker, "its code uses up worker_memory_bytes_max")
        elif worker.threads_left > 0:
            asyncio.get_running_loop().call_later(
                self._node.functions.worker_stop_s, self._replace_if_stuck, worker
            )

    def _replace_if_stuck(self, worker: Worker) -> None:
        if worker.threads_left > 0:
            self._replace(worker, "threads of sync functions do not end")

    def _replace(self, worker: Worker, reason: str) -> None:
        is_up = self._up.get(worker.index) is worker
        if not is_up or worker.index in self._draining:
            return
        structlog.get_logger().warning(
            f"worker replaced: {reason}",
            worker=worker.index,
            pid=worker.pid,
            threads=worker.threads_left,
        )
        del self._up[worker.index]
        worker.replace()
