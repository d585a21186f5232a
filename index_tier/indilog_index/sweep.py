"""Taking the records of a trimmed log out of the other tags of an index, bit by bit (ARCHITECTURE
13).

Tags are hashes: which of them are tags of the log is not known, so all are visited. That is as much
work as there are tags, and is spread over many turns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

import numpy as np

from indilog.base.ids import SeqNum, TagHash

_FEW: Final = 16
"""Up to so many entries are looked up one by one."""


class Sweep:
    """Removes the seqnums in `dead`, ascending, from the columns that were there at its start.

    What is added meanwhile comes later than all of them.

    Attributes:
        used: of the first spans, which begin at `firsts`, those in which something stays.
    """

    def __init__(
        self, columns: dict[TagHash, array[int]], dead: array[int], firsts: array[int]
    ) -> None:
        self._columns = columns
        self._dead = dead
        self._dead_view = np.frombuffer(dead, np.uint64)
        self._end: SeqNum = dead[-1] + 1
        self._left: Iterator[TagHash] = iter(list(columns))
        self._firsts = np.array(firsts, np.uint64)
        self.used = np.zeros(len(firsts), np.bool_)
        self.tags = len(columns)

    def advance(self, tags: int) -> tuple[int, bool]:
        """Visit some tags; return how many entries went, and whether all were visited."""
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
        dead = self._dead
        if len(head) <= _FEW:
            places = [bisect_left(dead, seqnum) for seqnum in head]
            return array(
                "Q",
                (s for s, at in zip(head, places, strict=True) if at == len(dead) or dead[at] != s),
            )
        seqnums = np.frombuffer(head, np.uint64)
        at = np.minimum(np.searchsorted(self._dead_view, seqnums), len(dead) - 1)
        return array("Q", seqnums[self._dead_view[at] != seqnums].tobytes())
