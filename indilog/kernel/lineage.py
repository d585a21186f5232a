"""The incarnation of the primary that proposed each entry of a copy of the metalog.

A primary that lost entries proposes others in their places, under a newer epoch (decision 0006). An
incarnation has one metalog and proposes at most one entry at a position. So two copies are equal up
to a position at which both have an entry of one epoch. Epochs ascend along a copy, and the
positions where the epoch changes identify the copy. There are at most as many changes as starts of
a primary. Sequencers compare copies by their lineages; storage nodes and index nodes note the
lineage of what they applied.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from indilog.base.ids import Epoch, MetalogPosition


class HasEpoch(Protocol):
    """An entry with an epoch; a lineage needs nothing else of it."""

    @property
    def epoch(self) -> Epoch:
        """The incarnation that proposed it."""


class Fit(enum.Enum):
    """How a page of entries relates to a copy."""

    FOLLOWS = enum.auto()
    """The copy equals the page up to the copy's end."""
    WITHIN = enum.auto()
    """The whole page equals the copy, and ends before the copy's end."""
    GAP = enum.auto()
    """The page begins beyond the copy's end."""
    DIFFERS = enum.auto()
    """The copy equals the page up to a position, and has another entry there."""
    UNRELATED = enum.auto()
    """The copy has another entry directly before the page, so the two differ at that entry or
    earlier.
    """


class Comparison(NamedTuple):
    """A fit, and the position up to which the copy and the page are known to be equal."""

    fit: Fit
    equal: MetalogPosition


class Extent(NamedTuple):
    """The extent of a copy: the incarnation that proposed its last entry, and how many entries it
    has.

    A copy is a prefix of that incarnation's metalog. So of two extents the greater one belongs to
    the newer copy, and equal extents belong to equal copies.
    """

    last: Epoch
    length: MetalogPosition


class TrimExtent(NamedTuple):
    """Which trims a copy of the metalog has: the first `trims` of incarnation `copy_of`.

    `epoch` is the incarnation that proposed the last of them; 0: not given, or there is none. Equal
    numbers of trims with the same `epoch` are the same trims.
    """

    copy_of: Epoch = Epoch(0)
    trims: int = 0
    epoch: Epoch = Epoch(0)

    def covers(self, trims: int, copy_of: Epoch) -> bool:
        """Whether the first `trims` trims of incarnation `copy_of` are among these.

        An older copy does not cover them: the newer incarnation may have other trims in their
        places.
        """
        return not trims or (trims <= self.trims and copy_of <= self.copy_of)


class LineageColumns(msgspec.Struct, frozen=True, array_like=True):
    """A lineage in the form of checkpoints: where each run begins, and its epoch."""

    base: MetalogPosition
    position: MetalogPosition
    starts: tuple[MetalogPosition, ...]
    epochs: tuple[Epoch, ...]


NO_ENTRIES: Final = LineageColumns(0, 0, (0,), (Epoch(0),))
"""The lineage of a copy without entries."""


class Lineage:
    """The epochs of the entries at the positions [base, position), as runs.

    Args:
        base: the first position; entries before it are not known.
        before: the epoch of the entry before `base`; 0: there is none.
    """

    __slots__ = ("_epochs", "_starts", "base", "position")

    def __init__(self, base: MetalogPosition = 0, before: Epoch = Epoch(0)) -> None:  # noqa: B008 an int
        self.base = base
        self._starts = array("Q", [base])
        self._epochs = array("Q", [before])
        """The epoch of each run. Run 0 begins with the entry before `base`, run i with the entry at
        `_starts[i]`.
        """
        self.position = base

    @property
    def last(self) -> Epoch:
        """The epoch of the last entry; 0: there is none."""
        return Epoch(self._epochs[-1])

    def append(self, epoch: Epoch, position: MetalogPosition | None = None) -> None:
        """Add the next entry; `position`: where it is, if positions before it are skipped."""
        position = self.position if position is None else position
        assert position >= self.position, "entries are added in order"
        if epoch != self._epochs[-1]:
            self._starts.append(position)
            self._epochs.append(epoch)
        self.position = position + 1

    def before(self, end: MetalogPosition) -> Epoch | None:
        """Return the epoch of the last entry below `end`; 0: there is none; None: not known."""
        if end < self.base or end > self.position:
            return None
        if end == self.base:
            return Epoch(self._epochs[0])
        index = bisect_right(self._starts, end - 1, lo=1) - 1
        return Epoch(self._epochs[index])

    def cut_off(self, end: MetalogPosition) -> None:
        """Forget the entries from `end` on."""
        assert self.base <= end <= self.position, "only existing entries can be cut off"
        while len(self._starts) > 1 and self._starts[-1] >= end:
            self._starts.pop()
            self._epochs.pop()
        self.position = end

    def copied(self, end: MetalogPosition | None = None) -> LineageColumns:
        """Return the columns for a checkpoint; `end`: only of the entries below it."""
        position = self.position if end is None else min(end, self.position)
        runs = bisect_left(self._starts, position, lo=1)
        epochs = tuple(Epoch(epoch) for epoch in self._epochs[:runs])
        return LineageColumns(self.base, position, tuple(self._starts[:runs]), epochs)

    @classmethod
    def restored(cls, columns: LineageColumns) -> Lineage:
        """Return the lineage of some columns."""
        lineage = cls(columns.base)
        lineage._starts = array("Q", columns.starts)
        lineage._epochs = array("Q", columns.epochs)
        lineage.position = columns.position
        return lineage

    def check_invariants(self) -> None:
        """Assert that the runs ascend and lie in [base, position)."""
        assert len(self._starts) == len(self._epochs) > 0, "each run has an epoch"
        assert self._starts[0] == self.base <= self.position, "run 0 begins at the base"
        assert list(self._starts[1:]) == sorted(set(self._starts[1:])), "runs ascend"
        assert len(self._starts) == 1 or self._starts[-1] < self.position, "no run is empty"
        pairs = zip(self._epochs, self._epochs[1:], strict=False)
        assert all(before != after for before, after in pairs), "neighbours differ"

    def compare(
        self, start: MetalogPosition, previous: Epoch, entries: Sequence[HasEpoch]
    ) -> Comparison:
        """Compare with consecutive entries from `start` on; `previous`: the epoch of the entry
        before `start`.
        """
        if start == self.position and previous == self._epochs[-1]:
            return Comparison(Fit.FOLLOWS, start)
        if start > self.position:
            return Comparison(Fit.GAP, self.position)
        end = start + len(entries)
        if start < self.base:
            if end < self.base:
                return Comparison(Fit.WITHIN, end)
            previous = entries[self.base - 1 - start].epoch
            entries = entries[self.base - start :]
            start = self.base
        if previous != self.before(start):
            return Comparison(Fit.UNRELATED, start)
        for position in range(start, min(end, self.position)):
            if entries[position - start].epoch != self.before(position + 1):
                return Comparison(Fit.DIFFERS, position)
        return Comparison(Fit.WITHIN if end < self.position else Fit.FOLLOWS, end)


def is_prefix(columns: LineageColumns, of: LineageColumns) -> bool:
    """Whether one copy is a prefix of another."""
    return columns == Lineage.restored(of).copied(columns.position)
