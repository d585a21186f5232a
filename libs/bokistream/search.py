"""Finds records of a stream by transaction id, offset or size, in O(log n) reads.

`Streams`, `Reading` and `truncation_point` call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from bokistream.chain import EffectCheck, Last, StreamRecord, check_from, read_last
from bokistream.errors import StreamTruncatedError
from bokistream.records import DATA, StreamEntry
from indilog import Log, Record, TrimmedError
from indilog.sdk import SeqNum

_PAGES: Final = (1, 8, 64, 512)
"""Records per read, while records that have no effect are skipped."""


class FoundRecord(NamedTuple):
    """A data record that has effect, and its content."""

    record: Record
    entry: StreamEntry

    @property
    def batch_start(self) -> SeqNum:
        """First seqnum of its batch."""
        return self.record.seqnum - self.entry.index

    @property
    def previous(self) -> SeqNum:
        """Seqnum of the data record before it; -1: there is none."""
        return self.record.seqnum - 1 if self.entry.index > 0 else self.entry.previous


def stream_record(record: Record, entry: StreamEntry) -> StreamRecord:
    """Return a data record as readers get it."""
    return StreamRecord(record.seqnum, entry.offset, entry.txid, entry.data, record.ordered_at)


async def first_from(log: Log, tag: str, name: str, bound: SeqNum) -> FoundRecord | None:
    """Return the first data record at or above `bound` that has effect.

    Raises:
        StreamTruncatedError: records at `bound` were trimmed.
        IndilogError: as for `check_from`.
    """
    check: EffectCheck | None = None
    attempt = 0
    while True:
        limit = _PAGES[min(attempt, len(_PAGES) - 1)]
        try:
            page = await log.read_range(tag, bound, limit=limit)
        except TrimmedError as error:
            raise StreamTruncatedError(name, error.first_seqnum) from error
        for record in page:
            if check is None:
                check = await check_from(log, tag, record, name)
            entry = check.entry_of(record)
            if entry is not None and entry.kind == DATA:
                return FoundRecord(record, entry)
        if not page:
            return None
        bound = page[-1].seqnum + 1
        attempt += 1


async def find_first(
    log: Log,
    tag: str,
    name: str,
    low: SeqNum,
    key: Callable[[StreamEntry], int],
    wanted: int,
) -> FoundRecord | None:
    """Return the first data record from `low` on whose key is at least `wanted`; None if there is
    none yet.

    It bisects the seqnums between `low` and the last record. So n seqnums take about 2 · log2(n)
    reads.

    Args:
        log: log of the stream.
        tag: tag of its records.
        name: its name, for error messages.
        low: first seqnum to look at; 0: the first that is not trimmed.
        key: a number that does not decrease along the stream.
        wanted: smallest key of the record.

    Raises:
        IndilogError: as for `first_from` and `read_last`.
    """
    last: Last = await read_last(log, tag, name, fresh=True)
    if last.seqnum < low:
        return None
    best = await _first_of_untrimmed(log, tag, name, last.seqnum)
    if best is None or key(best.entry) < wanted:
        return None
    high = last.seqnum - 1
    while low <= high:
        middle = (low + high) // 2
        try:
            found = await first_from(log, tag, name, middle)
        except StreamTruncatedError as error:
            low = max(middle + 1, error.first_seqnum)
            continue
        assert found is not None, "the last record lies above"
        if key(found.entry) >= wanted:
            best, high = found, middle - 1
        else:
            low = found.record.seqnum + 1
    return best


async def _first_of_untrimmed(log: Log, tag: str, name: str, bound: SeqNum) -> FoundRecord | None:
    try:
        return await first_from(log, tag, name, bound)
    except StreamTruncatedError as error:
        return await first_from(log, tag, name, error.first_seqnum)
