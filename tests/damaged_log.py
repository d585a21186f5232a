"""Logs in memory that have lost records, for everybody or for whoever reads through a view."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from indilog.errors import DataLossError
from indilog.ids import SeqNum
from indilog.log import Record, Session
from indilog.testing import MemoryLogs
from tests.hooked_log import HookedLog, HookedLogs, Read


def readable(records: list[Record], lost: Collection[SeqNum]) -> list[Record]:
    """Return what the platform answers if some of the records have no intact copy.

    Raises:
        DataLossError: the first of them has none.
    """
    first_lost = list(takewhile(lambda record: record.seqnum in lost, records))
    if first_lost:
        first, last = first_lost[0].seqnum, first_lost[-1].seqnum
        raise DataLossError("Lost.", seqnum=first, next_seqnum=last + 1)
    return list(takewhile(lambda record: record.seqnum not in lost, records))


class DamagedLogs(HookedLogs):
    """Some of its records are lost.

    Attributes:
        lost: their seqnums, until they are repaired.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[SeqNum] = set()

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        return readable(records, self.lost)


class DamagedLog(HookedLog):
    """One log of a view."""

    lost: set[SeqNum]

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        return readable(records, self.lost)


class DamagedView:
    """What somebody sees of logs that others may see more of.

    Attributes:
        lost: the seqnums that cannot be read through it.
    """

    def __init__(self, logs: MemoryLogs) -> None:
        self.lost: set[SeqNum] = set()
        self._logs = logs

    def log(self, name: str, session: Session | None = None) -> DamagedLog:
        log = DamagedLog(name, logs=self._logs, session=session)
        log.lost = self.lost
        return log
