"""Prepares the next segment of a `Journal` in a thread (ARCHITECTURE 7, docs/decisions/0001).

So the journal does not wait for a new segment at full load.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from indilog.base.room_reserve import NO_ROOM
from indilog.runtime.journal.segment import prepare_segment, segment_path


class SpareSegment:
    """Prepares the next segment, and tells whether there was room for it.

    Attributes:
        pool: the thread for background work on files of the journal.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="journal-segment")
        self._made: Future[None] | None = None
        self._starved = False
        self._judged: Future[None] | None = None
        """The attempt whose outcome is in `_starved`. The outcome is stored there, because each
        query of the future takes a lock.
        """
        self._closing = False

    @property
    def starved(self) -> bool:
        """Whether the last attempt found no room for the segment."""
        if (made := self._made) is None:
            self._starved = False
        elif made is not self._judged and made.done():
            error = made.exception()
            self._judged = made
            self._starved = isinstance(error, OSError) and error.errno in NO_ROOM
        return self._starved

    @property
    def ready(self) -> bool:
        """Whether the segment is prepared."""
        return self._made is not None and self._made.done() and self._made.exception() is None

    def begin(self, number: int) -> None:
        """Start to prepare segment `number`, unless a preparation has started."""
        if self._made is None:
            self.prepare(number)

    def prepare(self, number: int, size_bytes: int = 0) -> None:
        """Prepare segment `number` of at least `size_bytes`, unless it exists."""
        size_bytes = max(size_bytes, self._segment_bytes)

        def make() -> None:
            path = segment_path(self._directory, number)
            if not path.exists() or path.stat().st_size < size_bytes:
                prepare_segment(self._directory, number, size_bytes, lambda: self._closing)

        self._made = self.pool.submit(make)

    def make(self, number: int, size_bytes: int) -> None:
        """Wait for segment `number`. If `size_bytes` exceeds `segment_bytes`, prepare a larger
        segment.

        Raises:
            OSError: there is no room (`ENOSPC`), or another error of the system.
        """
        failed = self._made is not None and self._made.done() and self._made.exception() is not None
        if self._made is None or failed or size_bytes > self._segment_bytes:
            self.prepare(number, size_bytes)
        self.wait()

    def look_for_room(self, number: int) -> None:
        """Prepare segment `number` again, if there was no room before."""
        if self.starved and self._made is not None and self._made.done():
            self.prepare(number)

    def wait(self) -> None:
        """Wait until the segment is prepared.

        Raises:
            OSError: there is no room (`ENOSPC`), or another error of the system.
        """
        assert self._made is not None, "`begin` is called before `wait`"
        self._made.result()

    def used(self) -> None:
        """Note that the segment is in use; the next one must be prepared."""
        self._made = None

    def close(self) -> None:
        """Stop preparing, and wait for the thread."""
        self._closing = True
        self.pool.shutdown()
