"""Copies a stream to another platform, exactly once (docs/decisions/0083).

The copy is a stream whose records have the same offsets. The mirror is the writer of the copy. It
reads the records of the source from the next offset of the copy on, and takes the copy over. Then
it appends the records that the copy does not have yet. Taking the copy over fences each earlier
mirror, even if that mirror is still running or has appends in flight. So no record is copied twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, NamedTuple

from bokistream.chain import StreamRecord
from bokistream.errors import StreamTruncatedError
from bokistream.streams import Streams
from bokistream.writer import Writer

_BATCH_RECORDS: Final = 1_000
_BATCH_BYTES: Final = 1 << 20
_READY_S: Final = 0.001
"""Seconds to wait for a further record of a batch."""


class StreamMirrorProgress(NamedTuple):
    """The progress of a mirror.

    Attributes:
        copied: number of records that this process has copied.
        next_offset: offset of the next record to be copied.
        lag_s: seconds since the last copied record was ordered in the source; 0 if the copy has all
            records.
    """

    copied: int
    next_offset: int
    lag_s: float


class StreamMirror:
    """Copies the stream `name` of `source` to `target`.

    The copy has each record once, in order, with its data, transaction id and offset. If the source
    is sealed, the copy is sealed after its last record.

    Args:
        source: streams of the platform to copy.
        target: streams of the other platform; the copy is created with the settings of the source.
        name: name of the stream.
        progress: called after each batch.
    """

    def __init__(
        self,
        source: Streams,
        target: Streams,
        name: str,
        *,
        progress: Callable[[StreamMirrorProgress], object] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = target
        self._name = name
        self._progress = progress
        self._copied = 0

    async def run(self, *, follow: bool = True) -> None:
        """Copy all records; with `follow`, wait for new ones until the source is sealed.

        Raises:
            FencedError: another mirror, or another writer, has taken the copy over.
            StreamTruncatedError: records of the source were truncated before they were copied.
            IndilogError: as for `Streams.read` and `Writer.append`; call again to continue.
        """
        info = await self._source.info(self._name)
        await self._target.create(
            self._name,
            age_s=info.age_s,
            size_bytes=info.size_bytes,
            grace_s=info.grace_s,
            exist_ok=True,
        )
        last = await self._target.last(self._name)
        if last.is_sealed:
            return
        # A reader that follows reads up to the seal. Another one may end before later records.
        ends_at_seal = follow or (await self._source.last(self._name)).is_sealed
        reading = self._source.read(self._name, from_offset=last.offset, follow=follow)
        async with aclosing(reading) as records, aclosing(_batches(records)) as batches:
            first = await anext(batches, None)
            # A new copy begins at the first offset of the source, which may have been truncated.
            start = None if first is None or last.offset > 0 else first[0].offset
            async with self._target.writer(self._name, first_offset=start) as writer:
                if first is not None:
                    await self._copy(writer, first)
                async for batch in batches:
                    await self._copy(writer, batch)
                if ends_at_seal:
                    await writer.seal()

    async def _copy(self, writer: Writer, batch: list[StreamRecord]) -> None:
        """Append to the copy those records of a batch that the copy does not have yet.

        Raises:
            StreamTruncatedError: the source no longer has the next record of the copy.
        """
        following = writer.next_offset
        left = [record for record in batch if record.offset >= following]
        if left and left[0].offset != following:
            raise StreamTruncatedError(self._name, left[0].seqnum)
        await asyncio.gather(*(writer.append(r.data, txid=r.txid) for r in left))
        self._copied += len(left)
        newest = (await self._source.last(self._name)).seqnum
        now = await self._source.log.now()
        lag_s = now - batch[-1].ordered_at if newest > batch[-1].seqnum else 0.0
        self._progress(StreamMirrorProgress(self._copied, writer.next_offset, max(0.0, lag_s)))


async def _batches(
    records: AsyncGenerator[StreamRecord, None],
) -> AsyncGenerator[list[StreamRecord], None]:
    """Yield records in batches of at most 1,000 records and about 1 MiB.

    A batch also ends when no further record arrives within `_READY_S`.
    """
    coming: asyncio.Future[StreamRecord] | None = None
    try:
        while True:
            batch: list[StreamRecord] = []
            size = 0
            while len(batch) < _BATCH_RECORDS and size < _BATCH_BYTES:
                coming = coming or asyncio.ensure_future(anext(records))
                await asyncio.wait([coming], timeout=_READY_S if batch else None)
                if not coming.done():
                    break
                try:
                    record = coming.result()
                except StopAsyncIteration:
                    if batch:
                        yield batch
                    return
                coming = None
                batch.append(record)
                size += len(record.data)
            yield batch
    finally:
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.wait([coming])
