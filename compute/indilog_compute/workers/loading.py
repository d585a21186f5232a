"""Imports code in worker processes; new code first in a trial process, which runs no calls.

An import runs the code, which may end the process, crash the interpreter or never return. So new
code is first imported in a trial process, which then ends. `Applications` calls `load_into` and
`Trials`.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
from pathlib import Path
from typing import Final

from indilog.base.errors import DeployError, NotReadyError
from indilog.config import NodeConfig
from indilog.link.link_messages import (
    Answer,
    Failed,
    Greeting,
    Limits,
    LinkLostError,
    Question,
    error_from,
)
from indilog.link.worker_messages import Load, Loaded
from indilog_compute.workers.process import StartWorker, Worker, ready_in_time

_TRIALS_MAX: Final = 2
"""Largest number of concurrent trial processes; further imports wait."""
_TRIAL: Final = -1
"""Worker index of a trial process."""


async def load_into(worker: Worker, load: Load, *, timeout_s: float) -> Loaded:
    """Import the sources of `load` in `worker`.

    A worker that has not finished the import within `timeout_s` seconds is ended.

    Raises:
        DeployError: the sources do not import, or the worker crashed during the import.
        NotReadyError: the worker was lost before it began the import.
    """
    try:
        async with asyncio.timeout(timeout_s):
            answer: Answer = await worker.link.ask(load)
    except TimeoutError:
        worker.abort()
        await worker.stopped()
        raise DeployError(
            f"{_where(worker)}the code did not import within {timeout_s:g} s; move work out of "
            "module level."
        ) from None
    if isinstance(answer, Loaded):
        worker.deployments.add(load.deployment)
        return answer
    if isinstance(answer, Failed) and answer.kind != LinkLostError.__name__:
        raise error_from(answer)
    ended = _ended(await worker.stopped())
    raise DeployError(f"{_where(worker)}importing the code ends the Python process ({ended}).")


def _where(worker: Worker) -> str:
    return f"{worker.last_place}: " if worker.last_place else "At module level "


def _ended(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
    except ValueError:
        return f"signal {-code}"


class Trials:
    """Imports code in trial processes.

    Args:
        limits: the limits that a trial process must know.
        directory: contains a private directory for each process.
        node: settings that limit import time and logged output.
        start: starts a process.
    """

    def __init__(
        self, limits: Limits, directory: Path, node: NodeConfig, start: StartWorker
    ) -> None:
        self._limits = limits
        self._start = start
        self._directory = directory
        self._import_timeout_s = node.functions.import_timeout_s
        self._functions = node.functions
        self._numbers = itertools.count(1)
        self._running: set[Worker] = set()
        self._stopping = False
        self._slots = asyncio.Semaphore(_TRIALS_MAX)

    async def try_import(self, load: Load) -> Loaded:
        """Import the sources of `load` in a trial process; return the application that they define.

        Raises:
            DeployError: the sources do not import; the message names file and line.
            NotReadyError: no process could be started.
        """
        async with self._slots:
            if self._stopping:
                raise self._stopped()
            directory = self._directory / f"trial-{next(self._numbers)}"
            try:
                return await self._tried(load, directory)
            except OSError as error:
                raise NotReadyError(
                    f"No process could be started to import the code: {error}."
                ) from error
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    async def stop(self) -> None:
        """End all trial processes; later calls of `try_import` fail."""
        self._stopping = True
        running = list(self._running)
        for worker in running:
            worker.kill()
        await asyncio.gather(*(worker.stopped() for worker in running))

    def _stopped(self) -> NotReadyError:
        return NotReadyError("The platform stopped before the code was deployed.")

    async def _tried(self, load: Load, directory: Path) -> Loaded:
        worker = await self._start(
            _TRIAL,
            self._limits,
            directory=directory,
            threads_max=1,
            functions=self._functions,
            serve=_refused,
            on_lost=lambda _: None,
        )
        self._running.add(worker)
        try:
            if not await ready_in_time(worker):
                raise NotReadyError("The process that imports new code does not start; try again.")
            return await load_into(worker, load, timeout_s=self._import_timeout_s)
        except DeployError:
            if self._stopping:
                raise self._stopped() from None
            raise
        finally:
            self._running.discard(worker)
            worker.kill()
            await asyncio.shield(asyncio.ensure_future(worker.stopped()))


def _refused(_worker: Worker, _call: int, _message: Question | Greeting) -> None:
    raise NotReadyError("Code that is being imported cannot use the platform yet.")
