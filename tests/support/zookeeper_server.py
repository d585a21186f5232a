"""A real ZooKeeper for tests: one server or an ensemble, on loopback, with data of its own.

ZooKeeper is among PySpark's jars, which `./test` installs if Java is found. So nothing else needs
to be installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from bench.support.servers import free_port

TICK_MS: Final = 200
_READY_S_MAX: Final = 200.0
_JARS: Final = (
    "zookeeper*.jar", "slf4j-api*.jar", "netty-*.jar", "metrics-core*.jar", "snappy-java*.jar",
    "commons-io*.jar",
)  # fmt: skip


def classpath() -> str:
    """Return where ZooKeeper is; skips the test if this machine has none."""
    java = shutil.which("java")
    spark = find_spec("pyspark")
    places = spark.submodule_search_locations if spark is not None else None
    if java is None or not places:
        pytest.skip("ZooKeeper comes with PySpark and needs Java: ./test installs both if it can")
    jars = Path(places[0]) / "jars"
    return ":".join(str(jar) for pattern in _JARS for jar in sorted(jars.glob(pattern)))


class ZooKeeperServer:
    """One server; it can be paused, killed and started again on its data.

    Args:
        directory: of its configuration and data.
        port: of its clients.
        settings: further lines of its configuration.
        properties: of its Java process.
        port_setting: `secureClientPort` for TLS.
        synced: whether each transaction is synced to disk.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        *,
        settings: Mapping[str, str] | None = None,
        properties: Sequence[str] = (),
        port_setting: str = "clientPort",
        synced: bool = False,
    ) -> None:
        self.directory = directory
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._properties = [*properties, f"-Dzookeeper.forceSync={'yes' if synced else 'no'}"]
        self._is_secure = port_setting != "clientPort"
        data = directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        lines = {
            "tickTime": str(TICK_MS),
            "minSessionTimeout": "400",
            "maxSessionTimeout": "60000",
            "maxClientCnxns": "0",
            "dataDir": str(data),
            f"{port_setting}Address": "127.0.0.1",
            port_setting: str(port),
            "admin.enableServer": "false",
            **(settings or {}),
        }
        self._file = directory / "zoo.cfg"
        self._file.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))

    def start(self) -> None:
        """Start the server; it is not ready yet."""
        command = [
            "java", "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *self._properties,
            "-cp", classpath(), "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self._file),
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def wait_ready(self) -> None:
        """Wait until the server serves clients."""
        deadline = time.monotonic() + _READY_S_MAX
        while not self.mode():
            assert self._process is not None
            code = self._process.poll()
            log = (self.directory / "log").read_text()
            assert code is None, f"ZooKeeper ended with {code}: {log}"
            assert time.monotonic() < deadline, f"ZooKeeper is not ready: {log}"
            time.sleep(0.02)

    def mode(self) -> str:
        """Return `standalone`, `leader` or `follower`; empty: the server does not serve."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                if self._is_secure:
                    return "standalone"
                connection.sendall(b"srvr")
                answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        except OSError:
            return ""
        return next((line[6:] for line in answer.splitlines() if line.startswith("Mode: ")), "")

    def pause(self) -> None:
        """Pause the process; its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once. May be called again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it was started"
        os.kill(self._process.pid, number)


@contextlib.contextmanager
def zookeeper_running(
    directory: Path,
    settings: Mapping[str, str] | None = None,
    properties: Sequence[str] = (),
    port_setting: str = "clientPort",
    *,
    synced: bool = False,
) -> Iterator[ZooKeeperServer]:
    """Run one server while the block runs."""
    port = free_port()
    server = ZooKeeperServer(
        directory,
        port,
        settings=settings,
        properties=properties,
        port_setting=port_setting,
        synced=synced,
    )
    try:
        server.start()
        server.wait_ready()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def ensemble_running(directory: Path, *, synced: bool = False) -> Iterator[list[ZooKeeperServer]]:
    """Run three servers while the block runs."""
    ports = [free_port() for _ in range(9)]
    members = {
        f"server.{i + 1}": f"127.0.0.1:{ports[3 + 2 * i]}:{ports[4 + 2 * i]}" for i in range(3)
    }
    servers = []
    for i in range(3):
        own = directory / str(i + 1)
        settings = {"initLimit": "20", "syncLimit": "5", **members}
        servers.append(ZooKeeperServer(own, ports[i], settings=settings, synced=synced))
        (own / "data" / "myid").write_text(str(i + 1))
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()


def hosts_of(servers: Sequence[ZooKeeperServer]) -> str:
    """Return the setting `zookeeper_hosts` for some servers."""
    return ",".join(f"127.0.0.1:{server.port}" for server in servers)
