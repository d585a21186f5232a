"""A read-only `Log` over a data directory, from which libraries replay their state.

All records of the log that are ordered, durable and not trimmed are held in memory. A
`DirectoryLog` answers as the platform would at the image's position, also with `TrimmedError`. It
has no aux data, because aux data is only a cache. Its methods never suspend, so a coroutine that
awaits only these methods runs to its end without an event loop. `objects` replays BokiStore from
it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Never

import pyarrow as pa

from indilog.base.errors import IndilogError, TrimmedError
from indilog.base.ids import MAX_SEQNUM, SeqNum, TagHash, UserTag, log_tag, tag_columns, tag_hash
from indilog.base.log import (
    After,
    Entry,
    Log,
    Record,
    check_bound,
    check_limit,
    check_log_name,
    check_time,
)
from indilog.base.retention import Retention
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import Filter, read_records

_COLUMNS: Final = ("seqnum", "ordered_at", "time", "tags", "tag_names", "data")
_HASHES: Final = 1 << 64


class ReadOnlyLogError(IndilogError):
    """A write to a log of a data directory was refused; only the platform changes the log."""


class DirectoryLog(Log):
    """The log `name` of an image.

    Args:
        image: image of the data directory.
        name: name of the log.

    Raises:
        DataLossError: a record of the log is lost or damaged.
    """

    def __init__(self, image: LogImage, name: str) -> None:
        self.name = check_log_name(name)
        self._image = image
        self._records: dict[SeqNum, Record] = {}
        self._streams: defaultdict[TagHash, list[SeqNum]] = defaultdict(list)
        for batch in read_records(image, columns=_COLUMNS, wanted=Filter(name)):
            self._take(batch)

    def _take(self, batch: pa.RecordBatch) -> None:
        columns: dict[str, list[Any]] = {
            field: (
                batch.column(field).cast(pa.int64()) if field in _TIMES else batch.column(field)
            ).to_pylist()
            for field in _COLUMNS
        }
        for seqnum, ordered_us, time_us, hashes, names, data in zip(*columns.values(), strict=True):
            unsigned = [tag % _HASHES for tag in hashes]
            tags = tuple(self._tag(name, tag) for name, tag in zip(names, unsigned, strict=True))
            spelled = tag_columns(self.name, tags).names
            self._records[seqnum] = Record(seqnum, spelled, data, time_us / 1e6, ordered_us / 1e6)
            for tag in (log_tag(self.name), *unsigned):
                self._streams[tag].append(seqnum)

    def _tag(self, name: str, tag: TagHash) -> UserTag:
        """Return the tag whose text is `name`: the text itself if its hash is `tag`, otherwise the
        integer that it spells.
        """
        return name if tag_hash(self.name, name) == tag else int(name)

    def _stream(self, tag: UserTag | None) -> tuple[Sequence[SeqNum], SeqNum]:
        """Return the seqnums of the log, or of a tag, and its floor."""
        hashed = log_tag(self.name) if tag is None else tag_hash(self.name, tag)
        return self._streams.get(hashed, ()), Filter(self.name, tag).floor_in(self._image)

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """See `Log.read`; None for a record of another log."""
        del fresh
        _, floor = self._stream(None)
        if check_bound(seqnum) < floor:
            raise TrimmedError(floor)
        return self._records.get(seqnum)

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """See `Log.read_next`. This method never waits, because the image does not change."""
        del wait, fresh
        return next(self._from(tag, bound), None)

    def _from(self, tag: UserTag | None, bound: SeqNum) -> Iterator[Record]:
        seqnums, floor = self._stream(tag)
        if check_bound(bound) < floor:
            raise TrimmedError(floor)
        first = bisect_left(seqnums, bound)
        return (self._records[seqnum] for seqnum in islice(seqnums, first, None))

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """See `Log.read_prev`."""
        del fresh
        seqnums, floor = self._stream(tag)
        after = bisect_right(seqnums, check_bound(bound))
        if after and seqnums[after - 1] >= floor:
            return self._records[seqnums[after - 1]]
        if floor:
            raise TrimmedError(floor)
        return None

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        """See `Log.read_range`. This method never waits, because the image does not change."""
        del wait, fresh
        return list(islice(self._from(tag, bound), check_limit(limit)))

    async def tail(self) -> SeqNum:
        """Return the end of the image."""
        return self._image.tail

    async def now(self) -> float:
        """Return when the last record of the image was ordered; 0: there is no record."""
        times = self._image.ordered.times
        return float(times[-1]) / 1e6 if len(times) else 0.0

    async def find_time(self, time: float) -> SeqNum:
        """See `Log.find_time`."""
        return self._image.seqnum_at(check_time(time))

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Do nothing: aux data is a cache, and a cache may drop an entry at once."""

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """Raise `ReadOnlyLogError`."""
        del data, tags
        self._refuse()

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """Raise `ReadOnlyLogError`."""
        del entries, after
        self._refuse()

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """Raise `ReadOnlyLogError`."""
        del until, tag
        self._refuse()

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """Raise `ReadOnlyLogError`."""
        del age_s, size_bytes
        self._refuse()

    async def retention(self) -> Retention:
        """Raise `ReadOnlyLogError`: policies are records of another log."""
        self._refuse()

    def _refuse(self) -> Never:
        raise ReadOnlyLogError(
            f"Log {self.name!r} is read from the data directory {self._image.directory}; only its "
            "platform changes it."
        )


_TIMES: Final = frozenset({"ordered_at", "time"})
