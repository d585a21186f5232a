"""The image of a data directory: its records below one metalog position, and where their batches
are (decision 0035).

An image can be read without the platform or beside a running platform: reading takes no lock and
writes nothing. An image has only records that are ordered and durable. Its columns are numpy
arrays, one row for each batch, so an image of millions of records is small.

`record_batches`, `index_rows`, `rebuild` and `backup` read images. `journals` restores the nodes
that an image is made of, and `payloads` reads its batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indilog.base.errors import DataDirectoryError, NotReadyError
from indilog.base.ids import MetalogPosition, SeqNum, ShardId
from indilog.kernel.floors import Trimmed
from indilog.kernel.lineage import LineageColumns
from indilog.kernel.view import View
from indilog_pipeline.journals import (
    ATTEMPTS_MAX,
    FilesChangedError,
    StoredNode,
    StoredNodes,
    read_journals,
)
from indilog_storage.batch_reads import FIRST_COLD_SEGMENT
from indilog_storage.ordering import OrderedColumns

NO_FILE: Final = -1
"""The value in `BatchPlaces.files` for a replica that does not have the batch."""


class ColdFile(NamedTuple):
    """An object on cold storage: place, the folder of its node, name, and the CRC of its end."""

    place: str
    folder: str
    name: str
    footer_crc: int


class BatchPlaces(NamedTuple):
    """Batches as columns of equal length, ascending by seqnum.

    Attributes:
        seqnums, records: the first seqnum of each batch, and the number of its records.
        shards, localids: the shard of each batch, and its first localid.
        positions, ordered_us: the metalog position of the entry that ordered each batch, and the
            time of this entry in microseconds since 1970.
        files, offsets, lengths: where the replicas of each batch are, with a row for each batch and
            a column for each replica. `files` has indexes of `LogImage.files` (`NO_FILE`: the
            replica lacks the batch). `offsets` has the offset in the file; in a `ColdFile`, the
            first localid. `lengths` has upper bounds of the batch's bytes.
    """

    seqnums: NDArray[np.int64]
    records: NDArray[np.int64]
    shards: NDArray[np.uint16]
    localids: NDArray[np.uint64]
    positions: NDArray[np.int64]
    ordered_us: NDArray[np.int64]
    files: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def part(self, start: int, end: int) -> BatchPlaces:
        """Return the rows `start` to `end`."""
        return BatchPlaces._make(column[start:end] for column in self)

    @property
    def bytes(self) -> NDArray[np.int64]:
        """How many bytes each batch takes, at most."""
        largest: NDArray[np.int64] = self.lengths.max(axis=1, initial=0)
        return largest


class LogImage(NamedTuple):
    """The content of a data directory below the metalog position `position`.

    Attributes:
        directory: the data directory.
        view: the newest view: shards, replicas, and the schedule of index shards.
        position: number of metalog entries that the image covers.
        tail: upper bound of the image's seqnums, exclusive.
        lineage: the incarnations that proposed the entries (`indilog.kernel.lineage`).
        floors: floors of all trims below `position`, and perhaps of later trims.
        ordered: what each entry ordered.
        writers: a row of position, shard and epoch for each new writer that an entry names.
        batches: all batches that at least one replica holds.
        files: the files that hold these batches.
        gone: seqnums `[start, end)` of discarded batches, whose records are all trimmed.
        lost: seqnums `[start, end)` of records that no replica of the directory holds.
    """

    directory: Path
    view: View
    position: MetalogPosition
    tail: SeqNum
    lineage: LineageColumns
    floors: Trimmed
    ordered: OrderedColumns
    writers: NDArray[np.int64]
    batches: BatchPlaces
    files: tuple[Path | ColdFile, ...]
    gone: NDArray[np.int64]
    lost: NDArray[np.int64]

    @classmethod
    def read(cls, directory: Path) -> LogImage:
        """Read the image of a data directory.

        Beside a running platform, the image has at least all records acknowledged before the call.

        Raises:
            DataDirectoryError: there is no data directory, or another release wrote it.
            DataLossError: the order of the log is damaged, and there is no copy of it.
            NotReadyError: a running platform replaced files at each attempt.
        """
        for _ in range(ATTEMPTS_MAX):
            try:
                return _image_of(directory, read_journals(directory))
            except FilesChangedError:
                continue
            except OSError as error:
                raise DataDirectoryError(
                    f"The data directory {directory} cannot be read: {error.strerror or error}."
                ) from error
        raise NotReadyError(
            f"The platform that uses {directory} replaced files during {ATTEMPTS_MAX} attempts to "
            "read them; try again."
        )

    def seqnum_at(self, time_us: int) -> SeqNum:
        """Return the first seqnum ordered at `time_us` (µs since 1970) or later, else `tail`."""
        entry = int(np.searchsorted(self.ordered.times, np.uint64(max(time_us, 0))))
        return int(self.ordered.tails[entry - 1]) if entry else 0

    def tail_before(self, position: MetalogPosition) -> SeqNum:
        """Return the log's tail before the entry at `position`, but at most the image's tail."""
        return int(self.ordered.tails[position - 1]) if position else 0

    def rows_of(self, start: SeqNum, end: SeqNum) -> range:
        """Return the rows of `batches` with any record in `[start, end)`."""
        batches = self.batches
        first = int(np.searchsorted(batches.seqnums, start, side="right"))
        if first and batches.seqnums[first - 1] + batches.records[first - 1] > start:
            first -= 1
        return range(first, max(first, int(np.searchsorted(batches.seqnums, end))))

    def between(self, start: SeqNum, end: SeqNum) -> LogImage:
        """Return the part of the image that is needed to read `[start, end)`."""
        rows = self.rows_of(start, end)
        ordered = self.ordered
        first = max(0, int(np.searchsorted(ordered.seqnums, start, side="right")) - 1)
        spans = slice(first, int(np.searchsorted(ordered.seqnums, end)))
        of_part = OrderedColumns(
            ordered.tails[:0],
            ordered.times[:0],
            ordered.positions[spans],
            ordered.shards[spans],
            ordered.localids[spans],
            ordered.seqnums[spans],
            ordered.lengths[spans],
        )
        return self._replace(batches=self.batches.part(rows.start, rows.stop), ordered=of_part)


# --- building an image


class _Replica(NamedTuple):
    """The batches of one replica of a shard below the image's end: localids and places."""

    firsts: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    files: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    gone: NDArray[np.uint64]


class _JournalFiles:
    """The files of all journals, by their index."""

    def __init__(self) -> None:
        self.paths: list[Path | ColdFile] = []
        self._known: dict[Path | ColdFile, int] = {}

    def index(self, path: Path | ColdFile) -> int:
        """Return the index of a file."""
        if path not in self._known:
            self._known[path] = len(self.paths)
            self.paths.append(path)
        return self._known[path]


class _Spans(NamedTuple):
    """The spans of one shard, ascending."""

    localids: NDArray[np.int64]
    seqnums: NDArray[np.int64]
    lengths: NDArray[np.int64]
    positions: NDArray[np.int64]

    def rows(self, localids: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the span of each localid."""
        return np.searchsorted(self.localids, localids, side="right") - 1

    def seqnum_ranges(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the seqnums of ranges of localids, as ranges."""
        found = [np.empty((0, 2), np.int64)]
        ends = self.localids + self.lengths
        for start, end in ranges.tolist():
            first = int(np.searchsorted(ends, start, side="right"))
            after = int(np.searchsorted(self.localids, end))
            starts = np.maximum(self.localids[first:after], start)
            stops = np.minimum(ends[first:after], end)
            shift = self.seqnums[first:after] - self.localids[first:after]
            found.append(np.stack((starts + shift, stops + shift), axis=1))
        return np.concatenate(found)


def _image_of(directory: Path, stored: StoredNodes) -> LogImage:
    position = stored.committed.length
    ordered = stored.ordering.columns(position)
    files = _JournalFiles()
    shards: list[tuple[int, _Spans, list[_Replica]]] = []
    width = 1
    gone, lost = [np.empty((0, 2), np.int64)], [np.empty((0, 2), np.int64)]
    for shard in np.unique(ordered.shards).tolist():
        spans = _spans_of(ordered, shard)
        cut = int(spans.localids[-1] + spans.lengths[-1])
        found = [_replica(node, ShardId(shard), cut, files) for node in stored.nodes]
        of_shard = [replica for replica in found if replica is not None]
        width = max(width, len(of_shard))
        shards.append((shard, spans, of_shard))
        discarded, missing = _not_in_batches(of_shard, cut)
        gone.append(spans.seqnum_ranges(discarded))
        lost.append(spans.seqnum_ranges(missing))
    parts = [_batches_of(shard, spans, ordered, of, width) for shard, spans, of in shards]
    return LogImage(
        directory,
        stored.view,
        position,
        int(ordered.tails[-1]) if position else 0,
        stored.ordering.reader.lineage.copied(position),
        stored.ordering.floors,
        ordered,
        stored.ordering.writers(position),
        _by_seqnum(parts, width),
        tuple(files.paths),
        joined_ranges(np.concatenate(gone)),
        joined_ranges(np.concatenate(lost)),
    )


def _spans_of(ordered: OrderedColumns, shard: int) -> _Spans:
    rows = ordered.shards == shard
    localids, seqnums, lengths = (
        column[rows].astype(np.int64)
        for column in (ordered.localids, ordered.seqnums, ordered.lengths)
    )
    return _Spans(localids, seqnums, lengths, ordered.positions[rows])


def _replica(node: StoredNode, shard: ShardId, cut: int, files: _JournalFiles) -> _Replica | None:
    """Return the ordered batches of a node's replica; None: the node keeps no batch of the shard.

    Records that the node does not know to be ordered are left out, because they may differ from the
    records of the image.
    """
    if (kept := node.role.shards.get(shard)) is None:
        return None
    rows = kept.batch_rows()
    end = min(cut, kept.ordered)
    count = int(np.searchsorted(rows.firsts, np.uint64(end)))
    segments, offsets = node.moved.places(rows.segments[:count], rows.offsets[:count])
    known, of_known = np.unique(segments, return_inverse=True)
    found = np.full(len(known), NO_FILE, np.int32)
    for index, segment in enumerate(known.tolist()):
        if (file := _file_of(node, segment)) is not None:
            found[index] = files.index(file)
    in_file = found[of_known]
    there = in_file != NO_FILE
    return _Replica(
        rows.firsts[:count][there],
        rows.ends[:count][there],
        in_file[there],
        offsets[there].astype(np.int64),
        rows.lengths[:count][there].astype(np.int64),
        np.minimum(rows.gone, np.uint64(end)),
    )


def _file_of(node: StoredNode, segment: int) -> Path | ColdFile | None:
    """Return the file of a segment, or the object that its number names; None: there is neither."""
    if segment >= FIRST_COLD_SEGMENT:
        made = node.role.cold_objects.get(segment - FIRST_COLD_SEGMENT)
        if made is None or node.cold is None:
            return None
        return ColdFile(*node.cold, made.name, made.footer_crc)
    return node.files[segment].path if segment in node.files else None


def _batches_of(
    shard: int, spans: _Spans, ordered: OrderedColumns, replicas: Sequence[_Replica], width: int
) -> BatchPlaces:
    """Return the batches of a shard, each with its place in every replica."""
    keys = np.unique(np.concatenate([np.empty(0, np.uint64), *(r.firsts for r in replicas)]))
    ends = np.zeros(len(keys), np.uint64)
    files = np.full((len(keys), width), NO_FILE, np.int32)
    offsets, lengths = (np.zeros((len(keys), width), np.int64) for _ in range(2))
    for column, replica in enumerate(replicas):
        rows = np.searchsorted(keys, replica.firsts)
        ends[rows] = replica.ends
        files[rows, column] = replica.files
        offsets[rows, column] = replica.offsets
        lengths[rows, column] = replica.lengths
    localids = keys.astype(np.int64)
    of_span = spans.rows(localids)
    positions = spans.positions[of_span]
    return BatchPlaces(
        spans.seqnums[of_span] + localids - spans.localids[of_span],
        ends.astype(np.int64) - localids,
        np.full(len(keys), shard, np.uint16),
        keys,
        positions,
        ordered.times[positions].astype(np.int64),
        files,
        offsets,
        lengths,
    )


def _not_in_batches(
    replicas: Sequence[_Replica], cut: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two sets of localids below `cut` that no replica has, as ranges: the localids that a
    replica has discarded, and the localids that are unknown to all replicas.
    """
    held = [np.stack((r.firsts, r.ends), axis=1).astype(np.int64) for r in replicas]
    gone = [r.gone.astype(np.int64) for r in replicas]
    nothing = np.empty((0, 2), np.int64)
    in_batches = joined_ranges(np.concatenate([nothing, *held]))
    known = joined_ranges(np.concatenate([nothing, *held, *gone]))
    missing = _gaps(known, cut)
    return _gaps(joined_ranges(np.concatenate([in_batches, missing])), cut), missing


def _gaps(ranges: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Return the parts of [0, end) that are in none of the joined ranges."""
    starts = np.concatenate(([0], ranges[:, 1]))
    ends = np.concatenate((ranges[:, 0], [end]))
    return np.stack((starts, ends), axis=1)[starts < ends]


def joined_ranges(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the same numbers as ascending ranges `[start, end)` that do not touch."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if not len(ranges):
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    begins = np.concatenate(([True], ranges[1:, 0] > reach[:-1]))
    return np.stack((ranges[begins, 0], reach[np.append(begins[1:], True)]), axis=1)


def _by_seqnum(parts: Sequence[BatchPlaces], width: int) -> BatchPlaces:
    if not parts:
        flat = [np.empty(0, np.int64) for _ in range(6)]
        return BatchPlaces._make([*flat, *(np.empty((0, width), np.int64) for _ in range(3))])
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return BatchPlaces._make(column[order] for column in joined)
