"""Exports a log to Parquet files (`indilog export`): each record exactly once, even if exports are
killed.

A chunk of the log becomes files, one for each date and bucket of tags. These files are committed in
three steps. First, the files are written and synced in `_staged`. Second, a new manifest is renamed
into place; it names these files and the beginning of the next chunk. Third, the files are renamed
to where readers look. An export begins with the third step for the last chunk, and deletes staged
files that the manifest does not name. So readers never see a file that is not committed, and an
export continues after a killed export.

The command `indilog export` calls `export`, which reads through the `LogReads` of `spark`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from indilog.base.errors import ConfigError, DataDirectoryError
from indilog.base.ids import SeqNum
from indilog.base.log import check_log_name
from indilog_pipeline.spark.columns import COLUMNS
from indilog_pipeline.spark.options import MIB, Bounds, read_options
from indilog_pipeline.spark.reading import Found, Gap, LogReads, check_end
from indilog_pipeline.spark.tasks import GapError, reads_of

VERSION: Final = 1
BUCKETS: Final = 8
BUCKETS_MAX: Final = 1024
CHUNK_BYTES: Final = 128 * MIB
"""A chunk ends when its records take this many bytes of memory."""
_MANIFEST: Final = "_indilog_export.json"
_LOCK: Final = "_indilog_export.lock"
_STAGED: Final = "_staged"


class ExportManifest(msgspec.Struct, frozen=True):
    """The progress of an export.

    Attributes:
        version: version of this format.
        log: name of the log.
        buckets: number of buckets of tags.
        next: seqnum at which the next chunk begins.
        files: files of the last chunk; some may not be renamed into place yet.
    """

    version: int
    log: str
    buckets: int
    next: SeqNum = 0
    files: tuple[str, ...] = ()


class Exported(NamedTuple):
    """What an export wrote.

    Attributes:
        records: number of exported records.
        start, end: the records of the log with seqnums in [start, end) were exported.
        skipped: number of skipped seqnums of trimmed, lost and corrupt records.
    """

    records: int
    start: SeqNum
    end: SeqNum
    skipped: int


def export(
    log: str,
    directory: Path,
    *,
    path: str = "",
    url: str = "",
    buckets: int = BUCKETS,
    skips_gaps: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[SeqNum, SeqNum, SeqNum], None] = lambda _start, _at, _end: None,
) -> Exported:
    """Export those records of a log that a directory lacks, up to the present end of the log.

    Args:
        log: name of the log.
        directory: directory of the Parquet files; created if missing.
        path: data directory to read; empty: read through `url`.
        url: URL of a platform.
        buckets: number of buckets into which records are divided by their first tag.
        skips_gaps: skip records that are lost, or trimmed since the last export.
        chunk_bytes: approximate bytes of memory for a chunk.
        progress: called after each chunk with the seqnums of the export's start, progress and end.

    Raises:
        ConfigError: the directory has an export of another log or with other buckets, another
            export is writing to it, or an argument is not valid.
        GapError: records are lost, or were trimmed before they were exported.
        DataDirectoryError: the directory cannot be written, or `path` is not a data directory.
        NotReadyError, UnauthorizedError: as `indilog.connect`.
    """
    check_log_name(log)
    if not 1 <= buckets <= BUCKETS_MAX:
        raise ConfigError(f"An export has 1 to {BUCKETS_MAX:,} buckets, not {buckets}.")
    given = {"path": path} if path else {"url": url}
    reads = reads_of(read_options({**given, "log": log}))
    if not (directory / _MANIFEST).exists():
        reads.range_of(Bounds(logs=frozenset({log})))  # a wrong source leaves no directory behind
    try:
        with _locked(directory):
            files = _ExportFiles(directory, _manifest_of(directory, log, buckets))
            return _export(reads, files, chunk_bytes, progress, skips_gaps=skips_gaps)
    except OSError as error:
        raise DataDirectoryError(
            f"{directory} cannot be written: {error.strerror or error}."
        ) from error


def _export(
    reads: LogReads,
    files: _ExportFiles,
    chunk_bytes: int,
    progress: Callable[[SeqNum, SeqNum, SeqNum], None],
    *,
    skips_gaps: bool,
) -> Exported:
    begin = files.manifest.next
    bounds = Bounds(start=begin, logs=frozenset({files.manifest.log}))
    _, end = reads.range_of(bounds)
    check_end(begin, end)
    records = skipped = 0
    waiting: list[pa.RecordBatch] = []
    for found in _found(reads, bounds, begin, end, chunk_bytes):
        if isinstance(found, Gap):
            # A log that was trimmed before its first export begins at its floor.
            if not skips_gaps and not (found.kind == "trimmed" and begin == 0):
                raise GapError(_refusal(found))
            skipped += found.end - found.start
            continue
        waiting.append(found)
        records += found.num_rows
        if sum(batch.nbytes for batch in waiting) >= chunk_bytes:
            files.commit(waiting, int(waiting[-1].column("seqnum")[-1].as_py()) + 1)
            waiting = []
            progress(begin, files.manifest.next, end)
    if files.manifest.next < end:
        files.commit(waiting, end)
    progress(begin, end, end)
    return Exported(records, begin, end, skipped)


def _found(
    reads: LogReads, bounds: Bounds, start: SeqNum, end: SeqNum, chunk_bytes: int
) -> Iterator[Found]:
    """Yield records and gaps; a batch larger than a chunk has only one record."""
    for part in reads.parts(bounds, start, end):
        for found in reads.batches(part, bounds, list(COLUMNS)):
            if isinstance(found, Gap):
                yield found
                continue
            rows = max(1, chunk_bytes * found.num_rows // max(found.nbytes, 1))
            for first in range(0, found.num_rows, rows):
                yield found.slice(first, rows)


def _refusal(gap: Gap) -> str:
    what = "lost" if gap.kind == "lost" else "trimmed before they were exported"
    return f"Records at seqnums [{gap.start}, {gap.end}) are {what}; --skip-gaps skips them."


class _ExportFiles:
    """The files of an export, and its manifest."""

    def __init__(self, directory: Path, manifest: ExportManifest) -> None:
        self._directory = directory
        self._staged = directory / _STAGED
        self.manifest = manifest
        self._staged.mkdir(exist_ok=True)
        self._publish()
        for left in self._staged.iterdir():
            left.unlink()

    def commit(self, batches: list[pa.RecordBatch], end: SeqNum) -> None:
        """Add the records of the log from `next` to `end`."""
        names = self._stage(batches, end) if batches else []
        self.manifest = msgspec.structs.replace(self.manifest, next=end, files=tuple(names))
        written = self._staged / _MANIFEST
        written.write_bytes(msgspec.json.encode(self.manifest))
        _sync(written)
        _sync(self._staged)
        written.replace(self._directory / _MANIFEST)
        _sync(self._directory)
        self._publish()

    def _stage(self, batches: list[pa.RecordBatch], end: SeqNum) -> list[str]:
        table = pa.Table.from_batches(batches).combine_chunks()
        days = table["ordered_at"].cast(pa.timestamp("us")).cast(pa.date32()).cast(pa.int32())
        keys = np.stack((days.to_numpy(), _buckets(table["tags"], self.manifest.buckets)))
        names = []
        for key in np.unique(keys, axis=1).T:
            folder = f"date={np.datetime64(int(key[0]), 'D')}/bucket={key[1]}"
            name = f"{folder}/{self.manifest.next:020}-{end:020}.parquet"
            rows = table.filter(pa.array((keys == key[:, None]).all(axis=0)))
            pq.write_table(rows, self._place(name), compression="zstd")
            _sync(self._place(name))
            names.append(name)
        return names

    def _place(self, name: str) -> Path:
        return self._staged / name.replace("/", ",")

    def _publish(self) -> None:
        """Rename those files of the last chunk into place that are still staged."""
        folders = set()
        for name in self.manifest.files:
            if not self._place(name).exists():
                continue  # an earlier export renamed it; readers may have moved it since
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._place(name).replace(path)
            folders |= {path.parent, path.parent.parent}
        for folder in [*folders, self._directory] if folders else ():
            _sync(folder)


def _buckets(tags: Any, buckets: int) -> NDArray[np.int64]:  # noqa: ANN401 - lists have no type
    """Return the bucket of each record: its first tag's hash modulo `buckets`, 0 without tags."""
    lists = tags.combine_chunks()
    offsets = lists.offsets.to_numpy()
    values = np.append(lists.values.to_numpy().astype(np.uint64), np.uint64(0))
    firsts = np.where(offsets[1:] > offsets[:-1], values[offsets[:-1]], np.uint64(0))
    return (firsts % np.uint64(buckets)).astype(np.int64)


def _manifest_of(directory: Path, log: str, buckets: int) -> ExportManifest:
    try:
        manifest = msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=ExportManifest)
    except FileNotFoundError:
        return ExportManifest(VERSION, log, buckets)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{directory / _MANIFEST} is damaged: {error}.") from error
    if manifest.version != VERSION:
        raise ConfigError(f"Another release exported to {directory}; export to another directory.")
    if (manifest.log, manifest.buckets) != (log, buckets):
        raise ConfigError(
            f"{directory} has log {manifest.log!r} in {manifest.buckets} buckets; give each log "
            "a directory of its own, and the same --buckets each time."
        )
    return manifest


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"Another export is writing to {directory}.") from error
        yield


def _sync(path: Path) -> None:
    """Sync a file or folder to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
