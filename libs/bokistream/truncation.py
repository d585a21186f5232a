"""Finds the place where a stream can be truncated, for `Streams`."""

from __future__ import annotations

from typing import NamedTuple

from bokistream.chain import read_last
from bokistream.errors import StreamTruncatedError
from bokistream.search import first_from
from indilog import Log
from indilog.sdk import SeqNum


class TruncationPoint(NamedTuple):
    """Where to truncate a stream.

    Attributes:
        start: the seqnum after the last truncated data record.
        anchor: the seqnum below which records can be trimmed. A batch that has effect begins there,
            as readers require (`bokistream.chain`).
    """

    start: SeqNum
    anchor: SeqNum


async def truncation_point(log: Log, tag: str, name: str, bound: SeqNum) -> TruncationPoint:
    """Return where to truncate a stream so that no data record below `bound` remains.

    Raises:
        IndilogError: as for `read_last` and `first_from`.
    """
    last = await read_last(log, tag, name, fresh=True)
    try:
        found = await first_from(log, tag, name, bound)
    except StreamTruncatedError:
        return TruncationPoint(0, 0)  # it is trimmed further already
    if found is None:
        return TruncationPoint(last.seqnum + 1, max(last.batch_start, 0))
    return TruncationPoint(found.previous + 1, found.batch_start)
