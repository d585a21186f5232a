"""The tested cluster of `indilog node`: three machines with all roles, two with a compute node, and
an ensemble of ZooKeeper.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from bench.support.servers import free_port
from indilog.kernel.view import view_of
from indilog.runtime.cluster.processes import spread
from tests.nemesis.promise import TOPOLOGIES, ZOOKEEPER
from tests.nemesis.tested_cluster import ROOT, START_S_MAX, STOP_S_MAX, TestedCluster
from tests.support.zookeeper_server import ZooKeeperServer, ensemble_running, hosts_of

FIRST: Final = 3
"""Machines with all roles."""
RESTART_S: Final = 0.2
"""Seconds until a process that ended is started again, as systemd would do."""
LEADER_S_MAX: Final = 30.0


class _Machine:
    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.directory = directory / f"machine-{name}"
        self.data = self.directory / "data"
        self.port, self.node_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        file = self.directory / "platform.log"
        return file.read_text(errors="replace") if file.exists() else ""


class TestedMachines(TestedCluster):
    """Machines on loopback; this process restarts them."""

    def __init__(self, directory: Path) -> None:
        topology = TOPOLOGIES["machines"]
        self._machines = {name: _Machine(directory, name) for name in topology.processes}
        urls = [f"http://127.0.0.1:{self._machines[name].port}" for name in topology.gateways]
        super().__init__(directory, topology, urls)
        view = view_of(
            sequencers=3, storage_nodes=3, replicas=3, index_shards=2, index_replicas=2,
            aggregators=2, engines=3,
        )  # fmt: skip
        self._layout = spread(view.nodes, FIRST, {})
        self._token = secrets.token_urlsafe(32)
        self._zookeeper = ExitStack()
        self._servers: list[ZooKeeperServer] = []
        self._killed: ZooKeeperServer | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._restarts = 0

    async def start(self) -> None:
        """See `TestedCluster.start`. Machines start one after the other, so that each gets its
        name.
        """
        ensemble = ensemble_running(self.directory / "zookeeper", synced=True)
        self._servers = await asyncio.to_thread(self._zookeeper.enter_context, ensemble)
        for number, machine in enumerate(self._machines.values()):
            self._spawn(machine)
            if number < FIRST - 1:
                await self._until(machine, "other machines are awaited")
            elif number == FIRST - 1:
                for first in list(self._machines.values())[:FIRST]:
                    await self._until(first, f"{first.name} is up on")
            else:
                await self._until(machine, f"{machine.name} is up on")
        self._restarting = asyncio.create_task(self._restart_ended())

    async def _until(self, machine: _Machine, said: str) -> None:
        deadline = time.monotonic() + START_S_MAX
        while said not in machine.output:
            assert machine.process is not None
            assert machine.process.poll() is None, f"no start: {machine.directory}"
            assert time.monotonic() < deadline, f"{machine.name} does not start"
            await asyncio.sleep(0.05)

    def _spawn(self, machine: _Machine) -> None:
        machine.data.mkdir(parents=True, exist_ok=True)
        token = machine.data / "token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(self._token)
        number = list(self._machines).index(machine.name)
        roles = [] if number < FIRST else ["--roles", "compute"]
        settings = {
            "CLUSTER_SHARED_PROCESSES": str(FIRST),
            "NODE_PORT": str(machine.port),
            "NODE_NODE_HOST": "127.0.0.1",
            "NODE_NODE_PORT": str(machine.node_port),
            "NODE_METADATA_STORE": "zookeeper",
            "NODE_METADATA_TIMEOUT_S": "30",
            "NODE_ZOOKEEPER_HOSTS": hosts_of(self._servers),
        }
        environment = {f"INDILOG_{name}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "indilog", "node", "--data", str(machine.data), *roles]
        with (machine.directory / "platform.log").open("ab") as log:
            machine.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | self.environment() | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _restart_ended(self) -> None:
        while True:
            await asyncio.sleep(RESTART_S)
            for machine in self._machines.values():
                if machine.process is not None and machine.process.poll() is not None:
                    self._restarts += 1
                    self._spawn(machine)

    async def kill(self, what: str) -> None:
        """End the leader of ZooKeeper with SIGKILL; the others choose another one."""
        assert what == ZOOKEEPER
        deadline = time.monotonic() + LEADER_S_MAX
        while (leader := await asyncio.to_thread(self._leader)) is None:
            assert time.monotonic() < deadline, "ZooKeeper has no leader"
            await asyncio.sleep(0.1)
        self._killed = leader
        await asyncio.to_thread(leader.kill)

    def _leader(self) -> ZooKeeperServer | None:
        return next((server for server in self._servers if server.mode() == "leader"), None)

    async def start_again(self, what: str) -> None:
        """See `TestedCluster.start_again`."""
        assert what == ZOOKEEPER
        assert self._killed is not None
        self._killed.start()
        await asyncio.to_thread(self._killed.wait_ready)

    async def stop(self) -> None:
        """See `TestedCluster.stop`."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        started = [m.process for m in self._machines.values() if m.process is not None]
        for process in started:
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_S_MAX)
            process.kill()
            process.wait()
        await asyncio.to_thread(self._zookeeper.close)

    @property
    def data(self) -> Path:
        """See `TestedCluster.data`: the folders of all machines, in one directory."""
        merged = self.directory / "merged"
        if not merged.exists():
            merged.mkdir()
            first = next(iter(self._machines.values()))
            (merged / "metadata").write_bytes((first.data / "metadata").read_bytes())
            for name in self._machines:
                (merged / name).symlink_to(self.folder_of(name), target_is_directory=True)
        return merged

    @property
    def token(self) -> str:
        """See `TestedCluster.token`."""
        return self._token

    def folder_of(self, process: str) -> Path:
        """See `TestedCluster.folder_of`."""
        return self._machines[process].data / process

    def nodes_of(self, process: str) -> list[str]:
        """See `TestedCluster.nodes_of`."""
        return [*self._layout.all_of(process)] or [process.replace("node", "engine")]

    def pid_of(self, process: str) -> int | None:
        """See `TestedCluster.pid_of`."""
        started = self._machines[process].process
        return started.pid if started is not None and started.poll() is None else None

    def kept(self) -> Collection[int]:
        """See `TestedCluster.kept`: this process restarts them."""
        return {os.getpid()}

    # --- the network

    def endpoints(self) -> Iterable[str]:
        """See `TestedCluster.endpoints`."""
        return [f"port-{machine.node_port}" for machine in self._machines.values()]

    def receiver_at(self, endpoint: str) -> str:
        """See `TestedCluster.receiver_at`."""
        return next(m.name for m in self._machines.values() if endpoint == f"port-{m.node_port}")

    def sender_of(self, pid: int) -> str:
        """See `TestedCluster.sender_of`."""
        return next(
            (n for n, m in self._machines.items() if m.process and m.process.pid == pid), ""
        )

    async def connect(
        self,
        endpoint: str,
        pid: int,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `TestedCluster.connect`."""
        return await asyncio.open_connection("127.0.0.1", int(endpoint.removeprefix("port-")))
