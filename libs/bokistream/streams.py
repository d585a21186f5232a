"""The public interface of BokiStream: streams, their writers and their readers.

The design is that of DistributedLog; docs/decisions/0079 lists the differences. Applications,
`StreamMirror` and the command `python -m bokistream` call `Streams`.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Final

from bokistream.appender import Appender
from bokistream.appending import append_in_any_case
from bokistream.catalog import STREAMS_MAX, Catalog, StreamInfo
from bokistream.chain import Last, NewRecord, StreamRecord, read_last
from bokistream.errors import StreamExistsError, StreamSealedError, StreamSettingsError
from bokistream.reader import Reader, read_cursor
from bokistream.reading import AHEAD_BYTES, Reading
from bokistream.records import (
    SEAL,
    SECONDS_MAX,
    AddReader,
    Configure,
    Create,
    Delete,
    StreamEntry,
    Truncate,
    checked_name,
    checked_txid,
    cursor_tag,
    heartbeats_tag,
    records_tag,
)
from bokistream.search import find_first
from bokistream.status import (
    SEGMENTS_MAX,
    Segment,
    StreamStatus,
    read_segments,
    read_status,
)
from bokistream.truncation import truncation_point
from bokistream.writer import HEARTBEAT_S, Writer, checked_heartbeat_s, claim
from indilog import Log
from indilog.sdk import SeqNum, check_bound

APPENDERS_MAX: Final = 64
"""Largest number of appenders that a `Streams` object keeps; the least recently used is dropped."""
_SIZE_BYTES_MAX: Final = 2**63 - 1


class Streams:
    """The streams of a log. `Streams` objects are cheap.

    A stream is a sequence of records in the order of the log. One writer at a time appends to it:
    a new writer takes the stream over, and fences the one before. A record whose append has
    returned is durable, and all readers get it. A record whose append raised `FencedError` is
    never read. Any program that reaches the platform can write and read.

    Args:
        log: log of the streams; it may also hold other records. Do not trim the whole log: that
            would also trim the records of the catalog.
        catalog: catalog of the streams; None: a catalog whose replica all callers in this process
            share.
    """

    def __init__(self, log: Log, *, catalog: Catalog | None = None) -> None:
        self.log = log
        self._catalog = catalog or Catalog(log)
        self._appenders: OrderedDict[tuple[SeqNum, SeqNum], Appender] = OrderedDict()
        self._trimmed: dict[SeqNum, SeqNum] = {}
        """The seqnum below which this object has trimmed a stream, by the stream's `created`."""

    # --- streams

    async def create(
        self,
        name: str,
        *,
        age_s: float | None = None,
        size_bytes: int | None = None,
        grace_s: float = 0.0,
        exist_ok: bool = False,
    ) -> StreamInfo:
        """Create a stream.

        Args:
            name: 1 to 128 bytes of text, unique in the log.
            age_s: seconds after which a record is truncated; None: records are kept.
            size_bytes: the newest records, up to this many bytes, are kept; None: no limit.
            grace_s: seconds for which truncated records can still be read with
                `include_truncated`.
            exist_ok: whether the stream may exist already; then its settings stay as they are.

        Raises:
            StreamExistsError: there is a stream with this name.
            StreamSettingsError: an argument is invalid, or the log has 10,000 streams.
            IndilogError: as for `Log.append`; creating again with `exist_ok` is harmless.
        """
        checked_name("A stream's name", name)
        _check_retention(age_s, size_bytes, grace_s)
        streams = await self._catalog.streams()
        if name not in streams:
            if len(streams) >= STREAMS_MAX:
                raise StreamSettingsError(
                    f"Log {self.log.name!r} has {STREAMS_MAX:,} streams, which is the limit; "
                    "use another log."
                )
            if await self._catalog.change(Create(name, age_s, size_bytes, grace_s)):
                return await self._catalog.stream(name)
        if not exist_ok:
            raise StreamExistsError(f"Log {self.log.name!r} has a stream {name!r} already.")
        return await self._catalog.stream(name)

    async def list(self) -> list[StreamInfo]:
        """Return all streams of the log, by name."""
        return [stream for _, stream in sorted((await self._catalog.streams()).items())]

    async def info(self, name: str) -> StreamInfo:
        """Return the settings of a stream.

        Raises:
            StreamNotFoundError: there is none with this name.
        """
        return await self._catalog.stream(name)

    async def configure(
        self,
        name: str,
        *,
        age_s: float | None = None,
        size_bytes: int | None = None,
        grace_s: float = 0.0,
    ) -> StreamInfo:
        """Replace the retention and the grace period of a stream; arguments as for `create`.

        Raises:
            StreamNotFoundError: there is none with this name.
        """
        _check_retention(age_s, size_bytes, grace_s)
        info = await self._catalog.stream(name)
        await self._catalog.change(Configure(name, info.created, age_s, size_bytes, grace_s))
        return await self._catalog.stream(name)

    async def delete(self, name: str) -> None:
        """Seal a stream, trim all its records but the last one, and remove it from the list.

        The last record stays, because it tells readers and writers that the stream has ended. So
        reads with `follow` end, too. If the call fails, repeat it to complete the deletion.

        Raises:
            StreamNotFoundError: there is none with this name.
        """
        info = await self._catalog.stream(name)
        sealed = await self._seal(info)
        await self.log.trim(sealed.batch_start, tag=records_tag(info.created))
        tail = await self.log.tail()
        for tag in (
            heartbeats_tag(info.created),
            *(cursor_tag(info.created, reader) for reader in info.readers),
        ):
            await self.log.trim(tail, tag=tag)
        await self._catalog.change(Delete(name, info.created))

    # --- writing

    @asynccontextmanager
    async def writer(
        self,
        name: str,
        *,
        heartbeat_s: float | None = HEARTBEAT_S,
        first_offset: int | None = None,
    ) -> AsyncGenerator[Writer, None]:
        """Take a stream over, and yield its writer. The writer before is fenced from now on.

        Args:
            name: name of the stream.
            heartbeat_s: seconds between two heartbeats (0.01 to 3,600), by which readers notice
                that the writer has stopped; None: no heartbeats.
            first_offset: offset of the first record, if the stream has no records yet; None: 0.
                A copy of a truncated stream needs it, to have the offsets of its source.

        Raises:
            StreamNotFoundError: there is no stream with this name.
            StreamSealedError: the stream has ended.
            IndilogError: as for `Log.append`.
        """
        heartbeat_s = checked_heartbeat_s(heartbeat_s)
        info = await self._catalog.stream(name)
        if first_offset is not None and (type(first_offset) is not int or first_offset < 0):
            raise StreamSettingsError(
                f"first_offset must be 0 or more, or None, not {first_offset!r:.40}."
            )
        last = await claim(self.log, name, info.created, first_offset=first_offset)

        async def collect() -> None:
            await self.collect(name)

        async with Writer(
            self.log, name, info.created, last, heartbeat_s=heartbeat_s, collect=collect
        ) as writer:
            yield writer

    async def append(
        self,
        name: str,
        data: bytes,
        *,
        fencing_token: SeqNum | None = None,
        txid: int | None = None,
        match_seqnum: SeqNum | None = None,
    ) -> SeqNum:
        """Append a record without being the writer, and return the record's seqnum.

        Any compute node accepts the append and writes the record to the log itself. The order of
        the log decides whether the record has effect. So appends need not pass through the program
        that owns the stream.

        Args:
            name: name of the stream.
            data: as for `Writer.append`.
            fencing_token: `Writer.token` of the owner; None: the stream has had no writer.
            txid: as for `Writer.append`.
            match_seqnum: as for `Writer.append`.

        Raises:
            StreamNotFoundError: there is no stream with this name.
            IndilogError: as for `Writer.append`; `AppendContendedError` if others append all the
                time.
        """
        token = -1 if fencing_token is None else fencing_token
        if type(token) is not int or token < -1:
            raise StreamSettingsError(
                f"fencing_token must be the token of a writer, or None, not {fencing_token!r:.40}."
            )
        known = await self._catalog.known_stream(name)
        try:
            return await self._appender(known, token).append(
                data, txid=txid, match_seqnum=match_seqnum
            )
        except StreamSealedError:  # perhaps another stream has this name now
            info = await self._catalog.stream(name)
            if info.created == known.created:
                raise
        return await self._appender(info, token).append(data, txid=txid, match_seqnum=match_seqnum)

    def _appender(self, info: StreamInfo, token: SeqNum) -> Appender:
        """Return the appender that all appends to a stream under one token share."""
        place = (info.created, token)
        appender = self._appenders.get(place)
        if appender is None:
            appender = self._appenders[place] = Appender(self.log, info.name, info.created, token)
            if len(self._appenders) > APPENDERS_MAX:
                self._appenders.popitem(last=False)
        self._appenders.move_to_end(place)
        return appender

    async def seal(self, name: str) -> None:
        """End a stream: later appends are refused, and readers end after the last record.

        Any program may seal a stream, even if another program owns it.

        Raises:
            StreamNotFoundError: there is no stream with this name.
        """
        await self._seal(await self._catalog.stream(name))

    async def _seal(self, info: StreamInfo) -> Last:
        def record_after(last: Last) -> tuple[Last, NewRecord] | None:
            return None if last.is_sealed else (last, NewRecord(SEAL, last.txid))

        return await append_in_any_case(
            self.log, records_tag(info.created), info.name, record_after
        )

    # --- reading

    async def read(
        self,
        name: str,
        *,
        from_seqnum: SeqNum | None = None,
        from_txid: int | None = None,
        from_offset: int | None = None,
        follow: bool = False,
        include_truncated: bool = False,
        ahead_bytes: int = AHEAD_BYTES,
        idle_s: float | None = None,
    ) -> AsyncGenerator[StreamRecord, None]:
        """Yield the records of a stream, in order.

        Args:
            name: name of the stream.
            from_seqnum: first seqnum; None: begin at the first record that is not truncated.
            from_txid: begin at the first record whose transaction id is at least this one.
            from_offset: begin at the record with this offset.
            follow: whether to wait for new records at the end, until the stream is sealed.
                Otherwise the iteration ends after the records that the stream had at the call.
            include_truncated: whether to read truncated records, too, while they are kept.
            ahead_bytes: about how many bytes of records the reader holds (1 to 2**30). While the
                caller processes one page of the log, the reader already reads the next page.
            idle_s: seconds without a record after which the reader checks the stream; None: never.
                It raises `ReaderIdleError` if the stream has a record that the reader did not get,
                or if the writer writes no heartbeats. Use a multiple of the writer's `heartbeat_s`.

        Raises:
            StreamNotFoundError: there is no stream with this name.
            StreamTruncatedError: records from `from_seqnum` on were truncated.
            StreamSettingsError: an argument is invalid.
            ReaderIdleError: see `idle_s`.
            IndilogError: as for `Log.read_range`.
        """
        if sum(one is not None for one in (from_seqnum, from_txid, from_offset)) > 1:
            raise StreamSettingsError("Give only one of from_seqnum, from_txid and from_offset.")
        info = await self._catalog.stream(name)
        reading = Reading(
            self.log,
            name,
            info.created,
            0 if include_truncated else info.start,
            is_bound_given=False,
            follow=follow,
            ahead_bytes=ahead_bytes,
            idle_s=idle_s,
        )
        async with aclosing(
            reading.records_from(seqnum=from_seqnum, txid=from_txid, offset=from_offset)
        ) as records:
            async for record in records:
                yield record

    async def reader(
        self,
        name: str,
        reader: str,
        *,
        ahead_bytes: int = AHEAD_BYTES,
        idle_s: float | None = None,
    ) -> Reader:
        """Return a reader named `reader`, which stores its position as a record of the log.

        Another process that uses the same name continues at the stored position.

        Args:
            name: name of the stream.
            reader: name of the reader, 1 to 128 bytes of text; a stream has at most 1,000.
            ahead_bytes: as for `read`.
            idle_s: as for `read`.

        Raises:
            StreamNotFoundError: there is no stream with this name.
            StreamSettingsError: an argument is invalid, or the stream has 1,000 readers.
        """
        checked_name("A reader's name", reader)
        info = await self._catalog.stream(name)
        if reader not in info.readers:
            await self._catalog.change(AddReader(name, info.created, reader))
            info = await self._catalog.stream(name)
            if reader not in info.readers:
                raise StreamSettingsError(
                    f"Stream {name!r} has {len(info.readers):,} readers, which is the limit."
                )
        done = await read_cursor(self.log, info.created, reader)
        reading = Reading(
            self.log,
            name,
            info.created,
            info.start,
            is_bound_given=False,
            follow=True,
            ahead_bytes=ahead_bytes,
            idle_s=idle_s,
        )
        return Reader(reading, reader, done)

    async def last(self, name: str) -> Last:
        """Return the state of a stream after its last record.

        The state has the seqnum and transaction id of the last data record, and the offset of the
        next one.

        Raises:
            StreamNotFoundError: there is no stream with this name.
        """
        info = await self._catalog.stream(name)
        return await read_last(self.log, records_tag(info.created), name, fresh=True)

    # --- truncation and retention

    async def truncate(
        self, name: str, *, before_seqnum: SeqNum | None = None, before_txid: int | None = None
    ) -> SeqNum:
        """Truncate a stream, and return the seqnum below which it is truncated now.

        New readers no longer get the truncated records. Until the grace period of the stream is
        over, these records can be read with `include_truncated`. Then they are trimmed.

        Args:
            name: name of the stream.
            before_seqnum: truncate the records below this seqnum.
            before_txid: truncate the records with a smaller transaction id.

        Raises:
            StreamNotFoundError: there is no stream with this name.
            StreamSettingsError: not exactly one position is given, or it is invalid.
        """
        if (before_seqnum is None) == (before_txid is None):
            raise StreamSettingsError("Give before_seqnum or before_txid.")
        info = await self._catalog.stream(name)
        if before_seqnum is not None:
            start = await self._truncate(info, check_bound(before_seqnum))
        else:
            start = await self._truncate_before(
                info, lambda entry: entry.txid, checked_txid(before_txid)
            )
        await self._trim(await self._catalog.stream(name))
        return start

    async def collect(self, name: str) -> None:
        """Truncate a stream as its retention says, and trim records whose grace period is over.

        A writer does this every minute. Without a writer, call it from time to time.

        Raises:
            StreamNotFoundError: there is no stream with this name.
        """
        info = await self._catalog.stream(name)
        if info.age_s is not None:
            oldest = max(0.0, await self.log.now() - info.age_s)
            await self._truncate(info, await self.log.find_time(oldest))
        if info.size_bytes is not None:
            last = await read_last(self.log, records_tag(info.created), name, fresh=True)
            excess = last.size_bytes - info.size_bytes
            if excess > 0:
                await self._truncate_before(info, lambda entry: entry.size_bytes, excess)
        await self._trim(await self._catalog.stream(name))

    async def _truncate_before(
        self, info: StreamInfo, key: Callable[[StreamEntry], int], wanted: int
    ) -> SeqNum:
        """Truncate the records whose key is smaller than `wanted`."""
        tag = records_tag(info.created)
        last = await read_last(self.log, tag, info.name, fresh=True)
        found = await find_first(self.log, tag, info.name, info.start, key, wanted)
        bound = last.seqnum + 1 if found is None else found.record.seqnum
        return await self._truncate(info, bound)

    async def _truncate(self, info: StreamInfo, bound: SeqNum) -> SeqNum:
        """Truncate the records below `bound`, and return the new start of the stream."""
        point = await truncation_point(self.log, records_tag(info.created), info.name, bound)
        if point.start > info.start:
            await self._catalog.change(Truncate(info.name, info.created, point.start, point.anchor))
        return max(point.start, info.start)

    async def _trim(self, info: StreamInfo) -> None:
        """Trim the records whose grace period is over."""
        if not info.truncations:
            return
        until = info.trimmable(await self.log.now())
        if until > self._trimmed.get(info.created, 0):
            await self.log.trim(until, tag=records_tag(info.created))
            self._trimmed[info.created] = until

    # --- looking into streams

    async def segments(self, name: str, *, limit: int = 100) -> builtins.list[Segment]:
        """Return the segments of a stream, newest first; a segment is the records of one writer.

        Args:
            name: name of the stream.
            limit: largest number of segments, 1 to 1,000. Each takes two reads.

        Raises:
            StreamNotFoundError: there is no stream with this name.
        """
        if type(limit) is not int or not 1 <= limit <= SEGMENTS_MAX:
            raise StreamSettingsError(f"limit must be 1 to {SEGMENTS_MAX:,}, not {limit!r:.40}.")
        info = await self._catalog.stream(name)
        last = await read_last(self.log, records_tag(info.created), name, fresh=True)
        return await read_segments(self.log, last, limit)

    async def status(self, name: str) -> StreamStatus:
        """Return the state of a stream, of its writer and of its named readers.

        Raises:
            StreamNotFoundError: there is no stream with this name.
        """
        info = await self._catalog.stream(name)
        return await read_status(self.log, info)


def _check_retention(age_s: object, size_bytes: object, grace_s: object) -> None:
    """Check the retention and the grace period of a stream.

    Raises:
        StreamSettingsError: an argument is out of range.
    """
    if age_s is not None and (
        not isinstance(age_s, int | float) or not 1.0 <= age_s <= SECONDS_MAX
    ):
        raise StreamSettingsError(
            f"age_s must be 1 to {SECONDS_MAX:,.0f} seconds, or None, not {age_s!r:.40}."
        )
    if size_bytes is not None and (
        type(size_bytes) is not int or not 0 < size_bytes <= _SIZE_BYTES_MAX
    ):
        raise StreamSettingsError(
            f"size_bytes must be a number of bytes greater than 0, or None, not {size_bytes!r:.40}."
        )
    if not isinstance(grace_s, int | float) or not 0 <= grace_s <= SECONDS_MAX:
        raise StreamSettingsError(
            f"grace_s must be 0 to {SECONDS_MAX:,.0f} seconds, not {grace_s!r:.40}."
        )
