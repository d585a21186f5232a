"""Starts worker processes, and connects them to the compute node."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from indilog.link.link import Link, SocketLink
from indilog.link.link_messages import LINK_VERSION, Greeting, Limits, Question, Welcome
from indilog.link.worker_messages import Ready
from indilog.runtime.descriptors import given_limit
from indilog.runtime.forking.fork_starter import ForkStarter
from indilog.runtime.forking.held_process import HeldProcess
from indilog_compute.workers.claims import NodeClaims, claims_memory
from indilog_compute.workers.process import (
    OutputLimits,
    Serve,
    Worker,
    WorkerPipes,
    WorkerProcess,
    handle_message,
)
from indilog_compute.workers.starting import fork_server
from indilog_compute.workers.starting.environment import environment_of_worker
from indilog_compute.workers.starting.fork_server import WORKER_PROGRAM


class _Executed(HeldProcess):
    """A process that was executed, not forked."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process.pid, os.pidfd_open(process.pid))
        self._process = process

    async def exit_status(self) -> int:
        """Return its exit status."""
        return await self._process.wait()


class _Made(NamedTuple):
    """A worker that was started, and this end of what connects it."""

    process: HeldProcess
    pipes: WorkerPipes
    claims: NodeClaims
    stream: socket.socket


class WorkerStarter:
    """Starts worker processes: a `StartWorker`. They are forked from a process that has imported
    what a worker needs (docs/decisions/0069). If that fails, they are executed.

    Args:
        environment: names of further environment variables that the workers get.
    """

    def __init__(self, environment: Collection[str] = ()) -> None:
        self._environment = environment
        self._forks = ForkStarter(fork_server.command, environment_of_worker(environment))

    async def close(self) -> None:
        """End the process that forks workers, after all workers have ended."""
        await self._forks.close()

    async def __call__(
        self,
        index: int,
        limits: Limits,
        *,
        directory: Path,
        threads_max: int,
        output: OutputLimits,
        serve: Serve,
        on_lost: Callable[[Worker], None],
        on_threads_left: Callable[[Worker], None] = lambda _: None,
    ) -> WorkerProcess:
        """Start a worker process, which creates its private `directory`; see `StartWorker`."""
        made = await self._made(_arguments(limits, directory, threads_max))
        ready = asyncio.Event()
        worker: WorkerProcess

        def served(_link: Link, call: int, message: Question | Greeting) -> None:
            if isinstance(message, Ready):
                assert message.version == LINK_VERSION, "a worker runs the same code"
                ready.set()
            else:
                handle_message(worker, call, message, serve, on_threads_left)

        def lost(_link: Link) -> None:
            worker.lost()
            on_lost(worker)

        link = Link(served, message_bytes_max=limits.message_bytes_max, on_lost=lost)
        worker = WorkerProcess(
            index,
            made.process,
            made.pipes,
            link=link,
            ready=ready,
            directory=directory,
            claims=made.claims,
            output=output,
        )
        made.stream.setblocking(False)  # noqa: FBT003 - its only form
        try:
            await made.pipes.open()
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: SocketLink(link), sock=made.stream)
        except BaseException:  # also if the node stops now: no process may remain
            worker.kill()
            await asyncio.shield(asyncio.ensure_future(worker.stopped()))
            raise
        link.tell(Welcome(LINK_VERSION, limits))
        return worker

    async def _made(self, arguments: Sequence[str]) -> _Made:
        """Start a worker, which is not connected yet."""
        memory, (ours, theirs) = claims_memory(), socket.socketpair()
        try:
            claims, pipes = NodeClaims(memory), WorkerPipes()
            try:
                given = (theirs.fileno(), memory, *pipes.theirs)
                process = await self._process(arguments, given)
            except BaseException:
                pipes.close()
                raise
            finally:
                pipes.give()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        return _Made(process, pipes, claims, ours)

    async def _process(
        self, arguments: Sequence[str], given: tuple[int, int, int, int]
    ) -> HeldProcess:
        """Fork or execute a worker that gets the descriptors `given` (`fork_server`)."""
        try:
            return await self._forks.start([*WORKER_PROGRAM, *arguments], given)
        except OSError as error:
            structlog.get_logger().warning(
                "worker is executed, because the fork server failed", reason=str(error)
            )
        link, claims, stdin, stdout = given
        return _Executed(
            await asyncio.create_subprocess_exec(
                *WORKER_PROGRAM,
                *arguments,
                *("--fd", str(link)),
                *("--claims-fd", str(claims)),
                stdin=stdin,
                stdout=stdout,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(link, claims),
                env=environment_of_worker(self._environment),
                start_new_session=True,  # Ctrl-C at the terminal must reach the node only
            )
        )


def _arguments(limits: Limits, directory: Path, threads_max: int) -> list[str]:
    return [
        *("--directory", str(directory)),
        *("--threads", str(threads_max)),
        *("--message-bytes-max", str(limits.message_bytes_max)),
        *("--open-files", str(given_limit())),
    ]
