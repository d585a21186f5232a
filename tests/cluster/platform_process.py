"""`indilog up` as a process of its own, for tests that talk to it over HTTP and kill it."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 200.0
ENDS_S_MAX = 120.0
SETTINGS = {
    "INDILOG_NODE_SEGMENT_BYTES": str(8 * 1024 * 1024),
    "INDILOG_NODE_WORKERS": "1",
    "INDILOG_NODE_RESTART_S_MIN": "0.05",
    "INDILOG_NODE_RESTART_S_MAX": "0.5",
    # On a busy machine a process is silent now and then, and an append or a check takes long.
    "INDILOG_NODE_HANG_S": "600",
    "INDILOG_NODE_READY_APPEND_S": "60",
    "INDILOG_NODE_WORKER_STOP_S": "60",
}
_MARK = "TESTED_PLATFORM"
"""Environment variable that names the platform in its processes, except function workers."""


class PlatformProcess:
    """A platform that is up; `url` is its gateway's."""

    def __init__(self, process: subprocess.Popen[str], url: str, mark: str) -> None:
        self._process = process
        self._mark = mark
        self.url = url

    @property
    def pid(self) -> int:
        """The first process of the platform."""
        return self._process.pid

    def interrupted(self) -> str:
        """Let Ctrl-C stop the platform, and return what it logged."""
        self._process.send_signal(signal.SIGINT)
        _, logged = self._process.communicate(timeout=ENDS_S_MAX)
        assert self._process.returncode == 0, logged
        return logged

    def started(self) -> list[int]:
        """Return the processes that it has started, and those that these have."""
        return self._processes()

    def signal_node(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process of one node of a platform with `--processes`."""
        for pid in self._processes():
            command: list[bytes] = []
            with suppress(OSError):  # it may have ended meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--name" in command and name.encode() in command:
                _send(pid, number)
                return
        raise AssertionError(f"there is no process of {name}")

    def kill_everything(self) -> None:
        """End the platform and all processes that it started with SIGKILL, all at once."""
        pids = [self._process.pid, *self._processes()]
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        pids = [self._process.pid, *self._processes()]
        for pid in pids:
            _send(pid, signal.SIGKILL)
        self._process.wait(ENDS_S_MAX)

    def _processes(self) -> list[int]:
        """Return all processes of the platform but the first, also nodes whose parent has ended."""
        marked = [self._process.pid, *_marked(self._mark)]
        found = dict.fromkeys(pid for root in marked for pid in (root, *_descendants(root)))
        return [pid for pid in found if pid != self._process.pid]


@contextmanager
def platform(
    directory: Path,
    *options: str,
    open_files_max: int | None = None,
    python: Path = Path(sys.executable),
    cwd: Path = ROOT,
) -> Iterator[PlatformProcess]:
    """Run `indilog up` in `directory` while the block runs; end it in order if it still runs.

    The platform also ends when this process ends, however that happens. `open_files_max` is the
    limit of open files of its process; `python` is the interpreter of another environment.
    """

    def limited() -> None:
        accept_interrupts()
        if open_files_max is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files_max, open_files_max))

    mark = uuid.uuid4().hex
    ours, theirs = socket.socketpair()
    fd = str(theirs.fileno())
    command = [str(python), "-m", "indilog", "up", "--data", str(directory), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--supervisor-fd", fd, *options],
        pass_fds=[theirs.fileno()],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        env=os.environ | SETTINGS | {_MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limited,  # noqa: PLW1509 - it calls nothing that takes a lock
    )
    theirs.close()
    try:
        assert process.stdout is not None
        there, _, _ = select.select([process.stdout], [], [], START_S_MAX)
        line = process.stdout.readline() if there else ""
        found = re.search(r"https?://[\d.:]+", line)
        if found is None:
            PlatformProcess(process, "", mark).kill_everything()
            assert process.stderr is not None
            raise AssertionError(f"the platform did not start: {line} {process.stderr.read()}")
        yield PlatformProcess(process, found.group(), mark)
    finally:
        if process.poll() is None:
            process.terminate()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate(timeout=ENDS_S_MAX)
        ours.close()


def accept_interrupts() -> None:
    """Let a child process get SIGINT, also if it is ignored or blocked in this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _marked(mark: str) -> list[int]:
    """Return the processes with this mark in their environment."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *_descendants(child))]


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
