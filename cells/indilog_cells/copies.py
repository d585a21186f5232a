"""Copies of logs over cells: what a backup holds of a log, and how a new log gets it (decision
0094).

A copy has the cells of a log from its first live generation on, up to the first cell whose content
is not decided, and what the log has beside its cells: the newest checkpoint and the generations
that it names. So a log that is written from the copy has the same seqnums, times, tags, conditions
and floors as the log before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import count, islice
from typing import Final, NamedTuple

from indilog.base.errors import DataLossError, MalformedFrameError
from indilog.base.ids import SeqNum
from indilog.wire.cell_messages import CellSection
from indilog_cells.cells import CellsAndNotes
from indilog_cells.content import decode
from indilog_cells.index import GenerationInfo
from indilog_cells.state import LogState

_AT_ONCE: Final = 16
"""Cells that are read or written at once."""


class CopyOvertakenError(Exception):
    """Cells were trimmed before they were copied; a new copy begins behind them."""


class CopiedCell(NamedTuple):
    """A cell, a generation or a checkpoint; `position` is that of the cell, or names the note."""

    section: CellSection
    position: int
    content: bytes


class LogCopy:
    """Copies one log from its cells.

    Args:
        cells: the cells; nothing is written.
        is_open: the log is to be continued. If it has ended, its `End` and what follows are left
            out.

    Attributes:
        start: the first cell of the copy, once `begin` has returned.
        tail: the first seqnum that is not in the copy, once all pages were read.
    """

    def __init__(self, cells: CellsAndNotes, *, is_open: bool) -> None:
        self._cells = cells
        self._is_open = is_open
        self._state = LogState(cells.generation_limits)
        self._checkpoint: bytes | None = None
        self._generations: list[GenerationInfo] = []
        self._applied = 0
        """The cells below are in the checkpoint."""
        self._freed = 0
        """Records below this seqnum were trimmed, and freed, since the checkpoint was written."""
        self._ends_there = False
        """No cell above the checkpoint is in the copy."""
        self.start = 0
        self.tail: SeqNum = 0

    async def begin(self) -> None:
        """Read the newest checkpoint.

        Raises:
            DataLossError: it is damaged.
            CellsError: it cannot be read now.
        """
        self._checkpoint = await self._cells.newest_checkpoint()
        if self._checkpoint is None:
            return
        try:
            self._state = LogState.restored(self._checkpoint, self._cells.generation_limits)
        except MalformedFrameError as error:
            raise DataLossError(f"The newest checkpoint is damaged: {error}.") from error
        state = self._state
        self._applied, self.tail = state.position, state.tail
        kept = set(await self._cells.generations())
        for info in state.generations:
            if info.start in kept and await self._cells.read(info.start) != b"":
                break
            self._freed = info.tail
        self._generations = [each for each in state.generations if each.tail > self._freed]
        self.start = self._generations[0].start if self._generations else state.position
        if state.is_ended and self._is_open:
            self._checkpoint, self._ends_there = state.reopened(), True

    async def pages(self) -> AsyncIterator[list[CopiedCell]]:
        """Yield the copy: the checkpoint, then the generations, then the cells, in order.

        Raises:
            CopyOvertakenError: make a new copy.
            DataLossError: something is damaged or missing.
            CellsError: the cells cannot be read now.
        """
        if self._checkpoint is not None:
            yield [CopiedCell(CellSection.CHECKPOINT, self._applied, self._checkpoint)]
        for info in self._generations:
            if (stored := await self._cells.read_generation(info.start)) is None:
                raise CopyOvertakenError
            yield [CopiedCell(CellSection.GENERATION, info.start, stored)]
        for first in count(self.start, _AT_ONCE):
            wanted = range(first, first + _AT_ONCE)
            if self._ends_there:
                wanted = range(first, min(wanted.stop, self._applied))
            page = self._page(wanted, await asyncio.gather(*map(self._cells.read, wanted)))
            yield page
            if len(page) < _AT_ONCE:
                break
        if self._state.dead_below < self._freed:
            raise CopyOvertakenError  # the trim is not in the copy

    def _page(self, wanted: range, found: Sequence[bytes | None]) -> list[CopiedCell]:
        """Return the cells of a page, up to the first one that is not in the copy."""
        page: list[CopiedCell] = []
        for position, content in zip(wanted, found, strict=True):
            if content is None:
                if position < self._applied:
                    raise DataLossError(f"Cell {position} is missing.")
                break
            if not content:
                raise CopyOvertakenError
            if not self._takes(position, content):
                break
            page.append(CopiedCell(CellSection.RECORDS, position, content))
        return page

    def _takes(self, position: int, content: bytes) -> bool:
        """Check a cell, and apply it if it is above the checkpoint; return whether it is in the
        copy.
        """
        try:
            decoded = decode(content)
        except MalformedFrameError as error:
            raise DataLossError(f"Cell {position} is damaged: {error}.") from error
        if position < self._applied:
            return True
        self._state.apply(decoded)
        if self._state.is_ended and self._is_open:
            return False
        self._state.close_generation()
        self.tail = self._state.tail
        return True


async def write_copy(cells: CellsAndNotes, copied: Iterable[CopiedCell]) -> None:
    """Write a copy into the cells of a new log.

    Raises:
        CellsError: the cells cannot be written.
    """
    waiting = iter(copied)
    while batch := list(islice(waiting, _AT_ONCE)):
        await asyncio.gather(*(_write(cells, each) for each in batch))


async def _write(cells: CellsAndNotes, copied: CopiedCell) -> None:
    section, position, content = copied
    match section:
        case CellSection.RECORDS:
            took = await cells.write(position, content)
            assert took, "the log is new"
        case CellSection.GENERATION:
            await cells.write_generation(position, content)
        case CellSection.CHECKPOINT:
            await cells.write_checkpoint(position, content)
