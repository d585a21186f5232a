"""The state of a storage node in a checkpoint (decision 0028, docs/FORMATS.md).

A restored checkpoint gives the same state as a replay of all earlier frames. The checkpoint has the
applied metalog entries, the spans that each entry ordered, and the floors of trims. For each shard
it has the writers, the places of batches and the seqnums of records. Long parts are packed columns
(`indilog.base.columns`).

`StorageNode` calls `checkpoint_of` and `restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
import numpy as np

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, MetalogPosition, ShardId
from indilog.kernel.cold import ColdObject
from indilog.kernel.floors import FloorColumns, Floors
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import decode_entries, encode_entries
from indilog_storage.moved_shards import MovedShards, UnownedBatch
from indilog_storage.ordering import Ordering, OrderingColumns
from indilog_storage.ordering_journal import OrderingJournal
from indilog_storage.shard import Shard
from indilog_storage.shard_parts import ShardColumns


class _Floors(msgspec.Struct, frozen=True, array_like=True):
    """The floors of logs or of tags as columns of u64: tags, floors, and the logs of the tags."""

    tags: bytes
    untils: bytes
    logs: bytes


class _ShardPart(msgspec.Struct, frozen=True, array_like=True):
    """The state of one shard."""

    shard: ShardId
    columns: ShardColumns
    dropped: MetalogPosition = -1
    """The position of the entry that moved the shard away from this node; -1: the node keeps it."""
    unowned: tuple[UnownedBatch, ...] = ()
    """Batches of the shard that are not part of `columns`; see `MovedShards`."""


class Covered:
    """The metalog extents that the two newest checkpoints cover. A node can restart from either
    checkpoint.

    A start from the older checkpoint replays the frames after this checkpoint, but damage or power
    loss may have destroyed these frames. The node then has to request entries again. So the primary
    keeps all entries that the older checkpoint does not cover.

    Attributes:
        older: the extent applied at the older checkpoint; empty if there is no older checkpoint.
        newest: the extent applied at the newest durable checkpoint.
        is_unreported: whether the primary is still to be notified of `older`.
    """

    def __init__(self) -> None:
        self.older = self.newest = self._taken = NOTHING
        self.is_unreported = False

    def take(self, applied: Extent) -> Extent:
        """Note that a checkpoint is being written, at the extent `applied`. Return the extent of
        the newest durable checkpoint.
        """
        self._taken = applied
        return self.newest

    def note_written(self) -> None:
        """Note that the last checkpoint taken is durable."""
        self.older, self.newest = self.newest, self._taken
        self.is_unreported = True

    def restore(self, newest: Extent, older: Extent) -> None:
        """Start from a checkpoint of extent `newest`; the one before has extent `older`."""
        self.older, self.newest = older, newest


class _Checkpoint(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The state of a node; the tag is the version of the format."""

    ordering: OrderingColumns
    logs: _Floors
    tags: _Floors
    trimmed_at: MetalogPosition
    shards: tuple[_ShardPart, ...]
    pending: bytes
    """Applied entries that no frame before the checkpoint holds; see `OrderingJournal`."""
    gap: bool
    """See `OrderingJournal.gap`."""
    before: Extent
    """The extent that the checkpoint before this one covers."""


class _ColdCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The state of a node that has objects on cold storage."""

    hot: _Checkpoint
    objects: tuple[ColdObject, ...]


NOTHING: Final = Extent(Epoch(0), 0)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Checkpoint | _ColdCheckpoint)


def checkpoint_of(
    ordering: Ordering,
    moved: MovedShards,
    journal: OrderingJournal,
    before: Extent,
    objects: Mapping[int, ColdObject],
) -> Callable[[], bytes]:
    """Copy the state of a node. The returned function encodes the copy, and may run in any
    thread.
    """
    pending, gap = tuple(journal.pending), journal.gap
    columns = ordering.copied()
    logs, tags = ordering.floors.logs.columns(), ordering.floors.tags.columns()
    trimmed_at = ordering.trimmed_at
    kept = [(shard.id, shard.copied()) for shard in moved.shards.values()]
    dropped = [
        (one.shard.id, one.shard.copied(), one.position, moved.unowned_of(one.shard.id))
        for one in moved.dropped
    ]

    made = tuple(objects.values())

    def encode() -> bytes:
        hot = _Checkpoint(
            columns(),
            _Floors(*(column.tobytes() for column in logs)),
            _Floors(*(column.tobytes() for column in tags)),
            trimmed_at,
            (
                *(_ShardPart(shard, copy()) for shard, copy in kept),
                *(_ShardPart(shard, copy(), at, unowned) for shard, copy, at, unowned in dropped),
            ),
            encode_entries(pending),
            gap,
            before,
        )
        return _encoder.encode(_ColdCheckpoint(hot, made) if made else hot)

    return encode


def restore(
    payload: bytes,
    gone: Collection[int],
    ordering: Ordering,
    moved: MovedShards,
    covered: Covered,
    journal: OrderingJournal,
    objects: dict[int, ColdObject],
) -> None:
    """Restore a new node from `payload`; batches in `gone` segments become holes.

    Raises:
        MalformedFrameError: the payload is of a version that this release does not know.
    """
    try:
        checkpoint = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not the checkpoint of a storage node: {error}") from error
    if isinstance(checkpoint, _ColdCheckpoint):
        objects.update((made.number, made) for made in checkpoint.objects)
        checkpoint = checkpoint.hot
    trimmed = ordering.floors
    _restore_floors(trimmed.logs, checkpoint.logs)
    _restore_floors(trimmed.tags, checkpoint.tags)
    ordering.trimmed_at = checkpoint.trimmed_at
    ordering.restore(checkpoint.ordering)
    covered.restore(ordering.extent, checkpoint.before)
    moved.placement.restore(ordering.replicas, ordering.view)
    moved.clear()
    moved.sync()
    for part in checkpoint.shards:
        if part.dropped < 0 and (kept := moved.shards.get(part.shard)) is not None:
            shard = kept
        else:
            shard = Shard(part.shard)
            moved.add_dropped(shard, part.dropped if part.dropped >= 0 else ordering.position)
            for unowned in part.unowned:
                moved.add_unowned(part.shard, unowned)
        shard.restore(part.columns)
        shard.lose_segments(gone)
    journal.restore(decode_entries(checkpoint.pending), gap=checkpoint.gap)


def _restore_floors(floors: Floors, said: _Floors) -> None:
    columns = (np.frombuffer(column, np.uint64) for column in (said.tags, said.untils, said.logs))
    floors.restore(FloorColumns(*columns))
