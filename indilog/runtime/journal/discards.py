"""Frames that nobody will read again: marked, durably, then their pages go (decision 0008)."""

from __future__ import annotations

from collections import defaultdict, deque

import structlog

from indilog.roles.role import Location
from indilog.runtime.journal.moved_frames import MovedFrames
from indilog.runtime.journal.old_segments import OldSegments
from indilog.runtime.journal.open_segments import OpenSegments
from indilog.runtime.journal.segment import FRAME_HEADER_BYTES, frame_bytes, mark_gone, punch
from indilog.runtime.journal.segment_scan import header_at

log = structlog.get_logger(__name__)


class Discards:
    """Gives back the room of frames when what makes them superfluous is durable.

    Attributes:
        unpunched: frames that were discarded and keep their room until their file is rewritten.
        held: the segments of which none is given back now (`hold`).
    """

    def __init__(self, segments: OpenSegments, moved: MovedFrames, old: OldSegments) -> None:
        self._segments = segments
        self._moved = moved
        self._old = old
        self._waiting: deque[tuple[int, Location]] = deque()
        """Frames that may go when so many frames are synced."""
        self._parked: list[tuple[int, Location]] = []
        """Those that were due, and are held."""
        self.unpunched = 0
        self.held = range(0)

    def add(self, location: Location, written: int) -> None:
        """Let a frame go when `written` frames are synced."""
        self._waiting.append((written, location))

    def hold(self, segments: range) -> None:
        """Give back none of these segments until `release`: they are being rewritten."""
        self.held = segments

    def release(self) -> None:
        """What was held goes with the next `give_back`."""
        self.held = range(0)
        self._waiting.extendleft(reversed(self._parked))
        self._parked.clear()

    def due(self, synced: int) -> bool:
        """Whether something may be given back now, unless it is held since a moment ago."""
        return bool(self._waiting) and self._waiting[0][0] <= synced

    def give_back(self, synced: int) -> None:
        """Mark what may go by now, durably, and give its pages back.

        Raises:
            OSError: a mark could not be written or synced.
        """
        due: list[Location] = []
        while self._waiting and self._waiting[0][0] <= synced:
            written, location = self._waiting.popleft()
            if location.segment in self.held:
                self._parked.append((written, location))
            else:
                due.append(location)
        places: defaultdict[int, list[Location]] = defaultdict(list)
        for name in due:
            if (place := self._place(name)) is not None:
                places[place.segment].append(place)
                self._old.died(place.segment, frame_bytes(place.length))
        for segment, frames in places.items():
            # One file after the other: opening further ones closes those that were opened first.
            fd = self._segments.fd(segment)
            for marked in mark_gone([(fd, frame) for frame in frames]):
                self.punch(marked)

    def _place(self, name: Location) -> Location | None:
        """Return where a frame is, and how long, which a rewrite may have changed."""
        if not self._moved.has_moved(name.segment):
            return name
        if (place := self._moved.place(name)) is None:
            return None
        number, offset = place
        header = header_at(self._segments.fd(number), offset - FRAME_HEADER_BYTES)
        return Location(number, offset, header.length) if header is not None else None

    def punch(self, location: Location) -> None:
        """Give back the pages of a frame that is marked, if the file system can."""
        try:
            punch(self._segments.fd(location.segment), location)
        except OSError as error:
            if not self.unpunched:
                log.warning("the room of trimmed records is not given back", error=str(error))
            self.unpunched += 1
