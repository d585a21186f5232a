"""The stream for the log lines of a process (`indilog.base.telemetry`). It never blocks the
process.

A reader of a pipe or terminal may stop reading. The system then buffers 64 KiB, and a further write
would block until the reader continues. So a thread writes to such streams.
"""

from __future__ import annotations

import atexit
import os
import stat
import threading  # noqa: TID251 - writes to a reader that may stop reading
import time  # noqa: TID251 - waits at the end of the process
from collections import deque
from contextlib import suppress
from typing import Final, TextIO

WAITING_BYTES_MAX: Final = 1024 * 1024
"""Bytes of lines that wait for the reader; further lines are dropped and counted."""
_DROPPED: Final = b'{"event": "log lines dropped", "level": "warning", "lines": %d}\n'
_END_S_MAX: Final = 1.0
"""Seconds that the end of the process waits for the reader."""


class LogStream:
    """Writes lines to a stream whose reader may disappear or stop reading.

    A node may outlive its supervisor, and also the terminal or pipe that receives its lines. So
    lines that cannot be written are dropped. A thread writes the lines for a pipe, socket or
    terminal. If more than `WAITING_BYTES_MAX` bytes would wait, further lines are dropped until all
    waiting lines are written. Then a line says how many were dropped.

    Args:
        stream: takes the lines.
        waits: write each line directly, without a thread. The reader must never stop reading.
    """

    def __init__(self, stream: TextIO, *, waits: bool = False) -> None:
        self._stream = stream
        self._fd = None if waits else _reader_fd(stream)
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._pid = 0
        """Id of the process in which the thread runs. A forked process starts its own thread."""
        self._starting = threading.Lock()
        if self._fd is not None:
            atexit.register(self.drain)

    def write(self, text: str) -> int:
        """Write or queue `text`; drop it if that is impossible. Never blocks for a reader."""
        if self._fd is None:
            with suppress(OSError):
                self._stream.write(text)
            return len(text)
        line = text.encode(errors="backslashreplace")
        with self._starting:
            if self._pid != os.getpid():
                self._start()
        with self._changed:
            if self._dropped or self._bytes + len(line) > WAITING_BYTES_MAX:
                self._dropped += 1
                self._changed.notify_all()
            else:
                self._lines.append(line)
                self._bytes += len(line)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it is written without the thread. The thread does not buffer."""
        if self._fd is None:
            with suppress(OSError):
                self._stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def drain(self) -> None:
        """Wait until all lines are written, for a second at most."""
        until = time.monotonic() + _END_S_MAX
        with self._changed:
            while self._pid == os.getpid() and self._bytes:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    return

    def _start(self) -> None:
        self._changed = threading.Condition()
        self._lines, self._bytes, self._dropped = deque(), 0, 0
        threading.Thread(target=self._run, name="log", daemon=True).start()
        self._pid = os.getpid()

    def _run(self) -> None:
        assert self._fd is not None, "only streams with a reader have a thread"
        while True:
            with self._changed:
                while not (self._lines or self._dropped):
                    self._changed.wait()
                if self._lines:
                    line = self._lines[0]
                else:
                    line = _DROPPED % self._dropped
                    self._dropped = 0
                    self._lines.append(line)
                    self._bytes += len(line)
            with suppress(OSError):
                _write_all(self._fd, line)
            with self._changed:
                self._lines.popleft()
                self._bytes -= len(line)
                self._changed.notify_all()


def _reader_fd(stream: TextIO) -> int | None:
    """Return the descriptor of a stream that has a reader; None: it is a file, or in memory."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError, AttributeError):
        return None
    return fd if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd) else None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
