"""`Log` over cells, such as objects of an object store.

A `CellLogs` is one logspace, kept in the cells of one driver. Seqnums, tags, conditions, trims and
times follow from the cells in order, so all processes agree on them. The position of a session is
the number of cells that the session has seen.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from indilog.base.errors import (
    ConditionFailedError,
    NotReadyError,
    SealedError,
    TooLargeError,
    TrimmedError,
)
from indilog.base.ids import (
    MAX_SEQNUM,
    SeqNum,
    TagHash,
    UserTag,
    log_tag,
    names_match,
    tag_columns,
    tag_hash,
)
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
    check_record,
    check_tags,
    check_time,
    check_until,
    check_wait,
)
from indilog.base.retention import Retention, checked_retention
from indilog.config import MIB, ClusterConfig
from indilog.kernel.records import HEADER_BYTES, record_bytes
from indilog_cells.closed_generations import TrimmedCellError
from indilog_cells.content import AskTime, Condition, End, Policy, Records, TrimBelow
from indilog_cells.driver import CellDriver
from indilog_cells.index import CellTable
from indilog_cells.lookups import Lookups
from indilog_cells.outcomes import encode_appended
from indilog_cells.state import (
    Applied,
    BelowFloor,
    CheckedTooEarly,
    Contradicted,
    Ended,
    Placed,
    contradiction,
)

_PAGE_BYTES_MAX: Final = 4 * MIB
_AUX_BYTES_MAX: Final = 8 * MIB
"""Bytes of aux data that a process keeps for one logspace."""
_CHECKS_MAX: Final = 10
_POLL_S: Final = 0.05
_POLL_S_MAX: Final = 1.0
"""Seconds between two reads of a call that waits for records of other processes, while none of
these says that the log has grown: first `_POLL_S`, then doubled up to `_POLL_S_MAX`.
"""
_READS_PER_ITERATION: Final = 128

_FoundT = TypeVar("_FoundT", Record, list[Record])
_AnswerT = TypeVar("_AnswerT")


class CellLogs:
    """The logs of one logspace over cells: a `LogSource`.

    Args:
        driver: an open driver.
        config: limits of records and batches.
    """

    def __init__(self, driver: CellDriver, config: ClusterConfig | None = None) -> None:
        self.driver = driver
        self.config = config or ClusterConfig()
        self.lookups = Lookups(driver)
        self._aux: OrderedDict[SeqNum, bytes] = OrderedDict()
        self._aux_bytes = 0
        self._reads = 0

    def log(self, name: str, session: Session | None = None) -> CellLog:
        """Return the log `name`.

        Raises:
            InvalidTagError: no log can have that name.
        """
        return CellLog(self, name, session or Session())

    async def policies(self) -> dict[str, Retention]:
        """Return the retention policies of the logs, by name; a log that keeps all its records has
        none.
        """
        await self.driver.catch_up()
        return dict(self.driver.state.policies)

    async def end(self) -> SeqNum:
        """End the logspace: every later append, by any process, raises `SealedError`. Return the
        tail, which never grows again. Ending an ended logspace is harmless.

        Raises:
            NotReadyError, AppendOutcomeUnknownError: the logspace may have ended; repeat the call.
        """
        await self.driver.submit(End())
        await self.driver.catch_up()  # another process may have appended it
        return self.driver.state.tail

    @property
    def ended_at(self) -> SeqNum | None:
        """The tail, if this process has read that the logspace ended; else None."""
        state = self.driver.state
        return state.tail if state.is_ended else None

    @property
    def failure(self) -> str:
        """Why the log cannot be used now; empty: nothing is known to be wrong."""
        return self.driver.failure

    @property
    def position(self) -> int:
        """How many cells this process has applied."""
        return self.driver.state.position

    async def append_content(self, owner: str, content: bytes) -> bytes:
        """Append a content of another process, in the tenure `owner` of this process; return the
        answer as bytes.

        Raises:
            SealedError: see `CellDriver.append_content`.
            MalformedFrameError: it is no content.
        """
        return encode_appended(await self.driver.append_content(owner, content))

    async def yield_sometimes(self) -> None:
        """Let other tasks run, once in `_READS_PER_ITERATION` calls: reads of cached records do not
        suspend otherwise.
        """
        self._reads += 1
        if self._reads >= _READS_PER_ITERATION:
            self._reads = 0
            await asyncio.sleep(0)

    def aux(self, seqnum: SeqNum) -> bytes | None:
        """Return the aux data of a record; None: none was set, or it was dropped."""
        return self._aux.get(seqnum)

    def keep_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Keep aux data in memory; above `_AUX_BYTES_MAX`, the oldest is dropped."""
        self._aux_bytes += len(aux) - len(self._aux.pop(seqnum, b""))
        self._aux[seqnum] = aux
        while self._aux_bytes > _AUX_BYTES_MAX:
            _, dropped = self._aux.popitem(last=False)
            self._aux_bytes -= len(dropped)


class CellLog(Log):
    """One log over cells.

    Args:
        logs: its logspace.
        name: its name.
        session: the session of its calls.
    """

    def __init__(self, logs: CellLogs, name: str, session: Session) -> None:
        self.name = name
        self._logs = logs
        self._driver = logs.driver
        self._lookups = logs.lookups
        self._limits = logs.config
        self._session = session
        self._tag = log_tag(name)

    @property
    def scope(self) -> object:
        """The `CellLogs` that this log is from (`Log.scope`)."""
        return self._logs

    # --- writes

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """See `Log.append`."""
        (seqnum,) = await self._append([self._checked(data, tags)])
        return seqnum

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """See `Log.append_batch`."""
        if not entries and after is None:
            return []
        limits = self._limits
        check_batch(entries, records_max=limits.batch_records_max)
        records = [self._checked(entry.data, entry.tags) for entry in entries]
        size = HEADER_BYTES + sum(size for *_, size in records)
        if size > limits.batch_bytes_max:
            raise TooLargeError(
                "The batch's size in bytes", size=size, limit=limits.batch_bytes_max
            )
        if after is None:
            return await self._append(records)
        return await self._append_if(check_after(self.name, after, entries), records)

    def _checked(self, data: bytes, tags: Iterable[UserTag]) -> tuple[bytes, bytes, bytes, int]:
        """Return data, tags and names of a record, and its size in a batch."""
        check_tags(tags)
        listed = tuple(tags)
        limits = self._limits
        check_record(
            data, listed, bytes_max=limits.record_bytes_max, tags_max=limits.record_tags_max
        )
        columns = tag_columns(self.name, listed)
        return data, columns.tags, columns.names, record_bytes(data, columns)

    def _item(
        self, records: Sequence[tuple[bytes, bytes, bytes, int]], after: Condition | None = None
    ) -> Records:
        return Records(
            self._driver.now_us(),
            [tags for _, tags, _, _ in records],
            [names for _, _, names, _ in records],
            [data for data, _, _, _ in records],
            after,
        )

    async def _append(self, records: Sequence[tuple[bytes, bytes, bytes, int]]) -> list[SeqNum]:
        outcome = await self._driver.submit(self._item(records))
        if isinstance(outcome, Ended):
            raise await self._ended()
        assert isinstance(outcome, Placed), "records without a condition are appended"
        self._saw()
        return list(range(outcome.first, outcome.first + len(records)))

    async def _append_if(
        self, after: After, records: Sequence[tuple[bytes, bytes, bytes, int]]
    ) -> list[SeqNum]:
        """Append if the condition holds. This process checks the condition before the append. So
        when processes apply the append, they look only at the newest records.
        """
        known = -1 if after.seqnum is None else after.seqnum
        tag = tag_hash(self.name, after.tag)
        for _ in range(_CHECKS_MAX):
            checked = self._driver.state.tail
            last = await self._last(tag)
            floor = self._driver.state.floor(self._tag, tag)
            self._saw()
            outcome = contradiction(known, last, floor) or await self._driver.submit(
                self._item(records, Condition(self._tag, tag, known, checked))
            )
            self._saw()
            match outcome:
                case Placed(first):
                    return list(range(first, first + len(records)))
                case Contradicted(found):
                    raise ConditionFailedError(after.tag, found)
                case BelowFloor(below):
                    raise TrimmedError(below)
                case Ended():
                    raise await self._ended()
                case CheckedTooEarly() | Applied():
                    await self._driver.catch_up()
        raise NotReadyError(
            "The log grew faster than the condition could be checked; nothing was appended."
        )

    async def _ended(self) -> SealedError:
        """Return the error after this process has read the end, which another one may know only."""
        await self._driver.catch_up()
        return SealedError(f"Log {self.name} has ended here; nothing was appended.")

    async def _last(self, tag: TagHash) -> SeqNum:
        while True:
            try:
                return await self._lookups.last(tag)
            except TrimmedCellError:
                await self._driver.catch_up()

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """See `Log.trim`."""
        until = check_bound(until)
        hashed = None if tag is None else tag_hash(self.name, tag)
        await self._begin(fresh=True)
        check_until(until, self._driver.state.tail)
        await self._driver.submit(TrimBelow(self._tag, hashed, until))
        self._saw()

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """See `Log.set_retention`."""
        kept = checked_retention(self.name, age_s, size_bytes)
        await self._driver.submit(Policy(self.name, kept.age_s, kept.size_bytes))
        self._saw()

    async def retention(self) -> Retention:
        """See `Log.retention`."""
        await self._begin(fresh=False)
        return self._driver.state.policies.get(self.name, Retention())

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """See `Log.set_aux`; aux data is kept in the memory of this process."""
        if type(aux) is not bytes:
            raise TypeError(f"Aux data must be bytes, not {type(aux).__name__}; encode it first.")
        limit = self._limits.aux_bytes_max
        if len(aux) > limit:
            raise TooLargeError("The aux data's size in bytes", size=len(aux), limit=limit)
        if await self.read(seqnum) is not None:
            self._logs.keep_aux(seqnum, aux)

    # --- reads

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """See `Log.read`."""
        seqnum = check_bound(seqnum)

        async def once() -> Record | None:
            floor = self._driver.state.floor(self._tag, None)
            if seqnum < floor:
                raise TrimmedError(floor)
            if seqnum < self._driver.state.dead_below:
                return None  # of another log
            table = await self._lookups.table_of(seqnum)
            if table is None:
                return None
            record, tags = await self._lookups.record(seqnum, table)
            if not names_match(record.names, self.name, None):
                return None
            if self._driver.state.is_dead(seqnum, tags):
                raise TrimmedError(seqnum + 1)
            return self._with_aux(record)

        return await self._read(once, fresh=fresh)

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """See `Log.read_next`."""
        bound, wait_s = check_bound(bound), check_wait(wait)
        hashed = self._hash(tag)

        async def once() -> Record | None:
            self._check_floor(tag, bound)
            found = None
            async for seqnum, table in self._lookups.ascending(hashed, bound):
                if (found := await self._matching(seqnum, table, tag)) is not None:
                    break
            self._check_floor(tag, bound)  # what was trimmed meanwhile is not skipped
            return found

        return await self._read_until_found(once, wait_s, fresh=fresh)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """See `Log.read_prev`."""
        bound = check_bound(bound)
        hashed = self._hash(tag)

        async def once() -> Record | None:
            floor = self._floor(tag)
            async for seqnum, table in self._lookups.descending(hashed, bound):
                if seqnum < floor:
                    break
                if (found := await self._matching(seqnum, table, tag)) is not None:
                    return found
            if (floor := self._floor(tag)) > 0:
                raise TrimmedError(floor)
            return None

        return await self._read(once, fresh=fresh)

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
        bound, limit, wait_s = check_bound(bound), check_limit(limit), check_wait(wait)
        hashed = self._hash(tag)

        async def once() -> list[Record]:
            self._check_floor(tag, bound)
            page: list[Record] = []
            size = 0
            async for seqnum, table in self._lookups.ascending(hashed, bound):
                if (found := await self._matching(seqnum, table, tag)) is None:
                    continue
                size += len(found.data)
                if page and size > _PAGE_BYTES_MAX:
                    break
                page.append(found)
                if len(page) == limit:
                    break
            self._check_floor(tag, bound)
            return page

        return await self._read_until_found(once, wait_s, fresh=fresh) or []

    async def tail(self) -> SeqNum:
        """See `Log.tail`."""
        await self._begin(fresh=True)
        return self._driver.state.tail

    async def now(self) -> float:
        """See `Log.now`. If other processes may write to the log, it appends a cell."""
        if not self._driver.is_shared:
            self._saw()
            return self._driver.now_us() / 1e6
        outcome = await self._driver.submit(AskTime())
        assert isinstance(outcome, Applied), "a clock is no record"
        self._saw()
        return outcome.time_us / 1e6

    async def find_time(self, time: float) -> SeqNum:
        """See `Log.find_time`."""
        time_us = check_time(time)

        async def once() -> SeqNum:
            return await self._lookups.find_time(time_us)

        return await self._read(once, fresh=True)

    # --- inside

    def _hash(self, tag: UserTag | None) -> TagHash:
        return self._tag if tag is None else tag_hash(self.name, tag)

    def _saw(self) -> None:
        self._session.saw(self._driver.seen_position)

    async def _begin(self, *, fresh: bool) -> None:
        """Apply the cells that the read must see; raise the session to their position."""
        driver = self._driver
        driver.check_open()
        if driver.is_shared or fresh:
            await driver.catch_up()
        else:
            await self._logs.yield_sometimes()
        self._saw()

    def _floor(self, tag: UserTag | None) -> SeqNum:
        hashed = None if tag is None else self._hash(tag)
        return self._driver.state.floor(self._tag, hashed)

    def _check_floor(self, tag: UserTag | None, bound: SeqNum) -> None:
        if bound < (floor := self._floor(tag)):
            raise TrimmedError(floor)

    async def _matching(
        self, seqnum: SeqNum, table: CellTable, tag: UserTag | None
    ) -> Record | None:
        """Return a record that the index has found for a tag. None: the record is dead, or its tag
        is another one with the same hash.
        """
        record, tags = await self._lookups.record(seqnum, table)
        if not names_match(record.names, self.name, tag):
            return None
        if self._driver.state.is_dead(seqnum, tags):
            return None
        return self._with_aux(record)

    def _with_aux(self, record: Record) -> Record:
        record.aux = self._logs.aux(record.seqnum)
        return record

    async def _read(self, once: Callable[[], Awaitable[_AnswerT]], *, fresh: bool) -> _AnswerT:
        """Read. If a needed cell was trimmed meanwhile, catch up and read again."""
        await self._begin(fresh=fresh)
        while True:
            try:
                answer = await once()
            except TrimmedCellError:
                await self._driver.catch_up()
            else:
                self._saw()
                return answer

    async def _read_until_found(
        self, once: Callable[[], Awaitable[_FoundT | None]], wait_s: float, *, fresh: bool
    ) -> _FoundT | None:
        """Read until something is found or `wait_s` seconds are over.

        The watch begins before the read, so no record is missed in between.
        """
        if not wait_s:
            return await self._read(once, fresh=fresh)
        loop = asyncio.get_running_loop()
        end, poll_s = loop.time() + wait_s, _POLL_S
        while True:
            watch = self._driver.watch()
            try:
                found = await self._read(once, fresh=fresh)
                if found or (left_s := end - loop.time()) <= 0:
                    return found
                if self._driver.is_shared:
                    left_s, poll_s = min(left_s, poll_s), min(2 * poll_s, _POLL_S_MAX)
                    fresh = True
                await asyncio.wait([watch], timeout=None if left_s == math.inf else left_s)
            finally:
                self._driver.unwatch(watch)
