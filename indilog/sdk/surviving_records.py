"""What is left of a sub-stream, for libraries that go on without what is trimmed or lost of it.

Those that keep checkpoints in one trim it and begin at the best; one that is lost is one to do
without as long as another one helps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Log, Record


async def read_surviving_records(
    log: Log, tag: UserTag, start: SeqNum = 0, *, limit: int
) -> AsyncIterator[Record | DataLossError]:
    """Yield the records of a sub-stream that are left, in their order; where some of them are lost,
    the error that says so, with its `next_seqnum`.

    Args:
        log: where they are.
        tag: of the sub-stream.
        start: where to begin.
        limit: records to read at once.

    Raises:
        DataLossError: records are lost, and nobody knows where it goes on.
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
    """Tell whether a checkpoint among records that are lost may say more than one as of `end`.

    A checkpoint stands behind what it is as of, so one that goes further than the place of the last
    lost record supersedes them all.
    """
    return lost is not None and (lost.next_seqnum is None or end < lost.next_seqnum - 1)
