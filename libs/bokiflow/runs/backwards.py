"""Reads a sub-stream from its end to its start, in few reads.

Lost records are skipped, so damage does not hide older records. `run_lists` and `recent_starts`
read lists of runs with `Backwards`.
"""

from __future__ import annotations

from typing import Final

import structlog

from bokiflow.runs.run_log import seqnum_after_loss
from indilog import DataLossError, Log, Record, TrimmedError
from indilog.sdk import MAX_SEQNUM, READ_RANGE_LIMIT_MAX, SeqNum

_GROWTH: Final = 4
"""Factor by which the window widens if it had few records."""
_SPARE: Final = 1.25
"""Factor by which the limit of a read exceeds the number of expected records."""
_READ_MIN: Final = 8


class Backwards:
    """Reads the records of a tag, newest first.

    A log reads ranges only forwards. So each page reads a window of seqnums. The width of a window
    follows from the number of records in the windows before.

    Args:
        log: log of the records.
        tag: tag of the records.
        bound: the largest seqnum to read.

    Attributes:
        floor: the seqnum below which the tag is trimmed, as far as the reads have shown.
    """

    def __init__(self, log: Log, tag: str, bound: SeqNum = MAX_SEQNUM) -> None:
        self.floor: SeqNum = 0
        self._log = log
        self._tag = tag
        self._end = min(bound, MAX_SEQNUM) + 1
        self._width = 0
        self._is_near = False
        self._density = 1.0 / _GROWTH

    async def page(self, count: int) -> list[Record]:
        """Return the next records: about `count` (1 to 10,000), or [] if there are no more.

        Lost records are left out and logged.
        """
        self._width = max(self._width, count)
        if not self._is_near and not await self._jump():
            return []
        if self._end <= self.floor:
            return []
        low = max(self._end - self._width, self.floor)
        found = await self._window(low)
        covered = max(1, self._end - max(low, self.floor))
        self._end, self._density = max(low, self.floor), len(found) / covered
        self._is_near = bool(found)
        if len(found) < count // 2:
            self._width *= _GROWTH
        elif len(found) > 2 * count:
            self._width = max(count, int(count / self._density))
        if not found:
            return await self.page(count)
        found.reverse()
        return found

    async def _jump(self) -> bool:
        """Move to the last record; return whether there is one."""
        while self._end > self.floor:
            try:
                last = await self._log.read_prev(self._tag, self._end - 1)
            except TrimmedError as error:
                self.floor = self._end = max(self.floor, error.first_seqnum)
                return False
            except DataLossError as error:
                if error.seqnum is None or error.seqnum >= self._end:
                    raise
                self._note_loss(error)
                self._end = error.seqnum
            else:
                self._end = 0 if last is None else last.seqnum + 1
                return last is not None
        return False

    async def _window(self, low: SeqNum) -> list[Record]:
        """Return the records from `low` to the end of the window, oldest first."""
        found: list[Record] = []
        while low < self._end:
            expected = int(_SPARE * self._density * (self._end - low))
            limit = min(max(expected, _READ_MIN), READ_RANGE_LIMIT_MAX)
            try:
                page = await self._log.read_range(self._tag, low, limit=limit)
            except TrimmedError as error:
                self.floor = low = max(low, error.first_seqnum)
                continue
            except DataLossError as error:
                low = seqnum_after_loss(error, low)
                if low <= self._end:
                    self._note_loss(error)
                continue
            if not page:
                break
            found += [record for record in page if record.seqnum < self._end]
            low = page[-1].seqnum + 1
        return found

    def _note_loss(self, error: DataLossError) -> None:
        structlog.get_logger().error(
            "list of runs is damaged", log=self._log.name, tag=self._tag, place=error.seqnum
        )
