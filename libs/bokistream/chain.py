"""Decides which records of a stream have effect, from the log alone (docs/decisions/0079).

A batch has effect if the record that it names directly precedes it in the sub-stream. A program
that appends a batch names the last record that it knows. So of all batches that name the same
record, the first one in the log has effect, and the others never do. The claim of a new writer
follows the same rule. So the claim fences all batches of earlier writers that are ordered after it.

Truncations trim a stream only below the first record of a batch that has effect. So the first batch
at the floor of the sub-stream has effect. Readers and searches use `EffectCheck`; writers call
`read_last` and `entries_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from bokistream.errors import StreamTrimmedError, StreamTruncatedError
from bokistream.records import CLAIM, DATA, FORMAT, SEAL, StreamEntry, decode_entry
from indilog import DataLossError, Entry, Log, NotReadyError, Record, TrimmedError
from indilog.sdk import MAX_SEQNUM, SeqNum

_ATTEMPTS: Final = 100
"""How often the state of a stream is read again because the stream was truncated meanwhile."""


class StreamRecord(NamedTuple):
    """A data record of a stream.

    Attributes:
        seqnum: its position in the log.
        offset: number of data records before it in the stream.
        txid: its transaction id; never smaller than that of an earlier record.
        data: bytes of the application.
        ordered_at: when the log ordered it, seconds since 1970 (`indilog.Record.ordered_at`).
    """

    seqnum: SeqNum
    offset: int
    txid: int
    data: bytes
    ordered_at: float


class Last(NamedTuple):
    """The state of a stream after some record.

    Attributes:
        record: seqnum of the last record of the sub-stream, whether it has effect or not; -1: none.
        batch_start: first seqnum of the last batch that has effect; -1: there is none.
        seqnum: seqnum of the last data record that has effect; -1: there is none.
        token: fencing token of the writer; -1: the stream has had none.
        txid: transaction id of the last data record; 0 if there is none.
        offset: number of data records.
        size_bytes: bytes of all their data.
        is_sealed: whether the stream has ended.
    """

    record: SeqNum = -1
    batch_start: SeqNum = -1
    seqnum: SeqNum = -1
    token: SeqNum = -1
    txid: int = 0
    offset: int = 0
    size_bytes: int = 0
    is_sealed: bool = False


class NewRecord(NamedTuple):
    """A record to append: its kind, transaction id and data."""

    kind: int
    txid: int
    data: bytes = b""


def state_after(seqnum: SeqNum, entry: StreamEntry) -> Last:
    """Return the state after a record that has effect."""
    start, is_data = seqnum - entry.index, entry.kind == DATA
    return Last(
        record=seqnum,
        batch_start=start,
        seqnum=seqnum if is_data else entry.previous,
        token=seqnum if entry.kind == CLAIM else entry.token,
        txid=entry.txid,
        offset=entry.offset + is_data,
        size_bytes=entry.size_bytes + len(entry.data),
        is_sealed=entry.kind == SEAL,
    )


def entries_of(last: Last, records: Sequence[NewRecord], batch: int) -> list[StreamEntry]:
    """Return a batch that has effect if `last` is the state of the stream when it is ordered."""
    entries: list[StreamEntry] = []
    offset, size_bytes = last.offset, last.size_bytes
    for index, (kind, txid, data) in enumerate(records):
        token = -1 if kind == CLAIM else last.token
        entries.append(
            StreamEntry(
                kind, index, last.record, last.seqnum, token, txid, offset, size_bytes, batch, data
            )
        )
        offset += kind == DATA
        size_bytes += len(data)
    return entries


def encoded(entries: Sequence[StreamEntry], tag: str) -> list[Entry]:
    """Return the records of a batch for `Log.append_batch`."""
    return [Entry(FORMAT.encoded(entry), (tag,)) for entry in entries]


class EffectCheck:
    """Decides which records of a sub-stream have effect, while they are read in order.

    Args:
        record: seqnum of the record before the first one to be read; -1: there is none.
        batch_start: first seqnum of that record's batch.
        has_effect: whether that batch has effect.
    """

    def __init__(
        self, record: SeqNum = -1, batch_start: SeqNum = -1, *, has_effect: bool = False
    ) -> None:
        self._record = record
        self._batch_start = batch_start
        self._has_effect = has_effect

    def entry_of(self, record: Record) -> StreamEntry | None:
        """Return the content of the next record; None: it has no effect."""
        entry = decode_entry(record.data)
        if entry is None:
            self._batch_start, self._has_effect = -1, False
        else:
            start = record.seqnum - entry.index
            if start != self._batch_start:
                self._has_effect = entry.index == 0 and entry.after == self._record
            self._batch_start = start
        self._record = record.seqnum
        return entry if self._has_effect else None


class _Effect(NamedTuple):
    """Whether a batch has effect, and the record before it that was found."""

    has_effect: bool
    before: Record | None


async def _effect_of(
    log: Log, tag: str, record: Record, entry: StreamEntry | None, name: str
) -> _Effect:
    """Tell whether the batch of a record has effect, by the record that precedes the batch.

    If the preceding record is lost, the batch has effect if it names the last lost record. The
    batch's author has seen that record in the sub-stream, and no record between the two survives.
    """
    start = record.seqnum if entry is None else record.seqnum - entry.index
    try:
        before = await log.read_prev(tag, start - 1) if start > 0 else None
    except TrimmedError as error:
        if error.first_seqnum > record.seqnum:  # it was trimmed after it was read
            raise StreamTruncatedError(name, error.first_seqnum) from error
        if entry is None or error.first_seqnum != start:
            raise StreamTrimmedError(name, error.first_seqnum) from error
        return _Effect(has_effect=True, before=None)
    except DataLossError as error:
        if entry is not None and entry.after + 1 == error.next_seqnum:
            return _Effect(has_effect=True, before=None)
        raise DataLossError(
            f"Whether the record at {record.seqnum} of stream {name!r} has effect is not known, "
            f"because the record before it is lost: {error}",
            seqnum=error.seqnum,
            next_seqnum=record.seqnum + 1,
            tags=error.tags,
        ) from error
    before_seqnum = -1 if before is None else before.seqnum
    return _Effect(entry is not None and entry.after == before_seqnum, before)


async def check_from(log: Log, tag: str, first: Record, name: str) -> EffectCheck:
    """Return a check that continues at `first`, any record of the sub-stream.

    Raises:
        StreamTruncatedError: `first` was trimmed meanwhile.
        StreamTrimmedError: the whole log was trimmed, and with it the record that precedes `first`.
        DataLossError: the record that precedes `first` is lost, so `first` may have no effect.
    """
    entry = decode_entry(first.data)
    effect = await _effect_of(log, tag, first, entry, name)
    start = first.seqnum if entry is None else first.seqnum - entry.index
    return EffectCheck(first.seqnum - 1, start, has_effect=effect.has_effect)


async def read_last(log: Log, tag: str, name: str, *, fresh: bool = False) -> Last:
    """Return the state of a stream after its last record.

    Args:
        log: log of the stream.
        tag: tag of its records.
        name: name of the stream, for error messages.
        fresh: as for `Log.read_prev`. A state that is not the newest is harmless: a batch after it
            has no effect.

    Raises:
        StreamTrimmedError: the whole log was trimmed.
        DataLossError: the last record is lost.
    """
    for _ in range(_ATTEMPTS):
        try:
            newest = await log.read_prev(tag, MAX_SEQNUM, fresh=fresh)
        except TrimmedError as error:
            raise StreamTrimmedError(name, error.first_seqnum) from error
        try:
            return await _state_at(log, tag, newest, name)
        except StreamTruncatedError:  # a record was trimmed between two reads
            continue
    raise NotReadyError(f"Stream {name!r} is being truncated all the time; try again later.")


async def _state_at(log: Log, tag: str, newest: Record | None, name: str) -> Last:
    """Return the state after the last record that has effect, from `newest` backwards."""
    found = newest
    record = -1 if newest is None else newest.seqnum
    while found is not None:
        entry = decode_entry(found.data)
        effect = await _effect_of(log, tag, found, entry, name)
        if effect.has_effect:
            assert entry is not None, "only records of streams have effect"
            return state_after(found.seqnum, entry)._replace(record=record)
        found = effect.before
    return Last(record=record)
