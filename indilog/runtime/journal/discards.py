"""Frees the space of frames that are no longer needed (docs/decisions/0008).

A frame is first marked durably as gone. Then a hole is punched into the file, which frees the pages
of the frame. `Journal` owns the `Discards`.
"""

from __future__ import annotations

from collections import defaultdict, deque

import structlog

from indilog.roles.role import Discard, Location
from indilog.runtime.journal.moved_frames import MovedFrames
from indilog.runtime.journal.old_segments import OldSegments
from indilog.runtime.journal.open_segments import OpenSegments
from indilog.runtime.journal.segment import FRAME_HEADER_BYTES, frame_bytes, mark_gone, punch
from indilog.runtime.journal.segment_scan import header_at

log = structlog.get_logger(__name__)


class Discards:
    """Frees discarded frames. Each waits for a sync of the frames that made it unneeded.

    Attributes:
        unpunched: number of discarded frames that kept their pages, because the file system cannot
            punch holes; a rewrite of the file frees them.
        held: segments in which no frame is freed now, because they are being rewritten (`hold`).
    """

    def __init__(self, segments: OpenSegments, moved: MovedFrames, old: OldSegments) -> None:
        self._segments = segments
        self._moved = moved
        self._old = old
        self._waiting: deque[tuple[int, Discard]] = deque()
        """Pairs (n, frame) with ascending n: the frame is freed when the journal has synced n
        frames.
        """
        self._parked: list[tuple[int, Discard]] = []
        """Frames that are due, but in held segments."""
        self.unpunched = 0
        self.held = range(0)

    def add(self, discard: Discard, written: int) -> None:
        """Schedule a frame to be freed when `written` frames are synced."""
        self._waiting.append((written, discard))

    def hold(self, segments: range) -> None:
        """Free no frame in these segments until `release`, because they are being rewritten."""
        self.held = segments

    def release(self) -> None:
        """Let the next `free_discarded` free the held frames."""
        self.held = range(0)
        self._waiting.extendleft(reversed(self._parked))
        self._parked.clear()

    def due(self, synced: int) -> bool:
        """Tell whether the first waiting frame may be freed. Its segment may still be held."""
        return bool(self._waiting) and self._waiting[0][0] <= synced

    def free_discarded(self, synced: int) -> None:
        """Durably mark the frames that are due, and free their pages.

        Raises:
            OSError: a mark could not be written or synced.
        """
        due: list[Discard] = []
        while self._waiting and self._waiting[0][0] <= synced:
            written, discard = self._waiting.popleft()
            if discard.location.segment in self.held:
                self._parked.append((written, discard))
            else:
                due.append(discard)
        places: defaultdict[int, list[Location]] = defaultdict(list)
        for discard in due:
            if (place := self._place(discard.location)) is None:
                continue
            if discard.elsewhere:
                # The frame is counted like a frame without a batch: a rewrite omits it when the
                # kept checkpoints cover it.
                self._old.add_other(place.segment, frame_bytes(place.length))
                self._old.changed = True
                continue
            places[place.segment].append(place)
            self._old.add_dead(place.segment, frame_bytes(place.length))
        for segment, frames in places.items():
            # One file at a time, because opening another file may close this one.
            fd = self._segments.fd(segment)
            for marked in mark_gone([(fd, frame) for frame in frames]):
                self.punch(marked)

    def _place(self, name: Location) -> Location | None:
        """Return the current location and length of a frame. A rewrite may have changed both."""
        if not self._moved.has_moved(name.segment):
            return name
        if (place := self._moved.place(name)) is None:
            return None
        number, offset = place
        header = header_at(self._segments.fd(number), offset - FRAME_HEADER_BYTES)
        return Location(number, offset, header.length) if header is not None else None

    def punch(self, location: Location) -> None:
        """Free the pages of a marked frame, if the file system supports it."""
        try:
            punch(self._segments.fd(location.segment), location)
        except OSError as error:
            if not self.unpunched:
                log.warning("the space of trimmed records is not freed", error=str(error))
            self.unpunched += 1
