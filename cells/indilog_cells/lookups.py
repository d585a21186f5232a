"""Finds records of a log over cells by its index, forwards and backwards.

The index has seqnums and the cells of records (`index`); the records are read from their cells
through the driver. `log` turns these lookups into the reads of a `Log`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator

from indilog.base.errors import DataLossError, MalformedFrameError
from indilog.base.ids import MAX_SEQNUM, SeqNum, TagHash
from indilog.base.log import Record
from indilog_cells.content import Records
from indilog_cells.driver import CellDriver
from indilog_cells.index import CellTable


class Lookups:
    """Lookups through the driver of a log.

    Each answer is about the state when the lookup began, or about a later state. A lookup raises
    `TrimmedCellError` if what it needs was trimmed since.
    """

    def __init__(self, driver: CellDriver) -> None:
        self._driver = driver

    async def ascending(
        self, tag: TagHash, bound: SeqNum
    ) -> AsyncIterator[tuple[SeqNum, CellTable]]:
        """Yield the seqnums >= `bound` with a tag, each with the table that has its cell."""
        state = self._driver.state
        infos, newest = state.generations, state.open
        for info in infos:
            if info.tail > bound and info.may_have(tag):
                generation = await self._driver.generations.read(info)
                seqnums = generation.seqnums(tag)
                for at in range(bisect_left(seqnums, bound), len(seqnums)):
                    yield seqnums[at], generation.table
        seqnums = newest.seqnums(tag)
        for at in range(bisect_left(seqnums, bound), len(seqnums)):
            yield seqnums[at], newest.table

    async def descending(
        self, tag: TagHash, bound: SeqNum
    ) -> AsyncIterator[tuple[SeqNum, CellTable]]:
        """Yield the seqnums <= `bound` with a tag, the greatest one first."""
        state = self._driver.state
        infos, newest = state.generations, state.open
        seqnums = newest.seqnums(tag)
        for at in range(bisect_right(seqnums, bound) - 1, -1, -1):
            yield seqnums[at], newest.table
        for info in reversed(infos):
            if info.first <= bound and info.may_have(tag):
                generation = await self._driver.generations.read(info)
                seqnums = generation.seqnums(tag)
                for at in range(bisect_right(seqnums, bound) - 1, -1, -1):
                    yield seqnums[at], generation.table

    async def last(self, tag: TagHash) -> SeqNum:
        """Return the last seqnum with a tag; -1: there is none, or it is trimmed."""
        async for seqnum, _ in self.descending(tag, MAX_SEQNUM):
            return seqnum
        return -1

    async def table_of(self, seqnum: SeqNum) -> CellTable | None:
        """Return the table that has the cell of a record. None: no record has this seqnum yet, or
        its generation is trimmed.
        """
        state = self._driver.state
        if seqnum >= state.tail:
            return None
        if seqnum >= state.open.first:
            return state.open.table
        at = bisect_right(state.generations, seqnum, key=lambda info: info.first) - 1
        # Generations without records have the same first seqnum as the next one.
        if at < 0 or state.generations[at].tail <= seqnum:
            return None
        return (await self._driver.generations.read(state.generations[at])).table

    async def find_time(self, time_us: int) -> SeqNum:
        """Return the first seqnum ordered at `time_us` or later; if there is none, the tail."""
        state = self._driver.state
        infos, newest, tail = state.generations, state.open, state.tail
        for info in infos:
            if info.last_us >= time_us:
                if info.first_us >= time_us:
                    return info.first
                found = (await self._driver.generations.read(info)).table.find_time(time_us)
                assert found is not None, "the last record was ordered at that time or later"
                return found
        found = newest.table.find_time(time_us)
        return tail if found is None else found

    async def record(self, seqnum: SeqNum, table: CellTable) -> tuple[Record, bytes]:
        """Return a record, and its tags as stored.

        Raises:
            TrimmedCellError: its cell is trimmed.
            DataLossError: its cell is damaged.
        """
        place, ordered_us = table.place(seqnum)
        try:
            content = await self._driver.content(place.position)
        except MalformedFrameError as error:
            raise DataLossError(
                f"The cell {place.position} with record {seqnum} is damaged: {error}.",
                seqnum=seqnum,
                next_seqnum=seqnum + 1,
            ) from error
        offset = place.offset
        for item in content.items[place.item :]:
            if not isinstance(item, Records):
                continue
            if offset < len(item.data):
                found = Record(
                    seqnum, item.names[offset], item.data[offset], item.time_us / 1e6,
                    ordered_us / 1e6,
                )  # fmt: skip
                return found, item.tags[offset]
            offset -= len(item.data)
        raise AssertionError(f"cell {place.position} has no record {seqnum}")
