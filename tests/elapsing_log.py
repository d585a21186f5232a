"""A log whose time passes when somebody waits in vain, and only then: for tests that interleave."""

from __future__ import annotations

from indilog.ids import SeqNum, UserTag
from indilog.log import Log, Record
from indilog.testing.stepper import SteppedLog


class Time:
    """The clock of the log and of all who read it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ElapsingLog(SteppedLog):
    """A read that waits in vain lets its time pass."""

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
