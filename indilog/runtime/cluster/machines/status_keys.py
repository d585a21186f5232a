"""Publishes the status of processes on several machines, in the metadata store.

Each process has a key in `status/`, which it writes every few seconds. The clocks of machines may
differ, so no wall clock tells the age of a status. A status is recent if its key changed in the
last 10 s of the reader's monotonic clock. `machine_process` creates the `StatusKeys`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import structlog

from indilog.base.errors import IndilogError
from indilog.base.ids import NodeId
from indilog.runtime.cluster.status_files import (
    BELIEVED_S,
    INTERVAL_S,
    PublishedStatus,
    Status,
)
from indilog.runtime.metadata.store import MetadataStore, Written

STATUS_DIRECTORY: Final = "status/"

_decoder: Final = msgspec.json.Decoder(dict[str, dict[str, Any]])
_log = structlog.get_logger(__name__)


class _SeenStatus(NamedTuple):
    version: int
    at: float
    """When the reader first saw this version, in seconds of its monotonic clock."""
    status: Mapping[str, Mapping[str, Any]]


class StatusKeys:
    """A `StatusBoard` in the metadata store. `process` is the name of this process, which writes
    its status here.
    """

    def __init__(self, store: MetadataStore, process: str) -> None:
        self._store = store
        self._key = f"{STATUS_DIRECTORY}{process}"
        self._version = 0
        self._seen: dict[str, _SeenStatus] = {}

    async def write(self, status: Status) -> None:
        """See `StatusBoard.write`."""
        value = msgspec.json.encode(status)
        outcome = await self._store.compare_and_set(
            self._key, value, expected_version=self._version
        )
        if isinstance(outcome, Written):
            self._version = outcome.version
            return
        # An earlier start of this process wrote the key, or the answer to a write was lost.
        self._version = outcome.version
        outcome = await self._store.compare_and_set(
            self._key, value, expected_version=self._version
        )
        self._version = outcome.version

    async def remove(self, nodes: Sequence[NodeId]) -> None:  # noqa: ARG002 - all are in one key
        """See `StatusBoard.remove`."""
        await self._store.delete(self._key, expected_version=self._version)

    def read(self, names: Iterable[NodeId]) -> PublishedStatus:
        """See `StatusBoard.read`. The result is what the last `look` found."""
        oldest = time.monotonic() - BELIEVED_S
        recent: dict[str, Mapping[str, Any]] = {}
        for seen in self._seen.values():
            if seen.at >= oldest:
                recent.update(seen.status)
        names = list(names)
        found: dict[str, Mapping[str, Any]] = {
            name: recent[name] for name in names if name in recent
        }
        return PublishedStatus(found, [name for name in names if name not in recent])

    async def follow(self) -> NoReturn:
        """Call `look` every few seconds, until cancelled."""
        while True:
            try:
                await self.look()
            except IndilogError as error:
                _log.warning("the status of other machines is not known now", reason=str(error))
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Read the status of all processes.

        Raises:
            QuorumUnavailableError: the metadata store does not answer.
        """
        items, _ = await self._store.list_keys(STATUS_DIRECTORY)
        now = time.monotonic()
        seen: dict[str, _SeenStatus] = {}
        for key, found in items.items():
            before = self._seen.get(key)
            if before is not None and before.version == found.version:
                seen[key] = before
                continue
            try:
                seen[key] = _SeenStatus(found.version, now, _decoder.decode(found.value))
            except msgspec.DecodeError:
                _log.warning("a status is of another release", key=key)
        self._seen = seen
