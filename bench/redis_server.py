"""A Redis server of the benchmark's own: synced on every write, in a temporary directory, on a free
port of this machine and on a Unix socket. Debian's package is installed when it is missing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

READY_S_MAX = 10.0


class RedisServer(NamedTuple):
    """A running server."""

    port: int
    path: str
    """Of its Unix socket."""
    version: str


def installed() -> str:
    """Return the path of redis-server; install Debian's package first when it is missing."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SystemExit(
            "redis-server is missing; install it (Debian: apt-get install redis-server)."
        )
    sys.stderr.write("Installing Debian's redis-server ...\n")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "redis-server"]):
        subprocess.run(
            ["apt-get", "-qq", *command],
            check=True, env=environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    found = shutil.which("redis-server")
    if found is None:
        raise SystemExit("apt-get installed redis-server, but it is not on the path.")
    return found


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Run a server until the block is left: `appendonly yes`, `appendfsync always`."""
    program = installed()
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="indilog-redis-") as directory:
        port, path = _free_port(), str(Path(directory) / "redis.sock")
        process = subprocess.Popen(
            [
                program, "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", path,
                "--dir", directory, "--save", "", "--appendonly", "yes", "--appendfsync", "always",
                "--auto-aof-rewrite-percentage", "0", "--daemonize", "no",
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait_ready(process, port)
            yield RedisServer(port, path, version.stdout.split("v=")[1].split()[0])
        finally:
            process.terminate()
            process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + READY_S_MAX
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"redis-server ended at once with status {process.returncode}.")
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"redis-server was not ready after {READY_S_MAX:.0f} s.")
