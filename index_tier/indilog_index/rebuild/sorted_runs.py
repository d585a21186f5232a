"""Sorts rows with bounded memory: sorted runs in files, merged block by block.

Rows are added in log order. So the rows of a tag have smaller seqnums in an earlier run than in a
later run, and a merge compares tags only. A tag with more rows than a block is copied run by run:
the empty tag has a quarter or a half of all rows. The engines of `indilog_pipeline.rebuild` use
`SortedRuns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

import numpy as np

from indilog.kernel.index_snapshot import ROW_BYTES, Rows, sorted_rows

_COPIES: Final = 4
"""Copies of the rows in memory while they are sorted."""


class SortedRuns:
    """Rows of one snapshot.

    Args:
        directory: for the files of the runs; the caller removes it.
        memory_bytes_max: bytes of rows in memory.

    Attributes:
        rows: number of added rows.
    """

    def __init__(self, directory: Path, *, memory_bytes_max: int) -> None:
        self._directory = directory
        self._rows_max = max(1, memory_bytes_max // (_COPIES * ROW_BYTES))
        self._pieces: list[Rows] = []
        self._rows_pending = 0
        self._runs: list[Rows] = []
        self.rows = 0

    def add(self, rows: Rows) -> None:
        """Add sorted rows. The seqnums of each tag must be greater than its earlier seqnums."""
        self._pieces.append(rows)
        self._rows_pending += len(rows.tags)
        self.rows += len(rows.tags)
        if self._rows_pending >= self._rows_max:
            self._write(iter([sorted_rows(self._pieces)]))
            self._pieces, self._rows_pending = [], 0

    def add_run(self, pieces: Iterable[Rows]) -> None:
        """Add sorted rows in sorted pieces, without holding them in memory."""
        assert not self._pieces, "of a tag, their seqnums are greater than all before"
        self.rows += self._write(pieces)

    def _write(self, pieces: Iterable[Rows]) -> int:
        """Write a run; return its number of rows."""
        name = f"{len(self._runs):05d}"
        count = write_run(self._directory, name, pieces)
        if count:
            self._runs.append(mapped_run(self._directory, name))
        return count

    def merged(self) -> Iterator[Rows]:
        """Yield all rows, sorted, in pieces of bounded size."""
        runs = list(self._runs)
        if self._pieces:
            self._pieces = [sorted_rows(self._pieces)]
            runs += self._pieces
        block = self._rows_max // max(1, len(runs)) + 1
        at = [0] * len(runs)
        while bounds := [
            int(run.tags[min(start + block, len(run.tags)) - 1])
            for run, start in zip(runs, at, strict=True)
            if start < len(run.tags)
        ]:
            bound = min(bounds)
            ends = [_end(run, start, bound, "left") for run, start in zip(runs, at, strict=True)]
            if ends != at:
                parts = zip(runs, at, ends, strict=True)
                yield sorted_rows([run.part(start, end) for run, start, end in parts])
            # The tag itself may have more rows than a block.
            at = [_end(run, start, bound, "right") for run, start in zip(runs, ends, strict=True)]
            for run, start, end in zip(runs, ends, at, strict=True):
                for first in range(start, end, block):
                    yield run.part(first, min(first + block, end))


def write_run(directory: Path, name: str, pieces: Iterable[Rows]) -> int:
    """Write rows to files, one file per column; return the number of rows."""
    count = 0
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in _paths(directory, name)]
        for rows in pieces:
            count += len(rows.tags)
            for file, column in zip(files, rows, strict=True):
                file.write(np.ascontiguousarray(column).data)
    return count


def mapped_run(directory: Path, name: str) -> Rows:
    """Return the rows of a written run, mapped from its files; a run has at least one row."""
    tags, seqnums, shards = _paths(directory, name)
    return Rows(
        np.memmap(tags, np.uint64, "r"),
        np.memmap(seqnums, np.uint64, "r"),
        np.memmap(shards, np.uint16, "r"),
    )


def _paths(directory: Path, name: str) -> list[Path]:
    return [directory / f"{name}.{column}" for column in Rows._fields]


def _end(run: Rows, start: int, tag: int, side: Literal["left", "right"]) -> int:
    """Return where the rows of tags below `tag` end. With side `right`, return where the rows of
    tags up to and including `tag` end.
    """
    return start + int(np.searchsorted(run.tags[start:], np.uint64(tag), side=side))
