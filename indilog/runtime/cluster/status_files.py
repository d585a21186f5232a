"""Publishes the status of a cluster's processes for its gateways (ARCHITECTURE 11).

Each process writes the status of its roles every few seconds, and gateways (`assembly.status_of`)
read it. On one machine, the status is in files of the run's directory (`StatusFiles`). On several
machines, it is in the metadata store (`indilog.runtime.cluster.machines.status_keys`). So a status
request costs no message, and an old status reveals a process that hangs. A file also has the id of
its process, so that a killed process is noticed at once. The status is only for operators.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
import structlog

from indilog.base.errors import IndilogError
from indilog.base.ids import NodeId
from indilog.config import KIB

INTERVAL_S: Final = 2.0
"""Seconds between two updates of a process's status."""
BELIEVED_S: Final = 5 * INTERVAL_S
"""Age in seconds above which a status is not shown."""
_BYTES_MAX: Final = 256 * KIB

Status: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Counters and states by role (or other part), then by name."""

log = structlog.get_logger(__name__)


class PublishedStatus(NamedTuple):
    """The recent status of nodes in other processes, and the nodes without a recent status."""

    status: Status
    silent: list[NodeId]


class _StatusFile(msgspec.Struct):
    """The content of a file.

    Attributes:
        process: id of the process that wrote it.
        status: the status of one node; empty: the node has none.
    """

    process: int
    status: dict[str, dict[str, Any]]


class StatusBoard(Protocol):
    """Publishes the status of the nodes of this process, and reads the status of other nodes."""

    async def write(self, status: Status) -> None:
        """Publish the status of nodes of this process. `status` has an entry for each node.

        Raises:
            OSError, IndilogError: the status cannot be published now.
        """

    async def remove(self, nodes: Sequence[NodeId]) -> None:
        """Remove the status of these nodes, because their process ends without a failure."""

    def read(self, names: Iterable[NodeId]) -> PublishedStatus:
        """Return the recent status of the nodes `names`."""


@asynccontextmanager
async def publish_status(
    board: StatusBoard, nodes: Sequence[NodeId], status: Callable[[], Status]
) -> AsyncIterator[None]:
    """Publish the status of the `nodes` of a process at once, and periodically while the block
    runs.
    """

    async def publish_now() -> None:
        found = status()
        try:
            await board.write({node: found.get(node, {}) for node in nodes})
        except (OSError, IndilogError) as error:
            log.warning("status not written", nodes=list(nodes), error=str(error))

    async def publish() -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await publish_now()

    await publish_now()
    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(OSError, IndilogError):
            await board.remove(nodes)


class StatusFiles:
    """A `StatusBoard` of processes on one machine: files in the run's `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def write(self, status: Status) -> None:
        """See `StatusBoard.write`."""
        for node, figures in status.items():
            found = _StatusFile(os.getpid(), {node: dict(figures)} if figures else {})
            content = msgspec.json.encode(found)
            await asyncio.to_thread(_write, self._path(NodeId(node)), content)

    async def remove(self, nodes: Sequence[NodeId]) -> None:
        """See `StatusBoard.remove`."""
        for node in nodes:
            self._path(node).unlink(missing_ok=True)

    def read(self, names: Iterable[NodeId]) -> PublishedStatus:
        """See `StatusBoard.read`."""
        status: dict[str, Mapping[str, Any]] = {}
        silent: list[NodeId] = []
        for name in names:
            found = _read(self._path(name))
            if found is None:
                silent.append(name)
            else:
                status.update(found)
        return PublishedStatus(status, silent)

    def _path(self, name: NodeId) -> Path:
        return self._directory / f"{name}.status"


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    temporary.rename(path)


def _read(path: Path) -> dict[str, dict[str, Any]] | None:
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MAX)
        if time.time() - path.stat().st_mtime > BELIEVED_S:
            return None
        found = msgspec.json.decode(content, type=_StatusFile)
    except (OSError, msgspec.DecodeError):
        return None
    return found.status if _is_running(found.process) else None


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is a process of another user
        return True
    return True
