"""One worker process, on the compute node's side: its start, its link and its end.

`Worker` is the interface that `WorkerPool` and `CallRouter` use; a `StartWorker` starts a worker.
`start` starts a worker process; `in_process` has a worker inside this process, for tests.

The link is a Unix socket pair (docs/decisions/0003), so the end of the stream shows at once that
the process has died. The worker's output goes to the log, line by line (`output`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import structlog

from indilog.base.deployed import ServiceState
from indilog.config.function_groups import FunctionsConfig
from indilog.link.link import Link, SocketLink
from indilog.link.link_messages import LINK_VERSION, Greeting, Limits, Question, Welcome
from indilog.link.worker_messages import MemoryUsedUp, Ready, ServicesChanged, ThreadsLeft
from indilog.runtime.descriptors import given_limit
from indilog_compute.workers.claims import NodeClaims, claims_memory
from indilog_compute.workers.crash_location import read_crash_location
from indilog_compute.workers.output import OutputLines
from indilog_compute.workers.starting.environment import environment_of_worker

START_S: Final = 60.0
"""Seconds after which a worker that cannot run functions is killed."""
STOP_S: Final = 5.0
"""Seconds after which a worker that does not end is killed."""
_LAST_ANSWERS_S: Final = 0.5
"""Seconds after the exit of a worker until its link is closed, if the link has not ended by then.
Its last messages are read in this time.
"""
_OUTPUT_S: Final = 1.0
"""Longest time in seconds in which the last output of an exited worker is read."""
_DROPS_REPORTED_S: Final = 1.0
"""Seconds between two log lines that report dropped lines."""
_READ_BYTES: Final = 64 * 1024
_SIGNALS_OF_OTHERS: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)
"""Signals that people, supervisors and the out-of-memory killer send; a crash causes other signals.
"""


class Worker(Protocol):
    """A running worker.

    Attributes:
        index: number of the worker on its node; its replacement has the same index.
        link: the link to the worker.
        claims: shows which calls the worker has begun.
        deployments: numbers of the deployments that the worker has loaded.
        threads_left: number of threads of the worker that still run although their calls have
            ended.
        is_memory_used_up: whether its code uses up the memory that it may have (`MemoryUsedUp`).
        services: the state of the worker's services.
        last_place: after the end of the worker, the line of deployed code at which it crashed;
            None: the line is not known.
        was_ended_by_others: after the end of the worker, whether the signal that ended it probably
            came from outside, and neither from its code nor from this node.
    """

    index: int
    link: Link
    claims: NodeClaims
    deployments: set[int]
    threads_left: int
    is_memory_used_up: bool
    services: tuple[ServiceState, ...]
    last_place: str | None
    was_ended_by_others: bool

    def __hash__(self) -> int:
        """Workers are keys of dictionaries."""
        ...

    @property
    def pid(self) -> int:
        """The id of the process in which the worker runs."""
        ...

    async def until_ready(self) -> bool:
        """Wait until the worker can run functions; False: the worker ended first."""
        ...

    async def until_lost_or_replaced(self) -> None:
        """Wait until the link is lost, or `replace` was called."""

    def replace(self) -> None:
        """Mark the worker for replacement; this ends `until_lost_or_replaced`."""

    def kill(self) -> None:
        """End the worker at once."""

    def abort(self) -> None:
        """End the worker in such a way that it writes its stack; kill it if it does not end."""

    async def stopped(self, *, within_s: float = STOP_S) -> int:
        """Close the link, and wait until the worker has ended; kill the worker after `within_s`
        seconds. Return its exit code.
        """
        ...


async def ready_in_time(worker: Worker) -> bool:
    """Wait until a worker can run functions; False: it ended first, or was killed because it took
    longer than `START_S`.
    """
    try:
        async with asyncio.timeout(START_S):
            return await worker.until_ready()
    except TimeoutError:
        structlog.get_logger().warning(
            "worker killed: it did not start", worker=worker.index, pid=worker.pid, after_s=START_S
        )
        worker.kill()
        return False


Serve: TypeAlias = Callable[[Worker, int, Question | Greeting], None]
"""Answers a question; gets the worker, the number of the question, and the question."""


def handle_message(
    worker: Worker,
    call: int,
    message: Question | Greeting,
    serve: Serve,
    on_report: Callable[[Worker], None],
) -> None:
    """Note the state that a worker reports; pass its other messages to `serve`."""
    match message:
        case ServicesChanged():
            worker.services = message.services
        case ThreadsLeft():
            worker.threads_left = message.count
            on_report(worker)
        case MemoryUsedUp():
            worker.is_memory_used_up = True
            on_report(worker)
        case _:
            serve(worker, call, message)


class StartWorker(Protocol):
    """Starts a worker, with a private `directory`."""

    async def __call__(
        self,
        index: int,
        limits: Limits,
        *,
        directory: Path,
        threads_max: int,
        functions: FunctionsConfig,
        serve: Serve,
        on_lost: Callable[[Worker], None],
        on_report: Callable[[Worker], None] = ...,
    ) -> Worker:
        """Return a new worker.

        Args:
            index: number of the worker on its node.
            limits: the limits that the worker must know.
            directory: the private directory for deployed sources; the worker creates it.
            threads_max: largest number of sync functions that the worker runs at once.
            functions: settings of workers: memory, logged output, environment variables.
            serve: gets the questions of the worker.
            on_lost: called when the link of the worker is lost, before its calls fail.
            on_report: called when `threads_left` or `is_memory_used_up` changes.

        Raises:
            OSError: the worker cannot be started.
        """
        ...


class WorkerProcess:
    """A running worker process: a `Worker`."""

    def __init__(
        self,
        index: int,
        process: asyncio.subprocess.Process,
        link: Link,
        ready: asyncio.Event,
        directory: Path,
        claims: NodeClaims,
        functions: FunctionsConfig,
    ) -> None:
        self.index = index
        self.link = link
        self.claims = claims
        self.threads_left = 0
        self.is_memory_used_up = False
        self.services: tuple[ServiceState, ...] = ()
        self.deployments: set[int] = set()
        self.last_place: str | None = None
        self.was_ended_by_others = False
        self._is_ended_here = False
        self._directory = directory
        self._process = process
        self._ready = ready
        self._lines = OutputLines(
            structlog.get_logger().bind(worker=index, pid=process.pid),
            lines_per_s_max=functions.worker_output_lines_per_s_max,
            bytes_per_s_max=functions.worker_output_bytes_per_s_max,
        )
        self._lost = asyncio.Event()
        self._over = asyncio.Event()
        self._output = asyncio.ensure_future(self._log_output())
        self._ending = asyncio.ensure_future(self._watch_end())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def until_ready(self) -> bool:
        """Wait until the process can run functions; False: the process died first."""
        waits = [asyncio.ensure_future(e.wait()) for e in (self._ready, self._lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._ready.is_set() and not self._lost.is_set()

    async def until_lost_or_replaced(self) -> None:
        """Wait until the link is lost, or `replace` was called."""
        await self._over.wait()

    def replace(self) -> None:
        """Mark the process for replacement; this ends `until_lost_or_replaced`."""
        self._over.set()

    def lost(self) -> None:
        """Handle the loss of the link: the process ends, or has ended."""
        self._lost.set()
        self._over.set()

    def kill(self) -> None:
        """End the process at once."""
        self._is_ended_here = True
        if self._process.returncode is None:
            self._process.kill()

    def abort(self) -> None:
        """End the process by a signal that makes it write its stack; kill it if it does not end."""
        self._is_ended_here = True
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGABRT)
            asyncio.get_running_loop().call_later(STOP_S, self.kill)

    def close_stdin(self) -> None:
        """Close the standard input of the process. The worker then ends, as after the death of its
        parent.
        """
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()

    async def stopped(self, *, within_s: float = STOP_S) -> int:
        """Close the link, and wait until the process has exited; kill the process after `within_s`
        seconds. Return its exit code.

        When this method returns, all processes of its process group were killed, and its output is
        logged.
        """
        self.link.close()
        ended = {self._ending}
        await asyncio.wait(ended, timeout=within_s)
        if self._process.returncode is not None and not self._is_ended_here:
            self.was_ended_by_others = -self._process.returncode in _SIGNALS_OF_OTHERS
        self.kill()
        await asyncio.wait(ended)
        await asyncio.wait({self._output}, timeout=_OUTPUT_S)
        self._output.cancel()
        # Another process may keep the pipes open forever. asyncio has no public way to close them.
        self._process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001
        self.last_place = self.last_place or read_crash_location(self._directory)
        assert self._process.returncode is not None, "it has ended"
        return self._process.returncode

    async def _watch_end(self) -> None:
        """Wait until the process has exited; then kill its process group and close the link.

        A child process that a function started may keep the link and the output open. So the ends
        of link and output do not show that the worker has exited.
        """
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # it is the leader of its process group
        while self._process.returncode is None:  # noqa: ASYNC110 - asyncio reaps it now
            await asyncio.sleep(0.001)
        if not self.link.is_lost:
            await asyncio.wait({asyncio.ensure_future(self._lost.wait())}, timeout=_LAST_ANSWERS_S)
            self.link.close()

    async def _log_output(self) -> None:
        """Log the worker's output until it ends."""
        output = self._process.stdout
        assert output is not None, "it was started with a pipe"
        loop = asyncio.get_running_loop()
        telling: asyncio.TimerHandle | None = None
        while chunk := await output.read(_READ_BYTES):
            try:
                self._lines.received(chunk, loop.time())
                if self._lines.has_dropped and (telling is None or loop.time() >= telling.when()):
                    telling = loop.call_later(_DROPS_REPORTED_S, self._lines.log_dropped)
            except OSError:  # the log cannot be written; the worker continues
                continue
        if telling is not None:
            telling.cancel()
        self._lines.ended()


async def start(
    index: int,
    limits: Limits,
    *,
    directory: Path,
    threads_max: int,
    functions: FunctionsConfig,
    serve: Serve,
    on_lost: Callable[[Worker], None],
    on_report: Callable[[Worker], None] = lambda _: None,
) -> WorkerProcess:
    """Start a worker process; see `StartWorker` for the arguments.

    Raises:
        OSError: the process cannot be started.
    """
    memory, (ours, theirs) = claims_memory(), socket.socketpair()
    try:
        claims = NodeClaims(memory)
        process = await _spawn(theirs, memory, limits, directory, threads_max, functions)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(memory)
    ready = asyncio.Event()
    worker: WorkerProcess

    def served(_link: Link, call: int, message: Question | Greeting) -> None:
        if isinstance(message, Ready):
            assert message.version == LINK_VERSION, "a worker runs the same code"
            ready.set()
        else:
            handle_message(worker, call, message, serve, on_report)

    def lost(_link: Link) -> None:
        worker.lost()
        on_lost(worker)

    link = Link(served, message_bytes_max=limits.message_bytes_max, on_lost=lost)
    worker = WorkerProcess(index, process, link, ready, directory, claims, functions)
    ours.setblocking(False)  # noqa: FBT003 - its only form
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: SocketLink(link), sock=ours)
    except BaseException:  # even if the node stops now, no process may remain
        worker.kill()
        await asyncio.shield(asyncio.ensure_future(worker.stopped()))
        raise
    link.tell(Welcome(LINK_VERSION, limits))
    return worker


async def _spawn(
    stream: socket.socket,
    claims: int,
    limits: Limits,
    directory: Path,
    threads_max: int,
    functions: FunctionsConfig,
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "indilog_compute.workers"),
        *("--fd", str(stream.fileno())),
        *("--claims-fd", str(claims)),
        *("--directory", str(directory)),
        *("--threads", str(threads_max)),
        *("--message-bytes-max", str(limits.message_bytes_max)),
        *("--open-files", str(given_limit())),
        *("--memory-bytes-max", str(functions.worker_memory_bytes_max)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(stream.fileno(), claims),
        env=environment_of_worker(functions.environment_passed),
        start_new_session=True,  # Ctrl-C at the terminal must reach the node only
    )
