"""The catalog of a log: its streams, their settings, truncations and named readers.

The catalog is a state machine over a sub-stream of the log (`indilog.replayed`). Each process has a
replica, which applies the commands in the order of the log. `Streams` calls `Catalog`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from bokistream.errors import StreamNotFoundError, StreamTrimmedError
from bokistream.records import (
    CATALOG_CHECKPOINTS_TAG,
    CATALOG_TAG,
    FORMAT,
    AddReader,
    Command,
    Configure,
    Create,
    Delete,
    Truncate,
    decode_command,
)
from indilog import IndilogError, Log, Record, TrimmedError
from indilog.replayed import Replica, ReplicaCache, State, SubStream
from indilog.sdk import SeqNum

STREAMS_MAX: Final = 10_000
"""Largest number of streams in a log."""
READERS_MAX: Final = 1_000
"""Largest number of named readers of a stream."""
TRUNCATIONS_MAX: Final = 64
"""Largest number of truncations in their grace period; beyond it, the oldest two are joined."""
_LOGS_MAX: Final = 1_024
"""Largest number of replicas in memory for one platform."""


class Truncation(msgspec.Struct, frozen=True, array_like=True):
    """A truncation: below `anchor` the records may be trimmed after the grace period.

    Attributes:
        anchor: as in `Truncate`.
        at: when it was ordered, seconds since 1970.
    """

    anchor: SeqNum
    at: float


class StreamInfo(msgspec.Struct, frozen=True, array_like=True):
    """A stream, as the catalog has it.

    Attributes:
        name: its name.
        created: seqnum of its creation.
        created_at: when it was created, seconds since 1970 by the clock of the log.
        age_s: seconds after which a record is truncated; None: no bound.
        size_bytes: bytes of the newest records that are kept; None: no bound.
        grace_s: seconds for which truncated records can still be read.
        start: the seqnum below which the stream is truncated.
        truncations: truncations whose records may not all be trimmed yet, oldest first.
        readers: names of the readers that keep their position.
    """

    name: str
    created: SeqNum
    created_at: float
    age_s: float | None
    size_bytes: int | None
    grace_s: float
    start: SeqNum = 0
    truncations: tuple[Truncation, ...] = ()
    readers: tuple[str, ...] = ()

    def trimmable(self, now: float) -> SeqNum:
        """Return the seqnum below which all records may be trimmed at log time `now`."""
        over = [one.anchor for one in self.truncations if one.at + self.grace_s <= now]
        return max(over, default=0)


class CatalogState(State[bool]):
    """The streams of a log. The outcome of a command is whether it had effect."""

    def __init__(self, streams: Iterable[StreamInfo] = ()) -> None:
        self.streams = {stream.name: stream for stream in streams}

    def apply(self, record: Record) -> bool:
        """See `State.apply`."""
        command = decode_command(record.data)
        if command is None:
            return False
        if isinstance(command, Create):
            return self._create(command, record)
        stream = self.streams.get(command.name)
        if stream is None or stream.created != command.created:
            return False
        if isinstance(command, Delete):
            del self.streams[command.name]
            return True
        changed = _changed(stream, command, record.ordered_at)
        self.streams[command.name] = changed
        return changed != stream

    def _create(self, command: Create, record: Record) -> bool:
        if command.name in self.streams or len(self.streams) >= STREAMS_MAX:
            return False
        self.streams[command.name] = StreamInfo(
            command.name,
            record.seqnum,
            record.ordered_at,
            command.age_s,
            command.size_bytes,
            command.grace_s,
        )
        return True

    def snapshot(self) -> object:
        """See `State.snapshot`."""
        return tuple(self.streams.values())

    @property
    def size(self) -> int:
        """See `State.size`."""
        return len(self.streams)


def _changed(
    stream: StreamInfo, command: Configure | Truncate | AddReader, at: float
) -> StreamInfo:
    match command:
        case Configure():
            return replace(
                stream,
                age_s=command.age_s,
                size_bytes=command.size_bytes,
                grace_s=command.grace_s,
            )
        case AddReader(reader=reader):
            if reader in stream.readers or len(stream.readers) >= READERS_MAX:
                return stream
            return replace(stream, readers=(*stream.readers, reader))
        case Truncate():
            start = max(stream.start, command.start)
            truncations = _with(stream.truncations, Truncation(command.anchor, at), stream, at)
            return replace(stream, start=start, truncations=truncations)


def _with(
    before: tuple[Truncation, ...], new: Truncation, stream: StreamInfo, now: float
) -> tuple[Truncation, ...]:
    """Return the truncations and a new one. Of those whose grace is over, the last one suffices."""
    anchors = [one.anchor for one in before]
    if new.anchor <= max(anchors, default=0):
        return before
    over = [one for one in before if one.at + stream.grace_s <= now]
    kept = [*over[-1:], *before[len(over) :], new]
    if len(kept) > TRUNCATIONS_MAX:  # the grace period of the next one then counts for both
        del kept[0]
    return tuple(kept)


_decode_streams = msgspec.msgpack.Decoder(tuple[StreamInfo, ...]).decode


class Catalog:
    """The catalog of a log, in this process.

    Args:
        log: log of the streams.
        replica: state of the catalog; None: the state that all callers in the process share.
    """

    def __init__(self, log: Log, replica: Replica[CatalogState, bool] | None = None) -> None:
        self._log = log
        self._replica = replica or _REPLICAS.get(log, "catalog", catalog_replica)

    async def streams(self, *, fresh: bool = True) -> dict[str, StreamInfo]:
        """Return all streams by name.

        Raises:
            StreamTrimmedError: the whole log was trimmed.
        """
        try:
            await self._replica.catch_up(self._log, fresh=fresh)
        except TrimmedError as error:
            raise StreamTrimmedError("of any name", error.first_seqnum) from error
        return self._replica.state.streams

    async def stream(self, name: str) -> StreamInfo:
        """Return a stream.

        Raises:
            StreamNotFoundError: there is none with this name.
        """
        found = (await self.streams()).get(name)
        if found is None:
            raise StreamNotFoundError(
                f"Log {self._log.name!r} has no stream {name!r}; create it first."
            )
        return found

    async def known_stream(self, name: str) -> StreamInfo:
        """Return a stream as this process knows it. The log is read only if this process knows no
        stream with this name. The stream may have been deleted meanwhile.

        Raises:
            StreamNotFoundError: there is none with this name.
        """
        return self._replica.state.streams.get(name) or await self.stream(name)

    async def change(self, command: Command) -> bool:
        """Append a command and return whether it had effect. Errors are those of `Log.append`."""
        had_effect = await self._replica.append(self._log, FORMAT.encoded(command))
        if self._replica.is_save_due:
            with suppress(IndilogError):  # the command has been applied even if this fails
                await self._replica.save(self._log)
        return had_effect


def catalog_replica() -> Replica[CatalogState, bool]:
    """Return a new replica of a catalog."""
    return Replica[CatalogState, bool](
        SubStream(CATALOG_TAG, CATALOG_CHECKPOINTS_TAG, FORMAT, "The catalog of streams"),
        CatalogState,
        lambda content: CatalogState(_decode_streams(content)),
    )


_REPLICAS: Final = ReplicaCache[Replica[CatalogState, bool]](_LOGS_MAX)
