"""A fork server: a process that has imported what other processes need, and forks them.

Starting an interpreter and importing modules takes up to a second of processor time; a fork takes
milliseconds. `ForkStarter` runs a fork server. A Unix socket that preserves message boundaries
connects them:

- `ready`: the fork server has imported everything.
- A request is the command of a process, its arguments separated by zero bytes, with the descriptors
  that the process gets (`SCM_RIGHTS`).
- The answer is `started PID` with a pidfd of the child, or `refused REASON`.
- `ended PID STATUS` follows when the child has ended; status -N means signal N.

The fork server has one thread and no event loop. A fork copies only the calling thread, so a lock
held by another thread would stay locked in the child. The fork server ends when the other end of
its socket is closed; its children continue.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

REQUEST_BYTES_MAX: Final = 64 * 1024
DESCRIPTORS_MAX: Final = 8
COMMAND_ROOM_BYTES: Final = 512
"""Length of a dummy argument of the fork server, which reserves room for the command lines of its
children.
"""


def command_of(module: str, descriptor: int, *options: str) -> list[str]:
    """Return the command of a fork server.

    Args:
        module: its main function calls `serve_forks`.
        descriptor: of the socket to its starter.
        options: options of the interpreter.
    """
    program = [sys.executable, *options, "-m", module]
    return [*program, "--fd", str(descriptor), "--room", "x" * COMMAND_ROOM_BYTES]


class Request(NamedTuple):
    """A request to run a process: its command and its descriptors."""

    command: list[str]
    descriptors: list[int]


class ForkServer:
    """Forks a child for each request.

    Args:
        channel: socket to the process that sends requests.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}
        """Process ids by pidfd."""
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def serve(self) -> Request | None:
        """Serve until the other end is closed.

        Returns:
            In a child: what it is to run. In the fork server: None, at its end.
        """
        self._channel.send(b"ready")
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                elif (request := self._next_request()) is None:
                    return None
                elif self._fork(request):
                    return request

    def _next_request(self) -> Request | None:
        """Return the next request; None: the other end is gone."""
        command, descriptors, _, _ = socket.recv_fds(
            self._channel, REQUEST_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        return Request(command.decode().split("\0"), descriptors) if command else None

    def _fork(self, request: Request) -> bool:
        """Fork a child and report it; return whether this process is the child."""
        try:
            pid = os.fork()
        except OSError as error:
            self._channel.send(f"refused {error}".encode())
        else:
            if pid == 0:
                self._become_child()
                return True
            descriptor = os.pidfd_open(pid)
            self._children[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
            socket.send_fds(self._channel, [b"started %d" % pid], [descriptor])
        for given in request.descriptors:
            os.close(given)
        return False

    def _become_child(self) -> None:
        """Close all descriptors of the fork server and of its other children."""
        os.setsid()  # Ctrl-C at a terminal is not for it
        self._channel.close()
        for descriptor in self._children:
            os.close(descriptor)

    def _reap(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        pid, status = os.waitpid(self._children.pop(descriptor), 0)
        self._channel.send(b"ended %d %d" % (pid, os.waitstatus_to_exitcode(status)))


Run: TypeAlias = Callable[[Request], None]
"""Runs a process that was requested, in a child of the fork server."""


def serve_forks(module: str, load: Callable[[], Run]) -> None:
    """Be a fork server until its starter has ended. A child runs what was requested, then exits.

    Args:
        module: name of the module whose main function calls this.
        load: imports what the processes need; returns the function that runs one.
    """
    parser = argparse.ArgumentParser(module)
    parser.add_argument("--fd", type=int, required=True, help="socket to the starter")
    parser.add_argument("--room", help="room for the commands of the children")
    given = parser.parse_args()
    show_command(sys.orig_argv[:-2])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = load()
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        sys.exit(f"The fork server cannot fork: an import has started a thread ({threads} run).")
    gc.collect()
    gc.freeze()  # a garbage collection in a child would copy all shared pages
    request = ForkServer(socket.socket(fileno=given.fd)).serve()
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(request)


def show_command(command: Sequence[str]) -> None:
    """Make `ps` and /proc/PID/cmdline show `command` as the command of this process.

    It is cut to the length of the command line with which the process was executed.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5))
    text = b"".join(argument.encode() + b"\0" for argument in command)
    room = end - start
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
