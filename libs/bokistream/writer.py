"""The writer of a stream: it takes the stream over, and the next writer fences it.

`Streams.writer` calls `claim` and yields a `Writer`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from bokistream import waiting
from bokistream.appender import Appender
from bokistream.appending import append_in_any_case
from bokistream.chain import Last, NewRecord, read_last
from bokistream.errors import FencedError, StreamSealedError, StreamSettingsError
from bokistream.records import CLAIM, FORMAT, WriterHeartbeat, heartbeats_tag, records_tag
from indilog import IndilogError, Log
from indilog.sdk import SeqNum

HEARTBEAT_S: Final = 10.0
HEARTBEAT_S_MAX: Final = 3_600.0
_HEARTBEATS_PER_TRIM: Final = 64
_COLLECT_S: Final = 60.0
"""Seconds between two collections of garbage by a writer."""


async def claim(log: Log, name: str, created: SeqNum, *, first_offset: int | None = None) -> Last:
    """Take a stream over, and return its state. Records of earlier writers that are not in the log
    yet will have no effect.

    Args:
        log: log of the stream.
        name: name of the stream.
        created: seqnum of its creation.
        first_offset: offset of the next record if the stream has no data record; None: 0.

    Raises:
        StreamSealedError: the stream has ended.
        IndilogError: as for `append_in_any_case`.
    """

    def record_after(last: Last) -> tuple[Last, NewRecord]:
        if last.is_sealed:
            raise StreamSealedError(name)
        if first_offset is not None and last.seqnum < 0:
            last = last._replace(offset=first_offset)
        return last, NewRecord(CLAIM, last.txid)

    return await append_in_any_case(log, records_tag(created), name, record_after)


class Writer(Appender):
    """The owner of a stream, until another writer takes the stream over.

    Get it with `async with Streams.writer(...)`. Two writers never both succeed: when a newer
    writer owns the stream, each append of this one raises `FencedError`, and no reader ever gets
    its record.

    Attributes:
        token: the fencing token, greater than those of all earlier writers. `Streams.append` with
            this token appends from any other place.
        last_txid: transaction id of the last record when the writer took the stream over; 0 if
            there was none.
        is_fenced: whether the writer knows that it no longer owns the stream.
    """

    def __init__(
        self,
        log: Log,
        name: str,
        created: SeqNum,
        last: Last,
        *,
        heartbeat_s: float | None = None,
        collect: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(log, name, created, last.token)
        self._last = last
        self._next_offset = last.offset
        self.last_txid = last.txid
        self.is_fenced = False
        self._created = created
        self._heartbeat_s = heartbeat_s
        self._collect = collect
        self._tasks: list[waiting.Background | None] = []

    async def __aenter__(self) -> Self:
        """Begin to write heartbeats and to collect garbage."""
        if self._heartbeat_s is not None:
            await self._beat()
            self._tasks.append(waiting.run_in_background(self._beat_for_ever(self._heartbeat_s)))
        if self._collect is not None:
            self._tasks.append(waiting.run_in_background(self._collect_for_ever(self._collect)))
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Stop heartbeats and collections. The writer still owns the stream, until another writer
        takes the stream over.
        """
        for task in self._tasks:
            await waiting.stop(task)
        self._tasks.clear()

    def check(self, last: Last) -> None:
        """See `Appender.check`. On `FencedError`, note that the writer is fenced."""
        try:
            super().check(last)
        except FencedError:
            self.is_fenced = True
            raise

    # --- heartbeats and garbage

    async def _beat(self) -> None:
        content = FORMAT.encoded(WriterHeartbeat(self.token))
        await self.log.append(content, tags=[heartbeats_tag(self._created)])

    async def _beat_for_ever(self, heartbeat_s: float) -> None:
        """Write heartbeats until the writer is fenced. An error of the log skips a heartbeat."""
        count = 0
        while not self.is_fenced:
            await waiting.pause(heartbeat_s)
            count += 1
            try:
                self.check(await read_last(self.log, records_tag(self._created), self.name))
                await self._beat()
                if count % _HEARTBEATS_PER_TRIM == 0:
                    await trim_to_last(self.log, heartbeats_tag(self._created))
            except StreamSealedError:
                return
            except IndilogError:
                continue

    async def _collect_for_ever(self, collect: Callable[[], Awaitable[object]]) -> None:
        while not self.is_fenced:
            await waiting.pause(_COLLECT_S)
            try:
                await collect()
            except IndilogError:
                continue


async def trim_to_last(log: Log, tag: str) -> None:
    """Trim a sub-stream below its last record."""
    last = await log.read_prev(tag)
    if last is not None:
        await log.trim(last.seqnum, tag=tag)


def checked_heartbeat_s(heartbeat_s: object) -> float | None:
    """Return the seconds between two heartbeats; None: no heartbeats.

    Raises:
        StreamSettingsError: it is not a number from 0.01 to 3,600.
    """
    if heartbeat_s is None:
        return None
    if not isinstance(heartbeat_s, int | float) or not 0.01 <= heartbeat_s <= HEARTBEAT_S_MAX:
        raise StreamSettingsError(
            f"heartbeat_s must be 0.01 to {HEARTBEAT_S_MAX:g} seconds, or None, "
            f"not {heartbeat_s!r:.40}."
        )
    return float(heartbeat_s)
