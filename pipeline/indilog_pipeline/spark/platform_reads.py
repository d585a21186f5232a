"""Reads through a running platform: pages of one log, in parallel by ranges of seqnums.

Tasks read in a session that has seen the end of the log, so each answer has at least the records
that existed when the planner read this end. Reads of the platform do not return shard, localid and
position. If these columns are wanted, the task requests the places of its records
(`RemoteLog.places`). The answer has one row for each span of records.

`tasks.reads_of` creates `PlatformReads`, which read over a `BlockingConnection`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple

import pyarrow as pa

from indilog.base.errors import ConfigError, DataLossError, TrimmedError
from indilog.base.ids import MetalogPosition, SeqNum, UserTag, decode_names, tag_hashes_in
from indilog.base.log import READ_RANGE_LIMIT_MAX, Log, PlacedSpan, Record
from indilog.link.remote import RemoteLog
from indilog_pipeline.spark.columns import COLUMNS, arrow_schema
from indilog_pipeline.spark.connection import BlockingConnection, connected
from indilog_pipeline.spark.options import Access, Bounds
from indilog_pipeline.spark.reading import Found, Gap, ReadPart, check_end

_SAMPLE: Final = 1_000
"""Records that a plan reads to estimate how many seqnums a partition has."""
_PARTS_MAX: Final = 10_000
_RECORD_OVERHEAD_BYTES: Final = 64
_BATCH_BYTES: Final = 16 * 1024 * 1024
"""An Arrow batch is closed when it has this many bytes of data."""
_TOP_BIT: Final = 1 << 63


class _LogPart(NamedTuple):
    """A task's input besides its range.

    Attributes:
        log: name of the log.
        position: the metalog position of the planner's session after it read the end of the log.
    """

    log: str
    position: MetalogPosition


class PlatformReads:
    """Reads of logs of one platform (`LogReads`).

    Args:
        access: address of the platform, with its token.
        tag: only records with this tag; None: any tag.
        partition_bytes: target size of a part, in bytes.
        batch_rows: largest number of rows in an Arrow batch.
    """

    def __init__(
        self, access: Access, tag: UserTag | None, *, partition_bytes: int, batch_rows: int
    ) -> None:
        self._access = access
        self._tag = tag
        self._partition_bytes = partition_bytes
        self._batch_rows = batch_rows
        self._answered = False

    def range_of(self, bounds: Bounds) -> tuple[SeqNum, SeqNum]:
        """Return the seqnums [start, end) that bounds name, up to the end of the log now.

        The first call does not wait for a platform that does not answer, because the URL may be
        wrong.
        """
        with connected(self._access, waits=self._answered) as platform:
            self._answered = True
            # Seqnums and times are common to all logs, so any log gives the same answer.
            log = platform.log(_logs(bounds)[0] if _logs(bounds) else "any")
            start, end = bounds.start, min(bounds.end, platform.ask(log.tail))
            if bounds.ordered_start_us is not None:
                first = platform.ask(partial(log.find_time, _seconds(bounds.ordered_start_us)))
                start = max(start, first)
            if bounds.ordered_end_us is not None:
                end = min(
                    end, platform.ask(partial(log.find_time, _seconds(bounds.ordered_end_us)))
                )
        return start, end

    def parts(self, bounds: Bounds, start: SeqNum, end: SeqNum) -> list[ReadPart]:
        """Split [start, end) into parts of the target size, estimated from the first records."""
        if start >= end:
            return []
        parts = []
        with connected(self._access) as platform:
            for name in _logs(bounds):
                log = platform.log(name)
                # This answer moves the session to the position that the tasks' reads must reflect.
                check_end(end, platform.ask(log.tail))
                step = self._seqnums_per_part(platform, log, start, end)
                source = _LogPart(name, platform.position)
                parts += [
                    ReadPart(at, min(at + step, end), source) for at in range(start, end, step)
                ]
        return parts

    def _seqnums_per_part(
        self, platform: BlockingConnection, log: Log, start: SeqNum, end: SeqNum
    ) -> int:
        step = -(-(end - start) // _PARTS_MAX)
        pages = _pages(platform, log, self._tag, start, end, limit=_SAMPLE)
        sample: Sequence[Record] = next((page for page in pages if not isinstance(page, Gap)), ())
        if len(sample) < 2:
            return max(step, end - start)
        span = sample[-1].seqnum - sample[0].seqnum + 1
        data_bytes = sum(len(record.data) + _RECORD_OVERHEAD_BYTES for record in sample)
        return max(step, self._partition_bytes * span // data_bytes)

    def end_of_batch(
        self,
        bounds: Bounds,
        start: SeqNum,
        end: SeqNum,
        *,
        records_max: int | None,
        bytes_max: int | None,
    ) -> SeqNum:
        """Return where a batch from `start` ends (`LogReads.end_of_batch`).

        Without limits, the result is `end`. With a limit, this method also reads the records of the
        batch.
        """
        if records_max is None and bytes_max is None:
            return end
        with connected(self._access) as platform:
            log = platform.log(_logs(bounds)[0])
            platform.ask(log.tail)
            pages = _pages(platform, log, self._tag, start, end)
            return _end_within(pages, end, records_max, bytes_max)

    def batches(self, part: ReadPart, bounds: Bounds, columns: Sequence[str]) -> Iterator[Found]:
        """Yield the records of a part in log order, and the gaps between them."""
        del bounds  # the part has all that is needed
        assert isinstance(part.source, _LogPart), "the part was planned by this class"
        with connected(self._access, part.source.position) as platform:
            log = platform.log(part.source.log)
            places = _Places(platform, log, part.end) if _PLACES & set(columns) else None
            make = partial(_batch, log=log.name, columns=columns, places=places)
            waiting: list[Record] = []
            waiting_bytes = 0
            for page in _pages(platform, log, self._tag, part.start, part.end):
                if isinstance(page, Gap):
                    if waiting:
                        yield make(waiting)
                        waiting, waiting_bytes = [], 0
                    yield page
                    continue
                waiting += page
                waiting_bytes += sum(len(record.data) for record in page)
                while len(waiting) >= self._batch_rows or waiting_bytes >= _BATCH_BYTES:
                    yield make(waiting[: self._batch_rows])
                    waiting = waiting[self._batch_rows :]
                    waiting_bytes = sum(len(record.data) for record in waiting)
            if waiting:
                yield make(waiting)


class _Places:
    """The shard, localid and position of the records of a part; callers must ask in log order."""

    def __init__(self, platform: BlockingConnection, log: Log, end: SeqNum) -> None:
        assert isinstance(log, RemoteLog), "the log is read over a connection"
        self._platform, self._log, self._end = platform, log, end
        self._spans: list[PlacedSpan] = []

    def of(self, records: Sequence[Record]) -> dict[str, list[object]]:
        """Return the columns of consecutive records of the part."""
        found: dict[str, list[object]] = {name: [] for name in _PLACES}
        at = 0
        for record in records:
            while at == len(self._spans) or self._spans[at].end <= record.seqnum:
                at += 1
                if at >= len(self._spans):
                    self._fetch(record.seqnum)
                    at = 0
            first, _, shard, localid, position = self._spans[at]
            found["shard"].append(shard)
            found["localid"].append(localid + record.seqnum - first)
            found["position"].append(position)
        del self._spans[:at]
        return found

    def _fetch(self, start: SeqNum) -> None:
        spans = self._platform.ask(partial(self._log.places, start, max(self._end, start + 1)))
        assert spans, "the record was read, so it is ordered"
        self._spans = list(spans)


def _logs(bounds: Bounds) -> list[str]:
    """Return the names of the logs to read.

    Raises:
        ConfigError: no log is named, although a platform reads one log at a time.
    """
    if bounds.logs is None:
        raise ConfigError("A read through a platform is of one log: give option log.")
    return sorted(bounds.logs)


def _pages(
    platform: BlockingConnection,
    log: Log,
    tag: UserTag | None,
    start: SeqNum,
    end: SeqNum,
    *,
    limit: int = READ_RANGE_LIMIT_MAX,
) -> Iterator[list[Record] | Gap]:
    """Yield the records of [start, end) in pages, and the gaps between them.

    Raises:
        DataLossError: records are lost, and the end of the loss is unknown.
    """
    while start < end:
        try:
            wanted = min(limit, end - start)
            page = platform.ask(partial(log.read_range, tag, start, limit=wanted))
        except TrimmedError as error:
            if error.first_seqnum <= start:
                raise
            yield Gap("trimmed", start, min(error.first_seqnum, end), error)
            start = error.first_seqnum
            continue
        except DataLossError as error:
            following = error.next_seqnum
            if following is None or following <= start:
                raise
            first = start if error.seqnum is None else max(start, error.seqnum)
            if first < end:
                yield Gap("lost", first, min(following, end), error)
            start = following
            continue
        if page and page[-1].seqnum >= end:
            page = [record for record in page if record.seqnum < end]
            start = end
        else:
            start = page[-1].seqnum + 1 if page else end
        if page:
            yield page


def _end_within(
    pages: Iterator[list[Record] | Gap],
    end: SeqNum,
    records_max: int | None,
    bytes_max: int | None,
) -> SeqNum:
    """Return the seqnum of the first record beyond a limit; `end`: no record is beyond a limit."""
    records = data_bytes = 0
    for page in pages:
        if isinstance(page, Gap):
            continue
        for record in page:
            records += 1
            data_bytes += len(record.data)
            too_many = records_max is not None and records > records_max
            too_large = bytes_max is not None and data_bytes > bytes_max
            if records > 1 and (too_many or too_large):
                return record.seqnum
    return end


def _batch(
    records: Sequence[Record], log: str, columns: Sequence[str], places: _Places | None
) -> pa.RecordBatch:
    values = places.of(records) if places is not None else {}
    for name in columns:
        if name not in values:
            values[name] = _VALUES[name](records, log)
    arrays = [pa.array(values[name], type=COLUMNS[name].arrow) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(COLUMNS, columns))


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _seconds(micros: int) -> float:
    return max(micros, 0) / 1e6


@lru_cache(maxsize=16_384)
def _hashes(names: bytes) -> list[int]:
    """Return the tags of a record, without its log's, as signed 64 bits."""
    return [tag - 2 * _TOP_BIT if tag & _TOP_BIT else tag for tag in tag_hashes_in(names)]


@lru_cache(maxsize=16_384)
def _names(names: bytes) -> list[str]:
    """Return the tags of a record as text, without its log's."""
    return [str(tag) for tag in decode_names(names)[1]]


_VALUES: Final[dict[str, Callable[[Sequence[Record], str], list[object]]]] = {
    "seqnum": lambda records, _log: [record.seqnum for record in records],
    "ordered_at": lambda records, _log: [_micros(record.ordered_at) for record in records],
    "time": lambda records, _log: [_micros(record.time) for record in records],
    "log": lambda records, log: [log] * len(records),
    "tags": lambda records, _log: [_hashes(record.names) for record in records],
    "tag_names": lambda records, _log: [_names(record.names) for record in records],
    "data": lambda records, _log: [record.data for record in records],
}
_PLACES: Final = frozenset({"shard", "localid", "position"})
