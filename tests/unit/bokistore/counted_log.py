"""The cost of finding and fetching records."""

from __future__ import annotations

from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import Log, Record
from indilog.testing.stepper import SteppedLog


class CountedLog(SteppedLog):
    """Counts the calls of any log that find records, and the records that they return."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.calls = self.records = 0

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        self.calls += 1
        record = await super().read_prev(tag, bound, fresh=fresh)
        self.records += record is not None
        return record

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        self.calls += 1
        page = await super().read_range(tag, bound, limit=limit, wait=wait, fresh=fresh)
        self.records += len(page)
        return page
