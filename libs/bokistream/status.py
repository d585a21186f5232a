"""The status of a stream for operators: the records of each writer, the position of each reader.

`Streams.status` and `Streams.segments` return it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bokistream.catalog import StreamInfo
from bokistream.chain import Last, read_last, state_after
from bokistream.reader import read_cursor
from bokistream.records import StreamEntry, decode_entry, heartbeats_tag, records_tag
from indilog import Log, Record, TrimmedError
from indilog.sdk import SeqNum

SEGMENTS_MAX: Final = 1_000


class Segment(NamedTuple):
    """The records that one writer appended.

    Attributes:
        token: the writer's fencing token; -1: the records were appended before the first writer.
        started_at: when the writer took the stream over, seconds since 1970; None: there was no
            writer, or the writer's claim was trimmed.
        first_offset: offset of the first data record; None: the writer's claim was trimmed.
        end_offset: offset after the last data record.
        size_bytes: bytes of the data; None: the writer's claim was trimmed.
        last_txid: transaction id of the last data record.
    """

    token: SeqNum
    started_at: float | None
    first_offset: int | None
    end_offset: int
    size_bytes: int | None
    last_txid: int


class ReaderStatus(NamedTuple):
    """A named reader.

    Attributes:
        name: its name.
        done: seqnum that it committed last; -1: none.
        behind: data records that it has still to process; None: the record at `done` was trimmed,
            or is no record of the stream.
    """

    name: str
    done: SeqNum
    behind: int | None


class StreamStatus(NamedTuple):
    """A stream, its writer and its readers.

    Attributes:
        info: the settings of the stream.
        last: the state of the stream after its last record.
        heartbeat_age_s: seconds since the last heartbeat of a writer; None: there was none.
        readers: the named readers.
    """

    info: StreamInfo
    last: Last
    heartbeat_age_s: float | None
    readers: list[ReaderStatus]


async def read_segments(log: Log, last: Last, limit: int) -> list[Segment]:
    """Return the segments of the writers up to `last`, newest first. Writers without data records
    are left out, except the newest.
    """
    segments: list[Segment] = []
    while len(segments) < limit:
        if last.token < 0:
            if last.offset > 0:
                segments.append(Segment(-1, None, 0, last.offset, last.size_bytes, last.txid))
            break
        found = await _read_entry(log, last.token)
        if found is None:
            segments.append(Segment(last.token, None, None, last.offset, None, last.txid))
            break
        claim, entry = found
        segments.append(
            Segment(
                last.token,
                claim.ordered_at,
                entry.offset,
                last.offset,
                last.size_bytes - entry.size_bytes,
                last.txid,
            )
        )
        previous = await _read_entry(log, entry.previous) if entry.previous >= 0 else None
        if previous is None:
            break
        last = state_after(previous[0].seqnum, previous[1])
    return segments


async def _read_entry(log: Log, seqnum: SeqNum) -> tuple[Record, StreamEntry] | None:
    """Return the record of a stream at `seqnum`; None: it was trimmed."""
    try:
        record = await log.read(seqnum)
    except TrimmedError:
        return None
    entry = None if record is None else decode_entry(record.data)
    return None if record is None or entry is None else (record, entry)


async def read_status(log: Log, info: StreamInfo) -> StreamStatus:
    """Return the status of a stream."""
    last = await read_last(log, records_tag(info.created), info.name, fresh=True)
    try:
        beat = await log.read_prev(heartbeats_tag(info.created))
    except TrimmedError:
        beat = None
    age_s = None if beat is None else max(0.0, await log.now() - beat.ordered_at)
    readers: list[ReaderStatus] = []
    for name in info.readers:
        done = await read_cursor(log, info.created, name)
        found = await _read_entry(log, done) if done >= 0 else None
        offset = 0 if done < 0 else None
        if found is not None and records_tag(info.created) in found[0].tags:
            offset = state_after(found[0].seqnum, found[1]).offset
        readers.append(ReaderStatus(name, done, None if offset is None else last.offset - offset))
    return StreamStatus(info, last, age_s, readers)
