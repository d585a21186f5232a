"""Logs in memory that have lost records, for all readers or for the readers of one view."""

from __future__ import annotations

from itertools import takewhile

from indilog.base.errors import DataLossError
from indilog.base.ids import SeqNum
from indilog.base.log import Record, Session
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, HookedLogs, Hooks, Read


class Damage(Hooks):
    """Reads that behave as on a platform that has no intact copy of some records.

    Attributes:
        lost: seqnums of these records, until they are repaired.
        tags: the known tags of these records.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[SeqNum] = set()
        self.tags: tuple[str, ...] = ()

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        lost = list(takewhile(lambda record: record.seqnum in self.lost, records))
        if lost:
            first, last = lost[0].seqnum, lost[-1].seqnum
            raise DataLossError("Lost.", seqnum=first, next_seqnum=last + 1, tags=self.tags)
        return list(takewhile(lambda record: record.seqnum not in self.lost, records))


class DamagedLogs(Damage, HookedLogs):
    """Logs that have lost records for all readers."""


class DamagedView(Damage):
    """One reader's view of logs of which other readers may see more."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__()
        self._logs = logs

    def log(self, name: str, session: Session | None = None) -> HookedLog:
        return HookedLog(name, logs=self._logs, session=session, hooks=self)
