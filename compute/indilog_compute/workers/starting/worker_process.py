"""A worker process: `python -m indilog_compute.workers --fd N --directory DIR --threads N`.

`process.start` starts this program; a `WorkerRunner` does its work. The process lowers its limit of
open files to the limit with which the platform was started, because functions must not use the
node's raised limit. It limits its memory to `worker_memory_bytes_max`. The process ends when its
link closes or its parent dies. The end of its standard input shows that the parent has died, even
while a function blocks the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop

from indilog.base import memory_errors
from indilog.base.telemetry import configure_logging
from indilog.link.link import Link, SocketLink
from indilog.link.link_messages import LINK_VERSION
from indilog.link.worker_messages import Ready
from indilog.runtime.garbage import collect_rarely
from indilog_compute.workers.claims import WorkerClaims
from indilog_compute.workers.crash_location import CrashLocation
from indilog_compute.workers.output import FunctionOutput, attributed, note_unawaited
from indilog_compute.workers.runner import WorkerRunner

_STACK_BYTES: Final = 8 << 20
"""Address space of a thread's stack if stacks have no limit."""
_LEFT_SHARE_MIN: Final = 8
"""If imports have left less than this part of the memory, as much counts as left."""
_OTHER_THREADS: Final = 8
"""Threads besides those of sync functions whose stacks do not count as memory of the worker."""


class _MemoryLimit:
    """Limits the memory that this process allocates; an allocation beyond it raises `MemoryError`.

    The system counts the address space of stacks as allocated. So the limit is raised for the stack
    of each thread of a sync function.

    Args:
        bytes_max: the limit; 0: there is none.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        self._stack_bytes = _STACK_BYTES if stack == resource.RLIM_INFINITY else stack
        self._threads = _OTHER_THREADS
        self._before_bytes = self.in_use()
        """Bytes in use before any code was imported."""
        self.begin_thread()

    def begin_thread(self) -> None:
        """Make room for the stack of a thread that begins."""
        if not self._bytes_max:
            return
        self._threads += 1
        limit = self._bytes_max + self._threads * self._stack_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def in_use(self) -> int:
        """Return the bytes of memory in use, without stacks."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def is_used_up(self, imported_bytes: int) -> bool:
        """Whether more than half of the memory that imports have left is in use, without garbage.
        The memory that imports took (`imported_bytes`) does not count: the next process needs it,
        too.
        """
        if not self._bytes_max:
            return False
        gc.collect()
        needed = self._before_bytes + imported_bytes
        left = max(self._bytes_max - needed, self._bytes_max // _LEFT_SHARE_MIN)
        return self.in_use() - needed > left // 2


async def _serve(given: argparse.Namespace) -> None:
    crash_location = CrashLocation(given.directory)
    claims = WorkerClaims(given.claims_fd)
    os.close(given.claims_fd)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    memory = _MemoryLimit(given.memory_bytes_max)
    runner = WorkerRunner(
        given.directory,
        threads_max=given.threads,
        claims=claims,
        around_import=crash_location.note_exits,
        on_thread=memory.begin_thread,
        memory_in_use=memory.in_use,
        is_memory_used_up=memory.is_used_up,
    )
    memory_errors.listen(lambda: loop.call_soon_threadsafe(runner.note_memory_error))
    _note_unhandled(loop)
    limit = given.message_bytes_max
    link = Link(runner.serve, message_bytes_max=limit, on_lost=lambda _: ended.set())
    stream = socket.socket(fileno=given.fd)
    stream.setblocking(False)  # noqa: FBT003 - its only form
    await loop.create_unix_connection(lambda: SocketLink(link), sock=stream)
    link.tell(Ready(LINK_VERSION))
    await ended.wait()


def _note_unhandled(loop: asyncio.AbstractEventLoop) -> None:
    """Note the errors of tasks and threads that deployed code began and does not wait for."""

    def of_task(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) is not None:
            memory_errors.note_error(error)
        loop.default_exception_handler(context)

    def of_thread(raised: threading.ExceptHookArgs) -> None:
        if raised.exc_value is not None:
            memory_errors.note_error(raised.exc_value)
        threading.__excepthook__(raised)

    loop.set_exception_handler(of_task)
    threading.excepthook = of_thread


def _run(given: argparse.Namespace) -> None:
    """Serve until the link closes, even if a task of a function raises SystemExit or
    KeyboardInterrupt in the event loop.
    """
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    serving = loop.create_task(_serve(given))
    while not serving.done():
        try:
            loop.run_until_complete(serving)
        except (KeyboardInterrupt, SystemExit) as error:
            structlog.get_logger().error(
                "a task raised through the event loop", kind=type(error).__name__
            )


def _die_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _limit_open_files(given: argparse.Namespace) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (given.open_files, hard))


def main() -> None:
    """Read the arguments, and run the worker until its link closes."""
    parser = argparse.ArgumentParser(prog="indilog_compute.workers")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--claims-fd", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--message-bytes-max", type=int, required=True)
    parser.add_argument("--open-files", type=int, required=True)
    parser.add_argument("--memory-bytes-max", type=int, required=True)
    given = parser.parse_args()
    _limit_open_files(given)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    configure_logging("json", processors=(attributed,), counts_repeats=False)
    note_unawaited()
    outputs = FunctionOutput(sys.stdout), FunctionOutput(sys.stderr)
    sys.stdout, sys.stderr = outputs
    given.directory.mkdir(parents=True, mode=0o700)
    collect_rarely()
    _run(given)
    for output in outputs:
        output.end_line()
    os._exit(0)  # does not wait for threads in which sync functions still run
