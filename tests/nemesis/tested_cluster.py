"""A cluster of real processes under the nemesis: its supervisors, its nodes, and its health."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx

from bench.support.servers import free_port
from indilog.cli.cluster_health import Cluster
from tests.cluster.faults.small_disk import MIB, SmallDisk

ROOT: Final = Path(__file__).resolve().parents[2]
START_S_MAX: Final = 90.0
STOP_S_MAX: Final = 60.0
HEALTHY_AGAIN_S: Final = 3.0
"""Figures of other processes are up to 2 s old, so health is asked for twice."""
_MARK: Final = "TESTS_NEMESIS"
_DISK_BYTES: Final = 128 * MIB
_CLOCK: Final = struct.Struct("<d")
_SETTINGS: Final = {
    "CLUSTER_SEQUENCERS": "3",
    "CLUSTER_STORAGE_NODES": "4",
    "CLUSTER_REPLICAS": "3",
    "CLUSTER_ACK_QUORUM": "2",
    "CLUSTER_INDEX_SHARDS": "2",
    "CLUSTER_INDEX_REPLICAS": "2",
    "CLUSTER_AGGREGATORS": "2",
    "CLUSTER_ENGINES": "2",
    "CLUSTER_RECORD_BYTES_MAX": str(64 * 1024),
    "CLUSTER_BATCH_BYTES_MAX": str(128 * 1024),
    "NODE_SEGMENT_BYTES": str(256 * 1024),
    "NODE_RECORD_CACHE_BYTES_MAX": "0",
    "NODE_WORKERS": "1",
    "NODE_RESTART_S_MIN": "0.05",
    "NODE_RESTART_S_MAX": "0.5",
    "NODE_DISK_RETRY_S": "0.2",
    "NODE_APPEND_TIMEOUT_S": "20",
}


class TestedCluster:
    """A cluster whose processes all have this run's directory in their environment.

    Attributes:
        directory: the run's directory, with the data, the clock and the output of all processes.
        data: the data directory.
        urls: the gateways of the two compute nodes.
        last_problems: what was wrong when it was last asked for and found.
    """

    __test__ = False  # for pytest: it is no test

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        port = _two_free_ports()
        self.urls = tuple(f"http://127.0.0.1:{port + ahead}" for ahead in range(2))
        self._port = port
        self.last_problems: list[str] = []
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._tie: socket.socket | None = None
        self.set_clock(0.0)

    # --- the supervisor

    async def start(self) -> None:
        """Start a supervisor, which adopts the nodes that run; return when all are ready."""
        output = self.directory / "supervisor.out"
        process = self._supervisor = self._spawned(output)
        deadline = time.monotonic() + START_S_MAX
        while b"http://" not in output.read_bytes():
            assert process.poll() is None, f"no start: {self.directory / 'platform.log'}"
            assert time.monotonic() < deadline, "the cluster does not start"
            await asyncio.sleep(0.05)

    def _spawned(self, output: Path) -> subprocess.Popen[bytes]:
        """Start a supervisor. It stops everything when this process ends."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "indilog", "up", "--processes", "--data", str(self.data)]
        command += ["--port", str(self._port), "--supervisor-fd", str(theirs.fileno())]
        log = self.directory / "platform.log"
        with theirs, output.open("wb") as out, log.open("ab") as err:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=os.environ | self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        if self._tie is not None:
            self._tie.close()
        self._tie = ours
        return process

    async def kill_supervisor(self) -> None:
        """End the supervisor with SIGKILL; the nodes continue."""
        assert self._supervisor is not None
        self._supervisor.kill()
        await asyncio.to_thread(self._supervisor.wait, STOP_S_MAX)

    async def stop(self) -> None:
        """Stop everything in order, and end what is left."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._supervisor.wait, STOP_S_MAX)
        if self._tie is not None:
            self._tie.close()
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.wait, STOP_S_MAX)

    def _environment(self) -> dict[str, str]:
        settings = {f"INDILOG_{name}": value for name, value in _SETTINGS.items()}
        hooks = os.pathsep.join([str(Path(__file__).parent / "hooks"), *_python_path()])
        return settings | {_MARK: str(self.directory), "PYTHONPATH": hooks}

    # --- processes

    def _pids(self) -> Iterator[int]:
        """Yield the processes that have this run in their environment."""
        wanted = f"{_MARK}={self.directory}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)

    def pid_of(self, node: str) -> int | None:
        """Return the process of a node; None: none runs."""
        for pid in self._pids():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--name" in command and node.encode() in command and not _is_ended(pid):
                    return pid
        return None

    def signal(self, node: str, number: signal.Signals) -> int | None:
        """Send a signal to the process of a node; return its id, None: it was not running."""
        if (pid := self.pid_of(node)) is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def kill_everything(self) -> None:
        """End all nodes and what started them at once, except the supervisor."""
        assert self._supervisor is not None
        pids = [pid for pid in self._pids() if pid != self._supervisor.pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def workers_of(self, node: str) -> list[int]:
        """Return the function workers of a compute node."""
        pid, found = self.pid_of(node), list[int]()
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if b"indilog_compute.workers" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    # --- the machine

    def set_clock(self, ahead_s: float) -> None:
        """Put the wall clock of all processes ahead of this machine's."""
        path = self.directory / "clock"
        path.touch()
        with path.open("r+b") as file:
            file.write(_CLOCK.pack(ahead_s))

    @contextmanager
    def small_disk(self, node: str) -> Iterator[SmallDisk | None]:
        """Give a node a small disk of its own; None where nothing can be mounted.

        Afterwards its files are in the node's folder.
        """
        folder = self.data / node
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            yield None
            return
        try:
            yield SmallDisk(folder)
        finally:
            copy = self.directory / "copy"
            shutil.copytree(folder, copy)
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
            shutil.copytree(copy, folder, dirs_exist_ok=True)
            shutil.rmtree(copy)

    # --- health

    @property
    def token(self) -> str:
        """The token of the platform."""
        return (self.data / "token").read_text().strip()

    def http(self, gateway: int, timeout_s: float = 30.0) -> httpx.AsyncClient:
        """Return an HTTP client of one gateway."""
        headers = {"Authorization": f"Bearer {self.token}"}
        url = self.urls[gateway]
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)

    async def seen_by(self, gateway: int) -> Cluster | None:
        """Return what a gateway says of the cluster; None: it does not answer."""
        try:
            async with self.http(gateway, timeout_s=5.0) as http:
                status: dict[str, Any] = (await http.get("/status")).json()
                return Cluster(status)
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    async def position_of(self, node: str) -> int:
        """Return how many metalog entries a node has applied or committed; 0: not known."""
        found = 0
        for gateway in range(len(self.urls)):
            if (cluster := await self.seen_by(gateway)) is not None:
                with suppress(KeyError):  # a node without some figures
                    positions = {shown.node: shown.position for shown in cluster.nodes}
                    found = max(found, positions.get(node) or 0)
        return found

    async def problems(self) -> list[str]:
        """Return what is wrong, as the gateways say it."""
        found: list[str] = []
        for gateway, url in enumerate(self.urls):
            cluster = await self.seen_by(gateway)
            if cluster is None:
                found.append(f"no status at {url}")
            else:
                try:
                    health = cluster.health
                except KeyError as error:
                    found.append(f"an incomplete status at {url}: no {error}")
                else:
                    found += [*health.heals, *health.needs_operator]
        return found

    async def healthy(self, deadline_s: float) -> None:
        """Wait until both gateways say twice that nothing is wrong.

        Raises:
            TimeoutError: the cluster does not heal; the message says what is wrong.
        """
        deadline, times = time.monotonic() + deadline_s, 0
        while times < 2:
            wrong = await self.problems()
            times = 0 if wrong else times + 1
            self.last_problems = wrong or self.last_problems
            self._note(wrong)
            if wrong and time.monotonic() > deadline:
                raise TimeoutError(f"not healthy after {deadline_s:g} s: {' '.join(wrong)}")
            await asyncio.sleep(HEALTHY_AGAIN_S if not wrong else 0.5)

    def _note(self, wrong: list[str]) -> None:
        """Write what is wrong into the file `health.txt`, with the time."""
        with (self.directory / "health.txt").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {' '.join(wrong) or 'healthy'}\n")


def _is_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _two_free_ports() -> int:
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port


def _python_path() -> list[str]:
    path = os.environ.get("PYTHONPATH")
    return [path] if path else []


def drawn_bit(path: Path, rng: random.Random) -> str:
    """Flip one bit of the written part of a file; return where."""
    content = path.read_bytes()
    end = len(content.rstrip(b"\0"))
    offset = rng.randrange(end)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([content[offset] ^ 1 << rng.randrange(8)]))
    return f"{path.parent.name}/{path.name} at {offset} of {end}"
