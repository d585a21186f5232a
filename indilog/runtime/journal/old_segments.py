"""Counts the dead bytes of each segment file, and chooses the files to rewrite next
(docs/decisions/0016).

A file is rewritten when the dead share of its bytes reaches a limit. Neighbouring files are joined
under two conditions: their live bytes fit into one segment, and the largest file has at most half
of these bytes. So a join copies each byte into a file that is at least twice as large. Hence each
byte is copied only a few times, and the number of files stays proportional to the live bytes.
`Journal` and `Discards` report bytes here; `Rewriting` asks for the files to rewrite.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from indilog.base.ids import Instant
from indilog.runtime.journal.segment_files import SegmentFile

_NEVER: Final = Instant(-math.inf)


@dataclasses.dataclass
class OldSegment:
    """A segment file, as a candidate for a rewrite.

    Attributes:
        dead_bytes: bytes of discarded frames.
        other_bytes: bytes of frames without batches, which a checkpoint makes reclaimable.
        left_too_much: whether the file has more than twice the bytes that its rewrite was expected
            to leave. If so, the reclaimable bytes that roles report for it are ignored.
        damaged: whether the file is damaged; damaged files are not rewritten.
        copied_from: start time of the rewrite that wrote the file; `_NEVER` for other files.
    """

    file: SegmentFile
    size_bytes: int
    dead_bytes: int = 0
    other_bytes: int = 0
    left_too_much: bool = False
    damaged: bool = False
    copied_from: Instant = _NEVER


class OldSegments:
    """All files of a journal.

    Attributes:
        changed: whether anything changed since the attribute was last set to False.
        floor: segment below which only batches are needed, because the kept checkpoints cover all
            other frames. It only grows.
        pinned: segments with the place of a kept checkpoint; they are not rewritten.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._files: list[OldSegment] = []
        self._reclaimable: dict[str, Mapping[int, int]] = {}
        self.changed = False
        self.floor = 0
        self.pinned: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self._files)

    def add(
        self, file: SegmentFile, size_bytes: int, dead_bytes: int = 0, other_bytes: int = 0
    ) -> None:
        """Add the next file."""
        assert not self._files or self._files[-1].file.last < file.first, "each segment counts once"
        self._firsts.append(file.first)
        self._files.append(OldSegment(file, size_bytes, dead_bytes, other_bytes))
        self.changed = True

    def __iter__(self) -> Iterator[OldSegment]:
        """Return all files, oldest first."""
        return iter(self._files)

    def keep_from(self, floor: int, pinned: Iterable[int]) -> None:
        """Set `floor` and `pinned`, after the kept checkpoints changed."""
        self.floor = max(self.floor, floor)
        self.pinned = frozenset(pinned)
        self.changed = True

    def add_other(self, segment: int, size_bytes: int) -> None:
        """Count a frame without a batch."""
        if (old := self._with(segment)) is not None:
            old.other_bytes += size_bytes

    def has(self, number: int) -> bool:
        """Tell whether a file begins with segment `number`."""
        return number in self._firsts

    def _with(self, segment: int) -> OldSegment | None:
        index = bisect_right(self._firsts, segment) - 1
        return self._files[index] if index >= 0 else None

    def add_dead(self, segment: int, size_bytes: int) -> None:
        """Count a discarded frame."""
        if (old := self._with(segment)) is not None:
            old.dead_bytes += size_bytes
            self.changed = True

    def exclude_damaged(self, file: SegmentFile) -> None:
        """Exclude a damaged file from rewriting."""
        if (old := self._with(file.first)) is not None:
            old.damaged = True

    def set_reclaimable(self, owner: str, by_segment: Mapping[int, int], *, began: Instant) -> None:
        """Replace the report of `owner`: the reclaimable bytes, by segment, inside frames that
        `owner` still needs.

        `began` is when `owner` began to count. If a file was rewritten since then, the counts for
        its segments may be outdated. These counts are ignored until the next report.
        """
        self._reclaimable[owner] = {
            segment: size
            for segment, size in by_segment.items()
            if (old := self._with(segment)) is None or old.copied_from <= began
        }
        self.changed = True

    def choose(self, *, below: int, share_min: float, bytes_max: int) -> Sequence[OldSegment]:
        """Return the file to rewrite next, or neighbouring files to join. Empty: no rewrite is
        worthwhile.

        Only segments below `below` are chosen. Joined files have at most `bytes_max` live bytes
        together.
        """
        waste = self._waste()
        for index, old in enumerate(self._files):
            if old.damaged or old.file.last >= below or old.file.first in self.pinned:
                continue
            run = self._run(index, waste, below, bytes_max)
            if len(run) > 1 or waste[index] >= share_min * old.size_bytes:
                return run
        return ()

    def live_bytes(self, run: Sequence[OldSegment]) -> int:
        """Return the expected size of these files after a rewrite, in bytes."""
        waste = dict(zip(self._firsts, self._waste(), strict=True))
        return sum(old.size_bytes - waste[old.file.first] for old in run)

    def _waste(self) -> list[int]:
        """Return how many bytes of each file are dead or reclaimable."""
        waste = [
            old.dead_bytes + (old.other_bytes if old.file.last < self.floor else 0)
            for old in self._files
        ]
        for by_segment in self._reclaimable.values():
            for segment, size in by_segment.items():
                index = bisect_right(self._firsts, segment) - 1
                if index >= 0 and not self._files[index].left_too_much:
                    waste[index] += size
        return [min(w, old.size_bytes) for w, old in zip(waste, self._files, strict=True)]

    def _run(
        self, start: int, waste: Sequence[int], below: int, bytes_max: int
    ) -> Sequence[OldSegment]:
        """Return the longest sequence of neighbouring files from `start` that is worth joining."""
        total = largest = 0
        end = start + 1
        for index in range(start, len(self._files)):
            old = self._files[index]
            follows = index == start or old.file.first == self._files[index - 1].file.last + 1
            living = old.size_bytes - waste[index]
            total += living
            largest = max(largest, living)
            if old.damaged or old.file.last >= below or not follows or total > bytes_max:
                break
            if old.file.first in self.pinned or self._is_below(start) != self._is_below(index):
                break
            if 2 * largest <= total:
                end = index + 1
        return self._files[start:end]

    def _is_below(self, index: int) -> bool:
        return self._files[index].file.last < self.floor

    def replaced(
        self,
        run: Sequence[OldSegment],
        file: SegmentFile,
        size_bytes: int,
        other_bytes: int,
        *,
        copied_from: Instant,
    ) -> None:
        """Replace neighbouring files by one file."""
        expected = self.live_bytes(run)
        start = self._firsts.index(run[0].file.first)
        left_too_much = size_bytes > 2 * expected
        new = OldSegment(
            file, size_bytes, 0, other_bytes, left_too_much=left_too_much, copied_from=copied_from
        )
        self._files[start : start + len(run)] = [new]
        self._firsts[start : start + len(run)] = [file.first]
        self._reclaimable = {
            owner: {s: n for s, n in by_segment.items() if not file.first <= s <= file.last}
            for owner, by_segment in self._reclaimable.items()
        }
        self.changed = True
