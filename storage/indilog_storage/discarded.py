"""Answers index nodes that ask which records a storage node has discarded (ARCHITECTURE 13).

`StorageNode` calls `answer_discarded` for each `DiscardedWanted`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from indilog.base.ids import NodeId
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.tag_messages import DISCARDED_RUNS_MAX, Discarded, DiscardedWanted
from indilog_storage.ordering import Ordering
from indilog_storage.shard import Shard

_ROWS_MAX: Final = 1 << 16
"""Largest number of batches examined for one answer."""


def answer_discarded(
    event: Received, message: DiscardedWanted, shard: Shard | None, ordering: Ordering
) -> Effect:
    """Return the answer that names the discarded records in the requested runs of a shard.

    An answer has at most `DISCARDED_RUNS_MAX` runs. An invalid question is ignored.
    """
    bounds = np.frombuffer(message.runs[: len(message.runs) // 16 * 16], np.uint64)
    if shard is None or not 0 < len(bounds) <= 2 * DISCARDED_RUNS_MAX:
        return Ignore(event, "a question about records of a shard that is not kept here, or none")
    if (bounds[1:] < bounds[:-1]).any() or int(bounds[-1]) > ordering.tail:
        return Ignore(event, "a question about runs that do not ascend, or are not ordered here")
    return _answer(event.sender, shard, bounds.reshape(-1, 2).tolist(), ordering)


def _answer(to: NodeId, shard: Shard, runs: list[list[int]], ordering: Ordering) -> Effect:
    found = [np.empty((0, 2), np.uint64)]
    count, rows, looked = 0, _ROWS_MAX, 0
    for first, end in runs:
        looked = first
        if rows <= 0 or count >= DISCARDED_RUNS_MAX:
            break
        if (localid := shard.localid_of(first)) is None:
            looked = end
            continue
        gone, until, read = shard.gone_runs(localid, localid + end - first, rows)
        gone = gone[: DISCARDED_RUNS_MAX - count]
        found.append(gone - np.uint64(localid) + np.uint64(first))
        count, rows = count + len(gone), rows - read
        looked = first + until - localid
        if looked < end or count == DISCARDED_RUNS_MAX:
            looked = int(found[-1][-1, 1]) if count == DISCARDED_RUNS_MAX else looked
            break
    columns = np.concatenate(found).tobytes()
    known = ordering.trim_extent
    return Send(to, Discarded(shard.id, columns, looked, known.trims, known.copy_of))
