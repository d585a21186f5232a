"""The part of a batch that remains when its segment is rewritten (ARCHITECTURE 13, decision 0016).

A discarded batch is left out. In a partly live batch the dead records become tombstones. Tombstones
keep the localids of the dead records, so the other records keep their seqnums.

`StorageNode` calls `needed` for the shell that rewrites a segment, and `Reclaim` calls
`reclaimable_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from indilog.base.ids import ShardId
from indilog.kernel.floors import Mask, Trimmed
from indilog.kernel.records import RecordBatch, batch_header
from indilog.roles.role import ELSEWHERE, FrameKind, Location
from indilog_storage.batch_reads import cold_number
from indilog_storage.shard import Shard


def needed(
    shard_of: Callable[[ShardId], Shard | None],
    floors: Trimmed,
    kind: FrameKind,
    payload: bytes,
    location: Location,
) -> bytes | None:
    """Return the part of an intact batch that must remain.

    None: the batch was discarded, or this node no longer keeps the shard. `ELSEWHERE`: the records
    of the batch are on cold storage. A batch that a new writer dropped and replaced is kept until
    the replacing records are removed.
    """
    assert kind in {FrameKind.RECORDS, FrameKind.REPAIRED}, "only these hold batches"
    header = batch_header(payload)
    if (shard := shard_of(header.shard)) is None:
        return None  # another node keeps the shard
    if shard.is_gone(header.first) and shard.is_gone(header.end - 1):
        return None
    place = shard.location_of(header.first)
    if place is not None and cold_number(place) is not None and header.end <= shard.ordered:
        return ELSEWHERE
    if place is None or place[:2] != location[:2] or header.end > shard.ordered:
        return payload
    first = shard.seqnum_of(header.first)
    if first >= floors.highest:
        return payload
    batch = RecordBatch(payload)
    dead = floors.dead(first, *batch.tag_columns())
    return batch.with_tombstones(dead.tolist()) if reclaimable_bytes(batch, dead) else payload


def reclaimable_bytes(batch: RecordBatch, dead: Mask) -> int:
    """Return by how many bytes a batch shrinks when its dead records become tombstones."""
    sizes = 8 * np.frombuffer(batch.tag_counts, np.uint8).astype(np.int64)
    for ends in batch.ends:
        column = np.frombuffer(ends, np.uint32).astype(np.int64)
        sizes += column
        sizes[1:] -= column[:-1]
    return int(sizes[dead].sum())
