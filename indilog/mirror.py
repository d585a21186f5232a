"""Copies a log to another platform, exactly once (docs/decisions/0083).

A mirror appends copied records to the target in batches. Each batch ends with a mark, which states
the position in the source. The target takes a batch only if no mark was appended after the last one
that the mirror knows. So the marks say at any time which records are in the target. After a crash,
or if a second mirror runs, a mirror continues at the last mark. The command `indilog mirror` runs a
`LogMirror`.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - pauses before an append is repeated
import math
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import msgspec

from indilog.base.errors import (
    ConditionFailedError,
    ConfigError,
    DataLossError,
    OutcomeUnknownError,
    TooLargeError,
    TrimmedError,
)
from indilog.base.ids import SeqNum
from indilog.base.log import After, Entry, Log, Record
from indilog.sdk.record_format import RecordFormat

MARK_TAG: Final = "mirror"
"""Tag of the marks in the target."""
_FORMAT: Final = RecordFormat(b"\xb0M", 1, of="the mirror", error=ConfigError)
_BATCH_RECORDS: Final = 1_000
_BATCH_BYTES: Final = 1 << 20
_MARKS_PER_TRIM: Final = 1_000
_UNKNOWN_PAUSE_S: Final = 0.2


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The target has all records of the log `source` below seqnum `next`."""

    source: str
    next: Annotated[int, msgspec.Meta(ge=0)]


_decode_mark = msgspec.msgpack.Decoder(Mark).decode


class MirrorProgress(NamedTuple):
    """The progress of a mirror.

    Attributes:
        copied: number of records that this process has copied.
        next_seqnum: the target has all records of the source below this seqnum.
        lag_s: seconds since the last copied record was ordered, if further records wait; else 0.
    """

    copied: int
    next_seqnum: SeqNum
    lag_s: float


class LogMirror:
    """Copies the records of `source`, with their data and tags, to `target`.

    The target has each record once, in the order of the source, even if processes crash. Seqnums in
    the target differ from those in the source. The target also has marks, with the tag `mirror`.

    Args:
        source: log to copy; only its records that are not trimmed are copied.
        target: log of the other platform. No other program should append to it.
        skip_missing: whether to continue after records that were trimmed before they were copied,
            or lost; otherwise the mirror ends with an error.
        progress: called after each batch.
    """

    def __init__(
        self,
        source: Log,
        target: Log,
        *,
        skip_missing: bool = False,
        progress: Callable[[MirrorProgress], object] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = target
        self._skip_missing = skip_missing
        self._progress = progress
        self._copied = 0
        self._batches = 0
        self._batch_records_max = _BATCH_RECORDS
        self._mark_seqnum: SeqNum | None = None
        self._next: SeqNum | None = None
        """All records below this seqnum are in the target; None: the target has no mark."""

    async def run(self, *, follow: bool = True) -> None:
        """Copy all records; with `follow`, wait for new ones until cancelled.

        Raises:
            TrimmedError: records were trimmed in the source before they were copied.
            DataLossError: a record of the source is lost.
            ConfigError: the target is the mirror of another log.
            IndilogError: as for `Log.append_batch` and `Log.read_range`; if it is retryable, call
                again to continue.
        """
        await self._source.tail()  # the session then sees all records that were appended before
        await self._read_mark()
        while True:
            page = await self._read_page(wait=None)
            if not page:
                self._tell(0.0)
                if not follow:
                    return
                page = await self._read_page(wait=math.inf)
            while page:
                count = await self._copy(page)
                page = page[count:]

    def _tell(self, lag_s: float) -> None:
        self._progress(MirrorProgress(self._copied, self._next or 0, lag_s))

    async def _read_mark(self) -> None:
        """Read the last mark in the target.

        Raises:
            ConfigError: the target is the mirror of another log, or its marks were trimmed.
        """
        await self._target.tail()  # the session then sees the marks of other mirrors
        try:
            found = await self._target.read_prev(MARK_TAG)
        except TrimmedError as error:
            raise ConfigError(
                f"Log {self._target.name!r} of the target was trimmed with its marks, so its "
                "position is unknown; choose another target, and set no retention there."
            ) from error
        mark = None if found is None else _FORMAT.decoded(found.data, _decode_mark)
        if found is None:
            return
        if mark is None or mark.source != self._source.name:
            raise ConfigError(
                f"Log {self._target.name!r} of the target is the mirror of "
                f"{'something else' if mark is None else repr(mark.source)}, not of "
                f"{self._source.name!r}; choose another target."
            )
        self._mark_seqnum, self._next = found.seqnum, mark.next

    async def _read_page(self, *, wait: float | None) -> list[Record]:
        """Return the next records of the source."""
        try:
            return await self._source.read_range(
                None, self._next or 0, limit=self._batch_records_max, wait=wait
            )
        except TrimmedError as error:
            if self._next is not None and not self._skip_missing:
                raise
            following = error.first_seqnum
        except DataLossError as error:
            if not self._skip_missing or error.next_seqnum is None:
                raise
            following = error.next_seqnum
        self._next = max(self._next or 0, following)
        return await self._read_page(wait=wait)

    async def _copy(self, page: list[Record]) -> int:
        """Append the first records of `page`, or skip those that another mirror appended; return
        how many records of the page are in the target now.
        """
        count, size = 0, 0
        while count < min(len(page), self._batch_records_max) and (
            count == 0 or size < _BATCH_BYTES
        ):
            size += len(page[count].data)
            count += 1
        following = page[count - 1].seqnum + 1
        copies = [Entry(r.data, r.tags) for r in page[:count] if not _is_mark(r)]
        mark = _FORMAT.encoded(Mark(self._source.name, following))
        try:
            self._mark_seqnum = await self._append([*copies, Entry(mark, (MARK_TAG,))])
        except TooLargeError:
            if count == 1:
                raise
            self._batch_records_max = max(1, count // 2)
            return 0
        except (
            ConditionFailedError,
            TrimmedError,
        ):  # an earlier attempt, or another mirror, was successful
            await self._read_mark()
            done = self._next or 0
            return sum(record.seqnum < done for record in page)
        self._next = following
        self._copied += len(copies)
        await self._trim_marks()
        self._tell(max(0.0, await self._source.now() - page[count - 1].ordered_at))
        return count

    async def _append(self, entries: list[Entry]) -> SeqNum:
        """Append a batch if the last mark is the known one; return the seqnum of the new mark. A
        batch with an unknown outcome is appended again, which never copies a record twice.
        """
        condition = After(MARK_TAG, self._mark_seqnum)
        while True:
            try:
                return (await self._target.append_batch(entries, after=condition))[-1]
            except OutcomeUnknownError:
                await asyncio.sleep(_UNKNOWN_PAUSE_S)

    async def _trim_marks(self) -> None:
        self._batches += 1
        if self._batches % _MARKS_PER_TRIM == 0 and self._mark_seqnum is not None:
            await self._target.trim(self._mark_seqnum, tag=MARK_TAG)


def _is_mark(record: Record) -> bool:
    """Return whether a record of the source is a mark: the source may be a mirror itself."""
    return MARK_TAG in record.tags and _FORMAT.decoded(record.data, _decode_mark) is not None
