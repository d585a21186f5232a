"""Decides when a process writes a checkpoint of its roles, and writes it (docs/decisions/0028).

A checkpoint is due when a segment is full, or when replaying the frames written since the last
checkpoint would take long. A checkpoint also waits until the bytes appended since the last
checkpoint are at least half the size of that checkpoint. So large checkpoints are written less
often, and cost at most about twice the bytes of the appends.

The state is copied between two iterations of the event loop, when the roles have been notified of
all written frames. A `CHECKPOINT` frame marks the checkpoint's place in the journal. A thread
encodes and writes the copy when all frames up to that one are durable. So after a power loss no
checkpoint is ahead of its journal.

A clean stop also writes a checkpoint, so that the next start replays nothing. `NodeShell` calls
`Checkpointing` in each iteration; `checkpoint_files` defines the file format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final, NamedTuple

import structlog

from indilog.base.room_reserve import NO_ROOM
from indilog.roles.role import Checkpoints, NotesCheckpoints, Role, WantsCheckpoints
from indilog.runtime.journal.checkpoint_files import (
    FileUse,
    JournalCheckpoint,
    Place,
    write_checkpoint,
)
from indilog.runtime.journal.journal import Journal

_SHARE: Final = 2
"""A checkpoint of n bytes is written after at least n / `_SHARE` bytes were appended."""
_UNSAVED_BYTES: Final = 128
"""Assumed bytes of state for each frame in `Checkpoints.unsaved`, which estimates unsaved work as a
number of frames.
"""
_POLL_S: Final = 0.005
"""Seconds between two checks whether a sync, or the writing thread, has finished."""

log = structlog.get_logger(__name__)


class _Taken(NamedTuple):
    """A checkpoint that was copied and is not written yet.

    Attributes:
        place: its place in the journal.
        encoders: functions that encode the copied states of the roles, by stream.
        uses: the use of the segment files at the time of the copy.
        mark: the mark that the journal must reach before the checkpoint is written.
    """

    place: Place
    encoders: Mapping[int, Callable[[], bytes]]
    uses: tuple[FileUse, ...]
    mark: int


class Checkpointing:
    """Writes the checkpoints of one process.

    Attributes:
        written: number of checkpoints written in this incarnation.
    """

    def __init__(
        self,
        journal: Journal,
        roles: Mapping[int, Role],
        wake_after: Callable[[float], object],
        *,
        frames: int,
    ) -> None:
        self._journal = journal
        self._roles = {s: role for s, role in roles.items() if isinstance(role, Checkpoints)}
        self._wanting = [r for r in self._roles.values() if isinstance(r, WantsCheckpoints)]
        self._wake_after = wake_after
        self._frames_max = frames
        self._frames_at = 0
        self._bytes_at = 0
        self._segment_at = 0
        """The segment of the journal when the last checkpoint was taken. `_frames_at` and
        `_bytes_at` are the journal's frames and bytes at that time.
        """
        self._unsaved_at = 0
        """The sum of the roles' `Checkpoints.unsaved` directly after the last copy. It is 0 again
        when that checkpoint is durable, because the roles then count none of this work.
        """
        self._size_bytes = 0
        self._taken: _Taken | None = None
        self._writing: Future[int] | None = None
        self.written = 0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was copied and is not written yet."""
        return self._taken is not None

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do."""
        return self._taken is not None or self._due()

    def start(self) -> None:
        """Start after recovery. The frames that recovery replayed count as written since the last
        checkpoint.
        """
        self._segment_at = self._journal.files.active

    def advance(self, *, quiet: bool) -> None:
        """Copy the state if a checkpoint is due, or continue writing the last copy.

        `quiet`: the roles have been notified of all written frames.

        Raises:
            OSError: the journal has failed.
        """
        if self._taken is not None:
            self._continue(self._taken)
        elif quiet and self._due() and self._take():
            self._wake_after(_POLL_S)

    def _due(self) -> bool:
        journal = self._journal
        # If the last checkpoint could not be written, a role still wants one. The next attempt is
        # made only after new frames, not at once.
        has_new = journal.frames > self._frames_at and not journal.starved
        if has_new and any(role.wants_checkpoint for role in self._wanting):
            return True
        unsaved = self._unsaved() - self._unsaved_at
        frames = journal.frames - self._frames_at + unsaved
        filled = journal.files.active != self._segment_at and frames > 0
        if not filled and frames < self._frames_max:
            return False
        appended = journal.written_bytes - self._bytes_at + unsaved * _UNSAVED_BYTES
        return appended * _SHARE >= self._size_bytes and not journal.starved

    def _unsaved(self) -> int:
        unsaved = 0
        for role in self._roles.values():
            unsaved += role.unsaved
        return unsaved

    def _take(self) -> bool:
        """Copy the state of all roles; False: there is no room for the `CHECKPOINT` frame."""
        journal = self._journal
        try:
            place = journal.begin_checkpoint()
        except OSError as error:
            if error.errno not in NO_ROOM or journal.failed:
                raise
            return False
        encoders = {stream: role.checkpoint() for stream, role in self._roles.items()}
        self._taken = _Taken(place, encoders, journal.uses(), journal.mark())
        self._frames_at, self._bytes_at = journal.frames, journal.written_bytes
        self._segment_at, self._unsaved_at = place.segment, self._unsaved()
        return True

    def _continue(self, taken: _Taken) -> None:
        if self._writing is None:
            if self._journal.reached(taken.mark):
                self._writing = self._journal.spare.pool.submit(self._write, taken)
            self._wake_after(_POLL_S)
        elif self._writing.done():
            writing, self._writing, self._taken = self._writing, None, None
            self._concluded(taken, writing)
        else:
            self._wake_after(_POLL_S)

    def _write(self, taken: _Taken) -> int:
        assert self._journal.reached(taken.mark), "a checkpoint is not ahead of its journal"
        roles = {stream: encode() for stream, encode in taken.encoders.items()}
        derived = frozenset(stream for stream, role in self._roles.items() if role.derived)
        checkpoint = JournalCheckpoint(roles, derived, taken.uses)
        return write_checkpoint(self._journal.directory, taken.place, checkpoint)

    def _concluded(self, taken: _Taken, writing: Future[int]) -> None:
        try:
            self._size_bytes = writing.result()
        except OSError as error:
            log.warning("no checkpoint is written for now", error=str(error))
            return
        self.written += 1
        self._unsaved_at = 0
        self._journal.checkpointed(taken.place)
        for role in self._roles.values():
            if isinstance(role, NotesCheckpoints):
                role.checkpointed()

    def stop(self, *, quiet: bool) -> None:
        """Write a final checkpoint if there are frames or unsaved work since the last checkpoint.

        The call syncs the journal, and blocks until the file is written.

        Args:
            quiet: as in `advance`; if False, no checkpoint is written.

        Raises:
            OSError: the journal has failed.
        """
        if self._writing is not None:
            self._writing.exception()
        elif self._taken is not None:
            self._frames_at = 0  # the last copy was not written, so a new one is needed
        fresh = self._journal.frames != self._frames_at or self._unsaved()
        if quiet and fresh and self._take():
            self._journal.sync()
            assert self._taken is not None
            self._concluded(self._taken, self._journal.spare.pool.submit(self._write, self._taken))
        self._taken = None
