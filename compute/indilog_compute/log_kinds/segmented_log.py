"""A log of any kind, or of several kinds one after another, with the interface of any log.

Segments and switches come from a `Route`. `kinds` makes a `SegmentedLog` for each caller of a log
that is not `shared`, was switched, or is being switched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConditionFailedError,
    DataLossError,
    NotReadyError,
    SealedError,
    TrimmedError,
)
from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import (
    After,
    Entry,
    Log,
    Record,
    Session,
    check_after,
    check_bound,
    check_limit,
    check_tags,
    check_time,
    check_until,
    check_wait,
)
from indilog.base.log_kinds import SHARED
from indilog.base.retention import Retention, checked_retention
from indilog.config import MIB
from indilog.sdk.retention_log import RETENTION_LOG, record_policy, recorded_policy
from indilog_compute.log_kinds.route import Route
from indilog_compute.log_kinds.segments import FIRST, LogSegment, down_from, from_bound

_PAGE_BYTES_MAX: Final = 4 * MIB
"""A page with at least this many bytes is not filled with records of a further segment."""

_FoundT = TypeVar("_FoundT")
_Segments: TypeAlias = tuple[LogSegment, ...]
_Asking: TypeAlias = Coroutine[Any, Any, Record | list[Record] | None]


class SegmentedLog(Log):
    """Passes each call to the segments that the call is about, and follows switches.

    If a switch begins during an append to the old segment, the bridge decides the outcome. If the
    record is below the end of the old segment, the append is acknowledged. Else the record is not
    in the log, and is appended to the new segment.

    Args:
        route: the segments of the log.
        session: the session for `shared` segments. Segments of other kinds need none: their reads
            see all appends that were acknowledged before. Their positions cannot be compared with
            those of `shared` logs.
    """

    def __init__(self, route: Route, session: Session) -> None:
        self.name = route.name
        self._route = route
        self._session = session
        self._logs: dict[SeqNum, Log] = {}

    @property
    def scope(self) -> object:
        """See `Log.scope`."""
        return self._route.scope

    async def _local(self, segment: LogSegment) -> Log:
        if segment.kind == SHARED:
            # A read of a closed segment must see all its records, also in a session at an older
            # position.
            self._session.saw(self._route.state.position)
        if (log := self._logs.get(segment.number)) is None:
            log = self._logs[segment.number] = await self._route.local(segment, self._session)
            kept = {each.number for each in self._route.state.segments}
            self._logs = {number: each for number, each in self._logs.items() if number in kept}
        return log

    # --- appends

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """See `Log.append`."""
        check_tags(tags)
        listed = tuple(tags)

        async def once(_: _Segments, log: Log) -> list[SeqNum]:
            return [await log.append(data, tags=listed)]

        (seqnum,) = await self._append(once)
        return seqnum

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """See `Log.append_batch`."""
        if not entries and after is None:
            return []
        if after is not None:
            condition = check_after(self.name, after, entries)

        async def once(segments: _Segments, log: Log) -> list[SeqNum]:
            if after is None:
                return await log.append_batch(entries)
            await self._check_closed(segments, condition, log)
            segment = segments[-1]
            try:
                return await log.append_batch(entries, after=segment.after(condition))
            except ConditionFailedError as error:
                last = segment.seqnum(error.last_seqnum)
                raise ConditionFailedError(after.tag, last) from error
            except TrimmedError as error:
                raise TrimmedError(segment.seqnum(error.first_seqnum)) from error
            except DataLossError as error:
                raise segment.loss(error) from error

        return await self._append(once)

    async def _append(
        self, once: Callable[[_Segments, Log], Awaitable[list[SeqNum]]]
    ) -> list[SeqNum]:
        route = self._route
        deadline = route.deadline(route.append_timeout_s)
        while True:
            await route.wait_until_open(deadline)
            last, segments = route.state.last, route.state.segments
            segment = segments[-1]
            try:
                placed = await once(segments, await self._local(segment))
            except SealedError:
                if segment.kind == SHARED:
                    raise
                continue
            except (ConditionFailedError, TrimmedError, DataLossError):
                # The record that caused the error may be beyond the end of the segment.
                if route.is_open_since(last):
                    raise
                continue
            except NotReadyError:
                if route.state.segments is segments:
                    raise
                continue  # a segment was freed
            if route.is_open_since(last):
                return [segment.seqnum(each) for each in placed]
            if (settled := await self.settled(segment.number, placed, deadline)) is not None:
                return settled

    async def settled(
        self, number: SeqNum, placed: Sequence[SeqNum], deadline: float | None = None
    ) -> list[SeqNum] | None:
        """Wait for the end of a switch that began during an append; return the seqnums of the
        appended records.

        Args:
            number: number of their segment.
            placed: their local seqnums.
            deadline: time of the event loop; None: `append_timeout_s` from now.

        Returns:
            None: the records are not in the log, because the segment ended before them.

        Raises:
            AppendOutcomeUnknownError: the switch did not end in time, or the segment was freed
                meanwhile.
        """
        route = self._route
        if deadline is None:
            deadline = route.deadline(route.append_timeout_s)
        try:
            await route.wait_until_open(deadline)
        except NotReadyError as error:
            raise AppendOutcomeUnknownError(
                f"Log {self.name} is being switched to another kind; the record may be in the log."
            ) from error
        if (segment := route.segment(number)) is None:
            raise AppendOutcomeUnknownError(
                f"Log {self.name} was switched to another kind and trimmed meanwhile; the record "
                "may have been in the log."
            )
        if not segment.has(placed[-1]):
            return None
        return [segment.seqnum(each) for each in placed]

    async def _check_closed(self, segments: _Segments, condition: After, log: Log) -> None:
        """Check a condition in the closed segments.

        Args:
            segments: the segments of the log.
            condition: the condition, with seqnums of the log.
            log: the log of the open segment.

        Raises:
            ConditionFailedError: a record contradicts the condition.
            TrimmedError: a trimmed record may contradict it.
            DataLossError: a lost record may contradict it.
        """
        known = -1 if condition.seqnum is None else condition.seqnum
        for segment in reversed(segments[:-1]):
            if segment.end <= known + 1:
                return
            if segment.end == segment.start:
                continue
            assert segment.local_end is not None, "it is closed"
            closed = await self._local(segment)
            try:
                record = await closed.read_prev(condition.tag, segment.local_end - 1)
            except TrimmedError as error:
                floor = await self._floor(segments, condition.tag, segment, error)
                if known < floor - 1:
                    raise TrimmedError(floor) from error
                return
            except DataLossError as error:
                raise segment.loss(error) from error
            if record is not None and segment.has(record.seqnum):
                last = segment.seqnum(record.seqnum)
                if last > known:
                    newer = await log.read_prev(condition.tag)
                    found = last if newer is None else segments[-1].seqnum(newer.seqnum)
                    raise ConditionFailedError(condition.tag, found)
                return
        if known + 1 < segments[0].start:
            raise await self._freed(segments, condition.tag)

    # --- reads

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """See `Log.read`."""
        seqnum = check_bound(seqnum)

        async def once(segments: _Segments) -> Record | None:
            if seqnum < segments[0].start:
                raise await self._freed(segments, None)
            segment = next(from_bound(segments, seqnum))
            log = await self._local(segment)
            try:
                found = await log.read(segment.local(seqnum), fresh=fresh)
            except (TrimmedError, DataLossError) as error:
                raise await self._translated(segments, None, segment, error) from error
            return None if found is None else segment.record(found, self.name)

        return await self._read(once, lambda _, tail: seqnum < tail)

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """See `Log.read_next`."""

        def ask(log: Log, local: SeqNum, _: int, wait: float | None) -> _Asking:
            return log.read_next(tag, local, wait=wait, fresh=fresh)

        page = await self._read_forward(tag, check_bound(bound), 1, check_wait(wait), ask)
        return page[0] if page else None

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

        def ask(log: Log, local: SeqNum, limit: int, wait: float | None) -> _Asking:
            return log.read_range(tag, local, limit=limit, wait=wait, fresh=fresh)

        bound, limit = check_bound(bound), check_limit(limit)
        return await self._read_forward(tag, bound, limit, check_wait(wait), ask)

    async def _read_forward(
        self,
        tag: UserTag | None,
        bound: SeqNum,
        limit: int,
        wait_s: float,
        ask: Callable[[Log, SeqNum, int, float | None], _Asking],
    ) -> list[Record]:
        """Return the first records from `bound` on, at most `limit`, with the calls that `ask`
        makes. Wait up to `wait_s` seconds for the first record.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s if wait_s else None

        async def once(segments: _Segments) -> list[Record]:
            page: list[Record] = []
            if bound < segments[0].start:
                raise await self._freed(segments, tag)
            for segment in from_bound(segments, bound):
                try:
                    await self._fill(page, segment, segment.local(bound), limit, end, ask)
                except (TrimmedError, DataLossError) as error:
                    if not page:
                        raise await self._translated(segments, tag, segment, error) from error
                    return page
                if len(page) == limit or _size_bytes(page) > _PAGE_BYTES_MAX:
                    return page
            return page

        while True:
            page = await self._read(once, lambda page, tail: bool(page) and page[-1].seqnum < tail)
            if page or end is None or loop.time() >= end:
                return page

    async def _fill(
        self,
        page: list[Record],
        segment: LogSegment,
        at: SeqNum,
        limit: int,
        end: float | None,
        ask: Callable[[Log, SeqNum, int, float | None], _Asking],
    ) -> None:
        """Add records of a segment to a page, from the local seqnum `at` on.

        Of a closed segment, all further records are added, or as many as fit. Only an empty answer
        proves that a closed segment has no more records. Of the open segment, one answer is added;
        if the page is empty, the call waits for a record until the loop's time `end`.
        """
        log = await self._local(segment)
        while len(page) < limit:
            left = limit - len(page)
            try:
                # The segment may be closed by now: then no record in it is worth waiting for.
                if page or end is None or self._route.state.segments[-1] is not segment:
                    found = await ask(log, at, left, None)
                else:
                    left_s = max(end - asyncio.get_running_loop().time(), 0.0)
                    found = await self._unless_changed(ask(log, at, left, left_s))
            except DataLossError as error:
                if error.seqnum is not None and not segment.has(error.seqnum):
                    return  # the lost record is not in the log
                raise
            records = found if isinstance(found, list) else [found] if found else []
            more = [segment.record(each, self.name) for each in records if segment.has(each.seqnum)]
            page += more
            if not more or segment.local_end is None or _size_bytes(page) > _PAGE_BYTES_MAX:
                return
            at = segment.local(more[-1].seqnum + 1)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """See `Log.read_prev`."""
        bound = check_bound(bound)

        async def once(segments: _Segments) -> Record | TrimmedError | None:
            for segment in down_from(segments, bound):
                log, local = await self._local(segment), segment.local(bound)
                if segment.local_end is not None:
                    local = min(local, segment.local_end - 1)
                try:
                    found = await log.read_prev(tag, local, fresh=fresh)
                except TrimmedError as error:
                    return TrimmedError(await self._floor(segments, tag, segment, error))
                except DataLossError as error:
                    raise segment.loss(error) from error
                if found is not None:
                    return segment.record(found, self.name)
            return await self._freed(segments, tag) if segments[0].start else None

        # A switch may add a record above the floor, so the error is a result like any other.
        found = await self._read(once, lambda _, tail: bound < tail)
        if isinstance(found, TrimmedError):
            raise found
        return found

    async def _unless_changed(self, reading: Coroutine[Any, Any, _FoundT]) -> _FoundT | None:
        """Return the result of a waiting read; None: the route changed first."""
        task = asyncio.get_running_loop().create_task(reading)
        try:
            waiting: list[asyncio.Future[Any]] = [task, self._route.change()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    async def _read(
        self,
        once: Callable[[_Segments], Awaitable[_FoundT]],
        is_final: Callable[[_FoundT, SeqNum], bool],
    ) -> _FoundT:
        """Read. If a switch began or ended meanwhile, and can change the result, read again after
        it.

        Args:
            once: reads the segments.
            is_final: tells whether the result is about seqnums below the tail from before the
                switch (its second argument), so that the switch cannot change it.
        """
        route = self._route
        deadline: float | None = None
        while True:
            last, segments = route.state.last, route.state.segments
            try:
                found = await once(segments)
            except NotReadyError:
                if route.state.segments is segments:
                    raise
                continue  # a segment was freed
            except DataLossError as error:
                tail = self._final_below(last, segments)
                if error.seqnum is None or error.seqnum < tail:
                    raise
            else:
                tail = self._final_below(last, segments)
                if tail > MAX_SEQNUM or is_final(found, tail):
                    return found
            if deadline is None:
                deadline = route.deadline(route.read_timeout_s)
            await route.wait_until_open(deadline)

    def _final_below(self, last: SeqNum, segments: _Segments) -> SeqNum:
        """Return the seqnum below which a read is final: no switch can change what it has read. The
        read began when `last` was the log's last record in the catalog.
        """
        state = self._route.state
        if self._route.is_open_since(last):
            return MAX_SEQNUM + 1
        if state.segments is not segments:  # only a bridge replaces them
            return 0
        if state.switch is not None:
            return state.switch.tail
        return self._route.ended_at() or 0

    async def _translated(
        self,
        segments: _Segments,
        tag: UserTag | None,
        segment: LogSegment,
        error: TrimmedError | DataLossError,
    ) -> TrimmedError | DataLossError:
        """Return the error of a segment as an error of the log, with its seqnums."""
        if isinstance(error, DataLossError):
            return segment.loss(error)
        return TrimmedError(await self._floor(segments, tag, segment, error))

    async def _floor(
        self, segments: _Segments, tag: UserTag | None, segment: LogSegment, error: TrimmedError
    ) -> SeqNum:
        """Return the floor of the log, or of a tag, given the error of a segment."""
        floor = segment.seqnum(segment.limited(error.first_seqnum))
        if segment.local_end is None or error.first_seqnum < segment.local_end:
            return floor
        return await self._floor_from(segments, tag, floor)

    async def _freed(self, segments: _Segments, tag: UserTag | None) -> TrimmedError:
        """Return the error of a read below the first segment, which segments before it had raised
        until they were freed.
        """
        return TrimmedError(await self._floor_from(segments, tag, segments[0].start))

    async def _floor_from(self, segments: _Segments, tag: UserTag | None, floor: SeqNum) -> SeqNum:
        """Return the floor of the log, or of a tag. All segments that end at or below `floor` are
        trimmed; the first segment with a record that is not trimmed has the result.
        """
        for segment in from_bound(segments, floor):
            log = await self._local(segment)
            try:
                await log.read_next(tag, segment.local_first)
            except TrimmedError as error:
                floor = segment.seqnum(segment.limited(error.first_seqnum))
                if segment.local_end is None or error.first_seqnum < segment.local_end:
                    return floor
            except DataLossError:
                return floor
            else:
                return floor
        return floor

    # --- the log as a whole

    async def _ask(self, once: Callable[[_Segments, Log], Awaitable[_FoundT]]) -> _FoundT:
        """Make a call while no switch is under way; make it again if a switch began meanwhile."""
        route = self._route
        deadline = route.deadline(route.read_timeout_s)
        while True:
            await route.wait_until_open(deadline)
            last, segments = route.state.last, route.state.segments
            try:
                answer = await once(segments, await self._local(segments[-1]))
            except (NotReadyError, AppendOutcomeUnknownError):
                if route.state.segments is segments:
                    raise
                continue  # a segment was freed; to repeat a trim or a policy is harmless
            if route.is_open_since(last):
                return answer

    async def tail(self) -> SeqNum:
        """See `Log.tail`."""

        async def once(segments: _Segments, log: Log) -> SeqNum:
            return segments[-1].seqnum(await log.tail())

        return await self._ask(once)

    async def now(self) -> float:
        """See `Log.now`."""

        async def once(segments: _Segments, log: Log) -> float:
            return segments[-1].ordered_at(await log.now())

        return await self._ask(once)

    async def find_time(self, time: float) -> SeqNum:
        """See `Log.find_time`."""
        check_time(time)

        async def once(segments: _Segments, _: Log) -> SeqNum:
            for segment in segments:
                if segment.number != FIRST and segment.time_floor >= time:
                    return segment.start
                local = await (await self._local(segment)).find_time(time)
                if segment.local_end is None or local < segment.local_end:
                    return segment.seqnum(max(local, segment.local_first))
            raise AssertionError("the last segment is open")

        return await self._ask(once)

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """See `Log.trim`. The oldest segment is trimmed first."""
        until = check_bound(until)

        async def once(segments: _Segments, log: Log) -> None:
            check_until(until, segments[-1].seqnum(await log.tail()))
            for segment in segments:
                if until > segment.start and segment.end > segment.start:
                    local = await self._local(segment)
                    await local.trim(segment.local(until), tag=tag)

        await self._ask(once)

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """See `Log.set_retention`. The policy of a log that was switched is in `$retention`."""
        retention = checked_retention(self.name, age_s, size_bytes)

        async def once(_: _Segments, log: Log) -> None:
            if self._route.state.switches:
                await record_policy(self._policies(), self.name, retention)
            else:
                await log.set_retention(age_s=age_s, size_bytes=size_bytes)

        await self._ask(once)

    async def retention(self) -> Retention:
        """See `Log.retention`."""

        async def once(_: _Segments, log: Log) -> Retention:
            if self._route.state.switches:
                return await recorded_policy(self._policies(), self.name)
            return await log.retention()

        return await self._ask(once)

    def _policies(self) -> Log:
        return self._route.shared(RETENTION_LOG, self._session)

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """See `Log.set_aux`."""
        seqnum = check_bound(seqnum)

        async def once(segments: _Segments) -> None:
            if seqnum < segments[0].start:
                raise await self._freed(segments, None)
            segment = next(from_bound(segments, seqnum))
            log = await self._local(segment)
            try:
                await log.set_aux(segment.local(seqnum), aux)
            except (TrimmedError, DataLossError) as error:
                raise await self._translated(segments, None, segment, error) from error

        await self._read(once, lambda _, tail: seqnum < tail)


def _size_bytes(page: Sequence[Record]) -> int:
    return sum(len(each.data) for each in page)
