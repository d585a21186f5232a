"""The files of a backup (docs/FORMATS.md, decision 0045).

| file | holds |
|---|---|
| `plan` | what the backup will hold: position, tail, and where its parts begin; written first |
| `order` | what each metalog entry ordered, its stamp and its incarnation |
| `records-N` | the batches whose first seqnums are in part N |
| `log-N` | the cells of segment N of the logs of other kinds than `shared` |
| `manifest` | the digests of these files, and the floors; written last: the backup is whole |

Every file ends with a digest of its bytes (XXH3, 128 bits). A file is written under another name,
synced, and then renamed, so a file with its final name is whole. `create` writes the files, and
`restore` and `verify` read them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from indilog.base.errors import DataDirectoryError
from indilog.base.ids import Epoch, MetalogPosition, SeqNum, ShardId
from indilog.base.log_kinds import LogKind
from indilog.kernel.floors import Trimmed
from indilog.kernel.lineage import LineageColumns
from indilog.kernel.metalog import NO_FLOORS, Floor
from indilog.runtime.journal.segment import synced_directory
from indilog.wire.cell_messages import CellSection
from indilog_cells.copies import CopiedCell
from indilog_cells.index import GenerationLimits
from indilog_pipeline.log_image import LogImage

PLAN_FILE: Final = "plan"
ORDER_FILE: Final = "order"
MANIFEST_FILE: Final = "manifest"
_DIGEST_BYTES: Final = 16
_BATCH: Final = Struct("<HQII")
"""The header before each batch: its shard, first localid, number of records, and bytes."""
_CELLS_HEAD: Final = Struct("<QII")
"""The beginning of the file of a segment: first cell, records and cells of a generation."""
_CELL: Final = Struct("<BQI")
"""The header before each cell: its section, its position, and bytes."""
_READ_BYTES: Final = 1 << 20
_FLOORS_AT_ONCE: Final = 4096


class Plan(msgspec.Struct, frozen=True, array_like=True, tag="indilog backup plan 2"):
    """What a backup holds: the records of the metalog entries below `position`.

    Attributes:
        id: random id of this backup.
        tail: upper bound of the backup's seqnums, exclusive.
        starts: the seqnum at which each part begins, ascending.
        shards: the shards of the backup's records, and the shards of the platform's layout.
        lineage: which incarnations proposed the entries.
    """

    id: str
    position: MetalogPosition
    tail: SeqNum
    starts: tuple[SeqNum, ...]
    shards: tuple[ShardId, ...]
    lineage: LineageColumns

    def part(self, number: int) -> range:
        """Return the seqnums of a part."""
        ends = (*self.starts[1:], self.tail)
        return range(self.starts[number], ends[number])


class StoredSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment of a log of another kind than `shared`.

    Attributes:
        log: name of the log.
        kind: kind of the segment.
        folder: the unique name of the segment on the old platform.
        digest: digest of the segment's file, hexadecimal; empty: there is no file, because the
            segment has no cells or is left out.
        is_left_out: whether the backup was made without this log.
    """

    log: str
    kind: LogKind
    folder: str
    digest: str
    is_left_out: bool = False


class Manifest(msgspec.Struct, frozen=True, array_like=True, tag="indilog backup 3"):
    """The file that is written last and makes a backup whole.

    Attributes:
        plan, order: digests of the files with these names, hexadecimal.
        records: digests of the files `records-N`.
        epoch: upper bound of the epochs of the platform's batches and entries, inclusive.
        floors: a row for each floor: tag, floor, whether the floor is of a log, and the tag's log.
        kept: number of records in the parts.
        segments: the segments of logs of other kinds; segment N has the file `log-N`.
    """

    plan: str
    order: str
    records: tuple[str, ...]
    epoch: Epoch
    floors: tuple[tuple[int, SeqNum, bool, int], ...]
    kept: int
    segments: tuple[StoredSegment, ...]

    @property
    def left_out(self) -> list[str]:
        """The logs without which the backup was made."""
        return sorted({each.log for each in self.segments if each.is_left_out})

    @property
    def copied(self) -> int:
        """How many segments of logs of other kinds the backup has."""
        return sum(not each.is_left_out for each in self.segments)


class StoredBatch(NamedTuple):
    """A batch in a part."""

    shard: ShardId
    first: int
    records: int
    payload: bytes


class OrderFile(NamedTuple):
    """The content of the file `order`: the stamp of each entry, a row (entry, shard, number of
    records) for each span, and a row (entry, shard, epoch) for each new writer.
    """

    times: NDArray[np.uint64]
    positions: NDArray[np.int64]
    shards: NDArray[np.uint16]
    lengths: NDArray[np.uint64]
    writers: NDArray[np.int64]


_StructT = TypeVar("_StructT", Plan, Manifest)


def part_name(number: int) -> str:
    """Return the name of the file of a part."""
    return f"records-{number:08}"


def segment_name(number: int) -> str:
    """Return the name of the file of a segment of a log of another kind."""
    return f"log-{number:08}"


# --- writing


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file at once and durably; return its digest."""
    new = path.with_name(f"{path.name}.new")
    digest = xxh3_128()
    with new.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    synced_directory(path.parent)
    return digest.hexdigest()


def encoded(value: Plan | Manifest) -> bytes:
    """Return the content of a file that holds one value."""
    return msgspec.msgpack.encode(value)


def batch_pieces(batch: StoredBatch) -> tuple[bytes, bytes]:
    """Return the bytes of a batch in a part."""
    payload = batch.payload
    return _BATCH.pack(batch.shard, batch.first, batch.records, len(payload)), payload


def cells_head(start: int, limits: GenerationLimits) -> bytes:
    """Return the beginning of the file of a segment; see `CellsFile`."""
    return _CELLS_HEAD.pack(start, *limits)


def cell_pieces(copied: CopiedCell) -> tuple[bytes, bytes]:
    """Return the bytes of a cell in the file of a segment."""
    return _CELL.pack(copied.section, copied.position, len(copied.content)), copied.content


def order_pieces(image: LogImage, position: MetalogPosition) -> list[bytes]:
    """Return the content of `order`: five packed columns, each after its length."""
    ordered = image.ordered
    spans = int(np.searchsorted(ordered.positions, position))
    columns = (
        np.diff(ordered.times[:position].astype(np.int64), prepend=0),
        np.diff(ordered.positions[:spans], prepend=0),
        ordered.shards[:spans].astype(np.int64),
        ordered.lengths[:spans].astype(np.int64),
        image.writers[image.writers[:, 0] < position].ravel(),
    )
    pieces = []
    for column in columns:
        packed = zlib.compress(column.astype("<i8").tobytes(), 1)
        pieces += [len(packed).to_bytes(8, "little"), packed]
    return pieces


def floors_of(floors: Trimmed) -> tuple[tuple[int, SeqNum, bool, int], ...]:
    """Return all floors, beginning with the floors of tags."""
    found: list[Floor] = []
    cursor, is_last = NO_FLOORS, False
    while not is_last:
        page, is_last = floors.page(cursor, _FLOORS_AT_ONCE)
        found += page
        cursor = Trimmed.cursor_after(page)
    return tuple((tag, until, of_log, log) for tag, until, of_log, log in found)


# --- reading


def digest_of(path: Path) -> str:
    """Check the digest at the end of a file, and return it.

    Raises:
        DataDirectoryError: the file is missing or damaged.
    """
    try:
        digest, left = xxh3_128(), path.stat().st_size - _DIGEST_BYTES
        with path.open("rb") as file:
            while left > 0 and (read := file.read(min(left, _READ_BYTES))):
                digest.update(read)
                left -= len(read)
            end = file.read()
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    if left or end != digest.digest():
        raise _damaged(path, "its digest is wrong")
    return digest.hexdigest()


def plan_in(directory: Path) -> Plan:
    """Return the plan of a backup.

    Raises:
        DataDirectoryError: there is no plan, or the plan is damaged.
    """
    return _value(directory / PLAN_FILE, Plan)


def manifest_in(directory: Path) -> Manifest:
    """Return the manifest of a whole backup.

    Raises:
        DataDirectoryError: the backup is not whole, or the manifest is damaged.
    """
    if not (directory / MANIFEST_FILE).exists():
        is_begun = (directory / PLAN_FILE).exists()
        raise DataDirectoryError(
            f"The backup {directory} is not whole; run `indilog backup` with the same "
            "arguments again, which continues it."
            if is_begun
            else f"{directory} holds no backup: it has no file {MANIFEST_FILE}."
        )
    return _value(directory / MANIFEST_FILE, Manifest)


def _value(path: Path, kind: type[_StructT]) -> _StructT:
    digest_of(path)
    try:
        return msgspec.msgpack.decode(path.read_bytes()[:-_DIGEST_BYTES], type=kind)
    except msgspec.DecodeError as error:
        raise DataDirectoryError(
            f"{path} is of another release of IndiLog; use that one to restore it."
        ) from error


def order_in(directory: Path) -> OrderFile:
    """Return the order that a backup holds, whose digest was checked."""
    content = (directory / ORDER_FILE).read_bytes()
    columns, at = [], 0
    for _ in range(5):
        size = int.from_bytes(content[at : at + 8], "little")
        column = zlib.decompress(content[at + 8 : at + 8 + size])
        columns.append(np.frombuffer(column, "<i8").astype(np.int64))
        at += 8 + size
    times, positions, shards, lengths, writers = columns
    return OrderFile(
        np.cumsum(times).astype(np.uint64),
        np.cumsum(positions),
        shards.astype(np.uint16),
        lengths.astype(np.uint64),
        writers.reshape(-1, 3),
    )


def batches_in(directory: Path, number: int) -> Iterator[StoredBatch]:
    """Yield the batches of a part, whose digest was checked."""
    path = directory / part_name(number)
    left = path.stat().st_size - _DIGEST_BYTES
    with path.open("rb") as file:
        while left:
            shard, first, records, size = _BATCH.unpack(file.read(_BATCH.size))
            yield StoredBatch(ShardId(shard), first, records, file.read(size))
            left -= _BATCH.size + size


class CellsFile(NamedTuple):
    """The file of a segment, whose digest was checked.

    Attributes:
        start: the first cell that was not trimmed.
        limits: when generations of the index are closed.
        cells: the checkpoint, the generations and the cells.
    """

    start: int
    limits: GenerationLimits
    cells: Iterator[CopiedCell]


def cells_in(directory: Path, number: int) -> CellsFile:
    """Return the content of the file of a segment, whose digest was checked."""
    path = directory / segment_name(number)
    with path.open("rb") as file:
        start, records, cells = _CELLS_HEAD.unpack(file.read(_CELLS_HEAD.size))
    return CellsFile(start, GenerationLimits(records, cells), _cells_of(path))


def _cells_of(path: Path) -> Iterator[CopiedCell]:
    left = path.stat().st_size - _DIGEST_BYTES - _CELLS_HEAD.size
    with path.open("rb") as file:
        file.seek(_CELLS_HEAD.size)
        while left:
            section, position, size = _CELL.unpack(file.read(_CELL.size))
            yield CopiedCell(CellSection(section), position, file.read(size))
            left -= _CELL.size + size


def verify(directory: Path) -> tuple[Plan, Manifest]:
    """Check every file of a backup; return its plan and manifest.

    Raises:
        DataDirectoryError: the backup is not whole, or a file is missing, damaged, or of another
            backup.
    """
    manifest = manifest_in(directory)
    plan = plan_in(directory)
    wanted = {PLAN_FILE: manifest.plan, ORDER_FILE: manifest.order}
    wanted |= {part_name(number): digest for number, digest in enumerate(manifest.records)}
    wanted |= {
        segment_name(number): segment.digest
        for number, segment in enumerate(manifest.segments)
        if segment.digest
    }
    for name, digest in wanted.items():
        if digest_of(directory / name) != digest:
            raise _damaged(directory / name, "it is of another backup")
    if len(manifest.records) != len(plan.starts):
        raise _damaged(directory / MANIFEST_FILE, "it names other parts than the plan")
    return plan, manifest


def _damaged(path: Path, reason: str) -> DataDirectoryError:
    return DataDirectoryError(
        f"The backup's file {path} cannot be used: {reason}; use another backup."
    )
