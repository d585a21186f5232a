"""Removes forgotten records from all tags of an index, step by step (ARCHITECTURE 13).

Records are forgotten because their log was trimmed, or because storage has discarded them. The
index does not know which tags such a record has, because it stores the records of each tag in a
column. So a sweep visits all tags. Its work is proportional to the number of tags, and is spread
over many iterations of the event loop. `TagIndex` runs one `Sweep` at a time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

import numpy as np

from indilog.base.ids import SeqNum, TagHash

_FEW: Final = 16
"""Largest number of entries that are looked up one by one."""


class Sweep:
    """Removes the seqnums in `dead`, ascending, from the columns that existed at its start.

    Records that are added during the sweep have greater seqnums than all seqnums in `dead`.

    Attributes:
        dead: the seqnums.
        tags: number of columns at the start.
        used: for each span that begins at `firsts`, whether any of its records stay.
    """

    def __init__(
        self, columns: dict[TagHash, array[int]], dead: array[int], firsts: array[int]
    ) -> None:
        assert dead, "a sweep removes at least one record"
        self._columns = columns
        self.dead = dead
        self._dead_view = np.frombuffer(dead, np.uint64)
        self._end: SeqNum = dead[-1] + 1
        self._left: Iterator[TagHash] = iter(list(columns))
        self._firsts = np.array(firsts, np.uint64)
        self.used = np.zeros(len(firsts), np.bool_)
        self.tags = len(columns)

    def advance(self, tags: int) -> tuple[int, bool]:
        """Visit the next `tags` tags; return how many entries were removed, and whether all tags
        were visited.
        """
        removed = 0
        for _ in range(tags):
            tag = next(self._left, None)
            if tag is None:
                return removed, True
            column = self._columns.get(tag)
            if column is not None and column[0] < self._end:
                removed += self._visit(tag, column)
        return removed, False

    def _visit(self, tag: TagHash, column: array[int]) -> int:
        end = bisect_left(column, self._end)
        head = column[:end]
        kept = self._kept(head)
        if kept and len(self.used):
            spans = np.searchsorted(self._firsts, np.frombuffer(kept, np.uint64), side="right") - 1
            self.used[spans] = True
        if len(kept) < end:
            column[:end] = kept
            if not column:
                del self._columns[tag]
        return end - len(kept)

    def _kept(self, head: array[int]) -> array[int]:
        dead = self.dead
        if len(head) <= _FEW:
            places = [bisect_left(dead, seqnum) for seqnum in head]
            return array(
                "Q",
                (s for s, at in zip(head, places, strict=True) if at == len(dead) or dead[at] != s),
            )
        seqnums = np.frombuffer(head, np.uint64)
        at = np.minimum(np.searchsorted(self._dead_view, seqnums), len(dead) - 1)
        return array("Q", seqnums[self._dead_view[at] != seqnums].tobytes())
