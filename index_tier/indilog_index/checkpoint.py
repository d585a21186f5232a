"""The checkpoint of an index node: the facts that its newest snapshot lacks (decision 0028,
FORMATS).

`IndexNode` calls `checkpoint_of` and `restored`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from indilog.base.columns import packed, unpacked
from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.floors import FloorColumns, Floors
from indilog.kernel.index_snapshot import Rows, SnapshotInfo
from indilog.kernel.lineage import is_prefix
from indilog_index.index_store import IndexStore
from indilog_index.trim_feed import TrimFeed


class _Floors(msgspec.Struct, frozen=True, array_like=True):
    """The floors of logs or of tags: the tags, their floors and their logs, u64 each."""

    tags: bytes
    untils: bytes
    logs: bytes


class _Checkpoint(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A checkpoint. The tag is the version of the format.

    Attributes:
        info: the extent that the rows and the snapshot together cover.
        base: the position of the snapshot; None: there is no snapshot.
        trims, trims_at: the number of known trims, and the metalog position by which all of them
            are applied.
        trims_epoch: the incarnation of the primary that proposed the last of these trims.
        tags, seqnums, shards: rows that are not in the snapshot, packed.
    """

    info: SnapshotInfo
    base: MetalogPosition | None
    trims: int
    trims_at: MetalogPosition
    trims_epoch: Epoch
    log_floors: _Floors
    tag_floors: _Floors
    tags: bytes
    seqnums: bytes
    shards: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Checkpoint)


class CheckpointRows(NamedTuple):
    """The part of a checkpoint that is used once the snapshot is open."""

    info: SnapshotInfo
    base: MetalogPosition | None
    rows: Rows

    def follows(self, snapshot: SnapshotInfo | None) -> bool:
        """Whether these rows extend a snapshot (None: there is none) of the same metalog.

        The rows may begin where the snapshot ends, or within the extent that it covers.
        """
        if snapshot is None:
            return self.base is None
        position = snapshot.position
        return (self.base or 0) <= position < self.info.position and is_prefix(
            snapshot.lineage, self.info.lineage
        )


def checkpoint_of(store: IndexStore, floors: TrimFeed, info: SnapshotInfo) -> Callable[[], bytes]:
    """Copy the state of the node; return a function that encodes the copy, in any thread."""
    rows_of = store.unwritten_rows()
    base = store.base.info.position if store.base is not None else None
    (_, trims, trims_epoch), trims_at = floors.known, floors.position
    logs, tags = floors.trimmed.logs.columns(), floors.trimmed.tags.columns()

    def encode() -> bytes:
        rows = rows_of()
        return _encoder.encode(
            _Checkpoint(
                info,
                base,
                trims,
                trims_at,
                trims_epoch,
                _Floors(*(column.tobytes() for column in logs)),
                _Floors(*(column.tobytes() for column in tags)),
                packed(rows.tags),
                packed(rows.seqnums),
                packed(rows.shards.astype(np.uint64)),
            )
        )

    return encode


def restored(payload: bytes, floors: TrimFeed) -> CheckpointRows:
    """Restore `floors` from a checkpoint; return its rows.

    Raises:
        MalformedFrameError: the checkpoint is of a version that this release does not know.
    """
    try:
        said = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not the checkpoint of an index node: {error}") from error
    trimmed = floors.trimmed
    _restore(trimmed.logs, said.log_floors)
    _restore(trimmed.tags, said.tag_floors)
    floors.restore(said.trims, said.trims_epoch)
    floors.position = said.trims_at
    shards = unpacked(said.shards).astype(np.uint16)
    return CheckpointRows(
        said.info, said.base, Rows(unpacked(said.tags), unpacked(said.seqnums), shards)
    )


def _restore(floors: Floors, said: _Floors) -> None:
    columns = (np.frombuffer(column, np.uint64) for column in (said.tags, said.untils, said.logs))
    floors.restore(FloorColumns(*columns))
