"""Ranges of rows of about equal size, so that each of several processes sorts a part.

The empty tag, or the tag of one log, may have half of all rows. So a range is bounded by tag and
seqnum, not by tag alone. `SparkEngine` of `indilog_pipeline.rebuild` uses the ranges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indilog.kernel.index_snapshot import Rows


class RangeBounds(NamedTuple):
    """Where the second, third, ... range begins: ascending by (tag, seqnum).

    The first range begins before all rows. The last range ends after all rows.
    """

    tags: NDArray[np.uint64]
    seqnums: NDArray[np.uint64]

    @property
    def ranges(self) -> int:
        """Number of ranges."""
        return len(self.tags) + 1


def bounds_of(sample: Rows, ranges: int) -> RangeBounds:
    """Return the bounds of at most `ranges` ranges with about equally many rows of a sample.

    Args:
        sample: rows in any order.
        ranges: at least 1.
    """
    order = np.lexsort((sample.seqnums, sample.tags))
    places = np.arange(1, ranges) * len(order) // ranges
    chosen = order[np.unique(places)] if len(order) else order
    tags, seqnums = sample.tags[chosen], sample.seqnums[chosen]
    new = np.ones(len(tags), np.bool_)
    new[1:] = (tags[1:] != tags[:-1]) | (seqnums[1:] != seqnums[:-1])
    return RangeBounds(tags[new], seqnums[new])


def split(rows: Rows, bounds: RangeBounds) -> list[tuple[int, Rows]]:
    """Split sorted rows; return, for each range that has rows, its number and its rows."""
    firsts = np.searchsorted(rows.tags, bounds.tags, side="left").tolist()
    lasts = np.searchsorted(rows.tags, bounds.tags, side="right").tolist()
    cuts = [
        first + int(np.searchsorted(rows.seqnums[first:last], seqnum))
        for first, last, seqnum in zip(firsts, lasts, bounds.seqnums, strict=True)
    ]
    parts = zip([0, *cuts], [*cuts, len(rows.tags)], strict=True)
    return [
        (number, rows.part(start, end)) for number, (start, end) in enumerate(parts) if start < end
    ]
