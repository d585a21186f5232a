"""Runs the servers of other systems: from Debian's packages, in temporary directories, on free
ports of this machine. A missing package is installed first (as root).
"""

from __future__ import annotations

import fcntl
import functools
import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HOST = "127.0.0.1"
READY_S_MAX = 20.0
END_S_MAX = 30.0
CONNECTIONS_MAX = 600
"""Connections of PostgreSQL; a client process opens at most a few hundred."""
_NOBODY = "nobody"
_PORTS = 15_000, 32_768
"""Range of ports for servers, below those of outgoing connections (`ip_local_port_range`)."""
_TAKEN = set[int]()
"""The ports that this process has got."""


class Server(NamedTuple):
    """A running server.

    Attributes:
        address: how clients reach the server, in plain values.
        version: as reported by the server.
        durability: how durable an acknowledged write is, in words.
    """

    address: dict[str, Any]
    version: str
    durability: str


@contextmanager
def redis_server() -> Iterator[Server]:
    """Run Redis: `appendonly yes`, `appendfsync always`."""
    program = _installed("redis-server", "redis-server")
    version = _said(program, "--version").split("v=")[1].split()[0]
    with temporary("redis") as directory:
        port, path = free_port(), f"{directory}/redis.sock"
        command = [
            program, "--bind", HOST, "--port", str(port), "--unixsocket", path,
            "--dir", str(directory), "--save", "", "--appendonly", "yes", "--appendfsync", "always",
            "--auto-aof-rewrite-percentage", "0", "--daemonize", "no",
        ]  # fmt: skip
        with running(command, port, directory):
            yield Server({"port": port, "path": path}, version, "every write synced")


@contextmanager
def nats_server() -> Iterator[Server]:
    """Run NATS with JetStream in files. Debian's release cannot sync a message before its ack."""
    program = _installed("nats-server", "nats-server")
    version = _said(program, "--version").split("v")[-1].strip()
    with temporary("nats") as directory:
        port = free_port()
        command = [program, "-a", HOST, "-p", str(port), "-js", "-sd", str(directory)]
        with running(command, port, directory):
            yield Server({"port": port}, version, "NOT synced (every 2 minutes)")


@contextmanager
def etcd_server() -> Iterator[Server]:
    """Run one etcd; a put is acknowledged when it is synced."""
    program = _installed("etcd", "etcd-server")
    version = _said(program, "--version").split(":")[1].split()[0]
    with temporary("etcd") as directory:
        port, peers = free_port(), f"http://{HOST}:{free_port()}"
        clients = f"http://{HOST}:{port}"
        command = [
            program, "--data-dir", f"{directory}/data", "--name", "one", "--log-level", "error",
            "--listen-client-urls", clients, "--advertise-client-urls", clients,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
            "--initial-cluster", f"one={peers}", "--quota-backend-bytes", str(8 << 30),
        ]  # fmt: skip
        with running(command, port, directory):
            yield Server({"port": port}, version, "every write synced")


@contextmanager
def postgres_server() -> Iterator[Server]:
    """Run PostgreSQL with its defaults: `fsync` and `synchronous_commit` on.

    It refuses to run as root, so root runs it as `nobody`.
    """
    programs = _postgres_programs()
    version = _said(str(programs / "postgres"), "--version").split()[2]
    user = _NOBODY if os.geteuid() == 0 else None
    with temporary("postgres") as directory:
        if user is not None:
            found = pwd.getpwnam(user)
            os.chown(directory, found.pw_uid, found.pw_gid)
        subprocess.run(
            [
                programs / "initdb", "-D", directory / "data", "-U", "bench", "-A", "trust",
                "--no-sync", "-E", "UTF8", "--locale", "C",
            ],
            check=True, user=user, cwd=directory, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        port = free_port()
        command = [
            str(programs / "postgres"), "-D", f"{directory}/data", "-h", HOST, "-p", str(port),
            "-k", str(directory), "-c", f"max_connections={CONNECTIONS_MAX}",
        ]  # fmt: skip
        with running(command, port, directory, user=user):
            address = {"port": port, "host": str(directory)}
            yield Server(address, version, "every write synced (synchronous_commit)")


# --- programs


def _installed(program: str, package: str) -> str:
    """Return the path of `program`; install Debian's `package` first when it is missing."""
    if (found := shutil.which(program)) is None:
        _install(package)
        found = shutil.which(program)
    if found is None:
        raise SystemExit(f"apt-get installed {package}, but {program} is not on the path.")
    return found


def _postgres_programs() -> Path:
    def found() -> list[Path]:
        versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
        return sorted(versions, key=lambda path: float(path.parts[-3]))

    if not found():
        _install("postgresql")
    if not found():
        raise SystemExit("apt-get installed postgresql, but there is no /usr/lib/postgresql.")
    return found()[-1].parent


def _install(package: str) -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SystemExit(f"{package} is missing; install it (Debian: apt-get install {package}).")
    sys.stderr.write(f"Installing Debian's {package} ...\n")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", package]):
        subprocess.run(
            ["apt-get", "-qq", *command],
            check=True, env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip


def _said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# --- processes


@contextmanager
def temporary(name: str) -> Iterator[Path]:
    """Yield a directory that is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix=f"indilog-{name}-") as path:
        yield Path(path)


@contextmanager
def running(
    command: Sequence[str],
    port: int,
    directory: Path,
    *,
    user: str | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[int]:
    """Run a server during the block. The block gets the server's pid, and begins when the server
    answers at its port.

    `environment` is added to that of this process; `cwd` is `directory` by default.
    """
    said = directory / f"output-{port}"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, user=user, cwd=cwd or directory,
            env=os.environ | (environment or {}),
        )  # fmt: skip
    try:
        _wait_ready(process, port, said)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a free port of this machine that the system never gives to an outgoing connection.

    So it is still free for a server that starts a second time. No process of this user gets it a
    second time while this process runs.
    """
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of `count` successive free ports; see `free_port`."""
    while True:
        first = random.SystemRandom().randrange(*_PORTS)
        if all(_taken(port) for port in range(first, first + count)):
            return first


def _taken(port: int) -> bool:
    """Take a port for this process; False: it is in use, or was taken before."""
    if port in _TAKEN:
        return False
    locks = _locks()
    with socket.socket() as probe:
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind((HOST, port))
        except OSError:
            return False
    _TAKEN.add(port)
    return True


@functools.cache
def _locks() -> int:
    """Return a file in which each process locks one byte for each of its ports, at the offset that
    is the port's number.
    """
    path = f"{tempfile.gettempdir()}/indilog-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _wait_ready(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    until = time.monotonic() + READY_S_MAX
    while time.monotonic() < until:
        if process.poll() is not None:
            said = output.read_text(errors="replace").strip()
            raise SystemExit(f"{process.args!r} ended with {process.returncode}: {said}")
        try:
            with socket.create_connection((HOST, port), 1):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{process.args!r} was not ready after {READY_S_MAX:.0f} s.")
