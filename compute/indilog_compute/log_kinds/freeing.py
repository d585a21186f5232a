"""Frees the closed segments of a log whose records are all trimmed (decision 0095).

A record `freed` leaves such segments out of the log. Compute nodes that replay it use these
segments no more, and answer that reads below the first segment that is left are trimmed. When all
of them have followed, the cells or objects of the segments are deleted, and a further record says
so. Each step may be repeated. If the node crashes between two steps, the next run continues, also
on another node.

`kinds` runs this periodically, on the node that enforces retention policies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from indilog.base.errors import TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Session
from indilog.base.log_kinds import SHARED
from indilog.kernel.view import View
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from indilog_compute.log_kinds.route import Route
from indilog_compute.log_kinds.segments import LogSegment

_UNRELEASED_MAX: Final = 64
"""Freed segments of one log whose storage may exist; while there are more, none is freed."""


class Freeing:
    """Frees segments of logs.

    Args:
        catalog: the catalog.
        view: returns the newest view.
        wait_until_unused: waits until no compute node uses the segments that the record of a log at
            a seqnum leaves out. Raises `NotReadyError` if a node does not announce that in time.
        release: deletes the cells or objects of a segment of a log. Raises `IndilogError` if some
            may be left.
    """

    def __init__(
        self,
        catalog: ReplayedCatalog,
        *,
        view: Callable[[], View],
        wait_until_unused: Callable[[str, SeqNum], Awaitable[None]],
        release: Callable[[str, LogSegment], Awaitable[None]],
    ) -> None:
        self._catalog = catalog
        self._view = view
        self._wait_until_unused = wait_until_unused
        self._release = release

    async def run(self, route: Route) -> None:
        """Free the segments of a log that are trimmed, and release what was freed before.

        Raises:
            IndilogError: it was not completed; the next run continues.
        """
        state = route.state
        if not self._catalog.reads_freed(self._view().engines):
            return
        if (count := await self._trimmed(route)) and state.switch is None:
            freed = [each for each in state.segments[:count] if each.kind != SHARED]
            await self._record(route, state.segments[count:], (*state.unreleased, *freed))
        if state.unreleased:
            await self._release_all(route)

    async def _trimmed(self, route: Route) -> int:
        """Return how many of the oldest segments are closed and have only trimmed records."""
        segments, count = route.state.segments, 0
        if len(route.state.unreleased) >= _UNRELEASED_MAX:
            return 0
        for segment in segments[:-1]:
            if not await _is_trimmed(route, segment):
                break
            count += 1
        return count if route.state.segments is segments else 0

    async def _release_all(self, route: Route) -> None:
        """Delete what is kept of freed segments, after all compute nodes have followed."""
        state = route.state
        freed_at, unreleased = state.freed_at, state.unreleased
        assert freed_at is not None, "a record freed them"
        await self._wait_until_unused(route.name, freed_at)
        for segment in unreleased:
            await self._release(route.name, segment)
            await self._catalog.forget_layouts(segment.folder)
        if state.switch is None and state.freed_at == freed_at:
            await self._record(route, state.segments, ())

    async def _record(
        self,
        route: Route,
        segments: tuple[LogSegment, ...],
        unreleased: tuple[LogSegment, ...],
    ) -> None:
        if await self._catalog.free(route.name, segments=segments, unreleased=unreleased):
            await self._catalog.shorten(route.name, self._view().engines)


async def _is_trimmed(route: Route, segment: LogSegment) -> bool:
    """Whether all records of a closed segment are trimmed: the log's floor is its end, or above."""
    assert segment.local_end is not None, "it is closed"
    if segment.end == segment.start:
        return True
    session = Session()
    session.saw(route.state.position)
    log = await route.local(segment, session)
    try:
        await log.read_next(bound=segment.local_first)
    except TrimmedError as error:
        return error.first_seqnum >= segment.local_end
    return False
