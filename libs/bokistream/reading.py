"""Reads the records of a stream in order, a page ahead, and detects that records fail to arrive.

`Streams.read` and `Reader` use `Reading`, which calls `check_from` and `find_first`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from bokistream import waiting
from bokistream.chain import EffectCheck, StreamRecord, check_from, read_last
from bokistream.errors import ReaderIdleError, StreamSettingsError, StreamTruncatedError
from bokistream.records import (
    DATA,
    SEAL,
    StreamEntry,
    checked_txid,
    heartbeats_tag,
    records_tag,
)
from bokistream.search import find_first, first_from, stream_record
from indilog import Log, Record, TrimmedError
from indilog.replayed import RetryPolicy, retry_transient
from indilog.sdk import MAX_SEQNUM, SeqNum, check_bound

AHEAD_BYTES: Final = 1 << 20
AHEAD_BYTES_MAX: Final = 1 << 30
IDLE_S_MIN: Final = 0.01
_PAGE_MIN: Final = 16
"""Records of the first page, when the size of records is not known."""
_PAGE_MAX: Final = 1_000
_RETRIES: Final = RetryPolicy(tries=36, first_s=0.05, pause_s_max=2.0)
"""How long a read is retried while the platform does not answer (about a minute)."""


@dataclass(frozen=True)
class Reading:
    """A read of a stream, with its bounds and options.

    Attributes:
        log, name, created: the stream.
        bound: first seqnum.
        is_bound_given: whether the caller needs all records from `bound` on. Otherwise the reading
            begins at the first record that is not trimmed.
        follow: whether to wait for new records at the end, until the stream is sealed.
        ahead_bytes: about how many bytes of records are held, at most two pages.
        idle_s: seconds without a record after which `ReaderIdleError` may be raised; None: never.
    """

    log: Log
    name: str
    created: SeqNum
    bound: SeqNum
    is_bound_given: bool
    follow: bool
    ahead_bytes: int = AHEAD_BYTES
    idle_s: float | None = None

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            StreamSettingsError: `ahead_bytes` or `idle_s` is out of range.
        """
        if not 1 <= self.ahead_bytes <= AHEAD_BYTES_MAX:
            raise StreamSettingsError(
                f"ahead_bytes must be 1 to {AHEAD_BYTES_MAX:,}, not {self.ahead_bytes!r:.40}."
            )
        if self.idle_s is not None and not IDLE_S_MIN <= self.idle_s < math.inf:
            raise StreamSettingsError(
                f"idle_s must be at least {IDLE_S_MIN} seconds, or None, not {self.idle_s!r:.40}."
            )

    async def records_from(
        self, *, seqnum: SeqNum | None, txid: int | None, offset: int | None
    ) -> AsyncGenerator[StreamRecord, None]:
        """Yield the records from a position on, or from `bound` on if none is given.

        Raises:
            StreamTruncatedError: `seqnum` is smaller than `bound`, or was trimmed.
            StreamSettingsError: the position is invalid.
            IndilogError: as for `records`.
        """
        at = self
        if seqnum is not None:
            if check_bound(seqnum) < self.bound:
                raise StreamTruncatedError(self.name, self.bound)
            at = replace(self, bound=seqnum, is_bound_given=True)
        elif txid is not None:
            at = await self._at(lambda entry: entry.txid, checked_txid(txid))
        elif offset is not None:
            if type(offset) is not int or offset < 0:
                raise StreamSettingsError(f"from_offset must be 0 or more, not {offset!r:.40}.")
            at = await self._at(lambda entry: entry.offset, offset)
        async with aclosing(at.records()) as records:
            async for record in records:
                if record.txid >= (txid or 0) and record.offset >= (offset or 0):
                    yield record

    async def _at(self, key: Callable[[StreamEntry], int], wanted: int) -> Reading:
        """Return a reading that begins at the first record whose key is at least `wanted`."""
        tag = records_tag(self.created)
        last = await read_last(self.log, tag, self.name, fresh=True)
        found = await find_first(self.log, tag, self.name, self.bound, key, wanted)
        if found is not None:
            return replace(self, bound=found.record.seqnum, is_bound_given=True)
        return replace(self, bound=max(self.bound, last.seqnum + 1))

    async def records(self) -> AsyncGenerator[StreamRecord, None]:
        """Yield the data records that have effect, in order.

        Raises:
            StreamTruncatedError: records that are still to be read were trimmed.
            ReaderIdleError: no record came for `idle_s` seconds, although the stream has one, or
                its writer should have written a heartbeat.
            IndilogError: as for `Log.read_range`.
        """
        check: EffectCheck | None = None
        tag, end = records_tag(self.created), MAX_SEQNUM
        if not self.follow:
            end = await retry_transient(self.log.tail, _RETRIES, pause=waiting.pause)
        async with aclosing(self._pages(tag)) as pages:
            async for page in pages:
                for record in page:
                    if record.seqnum >= end:
                        return
                    if check is None:
                        check = await check_from(self.log, tag, record, self.name)
                    entry = check.entry_of(record)
                    if entry is None:
                        continue
                    if entry.kind == SEAL:
                        return
                    if entry.kind == DATA:
                        yield stream_record(record, entry)

    async def _pages(self, tag: str) -> AsyncGenerator[list[Record], None]:
        """Yield pages of the sub-stream. While the caller processes one, the next one is read."""
        bound, limit = await self._first_bound(tag), _PAGE_MIN
        ahead = waiting.Ahead(self._page(tag, bound, limit))
        try:
            while True:
                page: list[Record] = await ahead.result()
                if page:
                    bound, limit = page[-1].seqnum + 1, self._limit(page)
                elif not self.follow:
                    return
                else:
                    await self._check_idle(tag, bound)
                ahead = waiting.Ahead(self._page(tag, bound, limit))
                if page:
                    yield page
        finally:
            await ahead.cancel()

    async def _first_bound(self, tag: str) -> SeqNum:
        """Return the bound, or the floor of the sub-stream if that is greater and allowed."""
        try:
            await self.log.read_range(tag, self.bound, limit=1)
        except TrimmedError as error:
            if self.is_bound_given:
                raise StreamTruncatedError(self.name, error.first_seqnum) from error
            return error.first_seqnum
        return self.bound

    def _limit(self, page: list[Record]) -> int:
        """Return how many records of the mean size in `page` fit into half of `ahead_bytes`."""
        mean = max(1, sum(len(record.data) for record in page) // len(page))
        return max(1, min(_PAGE_MAX, self.ahead_bytes // 2 // mean))

    async def _page(self, tag: str, bound: SeqNum, limit: int) -> list[Record]:
        wait = (math.inf if self.idle_s is None else self.idle_s) if self.follow else None

        async def read() -> list[Record]:
            return await self.log.read_range(tag, bound, limit=limit, wait=wait)

        try:
            return await retry_transient(read, _RETRIES, pause=waiting.pause)
        except TrimmedError as error:
            raise StreamTruncatedError(self.name, error.first_seqnum) from error

    # --- idle

    async def _check_idle(self, tag: str, bound: SeqNum) -> None:
        """Raise if the reader should have got a record, or the stream's writer has stopped."""
        if self.idle_s is None:
            return
        now = await self.log.now()  # the session then sees all records that were appended before
        missed = await first_from(self.log, tag, self.name, bound)
        if missed is not None and missed.record.ordered_at <= now - self.idle_s:
            raise ReaderIdleError(
                f"Stream {self.name!r} has a record at seqnum {missed.record.seqnum}, which a "
                f"reader did not get for {self.idle_s:g} s; read on from seqnum {bound}.",
                missed.record.seqnum,
            )
        beat = await self.log.read_prev(heartbeats_tag(self.created))
        if beat is not None and beat.ordered_at <= now - self.idle_s:
            raise ReaderIdleError(
                f"Stream {self.name!r} got no record for {self.idle_s:g} s, and the last heartbeat "
                f"of its writer is {now - beat.ordered_at:.0f} s old; start a writer."
            )
