"""Stores the closed generations of a log's index, and frees cells and generations that are trimmed.

`index` says what a generation is, `cells.Notes` where it is kept. Each `driver` has one
`ClosedGenerations`. A generation can be read as soon as it is closed, also before it is stored.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Coroutine
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import structlog
from cachetools import LRUCache

from indilog.base.errors import DataLossError, MalformedFrameError, NotReadyError
from indilog_cells.cells import CellsAndNotes, CellsError
from indilog_cells.index import Generation, GenerationInfo
from indilog_cells.state import Closed, LogState

_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 60.0
_UNSTORED_MAX: Final = 64
"""Closed generations that may wait to be stored before appends are refused."""

_log = structlog.get_logger(__name__)


class TrimmedCellError(Exception):
    """A cell or generation that a read needs was trimmed. Catch up, and read again: the floors are
    higher then.
    """


class ClosedGenerations:
    """The closed generations of one log, in one process.

    Args:
        cells: the cells of the log.
        state: returns the applied state of the log.
        start: starts a task that ends with the driver.
        failed: called with each failure of the log's storage.
        cache_bytes_max: bytes of cached generations, at most.
    """

    def __init__(
        self,
        cells: CellsAndNotes,
        *,
        state: Callable[[], LogState],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        failed: Callable[[CellsError], None],
        cache_bytes_max: int,
    ) -> None:
        self._cells = cells
        self._state = state
        self._start = start
        self._failed = failed
        self._cached: LRUCache[int, Generation] = LRUCache(
            cache_bytes_max, getsizeof=attrgetter("size_bytes")
        )
        self._unstored: dict[int, bytes] = {}
        self._storing: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """One generation is stored at a time, in the order in which they were closed."""
        self._freed_below = 0
        """The cells below this one are freed."""
        self._is_freeing = False

    @property
    def are_too_many(self) -> bool:
        """Whether so many generations wait to be stored that no records should be appended."""
        return len(self._unstored) > _UNSTORED_MAX

    async def read(self, info: GenerationInfo) -> Generation:
        """Return a closed generation.

        Raises:
            TrimmedCellError: the generation is trimmed.
            NotReadyError: the store does not answer.
            DataLossError: the generation is damaged.
        """
        if (cached := self._cached.get(info.start)) is not None:
            return cached
        stored = self._unstored.get(info.start)
        try:
            stored = stored or await self._cells.read_generation(info.start)
        except CellsError as error:
            self._failed(error)
            raise NotReadyError(f"The log's store cannot be read: {error}.") from error
        if stored is None:
            raise TrimmedCellError
        try:
            found = Generation(stored)
        except MalformedFrameError as error:
            raise DataLossError(
                f"Part {info.start} of the log's index is damaged: {error}."
            ) from error
        if found.size_bytes <= self._cached.maxsize:
            self._cached[info.start] = found
        return found

    def store(self, closed: Closed) -> None:
        """Store a generation and its checkpoint, then free what is trimmed."""
        assert closed.info.start not in self._unstored, "it is closed once"
        self._unstored[closed.info.start] = closed.generation
        task = self._start(self._store(closed))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def wait_stored(self, timeout_s: float) -> None:
        """Wait until all closed generations are stored, but no longer than `timeout_s` seconds."""
        if self._storing:
            await asyncio.wait(self._storing, timeout=timeout_s)

    async def _store(self, closed: Closed) -> None:
        pause_s = _PAUSE_S
        async with self._turn:
            while True:
                try:
                    await self._cells.write_generation(closed.info.start, closed.generation)
                    await self._cells.write_checkpoint(closed.info.end, closed.checkpoint)
                except CellsError as error:
                    _log.warning("no checkpoint can be written for now", reason=str(error))
                    self._failed(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                    continue
                self._unstored.pop(closed.info.start, None)
                break
        if closed.has_trimmed:
            await self.collect()
        self.free_trimmed()

    def free_trimmed(self) -> None:
        """Free the closed generations that a trim has reached, before the next one is closed. On a
        full disk, only this makes room.
        """
        if not self._is_freeing and self._freeable() > self._freed_below:
            self._is_freeing = True
            self._start(self._free())

    def _freeable(self) -> int:
        """Return the end of the stored generations that a trim has reached; 0: there are none, or
        the log has ended: a copy may leave out the trims after its end.
        """
        state = self._state()
        if not state.generations or state.is_ended:
            return 0
        dead = bisect_right(state.generations, state.dead_below, key=attrgetter("tail"))
        while dead and state.generations[dead - 1].start in self._unstored:
            dead -= 1
        return state.generations[dead - 1].end if dead else 0

    async def _free(self) -> None:
        pause_s = _PAUSE_S
        try:
            while (end := self._freeable()) > self._freed_below:
                if await self.collect():
                    self._freed_below, pause_s = end, _PAUSE_S
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        finally:
            self._is_freeing = False

    async def collect(self) -> bool:
        """Free the cells and generations below the newest stored checkpoint that are trimmed.
        Return whether that succeeded; else some may stay.
        """
        try:
            stored = await self._cells.newest_checkpoint()
            if stored is not None:
                await self._collect_below(LogState.restored(stored))
        except (CellsError, MalformedFrameError) as error:
            _log.warning("trimmed cells stay for now", reason=str(error))
            return False
        return True

    async def _collect_below(self, noted: LogState) -> None:
        state = self._state()
        alive = (noted if state.is_ended else state).dead_below
        infos = [each for each in noted.generations if each.tail > alive]
        live = infos[0].start if infos else noted.position
        starts = [start for start in await self._cells.generations() if start < live]
        for start, end in pairwise([*starts, live]):
            await self._cells.trim(start, end)
            await self._cells.drop_generation(start)
