"""What a storage node writes of itself in a checkpoint (decision 0028, docs/FORMATS.md).

Everything that recovery would make of the frames before it: how far the metalog is applied, what
it says of each position, the floors of trims, and of each shard its writers, where its batches are,
and which seqnums its records have. Long parts are packed columns (`indilog.base.columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
import numpy as np

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, MetalogPosition, ShardId
from indilog.kernel.floors import FloorColumns, Floors
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import entries_decoded, entries_encoded
from indilog_storage.ordering import Ordering, OrderingColumns
from indilog_storage.ordering_journal import OrderingJournal
from indilog_storage.shard import Shard, ShardColumns


class _Floors(msgspec.Struct, frozen=True, array_like=True):
    """The floors of logs or of tags: the tags, their floors and their logs, u64 each."""

    tags: bytes
    untils: bytes
    logs: bytes


class _ShardPart(msgspec.Struct, frozen=True, array_like=True):
    """A shard, by its number."""

    shard: ShardId
    columns: ShardColumns


class Covered:
    """What the two newest checkpoints of a node cover, so that it can be got back from either.

    A life that begins with the older one replays what came after it, but damage or a loss of power
    may have taken that. So only what the older one covers is never asked for again.

    Attributes:
        older: how far the metalog was applied at the older one; of no entries: there is none.
        is_news: whether nobody was told.
    """

    def __init__(self) -> None:
        self.older = self.newest = self._taken = NOTHING
        self.is_news = False

    def take(self, applied: Extent) -> Extent:
        """Note a checkpoint that is being written; return what the newest durable one covers."""
        self._taken = applied
        return self.newest

    def written(self) -> None:
        """Note that the last one that was taken is durable."""
        self.older, self.newest = self.newest, self._taken
        self.is_news = True

    def restore(self, newest: Extent, older: Extent) -> None:
        """Begin with a checkpoint, and what the one before it covers."""
        self.older, self.newest = older, newest


class _Checkpoint(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The tag is the version of the format."""

    ordering: OrderingColumns
    logs: _Floors
    tags: _Floors
    trimmed_at: MetalogPosition
    shards: tuple[_ShardPart, ...]
    pending: bytes
    """Applied entries that no frame before the checkpoint holds, as in `OrderingJournal`."""
    gap: bool
    """As in `OrderingJournal`."""
    before: Extent
    """What the checkpoint before this one covers."""


NOTHING: Final = Extent(Epoch(0), 0)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Checkpoint)


def checkpoint_of(
    ordering: Ordering,
    shards: Mapping[ShardId, Shard],
    journal: OrderingJournal,
    before: Extent,
) -> Callable[[], bytes]:
    """Copy what the node knows; return what encodes the copy, which may run in a thread."""
    pending, gap = tuple(journal.pending), journal.gap
    columns = ordering.copied()
    logs, tags = ordering.floors.logs.columns(), ordering.floors.tags.columns()
    trimmed_at = ordering.trimmed_at
    copies = [(shard.id, shard.copied()) for shard in shards.values()]

    def encoded() -> bytes:
        return _encoder.encode(
            _Checkpoint(
                columns(),
                _Floors(*(column.tobytes() for column in logs)),
                _Floors(*(column.tobytes() for column in tags)),
                trimmed_at,
                tuple(_ShardPart(shard, copy()) for shard, copy in copies),
                entries_encoded(pending),
                gap,
                before,
            )
        )

    return encoded


def restore(
    payload: bytes,
    gone: Collection[int],
    ordering: Ordering,
    shards: Mapping[ShardId, Shard],
    covered: Covered,
    journal: OrderingJournal,
) -> None:
    """Put a node that knows nothing where `payload` says; batches in `gone` segments become holes.

    Raises:
        MalformedFrameError: it is of a version that this release does not know.
    """
    try:
        checkpoint = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not the checkpoint of a storage node: {error}") from error
    trimmed = ordering.floors
    _restore_floors(trimmed.logs, checkpoint.logs)
    _restore_floors(trimmed.tags, checkpoint.tags)
    ordering.trimmed_at = checkpoint.trimmed_at
    ordering.restore(checkpoint.ordering)
    covered.restore(ordering.extent, checkpoint.before)
    for part in checkpoint.shards:
        if (shard := shards.get(part.shard)) is not None:
            shard.restore(part.columns)
            shard.lose_segments(gone)
    journal.restore(entries_decoded(checkpoint.pending), gap=checkpoint.gap)


def _restore_floors(floors: Floors, said: _Floors) -> None:
    columns = (np.frombuffer(column, np.uint64) for column in (said.tags, said.untils, said.logs))
    floors.restore(FloorColumns(*columns))
