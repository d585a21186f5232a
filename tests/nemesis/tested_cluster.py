"""A cluster of real processes under the nemesis: its processes, their disks, and its health."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx

from indilog.cli.cluster_health import ClusterHealth
from tests.cluster.faults.small_disk import MIB, SmallDisk
from tests.nemesis.promise import Topology

ROOT: Final = Path(__file__).resolve().parents[2]
START_S_MAX: Final = 90.0
STOP_S_MAX: Final = 60.0
HEALTHY_AGAIN_S: Final = 3.0
"""Figures of other processes are up to 2 s old, so health is asked for twice."""
_WITH_DISK: Final = ("sequencer-", "storage-")
_MARK: Final = "TESTS_NEMESIS"
_DISK_BYTES: Final = 128 * MIB
_CLOCK: Final = struct.Struct("<d")
_SETTINGS: Final = {
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


class TestedCluster(ABC):
    """A cluster whose processes all have this run's directory in their environment.

    Attributes:
        directory: the run's directory, with the data, the clock and the output of all processes.
        topology: its processes.
        urls: the gateways of `topology.gateways`.
        last_problems: what was wrong when it was last asked for and found.
    """

    __test__ = False  # for pytest: it is no test

    def __init__(self, directory: Path, topology: Topology, urls: Sequence[str]) -> None:
        self.directory = directory
        self.topology = topology
        self.urls = tuple(urls)
        self.last_problems: list[str] = []
        self.set_clock(0.0)

    @abstractmethod
    async def start(self) -> None:
        """Start the cluster; return when all nodes are ready."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop everything in order, and end what is left."""

    @abstractmethod
    async def kill(self, what: str) -> None:
        """End the supervisor or the leader of ZooKeeper with SIGKILL."""

    @abstractmethod
    async def start_again(self, what: str) -> None:
        """Start what `kill` has ended."""

    @property
    @abstractmethod
    def data(self) -> Path:
        """The data directory of the stopped cluster."""

    @property
    @abstractmethod
    def token(self) -> str:
        """The token of the platform."""

    @abstractmethod
    def folder_of(self, process: str) -> Path:
        """Return the directory of the journal of a process."""

    @abstractmethod
    def nodes_of(self, process: str) -> list[str]:
        """Return the nodes of a process."""

    @abstractmethod
    def pid_of(self, process: str) -> int | None:
        """Return the id of a process; None: it does not run."""

    @abstractmethod
    def kept(self) -> Collection[int]:
        """Return the processes that `kill_everything` leaves: whatever restarts the others."""

    # --- the network: see `tests.nemesis.proxies.Network`

    @abstractmethod
    def endpoints(self) -> Iterable[str]:
        """Return where processes receive."""

    @abstractmethod
    def receiver_at(self, endpoint: str) -> str:
        """Return the process that receives there."""

    @abstractmethod
    def sender_of(self, pid: int) -> str:
        """Return the process of the cluster that has this id."""

    @abstractmethod
    async def connect(
        self, endpoint: str, pid: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to an endpoint, for the process `pid`."""

    def environment(self) -> dict[str, str]:
        """Return what all processes have in their environment."""
        settings = {f"INDILOG_{name}": value for name, value in _SETTINGS.items()}
        hooks = os.pathsep.join([str(Path(__file__).parent / "hooks"), *_python_path()])
        return settings | {_MARK: str(self.directory), "PYTHONPATH": hooks}

    # --- processes

    def pids(self) -> Iterator[int]:
        """Yield the processes that have this run in their environment."""
        wanted = f"{_MARK}={self.directory}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)

    def signal(self, node: str, number: signal.Signals) -> int | None:
        """Send a signal to the process of a node; return its id, None: it was not running."""
        if (pid := self.pid_of(node)) is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def kill_everything(self) -> None:
        """End all nodes and what started them at once, except those that restart them."""
        kept = self.kept()
        pids = [pid for pid in self.pids() if pid not in kept]
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
        folder = self.folder_of(node)
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

    def http(self, gateway: int, timeout_s: float = 30.0) -> httpx.AsyncClient:
        """Return an HTTP client of one gateway."""
        headers = {"Authorization": f"Bearer {self.token}"}
        url = self.urls[gateway]
        return httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout_s, trust_env=False,
            transport=_Connections(trust_env=False),
        )  # fmt: skip

    async def seen_by(self, gateway: int) -> ClusterHealth | None:
        """Return what a gateway says of the cluster; None: it does not answer."""
        try:
            async with self.http(gateway, timeout_s=5.0) as http:
                status: dict[str, Any] = (await http.get("/status")).json()
                return ClusterHealth(status)
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    async def position_of(self, process: str) -> int:
        """Return how many metalog entries all nodes of a process with a disk have applied or
        committed; 0: not known.
        """
        wanted = [node for node in self.nodes_of(process) if node.startswith(_WITH_DISK)]
        found = 0
        for gateway in range(len(self.urls)):
            if (cluster := await self.seen_by(gateway)) is not None:
                with suppress(KeyError):  # a node without some figures
                    positions = {shown.node: shown.position for shown in cluster.nodes}
                    found = max(found, min(positions.get(node) or 0 for node in wanted))
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
        """Wait until all gateways say twice that nothing is wrong.

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


class _Connections(httpx.AsyncHTTPTransport):
    """Reports a connection that a killed process closes while it is made as any other failure. With
    uvloop, anyio raises `AttributeError` for it.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("closed while it was made", request=request) from error


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
