"""The log object of a caller whose log is `shared` when it is opened. After a switch, the object
continues with the new kind.

`LocalLogs` makes these objects; the work after a switch is that of `segmented_log`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from indilog.base.errors import (
    ConditionFailedError,
    DataLossError,
    TrimmedError,
    WrongStateError,
)
from indilog.base.ids import EMPTY_TAG, MAX_SEQNUM, SeqNum, ShardId, UserTag, names_match
from indilog.base.log import After, Entry, Log, PlacedSpan, Record, Session, check_bound
from indilog.base.retention import Retention
from indilog.wire.messages import Direction
from indilog_compute.local_log import LocalLog, LocalLogs
from indilog_compute.log_kinds.segmented_log import SegmentedLog
from indilog_compute.log_kinds.segments import FIRST

_FoundT = TypeVar("_FoundT")


class FollowingLog(LocalLog):
    """A `shared` log until a switch of it begins; from then on, a `SegmentedLog`.

    Each call looks for a switch before and after its work. If a switch has begun meanwhile, the
    `SegmentedLog` makes a read again. An append first asks whether its records are in the log
    (`SegmentedLog.settled`), and is made again only if they are not. So each record is in the log
    once, in the order and the session of its caller. If the switch is abandoned, the log stays
    `shared`, and calls go on here. Without a switch, this costs two look-ups in a dictionary. Calls
    on hot paths repeat a few lines of `LocalLog`, because a further coroutine
    takes a twentieth of the time of a read.
    """

    __slots__ = ("_moved",)

    def __init__(self, logs: LocalLogs, name: str, session: Session) -> None:
        super().__init__(logs, name, session, logs.routes)

    def _followed(self) -> SegmentedLog:
        """Return the `SegmentedLog` of this log; a switch of the log has begun."""
        try:
            return self._moved
        except AttributeError:
            kinds = self._logs.kinds
            log = None if kinds is None else kinds.log(self.name, self._session)
            assert isinstance(log, SegmentedLog), "a switch began"
            self._moved: SegmentedLog = log
            return log

    # --- appends

    async def _append_overtaken(
        self, seqnum: SeqNum, data: bytes, tags: tuple[UserTag, ...]
    ) -> SeqNum:
        settled = await self._settled([seqnum])
        return settled[0] if settled else await self._followed().append(data, tags=tags)

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """See `Log.append_batch`."""
        if self.name in self._routes:
            return await self._followed().append_batch(entries, after=after)
        try:
            seqnums = await LocalLog.append_batch(self, entries, after=after)
        except (ConditionFailedError, TrimmedError, DataLossError):
            # The segment may have ended before the record that made the condition fail. Then that
            # record is not in the log, and neither is the loss that `DataLossError` reports.
            if self.name not in self._routes:
                raise
            return await self._followed().append_batch(entries, after=after)
        if not seqnums or self.name not in self._routes:
            return seqnums
        settled = await self._settled(seqnums)
        return settled or await self._followed().append_batch(entries, after=after)

    async def _settled(self, seqnums: Sequence[SeqNum]) -> list[SeqNum] | None:
        return await self._followed().settled(FIRST, seqnums)

    # --- reads

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """See `Log.read`."""
        if self.name not in self._routes:
            try:
                record = await self._read(
                    Direction.NEXT, EMPTY_TAG, check_bound(seqnum), fresh=fresh
                )
            except DataLossError:
                if self.name not in self._routes:
                    raise
            else:
                if self.name not in self._routes:
                    if record is None or record.seqnum != seqnum:
                        return None
                    return record if names_match(record.names, self.name, None) else None
        return await self._followed().read(seqnum, fresh=fresh)

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """See `Log.read_next`."""
        left_s = wait
        if self.name not in self._routes:
            started = 0.0 if wait is None else asyncio.get_running_loop().time()
            try:
                if wait is None:
                    record = await self._read_matching(
                        Direction.NEXT, tag, check_bound(bound), fresh=fresh
                    )
                else:
                    record = await LocalLog.read_next(self, tag, bound, wait=wait, fresh=fresh)
            except DataLossError:
                if self.name not in self._routes:
                    raise
            else:
                if self.name not in self._routes:
                    return record
            left_s = None if wait is None else _left(wait, started)
        return await self._followed().read_next(tag, bound, wait=left_s, fresh=fresh)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """See `Log.read_prev`."""
        if self.name not in self._routes:
            try:
                record = await self._read_matching(
                    Direction.PREV, tag, check_bound(bound), fresh=fresh
                )
            except DataLossError:
                if self.name not in self._routes:
                    raise
            else:
                if self.name not in self._routes:
                    return record
        return await self._followed().read_prev(tag, bound, fresh=fresh)

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        """See `Log.read_range`."""
        left_s = wait
        if self.name not in self._routes:
            started = 0.0 if wait is None else asyncio.get_running_loop().time()
            try:
                page = await LocalLog.read_range(
                    self, tag, bound, limit=limit, wait=wait, fresh=fresh
                )
            except DataLossError:
                if self.name not in self._routes:
                    raise
            else:
                if self.name not in self._routes:
                    return page
            left_s = None if wait is None else _left(wait, started)
        return await self._followed().read_range(tag, bound, limit=limit, wait=left_s, fresh=fresh)

    # --- the log as a whole

    async def _ask(self, once: Callable[[Log], Awaitable[_FoundT]]) -> _FoundT:
        """Make the call; make it again if a switch began meanwhile."""
        if self.name not in self._routes:
            answer = await once(self._logs.shared(self.name, self._session))
            if self.name not in self._routes:
                return answer
        return await once(self._followed())

    async def tail(self) -> SeqNum:
        """See `Log.tail`."""
        return await self._ask(lambda log: log.tail())

    async def now(self) -> float:
        """See `Log.now`."""
        return await self._ask(lambda log: log.now())

    async def find_time(self, time: float) -> SeqNum:
        """See `Log.find_time`."""
        return await self._ask(lambda log: log.find_time(time))

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """See `Log.trim`."""
        await self._ask(lambda log: log.trim(until, tag=tag))

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """See `Log.set_retention`."""
        await self._ask(lambda log: log.set_retention(age_s=age_s, size_bytes=size_bytes))

    async def retention(self) -> Retention:
        """See `Log.retention`."""
        return await self._ask(lambda log: log.retention())

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """See `Log.set_aux`."""
        await self._ask(lambda log: log.set_aux(seqnum, aux))

    async def places(self, start: SeqNum, end: SeqNum) -> Sequence[PlacedSpan]:
        """See `LocalLog.places`.

        Raises:
            WrongStateError: the log was switched, so its seqnums are not those of shards.
        """
        self._check_sharded()
        return await LocalLog.places(self, start, end)

    async def shard(self) -> ShardId | None:
        """See `LocalLog.shard`."""
        self._check_sharded()
        return await LocalLog.shard(self)

    def _check_sharded(self) -> None:
        if self.name in self._routes:
            raise WrongStateError(
                f"Log {self.name} was switched to another kind, so it has no shards of its own."
            )


def _left(wait_s: float, started: float) -> float:
    return max(wait_s - (asyncio.get_running_loop().time() - started), 0.0)
