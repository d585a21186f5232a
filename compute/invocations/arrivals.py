"""Waiting for what the log will say: until a record is read here, until an outcome is."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from compute.invocations.records import Ended
from indilog.errors import OverloadedError
from indilog.ids import SeqNum


class Arrivals:
    """Who waits for what.

    Args:
        callers_max: who may wait for outcomes at once, and who for records.
    """

    def __init__(self, callers_max: int) -> None:
        self._callers_max = callers_max
        self._waiting = 0
        self._appending = 0
        self._reading: list[tuple[SeqNum, int, asyncio.Future[None]]] = []
        self._outcomes: dict[str, list[asyncio.Future[Ended | None]]] = {}
        self._numbers = itertools.count()

    async def seqnum(self, seqnum: SeqNum, end: SeqNum) -> None:
        """Wait until the record at `seqnum` is read; `end`: what is read already."""
        if seqnum < end:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._reading, (seqnum, next(self._numbers), waiting))
        await waiting

    async def seqnum_for_caller(self, seqnum: SeqNum, end: SeqNum) -> None:
        """Wait like `seqnum`, for somebody who asks.

        Raises:
            OverloadedError: too many wait already, or have waited since a record was read last.
        """
        if seqnum >= end:
            self._check_room_for_record()
        await self.seqnum(seqnum, end)

    @contextmanager
    def room_for_record(self) -> Iterator[None]:
        """Keep room for one who appends a record and then waits until it is read (`seqnum`).

        Raises:
            OverloadedError: as `seqnum_for_caller`; before anything is appended.
        """
        self._check_room_for_record()
        self._appending += 1
        try:
            yield
        finally:
            self._appending -= 1

    def _check_room_for_record(self) -> None:
        waiting = len(self._reading) + self._appending
        if waiting >= self._callers_max:
            raise _too_many(waiting, "records")

    @contextmanager
    def room_for_outcome(self) -> Iterator[None]:
        """Keep room for one who waits for outcomes (`outcome`).

        Raises:
            OverloadedError: too many wait already.
        """
        if self._waiting >= self._callers_max:
            raise _too_many(self._waiting, "outcomes")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def outcome(self, id: str) -> Ended | None:  # noqa: A002 - it is called so
        """Wait until the outcome of an open invocation is read, and return it; None: it may have
        been read. There is room for who asks (`room_for_outcome`).
        """
        waiting: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()
        self._outcomes.setdefault(id, []).append(waiting)
        try:
            return await waiting
        finally:
            others = self._outcomes.get(id, [])
            if waiting in others:  # not told: cancelled; others may have come since it was told
                others.remove(waiting)
                if not others:
                    del self._outcomes[id]

    def read(self, end: SeqNum) -> None:
        """The records below `end` are read."""
        while self._reading and self._reading[0][0] < end:
            waiting = heapq.heappop(self._reading)[2]
            if not waiting.done():
                waiting.set_result(None)

    def ended(self, event: Ended) -> None:
        """The outcome of an invocation is read."""
        self._tell(event.id, event)

    def all_ended(self) -> None:
        """Any outcome may have been read: let all look who wait for one."""
        for id_ in list(self._outcomes):
            self._tell(id_, None)

    def _tell(self, id_: str, event: Ended | None) -> None:
        for waiting in self._outcomes.pop(id_, ()):
            if not waiting.done():
                waiting.set_result(event)


def _too_many(waiting: int, what: str) -> OverloadedError:
    return OverloadedError(
        f"{waiting:,} callers wait for {what} on this node, which is its limit; try again later."
    )
