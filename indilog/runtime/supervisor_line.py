"""How a process that was started by another one speaks with it, and learns that it is gone.

Both are connected by a socket pair. The started process writes one line when it is ready (`ready
DETAIL`) or cannot start (`failed SENTENCE`); when its end reads as closed, whoever started it is
gone, even by kill -9, and it ends too. Nodes have such a line to the supervisor
(`supervised_process`), and the platform of `./start` has one to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable


class SupervisorLine:
    """The process's end of the socket to its supervisor; without one, speaks to nobody.

    Made and used on the running event loop.

    `on_gone` is called when the supervisor has died. `was_ready`: whether `ready` was called.
    """

    def __init__(self, descriptor: int | None, on_gone: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self.was_ready = False
        self._socket: socket.socket | None = None
        if descriptor is not None:
            self._socket = socket.socket(fileno=os.dup(descriptor))
            os.close(descriptor)  # the duplicate is not inherited: no child of ours keeps it open
            self._socket.settimeout(0)
            self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def ready(self, detail: str) -> None:
        """Say that the node is ready; `detail` is for people."""
        self.was_ready = True
        self._say(f"ready {detail}")

    def failed(self, sentence: str) -> None:
        """Say why the node cannot start."""
        self._say(f"failed {' '.join(sentence.split())}")

    def close(self) -> None:
        """Let go of the socket. May be called again."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _say(self, line: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # gone, or not listening: we notice otherwise
                self._socket.send(f"{line}\n".encode())

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            if self._socket.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.close()
        self._on_gone()
