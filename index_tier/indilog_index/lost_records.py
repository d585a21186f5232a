"""Lookups that cross lost records (decision 0024). Only the matches before the lost records are
valid.

`IndexNode` calls `crossed`. `Merging` calls `nearest` and `before` for the answers of all index
shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from indilog.base.ids import SeqNum
from indilog.kernel.lost_ranges import LostRange, LostRanges
from indilog.wire.messages import Direction, IndexLookup
from indilog_index.tag_index import Matches

_RANGES_MAX: Final = 64
"""Largest number of lost ranges in one answer. `nearest` joins adjacent ranges of different index
shards.
"""


def crossed(
    ranges: LostRanges, lookup: IndexLookup, matches: Matches, floor: SeqNum
) -> tuple[LostRange, ...]:
    """Return the lost records that a lookup crosses on its way to `matches`, nearest first.

    A lookup searches from the bound to its last match if it found `count` matches. Otherwise it
    searches up to the limit, or for PREV down to the floor. A lost record may have had any tag.
    """
    seqnums = matches[0]
    last = seqnums[-1] if len(seqnums) == lookup.count else None
    if lookup.direction is Direction.NEXT:
        end = lookup.limit if last is None else last + 1
        found = ranges.ascending(max(lookup.bound, floor), end)
    else:
        above = min(lookup.bound + 1, lookup.limit)
        found = ranges.descending(floor if last is None else last, above)
    return tuple(islice(found, _RANGES_MAX))


def nearest(direction: Direction, found: Iterable[LostRange], floor: SeqNum) -> LostRange | None:
    """Return the first lost range that a lookup crosses, among the ranges of all index shards;
    None: the lookup crosses no lost records.

    Parts below the floor are left out, and adjacent ranges are joined.
    """
    left = sorted(LostRange(max(lost.start, floor), lost.end) for lost in found if lost.end > floor)
    if not left:
        return None
    if direction is Direction.NEXT:
        first = left.pop(0)
        for lost in left:
            if lost.start > first.end:
                break
            first = LostRange(first.start, max(first.end, lost.end))
        return first
    last = max(left, key=lambda lost: lost.end)
    for lost in sorted(left, key=lambda lost: lost.end, reverse=True):
        if lost.end < last.start:
            break
        last = LostRange(min(last.start, lost.start), last.end)
    return last


def before(direction: Direction, matches: Matches, lost: LostRange) -> Matches:
    """Return the matches that a lookup reaches before the lost records."""
    if direction is Direction.NEXT:
        kept = sum(1 for seqnum in matches[0] if seqnum < lost.start)
    else:
        kept = sum(1 for seqnum in matches[0] if seqnum >= lost.end)
    return matches[0][:kept], matches[1][:kept]
