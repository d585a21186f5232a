"""A log whose time advances only when a read times out, and logs that keep trimmed records.

For tests that interleave executions and compare them with a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Log, Record
from indilog.testing import MemoryLogs
from indilog.testing.stepper import SteppedLog


class Time:
    """The clock of the log and of all its readers."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ElapsingLog(SteppedLog):
    """A log on which a read that times out advances the time by its wait."""

    def __init__(self, log: Log, time: Time) -> None:
        super().__init__(log)
        self.time = time

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        record = await super().read_next(tag, bound, fresh=fresh)
        if record is None and wait:
            self.time.now += wait
        return record


class Kept(MemoryLogs):
    """Logs that keep trimmed records for the model."""

    def __init__(self, time: Time) -> None:
        super().__init__(clock=time)
        self.kept: list[Record] = []

    def append_all(self, entries: Sequence[tuple[bytes, bytes]]) -> list[SeqNum]:
        seqnums = super().append_all(entries)
        self.kept += [record for seqnum in seqnums if (record := self.record(seqnum))]
        return seqnums
