"""Handles a full disk: the process keeps running, and recovers automatically (ARCHITECTURE 11,
docs/decisions/0009, PITFALLS 18).

If there is no room for another segment, the journal can still use the rest of its last segment. A
part of that rest is reserved, for frames in flight and for the frames that a restart writes. When
only the reserve is left, the roles are notified to accept no more records (`SpaceChanged`).

The roles that store batches share half of the remaining room equally. When the segment has no room
for a frame, the frame waits here, and later frames wait after it, as on a slow disk. No message
that acknowledges a waiting frame leaves the process. Frames of sequencers do not wait for batches
of other roles, because trims are metalog entries and free disk space. `NodeShell` writes all frames
through `DiskSpace`. The cells of storage nodes are in other files, with a reserve of their own
(`indilog.runtime.cell_store`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from indilog.base.ids import Instant, NodeId
from indilog.base.room_reserve import NO_ROOM
from indilog.config import NodeConfig
from indilog.roles.role import METALOG_KINDS, Location, Persist, Persisted, SpaceChanged
from indilog.runtime.journal.journal import Journal

_SEGMENT_SHARE: Final = 4

log = structlog.get_logger(__name__)


class _Waiting(NamedTuple):
    node: NodeId
    stream: int
    effect: Persist


class DiskSpace:
    """Writes frames to the journal, and tracks whether there is room for more.

    Args:
        sharers: number of roles that store batches and share the remaining room.

    Attributes:
        full: whether the roles have been notified to accept no more records.
        others_full: whether other files of this process have no room on the disk.
    """

    def __init__(
        self,
        journal: Journal,
        config: NodeConfig,
        wake_after: Callable[[float], object],
        *,
        sharers: int,
    ) -> None:
        self._journal = journal
        self._reserve_bytes = min(
            config.journal.disk_reserve_bytes, config.journal.segment_bytes // _SEGMENT_SHARE
        )
        self._retry_s = config.journal.disk_retry_s
        self._wake_after = wake_after
        self._sharers = max(1, sharers)
        self._waiting: deque[_Waiting] = deque()
        self._retry_at: Instant | None = None
        self.full = False
        self.others_full = False

    @property
    def waiting(self) -> bool:
        """Whether frames wait for room."""
        return bool(self._waiting)

    @property
    def short(self) -> bool:
        """Whether the disk is full, or was full at the last check. While this is False,
        `pop_change` returns None.
        """
        return self.full or self.others_full or bool(self._waiting) or self._journal.starved

    def write(self, node: NodeId, stream: int, effect: Persist) -> Location | None:
        """Write a frame and return its location. None: the frame waits for room, and `retry`
        writes it later.

        Raises:
            OSError: the journal has failed.
        """
        if not self._waiting or self._passes(stream, effect):
            location = self._write(stream, effect)
            if location is not None:
                return location
        self._waiting.append(_Waiting(node, stream, effect))
        return None

    def _passes(self, stream: int, effect: Persist) -> bool:
        """Tell whether a frame may overtake the waiting frames. Order matters only within a
        stream.
        """
        metalog = effect.kind in METALOG_KINDS
        return metalog and all(waiting.stream != stream for waiting in self._waiting)

    def _write(self, stream: int, effect: Persist) -> Location | None:
        try:
            return self._journal.write(stream, effect.kind, effect.payload)
        except OSError as error:
            if error.errno not in NO_ROOM or self._journal.failed:
                raise
            return None

    def start(self) -> None:
        """Check for a full disk at the start, before anything is acknowledged."""
        if self._journal.room < self._reserve_bytes:
            self._journal.prepare_next()

    def pop_change(self, now: Instant) -> SpaceChanged | None:
        """Return the notification for the roles, if any; called after each iteration."""
        if not self.short:
            return None
        if self._retry_at is None and (self._journal.starved or self._waiting):
            self._retry_at = Instant(now + self._retry_s)
        if self._retry_at is not None:
            self._wake_after(max(0.0, self._retry_at - now))
        room = self._journal.room
        full = self.others_full or bool(self._waiting)
        full = full or (self._journal.starved and room < self._reserve_bytes)
        if full == self.full:
            return None
        self.full = full
        if full:
            log.error("no disk space left: read-only", room_bytes=room)
            return SpaceChanged(room // 2 // self._sharers)
        log.warning("disk space again: no longer read-only")
        return SpaceChanged(None)

    def retry(self, now: Instant) -> list[tuple[NodeId, Persisted]]:
        """If a retry is due, check for room and write waiting frames. Return the written frames."""
        if self._retry_at is None or now < self._retry_at:
            return []
        self._retry_at = None
        self._journal.look_for_room()
        done: list[tuple[NodeId, Persisted]] = []
        while self._waiting:
            node, stream, effect = self._waiting[0]
            if (location := self._write(stream, effect)) is None:
                break
            self._waiting.popleft()
            done.append((node, Persisted(effect.token, location)))
        return done
