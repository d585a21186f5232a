"""Decides when and how fast old segments of a journal are rewritten without their dead frames
(docs/decisions/0016).

One rewrite runs at a time, in small steps between the process's other work. A step reads a part of
the old files and asks the roles which frames they still need. A thread writes these frames durably.
A credit (token bucket) limits the bytes written. The credit grows by a share of the appended bytes.
It also grows at a fixed rate over time, so that rewrites continue when there are few appends. After
each step, a pause proportional to the step's estimated cost bounds the load on the event loop.

The roles decide from their state in memory, which may be ahead of the disk. So a copy replaces the
old files only when all frames written before the roles' last decision are synced. `NodeShell` calls
`advance`; `OldSegments` chooses the files, and `SegmentRewrite` copies them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import structlog

from indilog.base.ids import Instant, NodeId
from indilog.base.metrics import Metrics
from indilog.config import NodeConfig
from indilog.roles.role import FrameKind, Location, Role, Shrinks
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.journal.old_segments import OldSegment
from indilog.runtime.journal.segment_rewrite import DamagedSegmentError, SegmentRewrite, Slice

_CREDIT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest credit, in bytes."""
_FRAME_COST_S: Final = 20e-6
_BYTE_COST_S: Final = 2e-9
_REST: Final = 4
"""The pause after a step, in multiples of the step's estimated cost."""
_POLL_S: Final = 0.005
"""Seconds between two checks whether a thread or a sync is done."""
_LOOK_S: Final = 0.1
"""Shortest time in seconds between two searches for files to rewrite."""
_RETRY_S: Final = 5.0
"""Seconds before a rewrite that found no room is retried."""

log = structlog.get_logger(__name__)


class Rewriting:
    """Rewrites the old segments of one journal."""

    def __init__(
        self,
        journal: Journal,
        roles: Mapping[NodeId, Role],
        config: NodeConfig,
        wake_after: Callable[[float], object],
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._journal = journal
        self._wake_after = wake_after
        self._shrinking = {
            stream_of(node): role for node, role in roles.items() if isinstance(role, Shrinks)
        }
        self._share_min = config.journal.rewrite_dead_share_min
        self._share_max = config.journal.rewrite_share_max
        self._bytes_per_s = config.journal.rewrite_bytes_per_s
        self._credit = 0.0
        self._earned_at: Instant | None = None
        self._appended = 0
        self._due = Instant(0.0)
        self._run: Sequence[OldSegment] = ()
        self._began = Instant(0.0)
        self._copy: SegmentRewrite | None = None
        self._slices: Generator[Slice] | None = None
        self._mark: int | None = None
        """When the journal reaches this mark, the complete copy replaces the old files. None: the
        copy is not complete.
        """
        self._working: Future[None] | None = None
        self._cleaning: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a rewrite is running, or may be worthwhile."""
        return self._copy is not None or self._cleaning is not None or self._journal.old.changed

    # --- one step

    def advance(self, now: Instant) -> None:
        """Do the next step of a rewrite, if it is due.

        Raises:
            OSError: the journal has failed.
        """
        if (again_s := self._step(now)) is not None:
            self._wake_after(again_s)

    def _step(self, now: Instant) -> float | None:
        """Do a step, and return the seconds until the next step. None: there is no next step until
        the segments change.
        """
        if self._cleaning is not None:
            if not self._cleaning.done():
                return _POLL_S
            cleaning, self._cleaning = self._cleaning, None
            cleaning.result()
        if self._copy is None and not self._journal.old.changed:
            return None
        self._earn(now)
        if now < self._due:
            return self._due - now
        try:
            if self._copy is None and not self._begin(now):
                return self._due - now
            return self._continue(now)
        except DamagedSegmentError as error:
            log.warning("a segment is not rewritten", error=str(error))
            self._journal.old.exclude_damaged(error.file)
            self._give_up(now)
        except OSError as error:
            log.warning("no segment is rewritten for now", error=str(error))
            self._give_up(Instant(now + _RETRY_S))
        return max(_POLL_S, self._due - now)

    def _earn(self, now: Instant) -> None:
        """Add to the credit: a share of the appends, and a rate over time."""
        appended, before = self._journal.written_bytes, self._appended
        since = now - self._earned_at if self._earned_at is not None else 0.0
        earned = self._share_max * (appended - before) + self._bytes_per_s * since
        self._credit = min(_CREDIT_BYTES_MAX, self._credit + earned)
        self._appended, self._earned_at = appended, now

    # --- a rewrite

    def _begin(self, now: Instant) -> bool:
        """Choose files and open the copy; False: nothing is worth rewriting, or there is
        no room.
        """
        journal = self._journal
        journal.old.changed = False
        run = journal.old.choose(
            below=journal.files.active, share_min=self._share_min, bytes_max=journal.segment_bytes
        )
        if not run:
            self._due = Instant(now + _LOOK_S)
            return False
        if not self._has_room(journal.old.live_bytes(run)):
            journal.old.changed = True
            self._due = Instant(now + _RETRY_S)
            return False
        self._run = run
        self._began = now
        journal.discards.hold(range(run[0].file.first, run[-1].file.last + 1))
        files = [old.file for old in run]
        self._copy = SegmentRewrite(
            journal.directory,
            files,
            journal.moved,
            self._needed,
            batches_only=files[-1].last < journal.old.floor,
        )
        self._slices = self._copy.slices()
        return True

    def _has_room(self, size_bytes: int) -> bool:
        """Tell whether there is room for the copy and the next segment. On a full disk, twice the
        size of the copy suffices.
        """
        system = os.statvfs(self._journal.directory)
        free = system.f_bavail * system.f_frsize
        spare = self._journal.spare
        if spare.starved:
            return free > 2 * size_bytes
        return free > size_bytes + (0 if spare.ready else self._journal.segment_bytes)

    def _needed(
        self, stream: int, kind: FrameKind, payload: bytes, location: Location
    ) -> bytes | None:
        if (role := self._shrinking.get(stream)) is None:
            return payload
        return role.needed(kind, payload, location)

    def _continue(self, now: Instant) -> float:
        copy, slices = self._copy, self._slices
        assert copy is not None and slices is not None  # noqa: PT018 one state
        if self._working is not None:
            if not self._working.done():
                return _POLL_S
            working, self._working = self._working, None
            working.result()
        if self._mark is not None:
            return self._replace(now) if self._journal.reached(self._mark) else _POLL_S
        if self._credit <= 0:
            return max(_POLL_S, -self._credit / self._bytes_per_s)
        if (part := next(slices, None)) is None:
            self._mark = self._journal.mark()
            self._working = self._journal.spare.pool.submit(copy.finish)
            return _POLL_S
        size = sum(map(len, part.buffers))
        self._credit -= size
        self._metrics.rewritten_bytes += size
        if part.buffers:
            self._working = self._journal.spare.pool.submit(copy.write, part)
        cost_s = part.frames * _FRAME_COST_S + part.read_bytes * _BYTE_COST_S
        self._due = Instant(now + _REST * cost_s)
        return _REST * cost_s

    def _replace(self, now: Instant) -> float:
        """Replace the old files by the durable copy."""
        journal, copy, run = self._journal, self._copy, self._run
        assert copy is not None
        file = copy.give_name()
        journal.files.replaced([old.file.first for old in run], file)
        journal.moved.moved(range(file.first, file.last + 1), file.first, copy.places)
        journal.old.replaced(run, file, copy.bytes, copy.other_bytes, copied_from=self._began)
        self._metrics.rewrites += 1
        self._cleaning = journal.spare.pool.submit(copy.clean)
        self._end_rewrite(now)
        return _POLL_S

    def _give_up(self, until: Instant) -> None:
        """Remove the copy, and start another one at `until` or later."""
        if self._copy is not None:
            self._copy.give_up()
        self._journal.old.changed = True
        self._end_rewrite(until)

    def _end_rewrite(self, due: Instant) -> None:
        if self._slices is not None:
            self._slices.close()
        self._copy = self._slices = self._mark = self._working = None
        self._run = ()
        self._journal.discards.release()
        self._due = due

    def close(self) -> None:
        """Stop, and remove an incomplete copy."""
        for work in (self._working, self._cleaning):
            if work is not None:
                work.exception()
        if self._copy is not None:
            self._give_up(self._due)
