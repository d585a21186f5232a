"""The node's end of the connection to its supervisor. A new supervisor may replace the old one.

A supervisor starts a node with one end of a socket pair. The node sends lines over this socket:
`up` when its roles run, `ready DETAIL` when it serves, and `failed SENTENCE` if it cannot start. It
sends `drained` when its gateway has ended and its roles still run. After the node is ready, its
event loop sends `heartbeat`. A supervisor that gets no heartbeat for `hang_s` seconds kills the
node (`supervised_process`).

A ready node outlives its supervisor and continues to serve. It listens at a Unix socket in the
run's directory. The next supervisor connects there and adopts the node. This supervisor gets `ready
DETAIL` and then the heartbeats. A node that is not ready ends with its supervisor, because it needs
the supervisor's metadata store to start. A drained node also ends with its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

HEARTBEATS_PER_HANG: Final = 5
"""Heartbeats that a node sends within `hang_s`. So a few late heartbeats are harmless."""
_BACKLOG: Final = 4


def control_address(directory: Path, name: str) -> Path:
    """Return the Unix socket at which the node `name` of a run can be adopted."""
    return directory / f"{name}.control"


class SupervisorLink:
    """Sends lines to the node's present supervisor, if there is one.

    Created and used on the running event loop.

    Args:
        descriptor: a socket to the supervisor that started the node; None: the node has no
            supervisor.
        listen_at: the Unix socket for later supervisors; None: the node ends with its first
            supervisor.
        on_gone: called when the node has lost its supervisor and must end.

    Attributes:
        was_ready: whether `ready` was called.
    """

    def __init__(
        self, descriptor: int | None, listen_at: Path | None, on_gone: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self._listen_at = listen_at
        self._listener: socket.socket | None = None
        self._supervisor: socket.socket | None = None
        self._detail = ""
        self._heartbeat: asyncio.TimerHandle | None = None
        self._is_drained = False
        self.was_ready = False
        if descriptor is not None:
            self._connect(socket.socket(fileno=os.dup(descriptor)))
            os.close(descriptor)  # child processes do not inherit the duplicate

    def up(self) -> None:
        """Report that the roles run. They may still wait for other nodes."""
        self._send_line("up")

    def drained(self) -> bool:
        """Report that the gateway has ended and no call runs here any more. Return whether there is
        a supervisor.
        """
        self._is_drained = True
        self._send_line("drained")
        return self._supervisor is not None

    def ready(self, detail: str, *, hang_s: float | None = None) -> None:
        """Report that the node is ready, with the text `detail`, such as the gateway's URL. With
        `hang_s`, send heartbeats from now on.
        """
        self.was_ready, self._detail = True, detail
        if self._listen_at is not None:
            self._listen(self._listen_at)
        self._send_line(f"ready {detail}")
        if hang_s is not None:
            self._beat(hang_s / HEARTBEATS_PER_HANG)

    def failed(self, sentence: str) -> None:
        """Report why the node cannot start or continue."""
        self._send_line(f"failed {' '.join(sentence.split())}")

    def close(self) -> None:
        """Close both sockets. May be called again."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._disconnect()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _listen(self, address: Path) -> None:
        address.unlink(missing_ok=True)  # left by an earlier process of this node
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(0)
        self._loop.add_reader(self._listener.fileno(), self._accept_supervisor)

    def _accept_supervisor(self) -> None:
        """Connect to a new supervisor instead of the old one. The lock of the metadata store
        permits only one supervisor.
        """
        assert self._listener is not None
        try:
            supervisor, _ = self._listener.accept()
        except OSError:
            return  # the supervisor closed the connection again
        self._disconnect()
        self._connect(supervisor)
        self._send_line(f"ready {self._detail}")

    def _connect(self, supervisor: socket.socket) -> None:
        supervisor.settimeout(0)
        self._supervisor = supervisor
        self._loop.add_reader(supervisor.fileno(), self._on_readable)

    def _disconnect(self) -> None:
        if self._supervisor is not None:
            self._loop.remove_reader(self._supervisor.fileno())
            self._supervisor.close()
            self._supervisor = None

    def _beat(self, interval_s: float) -> None:
        self._heartbeat = self._loop.call_later(interval_s, self._beat, interval_s)
        self._send_line("heartbeat")

    def _send_line(self, line: str) -> None:
        if self._supervisor is not None:
            # If the supervisor has ended, `_on_readable` disconnects.
            with contextlib.suppress(OSError):
                self._supervisor.send(f"{line}\n".encode())

    def _on_readable(self) -> None:
        assert self._supervisor is not None
        try:
            if self._supervisor.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._disconnect()
        if self._listener is None or self._is_drained:
            self._on_gone()
