"""The fork server: one process that has imported the modules of a node, and forks the nodes of this
machine (docs/decisions/0034).

To start an interpreter and import a node's modules takes half a second of CPU time; a fork takes
milliseconds. `NodeStarter` runs the fork server. A Unix socket that preserves message boundaries
connects `NodeStarter` and the fork server:

- `ready`: the fork server has imported everything.
- A request is the command of a node, as arguments separated by zero bytes. It carries the
  descriptors that the node gets (`SCM_RIGHTS`). The first descriptor is the node's socket to its
  supervisor.
- The answer is `started PID` with a pidfd of the child, or `refused REASON`.
- `ended PID STATUS` follows when the child has ended; status -N means signal N.

The fork server has one thread and no event loop. A fork copies only the calling thread, so a lock
that another thread holds would stay locked in the child. The fork server ends when the other end of
its socket is closed; its children continue. A child runs `node_process.main`.
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
from typing import Final, NamedTuple

NODE_PROGRAM: Final = (sys.executable, "-m", "indilog.node")
"""The first arguments of a node's command, whether the node is executed or forked."""
REQUEST_BYTES_MAX: Final = 64 * 1024
DESCRIPTORS_MAX: Final = 8
COMMAND_ROOM_BYTES: Final = 512
"""Length of a dummy argument of the fork server, which reserves room for the command lines of its
children.
"""
_THREADS_OF_BLAS: Final = "OPENBLAS_NUM_THREADS"


def command(descriptor: int) -> list[str]:
    """Return the command of a fork server whose socket to its starter is `descriptor`."""
    program = [sys.executable, "-m", "indilog.runtime.cluster.fork_server"]
    return [*program, "--fd", str(descriptor), "--room", "x" * COMMAND_ROOM_BYTES]


class Request(NamedTuple):
    """A request to run a node: its command and its descriptors."""

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
        """Serve until the other end of the socket is closed.

        Returns:
            In a child: the request for the node to run. In the fork server: None, at its end.
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
        os.setsid()  # Ctrl-C at a terminal is for the supervisor alone
        self._channel.close()
        for descriptor in self._children:
            os.close(descriptor)

    def _reap(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        pid, status = os.waitpid(self._children.pop(descriptor), 0)
        self._channel.send(b"ended %d %d" % (pid, os.waitstatus_to_exitcode(status)))


def show_command(command: Sequence[str]) -> None:
    """Make `ps` and /proc/PID/cmdline show `command` as the command of this process.

    The shown command is cut to the length of the command line with which the process was executed.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5))
    text = b"".join(argument.encode() + b"\0" for argument in command)
    room = end - start
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)


def main() -> None:
    """Serve until the starter has ended. A child runs its node, then exits."""
    parser = argparse.ArgumentParser("indilog.runtime.cluster.fork_server")
    parser.add_argument("--fd", type=int, required=True, help="socket to the starter")
    parser.add_argument("--room", help="room for the commands of the nodes")
    given = parser.parse_args()
    show_command(command(given.fd)[:-2])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    node_main = imported_node_main()
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        sys.exit(f"The fork server cannot fork: an import has started a thread ({threads} run).")
    gc.collect()
    gc.freeze()  # a garbage collection in a child would copy all shared pages
    request = ForkServer(socket.socket(fileno=given.fd)).serve()
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        link = ("--supervisor-fd", str(request.descriptors[0]))
        show_command([*request.command, *link])
        sys.argv[:] = [*request.command[2:], *link]
        node_main([*request.command[len(NODE_PROGRAM) :], *link])


def imported_node_main() -> Callable[[Sequence[str]], None]:
    """Import a node, without the threads that numpy's OpenBLAS starts when it is loaded."""
    given = os.environ.get(_THREADS_OF_BLAS)
    os.environ[_THREADS_OF_BLAS] = "1"
    from indilog.runtime.cluster.node_process import main as node_main

    if given is None:
        del os.environ[_THREADS_OF_BLAS]
    else:
        os.environ[_THREADS_OF_BLAS] = given
    return node_main


if __name__ == "__main__":
    main()
