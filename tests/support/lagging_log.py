"""A log as seen by a session that lags in records, but not in trim floors."""

from __future__ import annotations

from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import Record
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, Read


class Behind(HookedLog):
    """A log that shows the records below `end`, but the current floors, like a read at an older
    position.

    `end` rises to the tail when the tail is requested, as the session of a client does.
    """

    def __init__(self, name: str, logs: MemoryLogs) -> None:
        super().__init__(name, logs=logs)
        self.end: SeqNum = logs.position

    async def tail(self) -> SeqNum:
        self.end = await super().tail()
        return self.end

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if read.is_page and read.wait:  # a waiting read sees new records
            self.end = self.logs.position
        return [record for record in records if record.seqnum < self.end]

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        return await super().read_prev(tag, min(bound, self.end - 1), fresh=fresh)
