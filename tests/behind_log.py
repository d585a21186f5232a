"""A log as seen by who is behind with its records, and not with its trims."""

from __future__ import annotations

from typing import Any

from indilog.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.log import Record
from indilog.testing import MemoryLog, MemoryLogs


class Behind(MemoryLog):
    """A log that shows the records below `end`, but the floors of now: as where a read is answered
    as of an older place of the log.

    `end` rises to the tail when that is asked for, as the session of a client does.
    """

    def __init__(self, name: str, logs: MemoryLogs) -> None:
        super().__init__(name, logs=logs)
        self.end: SeqNum = logs.position

    async def tail(self) -> SeqNum:
        self.end = await super().tail()
        return self.end

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        **options: Any,  # noqa: ANN401 - as the log's
    ) -> Record | None:
        record = await super().read_next(tag, bound, **options)
        return None if record is None or record.seqnum >= self.end else record

    async def read_prev(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = MAX_SEQNUM,
        **options: Any,  # noqa: ANN401
    ) -> Record | None:
        return await super().read_prev(tag, min(bound, self.end - 1), **options)

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        **options: Any,  # noqa: ANN401
    ) -> list[Record]:
        page = await super().read_range(tag, bound, **options)
        if options.get("wait"):  # what appeared is seen
            self.end = self.logs.position
        return [record for record in page if record.seqnum < self.end]
