"""Data types of `Shard`: the content of its checkpoints, and the values that it returns."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from indilog.base.columns import Pack
from indilog.base.ids import Epoch, LocalId
from indilog.roles.role import Location


class LocalBatches(NamedTuple):
    """Consecutive batches in the journal; only discarded batches lie between them.

    Attributes:
        first, end: the range of their localids.
        batches: the first localid and the place of each batch.
        bounded: whether a hole or a batch on cold storage follows the last batch.
    """

    first: LocalId
    end: LocalId
    batches: list[tuple[LocalId, Location]]
    bounded: bool


class BatchRows(NamedTuple):
    """The batches of one replica of a shard, ascending, as columns of equal length.

    Attributes:
        firsts, ends: the range of localids of each batch.
        segments, offsets, lengths: where it was written; for cold storage see
            `indilog_storage.batch_reads.cold_number`.
        gone: a row (first localid, end) for each discarded batch.
    """

    firsts: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    segments: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    gone: NDArray[np.uint64]


class ShardColumns(msgspec.Struct, frozen=True, array_like=True):
    """The durable state of a shard; rows and spans are packed (`indilog.base.columns`)."""

    writer: Epoch
    stored: LocalId
    ordered: LocalId
    runs: tuple[tuple[LocalId, Epoch], ...]
    rows: tuple[Pack, ...]
    spans: tuple[Pack, ...]
