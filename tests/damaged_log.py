"""Logs in memory that have lost records."""

from __future__ import annotations

import itertools

from indilog.errors import DataLossError
from indilog.log import Record
from tests.hooked_log import HookedLogs, Read


class DamagedLogs(HookedLogs):
    """Some of its records are lost: it reads as the platform does without an intact copy.

    Attributes:
        lost: their seqnums, until they are repaired.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[int] = set()

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        whole = list(itertools.takewhile(lambda record: record.seqnum not in self.lost, records))
        if records and not whole:
            lost = records[0].seqnum
            raise DataLossError("Lost.", seqnum=lost, next_seqnum=lost + 1)
        return whole
