"""Index data by tag: many parts at once, sorted by numpy.

Tags arrive in the order of their records; an index needs the records of each tag. After sorting,
adding a tag takes one step, however many records have it. The local index of a compute node and the
index of an index node use these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from indilog.base.ids import TagHash
from indilog.wire.messages import ShardTags

WAITING_MAX: Final = 2048
"""The most tags that wait to be added to an index; adding that many takes 1 to 2 ms."""
_FEW: Final = 48
_SAMPLE: Final = 256
_TAG_SHARE: Final = 3
"""Sorting is faster if the newest pairs have fewer than one distinct tag per this many pairs."""
_TAG_BYTES: Final = 8


class RowsByTag(NamedTuple):
    """Pairs of tag and record, ascending by tag, then seqnum.

    Attributes:
        seqnums: u64 each.
        shards: u16 each.
        groups: for each tag its rows [start, end), in the order of each tag's last record. A record
            that has a tag twice is one row.
    """

    seqnums: bytes
    shards: bytes
    groups: Iterable[tuple[TagHash, int, int]]


def rows_by_tag(parts: Sequence[ShardTags]) -> RowsByTag | None:
    """Return the rows of parts that ascend by seqnum and whose columns have matching lengths.

    None: there are few rows, or their tags mostly differ, so adding them one by one is faster.
    """
    joined = b"".join([part.tags for part in parts])
    size = len(joined) // _TAG_BYTES
    if size < _FEW:
        return None
    sample = set(memoryview(joined).cast("Q")[-_SAMPLE:])
    if _TAG_SHARE * len(sample) > min(size, _SAMPLE):
        return None
    tags = np.frombuffer(joined, np.uint64)
    counts = np.frombuffer(b"".join([part.tag_counts for part in parts]), np.uint8)
    lengths = [part.count for part in parts]
    firsts = np.array([part.first_seqnum for part in parts], np.uint64)
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.uint64)
    records = np.repeat(firsts - starts, lengths) + np.arange(len(counts), dtype=np.uint64)
    of_record = np.repeat(np.array([part.shard for part in parts], np.uint16), lengths)
    order = np.argsort(tags, kind="stable")
    tags = tags[order]
    seqnums = np.repeat(records, counts)[order]
    shards = np.repeat(of_record, counts)[order]
    new_tag = np.ones(len(tags), np.bool_)
    new_tag[1:] = tags[1:] != tags[:-1]
    again = ~new_tag
    again[1:] &= seqnums[1:] == seqnums[:-1]
    if again.any():
        kept = ~again
        tags, seqnums, shards = tags[kept], seqnums[kept], shards[kept]
        new_tag, order = new_tag[kept], order[kept]
    begins = np.flatnonzero(new_tag)
    ends = np.append(begins[1:], len(tags))
    by_last = np.argsort(order[ends - 1])
    groups = zip(
        tags[begins][by_last].tolist(),
        begins[by_last].tolist(),
        ends[by_last].tolist(),
        strict=True,
    )
    return RowsByTag(seqnums.tobytes(), shards.tobytes(), groups)
