"""A machine of a cluster: `indilog node` as a process with its own data directory and ports.

It runs this release, or a copy that is changed as a later release may be.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.support.servers import free_port, free_ports
from tests.cluster.platform_process import ROOT
from tests.support.zookeeper_server import ZooKeeperServer, hosts_of

READY_S_MAX: Final = 200.0
STOP_S_MAX: Final = 120.0


class Machine:
    """A machine that can be stopped, killed and started again.

    Attributes:
        settings: of `[node]`.
        name: of its process of the cluster; valid when it is ready.
        release: folder with the packages of another release, which the next start uses.
        url: of its gateway; valid when it is ready.
    """

    def __init__(
        self,
        directory: Path,
        zookeeper: ZooKeeperServer,
        root: str,
        settings: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        directory.mkdir()
        self._options = options
        self.name = self.url = ""
        self.release: Path | None = None
        self._log = directory / "output"
        self._process: subprocess.Popen[str] | None = None
        self.settings = {
            "data_dir": directory / "data",
            "port": free_port(),
            "node_host": "127.0.0.1",
            "node_port": free_ports(2),
            "workers": 1,
            "segment_bytes": 5 * 1024 * 1024,
            "metadata_store": "zookeeper",
            "zookeeper_hosts": hosts_of([zookeeper]),
            "zookeeper_root": root,
            **(settings or {}),
        }
        self._environment = {
            f"INDILOG_NODE_{name.upper()}": str(value) for name, value in self.settings.items()
        }
        self.config = directory / "cluster.toml"
        self.config.write_text("[cluster]\nshared_processes = 3\n")

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        command = [sys.executable, "-m", "indilog", "node", "--config", str(self.config)]
        environment = os.environ | self._environment
        if self.release is not None:
            folders = [self.release, *(self.release / folder for folder in FOLDERS)]
            environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self._options],
                cwd=self.release or ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_ready(self) -> None:
        """Wait until the process says that it is ready."""
        assert self._process is not None
        assert self._process.stdout is not None
        there, _, _ = select.select([self._process.stdout], [], [], READY_S_MAX)
        line = self._process.stdout.readline() if there else ""
        found = re.fullmatch(r"(node-\d+) is up(?: on (\S+))?\. .*\n", line)
        assert found is not None, f"the machine is not ready: {line!r} {self.output}"
        self.name, self.url = found[1], found[2] or ""

    def wait_ended(self) -> int:
        """Wait until the process ends by itself; return its exit code."""
        assert self._process is not None
        code = self._process.wait(STOP_S_MAX)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def stop(self) -> int:
        """Stop the process in order; return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self.wait_ended()

    def kill(self) -> None:
        """End the process at once, and with it its workers. May be called again."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self.wait_ended()

    @property
    def output(self) -> str:
        """What the process logged."""
        return self._log.read_text() if self._log.exists() else ""


@contextmanager
def machines_running(
    directory: Path, zookeeper: ZooKeeperServer, count: int = 3, **settings: object
) -> Iterator[list[Machine]]:
    """Run `count` machines, and those that the block adds to the list, while the block runs."""
    machines = [machine(directory, n, zookeeper, settings) for n in range(count)]
    try:
        for one in machines:
            one.start()
        for one in machines:
            one.wait_ready()
        machines.sort(key=lambda one: one.name)
        yield machines
    finally:
        for one in machines:
            one.kill()


def machine(
    directory: Path,
    number: int,
    zookeeper: ZooKeeperServer,
    settings: Mapping[str, object] | None = None,
    options: Sequence[str] = (),
) -> Machine:
    """Return a machine of the cluster whose part of ZooKeeper `directory` names."""
    root = f"/{directory.parent.name}-{directory.name}"
    return Machine(directory / f"machine-{number}", zookeeper, root, settings, options)


FOLDERS: Final = ("libs", "ordering", "storage", "index_tier", "compute", "cells", "pipeline")
"""Folders with packages; `indilog` itself is beside them."""
_GREETING: Final = '''class Greeting(WireMessage, frozen=True):
    """storage → primary: good morning."""

    words: tuple[str, ...]


class PlacementIs('''
_GREETED: Final = """\
greeting = Greeting(("good", "morning"))
        sent = [Send(leadership.primary, message) for message in (greeting, alive)]
        return [*sent, *effects]"""
_SETTING: Final = '''\
    greeting: str = "hello"
    """What a heartbeat says."""
    sequencers: int = 1
'''
_MESSAGES: Final = "indilog/wire/replica_messages.py"
_UNION: Final = "indilog/wire/messages.py"
_HEARTBEAT: Final = "storage/indilog_storage/heartbeat.py"
_IMPORTED: Final = "import PlacementIs, StorageAlive", "import Greeting, PlacementIs, StorageAlive"
_ROOM: Final = "    has_room: bool = True\n"
_CHANGES: Final = (
    ("indilog/base/release.py", '__version__ = "0.1.0"', '__version__ = "0.1.1"'),
    # A further field of a message.
    (_MESSAGES, _ROOM, f"{_ROOM}    load: float = 0.5\n"),
    # A further kind of message, which storage nodes send with each heartbeat. Sequencers ignore it.
    (_MESSAGES, "class PlacementIs(", _GREETING),
    (_UNION, *_IMPORTED),
    (_UNION, "    | StorageAlive\n", "    | StorageAlive\n    | Greeting\n"),
    (_HEARTBEAT, *_IMPORTED),
    (_HEARTBEAT, "return [Send(leadership.primary, alive), *effects]", _GREETED),
    # A further setting of clusters.
    ("indilog/config/cluster.py", "    sequencers: int = 1\n", _SETTING),
)
"""File, text, and the text in its place."""


def next_release(directory: Path) -> Path:
    """Return a new folder in `directory` with the packages of a later release."""
    copied = directory / "next-release"
    for folder in ("indilog", *FOLDERS):
        shutil.copytree(
            ROOT / folder, copied / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path, before, after in _CHANGES:
        file = copied / path
        text = file.read_text()
        assert before in text, f"{path} has changed: adapt the changes here"
        file.write_text(text.replace(before, after, 1))
    return copied
