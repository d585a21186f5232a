"""A platform with one application, for benchmarks over HTTP. It is a process as `indilog up` starts
it, on a free port and with a temporary directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.support.servers import HOST, free_port, temporary
from indilog.cli.start import PlatformLog, platform, run_step, wait_ready


class DeployedPlatform(NamedTuple):
    """The address of the platform, and its process."""

    url: str
    port: int
    pid: int


@contextmanager
def deployed(app: Path, name: str | None = None) -> Iterator[DeployedPlatform]:
    """Run a platform with `app`, under its own name or under `name`."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    with temporary("platform") as directory:
        data = directory / "data"
        log = PlatformLog(data)
        with platform(log, data, port) as process:
            wait_ready(process, url, log)
            named = [] if name is None else ["--name", name]
            run_step("Deploying", "indilog", "deploy", str(app), *named, "--url", url)
            yield DeployedPlatform(url, port, process.pid)
