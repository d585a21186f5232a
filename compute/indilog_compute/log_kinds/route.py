"""The route of one log: the segments to which its calls go, as one compute node knows them.

`kinds` creates routes and reports changes of the catalog to them; `segmented_log` asks them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from indilog.base.errors import NotReadyError, OverloadedError
from indilog.base.ids import SeqNum
from indilog.base.log import Log, Session
from indilog.base.log_kinds import SHARED
from indilog_compute.log_kinds.catalog_records import CreatedLogState
from indilog_compute.log_kinds.segments import LogSegment

_HELD_MAX: Final = 10_000
"""Largest number of calls of one log that wait for the end of a switch."""


class Route:
    """The segments of a log, and whether a switch is under way.

    During a switch, this node *holds* the log until it knows the outcome. While the node holds the
    log, it acknowledges no append, and answers no read about seqnums at or above the tail from
    before the switch. A node that left the view may not know of a switch. It holds the log when it
    reads that the open segment ended.

    Args:
        state: the state of the log in the catalog; it changes in place.
        scope: see `Log.scope`.
        shared: opens logs of kind `shared`.
        other: opens a segment of another kind.
        ended_at: returns the local tail of a segment, if this node has read that the segment ended;
            else None.
        follow: reads the records of the catalog that were appended before the call.
        append_timeout_s: longest wait of an append for the end of a switch, seconds.
        read_timeout_s: longest wait of a read for the end of a switch, seconds.
    """

    def __init__(
        self,
        state: CreatedLogState,
        scope: object | None,
        *,
        shared: Callable[[str, Session], Log],
        other: Callable[[LogSegment], Awaitable[Log]],
        ended_at: Callable[[LogSegment], SeqNum | None],
        follow: Callable[[], Awaitable[None]],
        append_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self.state = state
        self.name = state.created.log
        self.scope = self if scope is None else scope
        self.shared = shared
        self.append_timeout_s = append_timeout_s
        self.read_timeout_s = read_timeout_s
        self._other = other
        self._ended_at = ended_at
        self._follow = follow
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held = 0

    def is_open_since(self, last: SeqNum) -> bool:
        """Whether no switch is under way, and no switch has begun since `last` was the log's last
        record in the catalog.
        """
        is_known = self.state.last == last and self.state.switch is None
        return is_known and self.ended_at() is None

    def ended_at(self) -> SeqNum | None:
        """Return the tail of the last segment, if this node knows it as open but has read that it
        ended; else None. The catalog then has records that this node has not read.
        """
        segment = self.state.segments[-1]
        local = self._ended_at(segment)
        return None if local is None else segment.seqnum(local)

    def segment(self, number: SeqNum) -> LogSegment | None:
        """Return the segment with a number; None: it is freed."""
        return next((each for each in self.state.segments if each.number == number), None)

    async def local(self, segment: LogSegment, session: Session) -> Log:
        """Return the log of a segment.

        Raises:
            NotReadyError: the store of the segment does not answer, or the segment is freed.
        """
        if segment.kind != SHARED:
            return await self._other(segment)
        return self.shared(segment.local_log, session)

    def changed(self) -> None:
        """Note that `state` has changed."""
        change, self._change = self._change, asyncio.get_running_loop().create_future()
        change.set_result(None)

    def change(self) -> asyncio.Future[None]:
        """Return a future that is resolved at the next change of `state`. All callers share it, so
        none may cancel it.
        """
        return self._change

    def deadline(self, timeout_s: float) -> float:
        """Return the time of the event loop after `timeout_s` seconds."""
        return asyncio.get_running_loop().time() + timeout_s

    async def wait_until_open(self, deadline: float) -> None:
        """Wait while a switch is under way, also one that this node does not know of yet.

        Raises:
            NotReadyError: the switch did not end before `deadline`, or the catalog cannot be read.
            OverloadedError: too many calls wait for the end of the switch.
        """
        if self.state.switch is None and self.ended_at() is not None:
            await self._follow()
        while self.state.switch is not None or self.ended_at() is not None:
            await self._wait(deadline)

    async def _wait(self, deadline: float) -> None:
        if self._held >= _HELD_MAX:
            raise OverloadedError(
                f"Log {self.name} is being switched to another kind, and {self._held:,} calls wait "
                "for it; repeat the call."
            )
        self._held += 1
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            done, _ = await asyncio.wait([self._change], timeout=max(left_s, 0.0))
        finally:
            self._held -= 1
        if not done and left_s <= 0:
            raise NotReadyError(
                f"Log {self.name} is being switched to another kind; repeat the call."
            )
