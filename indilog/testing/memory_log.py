"""A log in memory, for tests of code that awaits the `Log` interface.

See API.md, "Testing without a server".

`MemoryLogs` is one logspace: as on the real platform, all logs share one dense total order, and no
log shows another's records. It passes the same contract suite as the real log (`tests/contract`),
with the same limits and error messages. No record is durable. Only reads with `wait` suspend, so
other coroutines that use a `MemoryLog` run without an event loop.

`MemoryLogs` uses the text of logs and tags instead of hashes. So a comparison with the real log
also tests the hashing.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from indilog.base.errors import ConditionFailedError, TooLargeError, TrimmedError
from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag, tag_columns
from indilog.base.log import (
    After,
    Entry,
    Log,
    Record,
    Session,
    check_after,
    check_batch,
    check_bound,
    check_limit,
    check_log_name,
    check_record,
    check_time,
    check_until,
    check_wait,
)
from indilog.base.retention import Retention, checked_retention
from indilog.config import MIB, ClusterConfig
from indilog.kernel.records import HEADER_BYTES, record_bytes
from indilog.sdk.retention_log import RETENTION_LOG, record_policy, recorded_policy
from indilog.testing.durations import seconds_of

_PAGE_BYTES_MAX: Final = 4 * MIB
_SEPARATOR: Final = b"\x1f"


class MemoryLogs:
    """One logspace in memory: a `LogSource`.

    Args:
        config: configuration with the limits; default: the platform's defaults.
        page_bytes_max: largest number of data bytes in one answer to `read_range`.
        clock: returns seconds since 1970, for `Record.ordered_at`, which never decreases even if
            the clock does.
        writer_clock: returns seconds since 1970, for `Record.time`; default: `clock`.
    """

    def __init__(
        self,
        config: ClusterConfig | None = None,
        *,
        page_bytes_max: int = _PAGE_BYTES_MAX,
        clock: Callable[[], float] = time.time,
        writer_clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config or ClusterConfig()
        self.page_bytes_max = page_bytes_max
        self._clock = clock
        self._writer_clock = writer_clock or clock
        self._records: list[Record] = []
        self._times_us: list[int] = []
        """When each record was ordered; never decreases."""
        self._now_us = 0
        self._skipped_s = 0.0
        self._aux: dict[SeqNum, bytes] = {}
        self._streams: defaultdict[bytes, list[SeqNum]] = defaultdict(list)
        self._floors: dict[bytes, SeqNum] = {}
        self._waiting: defaultdict[bytes, dict[asyncio.Future[None], None]] = defaultdict(dict)
        """Readers that wait for a record of a stream, woken in the order in which they began."""

    def log(self, name: str, session: Session | None = None) -> MemoryLog:
        """Return the log `name`; it need not exist before."""
        return MemoryLog(name, logs=self, session=session)

    @property
    def position(self) -> int:
        """The logical clock, which advances with each record."""
        return len(self._records)

    def append_all(self, entries: Sequence[tuple[bytes, bytes]]) -> list[SeqNum]:
        """Append (data, names) pairs at consecutive seqnums, and wake the readers that wait for
        them.
        """
        start = len(self._records)
        now, ordered_us = self._writer_clock(), self.now_us()
        self._times_us += [ordered_us] * len(entries)
        for seqnum, (data, names) in enumerate(entries, start):
            self._records.append(Record(seqnum, names, data, now, ordered_us / 1e6))
            for stream in _streams_of(names):
                self._streams[stream].append(seqnum)
                for waiter in self._waiting.pop(stream, ()):
                    if not waiter.done():
                        waiter.set_result(None)
        return list(range(start, len(self._records)))

    def now_us(self) -> int:
        """Return the time of these logs, microseconds since 1970; it never goes back."""
        self._now_us = max(self._now_us, int((self._clock() + self._skipped_s) * 1e6))
        return self._now_us

    async def skip(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Let time pass at once: later records have a later `ordered_at`.

        Raises:
            ValueError: the duration is negative or no number.
        """
        self._skipped_s += seconds_of(days, hours, minutes, seconds)

    def stream(self, stream: bytes) -> Sequence[SeqNum]:
        """Return the seqnums of a stream, ascending. A stream is the text of a log, or of a log and
        a tag.
        """
        return self._streams.get(stream, ())

    def record(self, seqnum: SeqNum) -> Record | None:
        """Return the record at `seqnum` with its current aux data; None beyond the tail."""
        if seqnum >= len(self._records):
            return None
        kept = self._records[seqnum]
        aux = self._aux.get(seqnum)
        return Record(seqnum, kept.names, kept.data, kept.time, kept.ordered_at, aux)

    def find_time(self, time_us: int) -> SeqNum:
        """Return the first seqnum ordered at `time_us` or later."""
        return bisect_left(self._times_us, time_us)

    def floor(self, stream: bytes) -> SeqNum:
        """Return the floor of a stream: the maximum of its own floor and that of its log."""
        log = stream.split(_SEPARATOR, 1)[0]
        return max(self._floors.get(stream, 0), self._floors.get(log, 0))

    def trim(self, stream: bytes, until: SeqNum) -> None:
        """Raise the floor of a stream."""
        self._floors[stream] = max(until, self._floors.get(stream, 0))

    def is_dead(self, seqnum: SeqNum) -> bool:
        """Return whether a record is dead: below the floor of its log, or of all its tags."""
        log, *tags = _streams_of(self._records[seqnum].names)
        below = [seqnum < self._floors.get(stream, 0) for stream in (log, *tags)]
        return below[0] or (len(tags) > 0 and all(below[1:]))

    def keep_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Keep `aux` beside a record that exists."""
        self._aux[seqnum] = aux

    def drop_aux(self, seqnum: SeqNum | None = None) -> None:
        """Drop the aux data of one record, or of all, as a cache may do at any time."""
        if seqnum is None:
            self._aux.clear()
        else:
            self._aux.pop(seqnum, None)

    async def appended(self, stream: bytes) -> None:
        """Return when the next record is appended to `stream`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[stream][waiter] = None
        try:
            await waiter
        finally:
            if stream in self._waiting:
                self._waiting[stream].pop(waiter, None)


class MemoryLog(Log):
    """A named log of a `MemoryLogs`. Created without `MemoryLogs`, it has its own logspace."""

    def __init__(
        self, name: str, *, logs: MemoryLogs | None = None, session: Session | None = None
    ) -> None:
        self.name = name if logs is not None else check_log_name(name)
        self.logs = logs or MemoryLogs()
        self.session = session or Session()
        self._stream(None)  # refuses a name that no log may have

    @property
    def scope(self) -> MemoryLogs:
        """See `Log.scope`."""
        return self.logs

    def _stream(self, tag: UserTag | None) -> bytes:
        return tag_columns(self.name, () if tag is None else (tag,)).names

    def _checked(self, data: bytes, tags: Iterable[UserTag]) -> tuple[bytes, bytes, int]:
        """Return data, names and the bytes that the record takes in a batch."""
        listed = tags if isinstance(tags, str) else tuple(tags)
        config = self.logs.config
        check_record(
            data, listed, bytes_max=config.record_bytes_max, tags_max=config.record_tags_max
        )
        columns = tag_columns(self.name, tuple(listed))
        return data, columns.names, record_bytes(data, columns)

    def _saw(self) -> None:
        self.session.saw(self.logs.position)

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """See `Log.append`."""
        data, names, _ = self._checked(data, tags)
        (seqnum,) = self.logs.append_all([(data, names)])
        self._saw()
        return seqnum

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """See `Log.append_batch`."""
        check_batch(entries, records_max=self.logs.config.batch_records_max)
        checked = [self._checked(entry.data, entry.tags) for entry in entries]
        size = HEADER_BYTES + sum(taken for _, _, taken in checked)
        if size > self.logs.config.batch_bytes_max:
            limit = self.logs.config.batch_bytes_max
            raise TooLargeError("The batch's size in bytes", size=size, limit=limit)
        if after is not None:
            self._check_condition(check_after(self.name, after, entries))
        seqnums = self.logs.append_all([(data, names) for data, names, _ in checked])
        self._saw()
        return seqnums

    def _check_condition(self, after: After) -> None:
        self._saw()
        known = -1 if after.seqnum is None else after.seqnum
        stream = self._stream(after.tag)
        floor = max(self.logs.floor(stream), self.logs.floor(self._stream(None)))
        last = max(self.logs.stream(stream)[-1:], default=-1)
        if last >= floor and last > known:
            raise ConditionFailedError(after.tag, last)
        if last < floor and known < floor - 1:
            raise TrimmedError(floor)

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:  # noqa: ARG002
        """See `Log.read`; every read is fresh here."""
        record = self.logs.record(check_bound(seqnum))
        self._saw()
        if seqnum < self.logs.floor(self._stream(None)):
            raise TrimmedError(self.logs.floor(self._stream(None)))
        if record is not None and self.logs.is_dead(seqnum):
            raise TrimmedError(seqnum + 1)
        if record is None or record.names.split(_SEPARATOR, 1)[0] != self.name.encode():
            return None
        return record

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,  # noqa: ARG002
    ) -> Record | None:
        """See `Log.read_next`."""
        stream, bound = self._stream(tag), check_bound(bound)
        await self._appeared(stream, bound, check_wait(wait))
        return self._first(stream, bound)

    async def _appeared(self, stream: bytes, bound: SeqNum, wait_s: float) -> None:
        """Return when there is a record at or beyond `bound`, or after `wait_s`."""
        if wait_s == 0.0 or self._first(stream, bound) is not None:
            return
        try:
            async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                while self._first(stream, bound) is None:
                    await self.logs.appended(stream)
        except TimeoutError:
            pass

    def _first(self, stream: bytes, bound: SeqNum) -> Record | None:
        self._saw()
        self._check_floor(stream, bound)
        seqnums = self.logs.stream(stream)
        alive = (s for s in seqnums[bisect_left(seqnums, bound) :] if not self.logs.is_dead(s))
        first = next(alive, None)
        return self.logs.record(first) if first is not None else None

    def _check_floor(self, stream: bytes, bound: SeqNum) -> None:
        if bound < self.logs.floor(stream):
            raise TrimmedError(self.logs.floor(stream))

    async def read_prev(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = MAX_SEQNUM,
        *,
        fresh: bool = False,  # noqa: ARG002
    ) -> Record | None:
        """See `Log.read_prev`."""
        self._saw()
        stream = self._stream(tag)
        seqnums, floor = self.logs.stream(stream), self.logs.floor(stream)
        before = seqnums[: bisect_right(seqnums, check_bound(bound))]
        alive = (s for s in reversed(before) if s >= floor and not self.logs.is_dead(s))
        last = next(alive, None)
        if last is None and floor:
            raise TrimmedError(floor)
        return self.logs.record(last) if last is not None else None

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,  # noqa: ARG002
    ) -> list[Record]:
        """See `Log.read_range`."""
        stream, bound, limit = self._stream(tag), check_bound(bound), check_limit(limit)
        await self._appeared(stream, bound, check_wait(wait))
        self._saw()
        seqnums = self.logs.stream(stream)
        self._check_floor(stream, bound)
        alive = (s for s in seqnums[bisect_left(seqnums, bound) :] if not self.logs.is_dead(s))
        page: list[Record] = []
        size = 0
        for seqnum in islice(alive, limit):
            record = self.logs.record(seqnum)
            assert record is not None, "a stream names only records that exist"
            size += len(record.data)
            if page and size > self.logs.page_bytes_max:
                break
            page.append(record)
        return page

    async def tail(self) -> SeqNum:
        """See `Log.tail`."""
        self._saw()
        return self.logs.position

    async def now(self) -> float:
        """See `Log.now`."""
        self._saw()
        return self.logs.now_us() / 1e6

    async def find_time(self, time: float) -> SeqNum:
        """See `Log.find_time`."""
        self._saw()
        return self.logs.find_time(check_time(time))

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """See `Log.trim`."""
        stream, until = self._stream(tag), check_bound(until)
        check_until(until, self.logs.position)
        self.logs.trim(stream, until)
        self._saw()

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """See `Log.set_retention`; the policy is recorded, but not enforced."""
        retention = checked_retention(self.name, age_s, size_bytes)
        await record_policy(self._policies(), self.name, retention)

    async def retention(self) -> Retention:
        """See `Log.retention`."""
        return await recorded_policy(self._policies(), self.name)

    def _policies(self) -> MemoryLog:
        return self.logs.log(RETENTION_LOG, self.session)

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """See `Log.set_aux`."""
        limit = self.logs.config.aux_bytes_max
        if len(aux) > limit:
            raise TooLargeError("The aux data's size in bytes", size=len(aux), limit=limit)
        if await self.read(seqnum) is not None:
            self.logs.keep_aux(seqnum, aux)


def _streams_of(names: bytes) -> list[bytes]:
    """Return the streams that a record with `names` is in: its log's, and one per tag."""
    log, *spelled = names.split(_SEPARATOR)
    return [log, *(log + _SEPARATOR + name for name in spelled)]
