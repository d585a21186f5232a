"""Wakes callers that wait until this node has read a record, or until an invocation has an outcome.

`InvocationService` and `CheckpointLog` wait by `OutcomeWaiters`. The service notifies it when it
has read records.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from indilog.base.errors import OverloadedError
from indilog.base.ids import SeqNum
from indilog_compute.invocations.records import InvocationEnded
from indilog_compute.shares import limit_of_one


class OutcomeWaiters:
    """Wakes waiting callers, and limits their number.

    Args:
        callers_max: largest number of callers that wait for outcomes, and also the largest number
            of callers that wait for records.
        share_max: the part of the free places for outcomes that one application may use (0 to 1).
        is_shared: returns whether several applications are deployed. If not, `share_max` does not
            apply.
    """

    def __init__(
        self,
        callers_max: int,
        *,
        share_max: float = 1.0,
        is_shared: Callable[[], bool] = lambda: True,
    ) -> None:
        self._callers_max = callers_max
        self._share_max = share_max
        self._is_shared = is_shared
        self._waiting: Counter[str] = Counter()
        self._appending = 0
        self._reading: list[tuple[SeqNum, int, asyncio.Future[None]]] = []
        self._outcomes: dict[str, list[asyncio.Future[InvocationEnded | None]]] = {}
        self._numbers = itertools.count()

    async def wait_for_record(self, seqnum: SeqNum, end: SeqNum) -> None:
        """Wait until this node has read the record at `seqnum`. The node has read the records below
        `end` already.
        """
        if seqnum < end:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._reading, (seqnum, next(self._numbers), waiting))
        await waiting

    async def wait_for_record_bounded(self, seqnum: SeqNum, end: SeqNum) -> None:
        """Wait as `wait_for_record` does, with a limit on the number of waiting callers.

        Raises:
            OverloadedError: `callers_max` callers wait for records already. A cancelled caller
                counts until its record is read.
        """
        if seqnum >= end:
            self._check_room_for_record()
        await self.wait_for_record(seqnum, end)

    @contextmanager
    def reserve_record_wait(self) -> Iterator[None]:
        """Reserve room for a caller that appends a record and then waits for it by
        `wait_for_record`.

        Raises:
            OverloadedError: as `wait_for_record_bounded`; nothing was appended.
        """
        self._check_room_for_record()
        self._appending += 1
        try:
            yield
        finally:
            self._appending -= 1
            assert self._appending >= 0, "each reservation ends once"

    def _check_room_for_record(self) -> None:
        waiting = len(self._reading) + self._appending
        if waiting >= self._callers_max:
            raise _too_many(waiting, "records")

    @contextmanager
    def reserve_outcome_wait(self, application: str) -> Iterator[None]:
        """Reserve room for a caller that waits for outcomes of an application.

        Raises:
            OverloadedError: too many callers wait already.
        """
        waiting, own = self._waiting.total(), self._waiting[application]
        if waiting >= self._callers_max:
            raise _too_many(waiting, "outcomes")
        others = waiting - own
        if own >= limit_of_one(
            self._share_max, self._callers_max, others, is_shared=self._is_shared()
        ):
            raise OverloadedError(
                f"{own:,} callers wait for outcomes of app {application} on this node, which is "
                "all that one application may have (app_pending_share_max of calls_pending_max); "
                "try again later."
            )
        self._waiting[application] += 1
        try:
            yield
        finally:
            self._waiting[application] -= 1
            assert self._waiting[application] >= 0, "each reservation ends once"
            if not self._waiting[application]:
                del self._waiting[application]

    async def wait_for_outcome(self, id: str) -> InvocationEnded | None:  # noqa: A002 - the field's name
        """Wait until the outcome of an open invocation is read, and return the outcome.

        The result is None after `notify_all`; then the caller must look into the invocation table.
        Before the call, the caller must reserve room (`reserve_outcome_wait`).
        """
        waiting: asyncio.Future[InvocationEnded | None] = asyncio.get_running_loop().create_future()
        self._outcomes.setdefault(id, []).append(waiting)
        try:
            return await waiting
        finally:
            others = self._outcomes.get(id, [])
            if waiting in others:  # this caller was cancelled; other callers may still wait
                others.remove(waiting)
                if not others:
                    del self._outcomes[id]

    def notify_read(self, end: SeqNum) -> None:
        """Wake the callers that wait for records below `end`."""
        while self._reading and self._reading[0][0] < end:
            waiting = heapq.heappop(self._reading)[2]
            if not waiting.done():
                waiting.set_result(None)

    def notify_outcome(self, event: InvocationEnded) -> None:
        """Wake the callers that wait for the outcome `event`."""
        self._notify(event.id, event)

    def notify_all(self) -> None:
        """Wake all callers that wait for outcomes, because any outcome may have been read."""
        for id_ in list(self._outcomes):
            self._notify(id_, None)

    def _notify(self, id_: str, event: InvocationEnded | None) -> None:
        for waiting in self._outcomes.pop(id_, ()):
            if not waiting.done():
                waiting.set_result(event)


def _too_many(waiting: int, what: str) -> OverloadedError:
    return OverloadedError(
        f"{waiting:,} callers wait for {what} on this node, which is its limit; try again later."
    )
