"""Reads the records of a sub-stream that are neither trimmed nor lost.

It is for sub-streams of checkpoints. A library starts from the surviving checkpoint that covers the
most records, so a lost checkpoint matters only if it may cover more. `indilog.replayed.checkpoints`
uses these functions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Log, Record


async def read_surviving_records(
    log: Log, tag: UserTag, start: SeqNum = 0, *, limit: int
) -> AsyncIterator[Record | DataLossError]:
    """Yield the surviving records of a sub-stream in log order, and an error for each lost range.

    Args:
        log: log to read.
        tag: tag of the sub-stream.
        start: first seqnum to read.
        limit: largest number of records per read.

    Raises:
        DataLossError: records are lost, and the error has no `next_seqnum` from which to continue.
    """
    while True:
        try:
            page = await log.read_range(tag, start, limit=limit)
        except TrimmedError as error:
            start = max(start, error.first_seqnum)
            continue
        except DataLossError as error:
            if error.next_seqnum is None or error.next_seqnum <= start:
                raise
            yield error
            start = error.next_seqnum
            continue
        for record in page:
            yield record
        if not page:
            return
        start = page[-1].seqnum + 1


def may_go_further(lost: DataLossError | None, end: int) -> bool:
    """Tell whether a lost checkpoint may cover more than a checkpoint of the records below `end`.

    A checkpoint is appended after the records that it covers. So if a checkpoint covers the seqnum
    of the last lost record, it covers more than any lost checkpoint.
    """
    return lost is not None and (lost.next_seqnum is None or end < lost.next_seqnum - 1)
