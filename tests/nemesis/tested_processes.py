"""The tested cluster with a process for each node, and a supervisor: `indilog up --processes`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from bench.support.servers import free_ports
from tests.nemesis.promise import SUPERVISOR, TOPOLOGIES
from tests.nemesis.tested_cluster import ROOT, START_S_MAX, STOP_S_MAX, TestedCluster

_SETTINGS: Final = {
    "INDILOG_CLUSTER_SEQUENCERS": "3",
    "INDILOG_CLUSTER_STORAGE_NODES": "4",
    "INDILOG_CLUSTER_REPLICAS": "3",
    "INDILOG_CLUSTER_INDEX_SHARDS": "2",
    "INDILOG_CLUSTER_INDEX_REPLICAS": "2",
    "INDILOG_CLUSTER_AGGREGATORS": "2",
    "INDILOG_CLUSTER_ENGINES": "2",
}
_WAITING: Final = {
    "INDILOG_CLUSTER_ACK_QUORUM": "0",
    "INDILOG_NODE_STORAGE_LOST_S": "2",
    "INDILOG_NODE_STORAGE_REPLACED_S": "8",
}
"""Appends wait for each lost storage node, so that the policy decides what happens."""
_MASKING: Final = {"INDILOG_CLUSTER_ACK_QUORUM": "2"}


class TestedProcesses(TestedCluster):
    """A supervisor and its processes, which dial Unix sockets.

    Args:
        directory: the directory of the run.
        policy: `lost_storage_policy`. With `mask`, two of three replicas acknowledge; with the
            others, all three.
    """

    def __init__(self, directory: Path, policy: str = "mask") -> None:
        self._settings = {
            **_SETTINGS,
            **(_MASKING if policy == "mask" else _WAITING),
            "INDILOG_CLUSTER_LOST_STORAGE_POLICY": policy,
        }
        self._port = free_ports(2)
        urls = [f"http://127.0.0.1:{self._port + ahead}" for ahead in range(2)]
        super().__init__(directory, TOPOLOGIES["processes"], urls)
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._tie: socket.socket | None = None

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
                env=os.environ | self.environment() | self._settings,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        if self._tie is not None:
            self._tie.close()
        self._tie = ours
        return process

    async def kill(self, what: str) -> None:
        """End the supervisor with SIGKILL; the nodes continue."""
        assert what == SUPERVISOR
        assert self._supervisor is not None
        self._supervisor.kill()
        await asyncio.to_thread(self._supervisor.wait, STOP_S_MAX)

    async def start_again(self, what: str) -> None:
        """See `TestedCluster.start_again`."""
        assert what == SUPERVISOR
        await self.start()

    async def stop(self) -> None:
        """See `TestedCluster.stop`."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._supervisor.wait, STOP_S_MAX)
        if self._tie is not None:
            self._tie.close()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.wait, STOP_S_MAX)

    @property
    def data(self) -> Path:
        """See `TestedCluster.data`."""
        return self.directory / "data"

    @property
    def token(self) -> str:
        """See `TestedCluster.token`."""
        return (self.data / "token").read_text().strip()

    def folder_of(self, process: str) -> Path:
        """See `TestedCluster.folder_of`."""
        return self.data / process

    def nodes_of(self, process: str) -> list[str]:
        """See `TestedCluster.nodes_of`."""
        return [process]

    def pid_of(self, process: str) -> int | None:
        """See `TestedCluster.pid_of`."""
        for pid in self.pids():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--name" in command and process.encode() in command and not _is_ended(pid):
                    return pid
        return None

    def kept(self) -> Collection[int]:
        """See `TestedCluster.kept`."""
        assert self._supervisor is not None
        return {self._supervisor.pid}

    # --- the network

    def endpoints(self) -> Iterable[str]:
        """See `TestedCluster.endpoints`: the names of the nodes' sockets."""
        return self.topology.processes

    def receiver_at(self, endpoint: str) -> str:
        """See `TestedCluster.receiver_at`."""
        return endpoint

    def sender_of(self, pid: int) -> str:
        """See `TestedCluster.sender_of`."""
        return _option(pid, "--name")

    async def connect(
        self, endpoint: str, pid: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `TestedCluster.connect`: the process names its run's sockets."""
        run = Path(_option(pid, "--metadata").removeprefix("unix://")).parent
        return await asyncio.open_unix_connection(str(run / endpoint))


def _option(pid: int, name: str) -> str:
    """Return the value of an option in the command line of a process."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return command[command.index(name) + 1]


def _is_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
