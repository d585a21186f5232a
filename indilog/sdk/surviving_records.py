"""The records of a sub-stream that are neither trimmed nor lost.

For sub-streams of checkpoints: a library begins at the surviving checkpoint that covers most, so a
lost one matters only if it may cover more.
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
        log: to read.
        tag: of the sub-stream.
        start: first seqnum to read.
        limit: records per read.

    Raises:
        DataLossError: records are lost, and the error has no `next_seqnum` to read on from.
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
    """Tell whether a lost checkpoint may cover more than one that covers records below `end`.

    A checkpoint is appended after the records that it covers. So a checkpoint that covers the place
    of the last lost record covers more than every lost checkpoint.
    """
    return lost is not None and (lost.next_seqnum is None or end < lost.next_seqnum - 1)
