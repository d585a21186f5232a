"""Publishes the status of a run's processes for its gateways (ARCHITECTURE 11).

Each process writes the status of its roles to a file of the run's directory every
few seconds, and gateways read these files. So a status request costs no message, and an old file
reveals a process that hangs. The status is only for operators.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import structlog

from indilog.base.ids import NodeId
from indilog.config import KIB

_INTERVAL_S: Final = 2.0
_BELIEVED_S: Final = 5 * _INTERVAL_S
"""Age in seconds above which a status is not shown."""
_BYTES_MAX: Final = 256 * KIB

Status: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Counters and states by role (or other part), then by name."""

log = structlog.get_logger(__name__)


class PublishedStatus(NamedTuple):
    """The status of other processes, and the nodes without a recent status."""

    status: Status
    silent: list[NodeId]


@asynccontextmanager
async def publish_status(
    directory: Path, nodes: Sequence[NodeId], status: Callable[[], Status]
) -> AsyncIterator[None]:
    """Write the status of the `nodes` of a process at once and periodically while the block runs:
    a file for each.
    """

    async def publish_now() -> None:
        found = status()
        for node in nodes:
            own = {node: found[node]} if node in found else {}
            try:
                await asyncio.to_thread(_write, _path(directory, node), msgspec.json.encode(own))
            except OSError as error:
                log.warning("status not written", node=node, error=str(error))

    async def publish() -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await publish_now()

    await publish_now()
    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for node in nodes:
            _path(directory, node).unlink(missing_ok=True)


def read_status(directory: Path, names: Iterable[NodeId]) -> PublishedStatus:
    """Return the recent status of the nodes `names`."""
    status: dict[str, Mapping[str, Any]] = {}
    silent: list[NodeId] = []
    for name in names:
        found = _read(_path(directory, name))
        if found is None:
            silent.append(name)
        else:
            status.update(found)
    return PublishedStatus(status, silent)


def _path(directory: Path, name: NodeId) -> Path:
    return directory / f"{name}.status"


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    temporary.rename(path)


def _read(path: Path) -> dict[str, dict[str, Any]] | None:
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MAX)
        if time.time() - path.stat().st_mtime > _BELIEVED_S:
            return None
        return msgspec.json.decode(content, type=dict[str, dict[str, Any]])
    except (OSError, msgspec.DecodeError):
        return None
