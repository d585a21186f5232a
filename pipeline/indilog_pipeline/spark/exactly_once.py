"""Writing batches of records to a log exactly once, with the public `Log` only (decision 0036).

A writer has a name and numbers its batches. Each batch goes through four steps:

1. *Stage*: tasks append chunks of records to a staging log. A task that fails leaves chunks that no
   marker names.
2. *Mark*: one marker record names the chunks of the batch, in order. The first marker of a batch
   counts.
3. *Publish*: each chunk is appended to the target log, as one atomic batch of ordinary records. The
   last record of a chunk has two more tags that name writer, batch and chunk. So one read finds the
   last published chunk. The append of the next chunk has a condition: no other chunk was published
   since. So if several programs publish the same chunk, one of them succeeds, and the others
   continue after this chunk.
4. *Finish*: a record says that the batch is done, and the staging log is trimmed up to the marker.

A batch is written only if its number is above the number of the last finished batch. `writing`
calls `stage` in tasks and `BatchCommit` in the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from indilog.base.errors import ConditionFailedError, ConfigError, TooLargeError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import After, Entry, Log, Record, check_log_name

VERSION: Final = 1
CHUNK_RECORDS: Final = 1_000
CHUNK_BYTES: Final = 1024 * 1024
"""Largest number of data bytes in a chunk. A larger record is a chunk by itself."""
PROGRESS_TAGS: Final = 2
"""Number of tags that publishing adds to the last record of a chunk."""
_PIECE_BYTES: Final = 512 * 1024
"""A chunk is staged in pieces of this many bytes, because a packed chunk may exceed the size limit
of a record.
"""
_CHUNKS_MAX: Final = 40_000
_WRITER_BYTES_MAX: Final = 64
_CHUNK, _DONE = "chunk", "done"


class StagedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A staged chunk: consecutive records of the staging log.

    Attributes:
        first: seqnum of its first piece.
        pieces: number of its pieces, which are consecutive records.
    """

    first: SeqNum
    pieces: int


class _Marker(msgspec.Struct, frozen=True, array_like=True):
    version: int
    batch: int
    chunks: tuple[StagedChunk, ...]


class _Done(msgspec.Struct, frozen=True, array_like=True):
    version: int
    batch: int


_packed = msgspec.msgpack.Encoder().encode
_unpack_chunk = msgspec.msgpack.Decoder(list[tuple[bytes, list[str]]]).decode
_unpack_marker = msgspec.msgpack.Decoder(_Marker).decode
_unpack_done = msgspec.msgpack.Decoder(_Done).decode


def staging_log(log: str, writer: str) -> str:
    """Return the name of the log in which a writer stages records for `log`.

    Raises:
        ConfigError: the writer's name cannot be part of a log's name.
    """
    if not 0 < len(writer.encode()) <= _WRITER_BYTES_MAX or {":", "\x1f"} & set(writer):
        raise ConfigError(
            f"Option writer_id is 1 to {_WRITER_BYTES_MAX} bytes of text without a colon."
        )
    return check_log_name(f"{log}.staged.{writer}")


def own_tag(writer: str) -> str:
    """Return the tag of the last record of each chunk that a writer publishes."""
    return f"written:{writer}"


def chunks_of(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Split records into chunks."""
    chunk: list[Entry] = []
    data_bytes = 0
    for entry in entries:
        full = len(chunk) == CHUNK_RECORDS or data_bytes + len(entry.data) > CHUNK_BYTES
        if chunk and full:
            yield chunk
            chunk, data_bytes = [], 0
        chunk.append(entry)
        data_bytes += len(entry.data)
    if chunk:
        yield chunk


async def stage(staging: Log, entries: Sequence[Entry]) -> StagedChunk:
    """Append one chunk of records to the staging log."""
    packed = _packed([(entry.data, entry.tags) for entry in entries])
    pieces = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)]
    seqnums = await staging.append_batch([Entry(piece, [_CHUNK]) for piece in pieces])
    return StagedChunk(seqnums[0], len(pieces))


class _Published(NamedTuple):
    """How far the writer has published.

    Attributes:
        last: upper bound of the seqnum of the last record with the writer's tag; None: there is no
            such record.
        batch: batch of this record; -1: the record is older than the marker of the batch to
            publish.
        chunks: number of published chunks of this batch.
    """

    last: SeqNum | None
    batch: int
    chunks: int


class BatchCommit:
    """Commits one batch of a writer, or the rest of a batch that is committed in part.

    Several programs may commit the same batch at the same time.

    Args:
        staging: the writer's staging log.
        target: the log that the records are for.
        writer: the writer's name.
        batch: the number of the batch.
    """

    def __init__(self, staging: Log, target: Log, *, writer: str, batch: int) -> None:
        self._staging = staging
        self._target = target
        self._written = own_tag(writer)
        self._batch = batch

    async def run(self, chunks: Sequence[StagedChunk]) -> bool:
        """Publish the chunks; return False if this batch had already been finished.

        The published chunks are those of the batch's first marker. They may differ from `chunks`.

        Raises:
            AppendOutcomeUnknownError: the batch may be published in part. A repeated call
                continues the batch.
            TrimmedError: the target was trimmed beyond what this batch had published.
            ConfigError: another program has begun a later batch of this writer.
        """
        if await self._is_done():
            return False
        try:
            seqnum, marker = await self._mark(chunks)
            # If the first marker of the batch was trimmed, the batch is finished, and this marker
            # is a later marker.
            if await self._is_done():
                return False
            if not await self._publish_all(seqnum, marker):
                if await self._is_done():
                    return False
                raise ConfigError(
                    f"Another program has begun a later batch than {self._batch} with the tag "
                    f"{self._written!r}; give each program a writer_id of its own."
                )
        except TrimmedError:
            if await self._is_done():
                return False
            raise
        await self._staging.append(_packed(_Done(VERSION, self._batch)), tags=[_DONE])
        await self._staging.trim(seqnum + 1)
        return True

    async def _publish_all(self, seqnum: SeqNum, marker: _Marker) -> bool:
        """Publish what is not published yet; return False if a later batch has been begun."""
        published = await self._published(seqnum)
        while published.batch <= self._batch:
            number = published.chunks if published.batch == self._batch else 0
            if number == len(marker.chunks):
                return True
            try:
                last = await self._publish(number, marker.chunks[number], published.last)
            except ConditionFailedError:  # another program has published it
                published = await self._published(seqnum)
            else:
                published = _Published(last, self._batch, number + 1)
        return False

    async def _is_done(self) -> bool:
        # A program that was paused may append the record of an earlier batch after the records of
        # later batches, so the greatest batch counts. Trims leave few of these records.
        finished, bound = -1, 0
        while page := await _page(self._staging, _DONE, bound):
            finished = max(finished, *(_unpack_done(record.data).batch for record in page))
            bound = page[-1].seqnum + 1
        return self._batch <= finished

    async def _mark(self, chunks: Sequence[StagedChunk]) -> tuple[SeqNum, _Marker]:
        """Return the first marker of this batch; append it if there is none."""
        tag = f"marker:{self._batch}"
        found = await _page(self._staging, tag)
        if not found:
            if len(chunks) > _CHUNKS_MAX:
                raise TooLargeError(
                    "The number of chunks (of 1,000 records or 1 MiB) of a batch",
                    size=len(chunks),
                    limit=_CHUNKS_MAX,
                )
            marker = _Marker(VERSION, self._batch, tuple(chunks))
            own = await self._staging.append(_packed(marker), tags=[tag])
            found = await _page(self._staging, tag)
            if not found:  # a later batch is finished
                raise TrimmedError(own + 1)
        return found[0].seqnum, _unpack_marker(found[0].data)

    async def _published(self, marker: SeqNum) -> _Published:
        """Return how far the writer has published."""
        try:
            last = await self._target.read_prev(self._written, fresh=True)
        except TrimmedError as error:
            if error.first_seqnum > marker:
                raise
            return _Published(error.first_seqnum - 1, -1, 0)
        if last is None or last.seqnum < marker:
            return _Published(None if last is None else last.seqnum, -1, 0)
        batch, number = _place_in(last, self._written)
        return _Published(last.seqnum, batch, number + 1)

    async def _publish(self, number: int, chunk: StagedChunk, last_known: SeqNum | None) -> SeqNum:
        """Publish a chunk, and return the seqnum of its last record. The append fails if another
        chunk was published after `last_known`.
        """
        packed = bytearray()
        bound, end = chunk.first, chunk.first + chunk.pieces
        while bound < end:
            page = await self._staging.read_range(bound=bound, limit=end - bound)
            if not page or page[-1].seqnum >= end:
                raise TrimmedError(bound)
            packed += b"".join(record.data for record in page)
            bound = page[-1].seqnum + 1
        entries = [Entry(data, tags) for data, tags in _unpack_chunk(bytes(packed))]
        last = entries[-1]
        place = f"{self._written}:{self._batch}:{number}"
        entries[-1] = Entry(last.data, [*last.tags, self._written, place])
        after = After(self._written, last_known)
        return (await self._target.append_batch(entries, after=after))[-1]


def _place_in(record: Record, written: str) -> tuple[int, int]:
    """Return batch and chunk that the last record of a chunk names."""
    for tag in record.tags:
        if isinstance(tag, str) and tag.startswith(f"{written}:"):
            batch, number = tag.removeprefix(f"{written}:").split(":")
            return int(batch), int(number)
    raise AssertionError("the last record of a chunk names its place")


async def _page(log: Log, tag: str, bound: SeqNum = 0) -> list[Record]:
    """Return the first records of a sub-stream from `bound` on, or from its floor if the floor is
    higher.

    Another program may trim the log at any time, also between two of these reads.
    """
    while True:
        try:
            return await log.read_range(tag, bound, fresh=True)
        except TrimmedError as error:
            bound = error.first_seqnum
