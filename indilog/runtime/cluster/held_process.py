"""Processes that a supervisor can signal and await, even if they are not its children.

`SupervisedProcess` holds them. `executed` and `NodeStarter` start them, and `connected` finds
processes of an earlier supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

STATUS_UNKNOWN: Final = -1
"""The exit status of a process whose parent does not report it."""
_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred`: process id, user, group."""


class Process(Protocol):
    """A process that can be signalled and awaited."""

    @property
    def pid(self) -> int:
        """The process id."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit status."""


class Start(Protocol):
    """Starts a process."""

    async def __call__(
        self, command: Sequence[str], inherited: Sequence[int]
    ) -> tuple[socket.socket, Process]:
        """Start `command` in a new session.

        `--supervisor-fd N` is added to the command. N is the process's descriptor of one end of a
        socket pair.

        Args:
            command: the program and its arguments.
            inherited: descriptors that the process keeps open.

        Returns:
            The other end of the socket pair, and the process.

        Raises:
            OSError: the process cannot be started.
        """


async def executed(
    command: Sequence[str], inherited: Sequence[int]
) -> tuple[socket.socket, Process]:
    """Start a process that executes `command`; see `Start`."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--supervisor-fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno(), *inherited],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at a terminal is for the supervisor alone
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


class HeldProcess:
    """A process that another process started. It is held by a descriptor (pidfd), so that a reused
    process id is never signalled.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._is_gone = False

    def terminate(self) -> None:
        """Send SIGTERM.

        Raises:
            ProcessLookupError: the process is gone.
        """
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. Errors are those of `terminate`."""
        self._signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until the process has ended, and return `STATUS_UNKNOWN`: only the process's parent
        gets the exit status. Call this once.
        """
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            # Also set if `wait` is cancelled, because the descriptor's number may be reused.
            self._is_gone = True
        return STATUS_UNKNOWN

    def _signal(self, number: signal.Signals) -> None:
        if self._is_gone:
            raise ProcessLookupError(self.pid)
        signal.pidfd_send_signal(self._descriptor, number)


def connected(control: Path) -> tuple[socket.socket, HeldProcess] | None:
    """Connect to the process that listens at `control`; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(0)  # a hung process with a full queue would block us
    try:
        connection.connect(str(control))
        size = _CREDENTIALS.size
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, _, _ = _CREDENTIALS.unpack(peer)
        descriptor = os.pidfd_open(pid)
    except OSError:
        connection.close()
        return None
    with contextlib.suppress(BlockingIOError):
        # The end of the stream shows that the process died before its descriptor was opened. Its id
        # may have been reused.
        if not connection.recv(1, socket.MSG_PEEK):
            connection.close()
            os.close(descriptor)
            return None
    return connection, HeldProcess(pid, descriptor)
