"""Index data that no snapshot has, in forms that are fast to copy and to load (decision 0028).

`AddedParts` keeps the columns of index data as they arrived, in addition to the index made of them.
So a checkpoint copies them in one piece. `RecentIndex` searches the sorted rows of a checkpoint
directly, so that a start need not add them record by record. The generations of `IndexStore` use
both.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import SeqNum, TagHash
from indilog.kernel.index_snapshot import ROW_BYTES, Rows, no_rows
from indilog.kernel.metalog import Floor
from indilog.wire.messages import ShardTags
from indilog_index.spilled import next_in, prev_in
from indilog_index.tag_index import Matches


class AddedParts:
    """Index data in the order of its seqnums.

    The columns take 8 bytes for each tag, 1 byte for each record, and 18 bytes for each run of
    consecutive records of one shard.
    """

    __slots__ = ("_counts", "_firsts", "_lengths", "_shards", "_tags")

    def __init__(self) -> None:
        self._counts = bytearray()
        self._tags = array("Q")
        self._firsts = array("Q")
        self._lengths = array("Q")
        self._shards = array("H")

    @property
    def memory_bytes(self) -> int:
        """About how many bytes the parts take."""
        return len(self._counts) + 8 * len(self._tags) + 18 * len(self._firsts)

    @property
    def entries(self) -> int:
        """Number of added pairs of record and tag."""
        return len(self._tags)

    @classmethod
    def of(cls, rows: Rows) -> AddedParts:
        """Return parts that make the same rows; `rows` are sorted by tag and seqnum."""
        own, tagged = rows.tags == 0, rows.tags != 0
        records, shards = rows.seqnums[own], rows.shards[own]
        order = np.argsort(rows.seqnums[tagged], kind="stable")
        seqnums = rows.seqnums[tagged][order]
        counts = np.diff(np.searchsorted(seqnums, records), append=len(seqnums))
        starts = _run_starts(records, shards)
        parts = cls()
        parts._counts = bytearray(counts.astype(np.uint8).tobytes())
        parts._tags = array("Q", rows.tags[tagged][order].tobytes())
        parts._firsts = array("Q", records[starts].tobytes())
        lengths = np.diff(starts, append=len(records)).astype(np.uint64)
        parts._lengths = array("Q", lengths.tobytes())
        parts._shards = array("H", shards[starts].tobytes())
        return parts

    def add(self, part: ShardTags) -> None:
        """Add records that follow all earlier records."""
        self._counts += part.tag_counts
        self._tags.frombytes(part.tags)
        if (
            self._firsts
            and self._firsts[-1] + self._lengths[-1] == part.first_seqnum
            and self._shards[-1] == part.shard
        ):
            self._lengths[-1] += part.count
            return
        self._firsts.append(part.first_seqnum)
        self._lengths.append(part.count)
        self._shards.append(part.shard)

    def copied(self) -> Callable[[], Rows]:
        """Copy everything; return a function that makes sorted rows of the copy, in any thread."""
        counts = np.frombuffer(bytes(self._counts), np.uint8)
        columns = (self._tags, self._firsts, self._lengths, self._shards)
        tags, firsts, lengths, shards = (np.array(column) for column in columns)

        def rows() -> Rows:
            if not len(firsts):
                return no_rows()
            records_in = lengths.astype(np.int64)
            starts = np.cumsum(lengths) - lengths
            places = np.arange(len(counts), dtype=np.uint64)
            records = np.repeat(firsts - starts, records_in) + places
            of_record = np.repeat(shards, records_in)
            all_tags = np.concatenate([np.zeros(len(counts), np.uint64), tags])
            seqnums = np.concatenate([records, np.repeat(records, counts)])
            all_shards = np.concatenate([of_record, np.repeat(of_record, counts)])
            order = np.lexsort((seqnums, all_tags))
            found = Rows(all_tags[order], seqnums[order], all_shards[order])
            again = np.zeros(len(order), np.bool_)
            again[1:] = (found.tags[1:] == found.tags[:-1]) & (
                found.seqnums[1:] == found.seqnums[:-1]
            )
            return found.chosen(~again) if again.any() else found

        return rows


class RecentIndex:
    """Finds the records of a tag among sorted rows; like a `TagIndex` without `add`.

    Rows below a floor stay, as in a snapshot, and lookups skip them.

    Attributes:
        end: the seqnum after the last record that the index may have.
        entries: number of rows, without the rows of the empty tag.
        tags: number of different tags.
    """

    __slots__ = ("_rows", "end", "entries", "tags")

    spans = 0
    sweeping = False

    def __init__(self, rows: Rows, end: SeqNum) -> None:
        self._rows = rows
        self.end = end
        self.entries = int(np.count_nonzero(rows.tags))
        self.tags = len(np.unique(rows.tags))

    @property
    def memory_bytes(self) -> int:
        """How many bytes the rows take."""
        return ROW_BYTES * len(self._rows.tags)

    def rows(self) -> Rows:
        """Return everything as rows of a snapshot."""
        return self._rows

    def next(self, tag: TagHash, bound: SeqNum, limit: SeqNum, count: int) -> Matches:
        """Return the `count` smallest seqnums of `tag` in [bound, limit), ascending."""
        seqnums, shards = next_in(self._rows, tag, bound, limit, count)
        return tuple(seqnums), tuple(shards)

    def prev(self, tag: TagHash, bound: SeqNum, limit: SeqNum, count: int) -> Matches:
        """Return the `count` largest seqnums of `tag` in [0, min(bound, limit - 1)], descending."""
        seqnums, shards = prev_in(self._rows, tag, min(bound + 1, limit), count)
        return tuple(seqnums), tuple(shards)

    def trim(self, floor: Floor) -> None:
        """Do nothing: lookups skip rows below a floor."""

    def runs(self) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
        """Return all runs of consecutive seqnums (a row each: first, end), and their shards."""
        own = self._rows.chosen(self._rows.tags == 0)
        starts = _run_starts(own.seqnums, own.shards)
        ends = np.append(starts[1:], len(own.seqnums))[: len(starts)] - 1
        bounds = np.stack([own.seqnums[starts], own.seqnums[ends] + np.uint64(1)], axis=1)
        return bounds, own.shards[starts]

    def forget(self, dead: NDArray[np.uint64]) -> None:
        """Drop records that no read may return any more."""
        self._rows = self._rows.chosen(~np.isin(self._rows.seqnums, dead))
        self.entries = int(np.count_nonzero(self._rows.tags))
        self.tags = len(np.unique(self._rows.tags))

    def sweep(self, tags: int) -> None:
        """Do nothing: `forget` has removed all rows of dropped records."""


def _run_starts(records: NDArray[np.uint64], shards: NDArray[np.uint16]) -> NDArray[np.intp]:
    """Return where runs of consecutive records of one shard begin."""
    follows = (records[1:] == records[:-1] + np.uint64(1)) & (shards[1:] == shards[:-1])
    return np.flatnonzero(np.concatenate([np.ones(min(1, len(records)), np.bool_), ~follows]))
