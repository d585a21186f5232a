"""Logs of which records are lost by damage, for whoever reads through them: for tests."""

from __future__ import annotations

from itertools import takewhile

from indilog.errors import DataLossError
from indilog.ids import SeqNum, UserTag
from indilog.log import Record, Session
from indilog.testing import MemoryLog, MemoryLogs


class LossyLog(MemoryLog):
    """One log of them. It answers as the platform does: with what stands before, else where to read
    on.
    """

    lost: set[SeqNum]

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        record = await super().read_next(tag, bound, wait=wait, fresh=fresh)
        if record is not None:
            self._readable([record])
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
        page = await super().read_range(tag, bound, limit=limit, wait=wait, fresh=fresh)
        return self._readable(page)

    def _readable(self, page: list[Record]) -> list[Record]:
        lost = list(takewhile(lambda record: record.seqnum in self.lost, page))
        if lost:
            first, last = lost[0].seqnum, lost[-1].seqnum
            raise DataLossError(f"Lost: {first} to {last}.", seqnum=first, next_seqnum=last + 1)
        return list(takewhile(lambda record: record.seqnum not in self.lost, page))


class LossyLogs:
    """What somebody sees of logs that lose records.

    Attributes:
        lost: the seqnums that cannot be read through it.
    """

    def __init__(self, logs: MemoryLogs) -> None:
        self.lost: set[SeqNum] = set()
        self._logs = logs

    def log(self, name: str, session: Session | None = None) -> LossyLog:
        log = LossyLog(name, logs=self._logs, session=session)
        log.lost = self.lost
        return log
