"""Many records as Arrow arrays: the columns of programs that read a whole log, and of objects on
cold storage.

The arrays are made from `indilog.kernel.batch_columns`, without a Python step for each record.
Importing this module imports pyarrow, so the platform imports it only in threads that need it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indilog.kernel.batch_columns import BatchColumns, Counts

TIMES: Final = pa.timestamp("us", tz="UTC")
TAGS: Final = pa.list_(pa.field("element", pa.int64()))
TAG_NAMES: Final = pa.list_(pa.field("element", pa.string()))
SEPARATOR: Final = b"\x1f"
RECORD_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("seqnum", pa.int64()),
    pa.field("ordered_at", TIMES),
    pa.field("time", TIMES),
    pa.field("log", pa.string()),
    pa.field("tags", TAGS),
    pa.field("tag_names", TAG_NAMES),
    pa.field("data", pa.binary()),
    pa.field("shard", pa.int32()),
    pa.field("localid", pa.int64()),
    pa.field("position", pa.int64()),
]
"""The columns of a record, for programs (docs/SPARK.md) and in objects on cold storage."""


class RecordArrays:
    """The columns of all records of some batches."""

    def __init__(self, columns: BatchColumns) -> None:
        self._columns = columns

    def data(self) -> pa.Array[Any]:
        """Return the data of each record."""
        data, ends = self._columns.data()
        return strings(pa.binary(), ends, data)

    def tags(self) -> pa.Array[Any]:
        """Return the hashes of the tags of each record, without that of its log, as signed
        integers.
        """
        columns = self._columns
        others = np.ones(len(columns.tags), np.bool_)
        others[self.log_tags()] = False
        tags = columns.tags[others].view(np.int64)
        return _lists(TAGS, self._tag_ends(), pa.array(tags))

    def _tag_ends(self) -> Counts:
        """Return where the tags of each record end, without those of logs."""
        return np.cumsum(np.maximum(self._columns.tag_counts - 1, 0))

    def log_tags(self) -> Counts:
        """Return the places of the tags of logs in `columns.tags`; a tombstone has none."""
        counts = self._columns.tag_counts
        return (np.cumsum(counts) - counts)[counts > 0]

    def logs(self) -> pa.Array[Any]:
        """Return the name of each record's log. A name is decoded once, then found by its tag."""
        columns = self._columns
        names, ends = columns.names()
        alive = columns.tag_counts > 0
        tags = np.zeros(len(alive), np.uint64)
        tags[alive] = columns.tags[self.log_tags()]
        logs = pa.array(tags).dictionary_encode()
        index = logs.indices.to_numpy()
        first = np.empty(len(logs.dictionary), np.int64)
        first[index[::-1]] = np.arange(len(index))[::-1]
        starts = np.where(first > 0, ends[first - 1], 0)
        spelled = [
            names[start:end].partition(SEPARATOR)[0].decode()
            for start, end in zip(starts.tolist(), ends[first].tolist(), strict=True)
        ]
        return pa.array(spelled, pa.string()).take(logs.indices)

    def tag_names(self) -> pa.Array[Any]:
        """Return the tags of each record as text.

        In `names`, each tag follows a separator and the letter of its kind.
        """
        names, ends = self._columns.names()
        tag_ends = self._tag_ends()
        column = np.frombuffer(names, np.uint8)
        separators = np.flatnonzero(column == SEPARATOR[0])
        starts = separators + 2
        # A tag ends at the next separator. The last tag of a record ends with its names.
        stops = np.append(separators[1:], len(names))[: len(starts)]
        tagged = np.diff(tag_ends, prepend=0) > 0
        stops[tag_ends[tagged] - 1] = ends[tagged]
        lengths = np.empty(2 * len(starts), np.int64)
        lengths[::2] = np.diff(starts, prepend=0)
        lengths[2::2] -= (stops - starts)[:-1]
        lengths[1::2] = stops - starts
        kept = np.repeat(np.tile([False, True], len(starts)), lengths)
        text = column[: len(kept)][kept].tobytes()
        return _lists(TAG_NAMES, tag_ends, strings(pa.string(), np.cumsum(lengths[1::2]), text))

    def tag_kinds(self) -> pa.Array[Any]:
        """Return a text for each record: the letters of the kinds of its tags."""
        names, _ = self._columns.names()
        column = np.frombuffer(names, np.uint8)
        kinds = column[np.flatnonzero(column == SEPARATOR[0]) + 1]
        return strings(pa.string(), self._tag_ends(), kinds.tobytes())


def times(us: NDArray[np.int64]) -> pa.Array[Any]:
    """Return microseconds since 1970 as times."""
    return pa.Array.from_buffers(TIMES, len(us), [None, _buffer(us)])


def strings(kind: pa.DataType, ends: NDArray[np.int64], content: bytes) -> pa.Array[Any]:
    """Return texts or byte strings, given where each ends in `content`."""
    return pa.Array.from_buffers(kind, len(ends), [None, _offsets(ends), pa.py_buffer(content)])


def _buffer(column: NDArray[np.int32] | NDArray[np.int64]) -> pa.Buffer:
    return pa.py_buffer(column.data)


def _offsets(ends: NDArray[np.int64]) -> pa.Buffer:
    return _buffer(np.concatenate(([0], ends)).astype(np.int32))


def _lists(kind: pa.DataType, ends: NDArray[np.int64], values: pa.Array[Any]) -> pa.Array[Any]:
    return pa.Array.from_buffers(kind, len(ends), [None, _offsets(ends)], children=[values])
