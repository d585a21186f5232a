"""Skips lost records and unreadable runs, so that they do not delay other records and runs.

Each skipped run or loss is logged or returned. `taking` wraps each takeover in `SkipUnreadable`;
replicas of executors, partitions and limits use `catch_up_readable`.
"""

from __future__ import annotations

from typing import Any, Self

import structlog

from bokiflow.runs.run_log import is_transient
from indilog import DataLossError, IndilogError, Log, TrimmedError
from indilog.replayed import Replica
from indilog.sdk import SeqNum


class SkipUnreadable:
    """Context manager for the takeover of one run. It logs an error that is not transient, instead
    of raising it. That may be any exception, for example of the workflow's settings.

    Attributes:
        failed: whether there was an error that is not transient.
    """

    def __init__(self, run: str) -> None:
        self.failed = False
        self._run = run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        of_log = error if isinstance(error, IndilogError) else None
        self.failed = isinstance(error, Exception) and not (of_log and is_transient(of_log))
        if self.failed:
            structlog.get_logger().error(
                "run cannot be taken over",
                run=self._run,
                reason=str(error),
                exc_info=None if of_log else error,
            )
        return self.failed


async def catch_up_readable(
    replica: Replica[Any, Any], log: Log, own: SeqNum = -1
) -> DataLossError | None:
    """Do the same as `Replica.catch_up`, and skip lost records. Return the last loss; None: no
    record was lost.

    Raises:
        DataLossError: a checkpoint is lost, or the loss has no known end.
        IndilogError: the other errors of `Replica.catch_up`.
    """
    skipped: DataLossError | None = None
    while True:
        before = replica.end
        try:
            await replica.catch_up(log, own)
        except DataLossError as error:
            lost = await _lost_record(replica, log)
            if lost is None or lost.next_seqnum is None or lost.next_seqnum <= replica.end:
                if replica.end > before:
                    continue  # another reader of the replica has skipped the loss meanwhile
                raise
            replica.end, skipped = lost.next_seqnum, error
        else:
            return skipped


async def _lost_record(replica: Replica[Any, Any], log: Log) -> DataLossError | None:
    """Return the loss at the place that the replica reads next; None: a checkpoint is lost."""
    try:
        await log.read_range(replica.stream.tag, replica.end, limit=1)
    except DataLossError as lost:
        return lost
    except TrimmedError:
        return None
    return None
