"""Checks index data for the local index, and splits its tags into columns.

Writers put the tag of the log first among the tags of a record. So if all records of a part have
the same number of tags, `width`, then every `width`-th tag is often the same. Such a constant
column is a *run*: `TagCache` adds it in one bulk operation. `LocalIndex` calls `malformed`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from indilog.base.ids import MAX_SEQNUM, SeqNum, TagHash
from indilog.kernel.lost_ranges import within
from indilog.wire.messages import ShardTags
from indilog_compute.local_index.tag_rows import SHARD_MASK


def malformed(parts: Sequence[ShardTags], tail: SeqNum) -> str | None:
    """Return why `parts` cannot be the index data from `tail` on; None: they are well-formed."""
    for part in parts:
        if not part.count == len(part.tag_counts) > 0:
            return "a part is empty, or does not have one tag count per record"
        if sum(part.tag_counts) * 8 != len(part.tags):
            return "a part does not have as many tags as its counts add up to"
        if part.first_seqnum < tail or not 0 <= part.shard <= SHARD_MASK:
            return "the parts do not ascend from the tail of what is applied"
        tail = part.first_seqnum + part.count
        if not within(part.lost, part.first_seqnum, tail):
            return "a part names lost records outside its range"
        if tail > MAX_SEQNUM:
            return "the parts go beyond the last seqnum that can exist"
    return None


class PartColumns(NamedTuple):
    """The tags of one part.

    Attributes:
        runs: tags that every record has exactly once.
        seqnums_of_run: the seqnums of all records.
        tags: the tags of all records without `runs`, in the order of the records.
        seqnums: for each element of `tags`, the seqnum of its record.
    """

    runs: list[TagHash]
    seqnums_of_run: range
    tags: array[int]
    seqnums: Sequence[SeqNum]


def columns_of(part: ShardTags) -> PartColumns:
    """Return the tags of a part that is not `malformed`."""
    counts, count = part.tag_counts, part.count
    seqnums = range(part.first_seqnum, part.first_seqnum + count)
    tags = array("Q", part.tags)
    runs: list[TagHash] = []
    width = counts[0]
    if count == 1:
        return PartColumns(runs, seqnums, tags, [part.first_seqnum] * width)
    if counts.count(width) < count:
        each = [s for s, width in zip(seqnums, counts, strict=True) for _ in range(width)]
        return PartColumns(runs, seqnums, tags, each)
    while width and (column := tags[::width]).tobytes() == column[:1].tobytes() * count:
        others = tags[:]
        del others[::width]
        if column[0] in others:
            break
        runs.append(column[0])
        tags, width = others, width - 1
    if width == 1:
        return PartColumns(runs, seqnums, tags, seqnums)
    return PartColumns(runs, seqnums, tags, [s for s in seqnums for _ in range(width)])
