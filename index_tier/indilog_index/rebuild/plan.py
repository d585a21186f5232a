"""The extent and the rows of a snapshot, computed from the schedule and the order of the log.

An index node derives the same result from the index data that it receives. Callers are
`indilog_pipeline.index_rows` and the engines of `indilog_pipeline.rebuild`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import MetalogPosition
from indilog.kernel.floors import Trimmed
from indilog.kernel.index_schedule import Eras, IndexPositions, last_below
from indilog.kernel.index_snapshot import Rows
from indilog.kernel.lineage import Lineage, LineageColumns


def owners_of(eras: Eras, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index shard of each metalog position (`index_schedule.index_shard_at`)."""
    owners = np.zeros(len(positions), np.int64)
    for era in eras:
        rows = positions >= era.start
        owners[rows] = np.array(era.shards)[positions[rows] % len(era.shards)]
    return owners


def lineage_of(
    eras: Eras, index_shard: int, lineage: LineageColumns, end: MetalogPosition
) -> LineageColumns:
    """Return the epochs at an index shard's positions below `end`, given those of all positions."""
    positions, found = IndexPositions.of(eras, index_shard), Lineage()
    ends = [*lineage.starts[1:], lineage.position]
    for start, epoch, after in zip(lineage.starts, lineage.epochs, ends, strict=True):
        after = min(after, end)  # noqa: PLW2901 the part below the end
        first, last = positions.first_from(start), last_below(eras, index_shard, after)
        if first < after:
            found.append(epoch, first)
        if first < last < after:
            found.append(epoch, last)
    return found.copied()


def rows_of(
    seqnums: NDArray[np.uint64],
    shards: NDArray[np.uint16],
    tag_counts: NDArray[np.int64],
    tags: NDArray[np.uint64],
    trimmed: Trimmed,
) -> Rows:
    """Return the rows of records, sorted, without rows of trimmed records.

    Args:
        seqnums: seqnums of the records, ascending.
        shards: shards of the records.
        tag_counts: number of tags of each record; 0: its tags are lost, or it is a tombstone.
        tags: tags of all records, concatenated.
        trimmed: floors.
    """
    of_record = np.repeat(np.arange(len(seqnums)), tag_counts)
    dead = np.zeros(len(seqnums), np.bool_)
    below = np.zeros(len(tags), np.bool_)
    if len(seqnums) and (trimmed.highest > seqnums[0] or not tag_counts.all()):
        dead = trimmed.dead_at(seqnums, tag_counts, tags)
        below = trimmed.tags.of_each(tags) > seqnums[of_record]
    kept = ~(dead[of_record] | below)
    alive = np.flatnonzero(~dead)
    records = np.concatenate((alive, of_record[kept]))
    every = np.concatenate((np.zeros(len(alive), np.uint64), tags[kept]))
    order = np.argsort(every, kind="stable")
    records = records[order]
    return Rows(every[order], seqnums[records], shards[records])
