"""Index snapshots: the index of one index shard below a metalog position, as a Parquet file (format
in docs/FORMATS.md).

A row says that the record at `seqnum`, of shard `shard`, has `tag`. Every record also has a row for
the empty tag, 0. Rows are sorted by (tag, seqnum). Row groups have a bounded size, because a later
read fetches one of them. The file's name states the CRC of the whole file, which is checked before
the file is used. Each page has its own CRC, which is checked when the page is read. A Bloom filter
excludes most tags without rows in the file.

The shell of an index node (`indilog.runtime.snapshot_files`) serves the requests that are defined
here. The index rebuild of `indilog_pipeline` writes the same files. pyarrow is imported inside
functions, because the import takes longer than a whole command.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, assert_never

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.kernel.index_schedule import IndexEra
from indilog.kernel.lineage import NO_ENTRIES, LineageColumns
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.tag_filter import TagFilter, TagFilterBuilder

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

SNAPSHOT_VERSION: Final = 2
GROUP_ROWS: Final = 16_384
"""Rows of a row group; the last one of a file may have fewer."""
ROW_BYTES: Final = 18
"""Bytes that a row takes in memory."""
_VERSION_KEY: Final = b"indilog.index_snapshot.version"
_INFO_KEY: Final = b"indilog.index_snapshot.info"
_TAGS_KEY: Final = b"indilog.index_snapshot.tags"
_NAME: Final = re.compile(r"snapshot-(?P<position>\d{20})-(?P<crc>[0-9a-f]{8})\.parquet")
_CHUNK_BYTES: Final = 1 << 20


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot covers: index data of one index shard.

    Attributes:
        logspace: the logspace of the index shard.
        index_shard: the index shard; the snapshot has the index data of all its positions below
            `position`, according to `eras`.
        position: the metalog position where the snapshot ends.
        tail: all its seqnums are below this one.
        eras: the schedule of positions.
        lost: seqnums whose tags are lost; the snapshot has rows of them for the empty tag only.
        lineage: the epochs of the entries at the covered positions.
    """

    logspace: int = 0
    index_shard: int
    position: MetalogPosition
    tail: SeqNum
    eras: tuple[IndexEra, ...]
    lost: tuple[LostRange, ...] = ()
    lineage: LineageColumns = NO_ENTRIES


class Rows(NamedTuple):
    """Rows as columns of equal length, sorted by (tag, seqnum); no two are equal."""

    tags: NDArray[np.uint64]
    seqnums: NDArray[np.uint64]
    shards: NDArray[np.uint16]

    def part(self, start: int, end: int) -> Rows:
        """Return the rows `start` to `end`."""
        return Rows(self.tags[start:end], self.seqnums[start:end], self.shards[start:end])

    def chosen(self, mask: NDArray[np.bool_]) -> Rows:
        """Return the rows where `mask` is true."""
        return Rows(self.tags[mask], self.seqnums[mask], self.shards[mask])


_NONE: Final[NDArray[np.uint64]] = np.empty(0, np.uint64)


class SnapshotFloors(NamedTuple):
    """Which rows a snapshot leaves out.

    Attributes:
        log_tags, log_untils: tags of logs, ascending, and their floors.
        tags, untils: other tags, ascending, and their floors.
        discarded: seqnums of discarded records, ascending.
    """

    log_tags: NDArray[np.uint64]
    log_untils: NDArray[np.uint64]
    tags: NDArray[np.uint64]
    untils: NDArray[np.uint64]
    discarded: NDArray[np.uint64] = _NONE


class RowGroups(NamedTuple):
    """The smallest and largest tag and seqnum of each row group of a file."""

    first_tags: NDArray[np.uint64]
    last_tags: NDArray[np.uint64]
    lowest: NDArray[np.uint64]
    highest: NDArray[np.uint64]


class IndexSnapshot(NamedTuple):
    """A snapshot on disk, with the bounds of its row groups and the filter of its tags.

    Attributes:
        info: what it covers.
        groups: the bounds of its row groups.
        rows: how many rows it has.
        tags: the filter of its tags; it has no row of a tag that the filter excludes.
    """

    info: SnapshotInfo
    groups: RowGroups
    rows: int
    tags: TagFilter


# --- requests of an index node to its shell, and the answers


class OpenSnapshot(NamedTuple):
    """Find the newest intact snapshot of a position below `below`; answered by `SnapshotOpened`."""

    below: MetalogPosition


class SnapshotOpened(NamedTuple):
    """The snapshot found; None: there is none."""

    snapshot: IndexSnapshot | None


class WriteSnapshot(NamedTuple):
    """Write a snapshot with the rows of the snapshot of position `base`, and those of `recent`.

    If `base` is None, there is no earlier snapshot.

    Writing begins when everything persisted earlier is synced, so that no snapshot is ahead of the
    log. `recent` is called in a thread; all its rows are at or above the base's tail. Rows of the
    base that `floors` names are left out. The tag filter has at most `filter_bytes_max` bytes.
    """

    info: SnapshotInfo
    base: MetalogPosition | None
    recent: Callable[[], Rows]
    floors: SnapshotFloors | None = None
    filter_bytes_max: int = 1 << 20


class SnapshotWritten(NamedTuple):
    """The answer to `WriteSnapshot`.

    Attributes:
        position: position of the requested snapshot.
        snapshot: the durable snapshot; None: it could not be written.
        base_lost: whether the previous snapshot is damaged or missing, so a retry would fail, too.
    """

    position: MetalogPosition
    snapshot: IndexSnapshot | None
    base_lost: bool = False


class ReadRows(NamedTuple):
    """Read a row group of the snapshot of `position`; answered by `RowsRead`."""

    position: MetalogPosition
    group: int


class RowsRead(NamedTuple):
    """The rows of a row group; None: they are damaged or missing."""

    position: MetalogPosition
    group: int
    rows: Rows | None


SnapshotRequest: TypeAlias = OpenSnapshot | WriteSnapshot | ReadRows
SnapshotAnswer: TypeAlias = SnapshotOpened | SnapshotWritten | RowsRead


def without_snapshots(request: SnapshotRequest) -> SnapshotAnswer:
    """Return the answer of a shell that keeps no snapshots."""
    match request:
        case OpenSnapshot():
            return SnapshotOpened(None)
        case WriteSnapshot(info):
            return SnapshotWritten(info.position, None)
        case ReadRows(position, group):
            return RowsRead(position, group, None)
        case unreachable:
            assert_never(unreachable)


# --- rows


def no_rows() -> Rows:
    """Return no rows."""
    return Rows(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.uint16))


def sorted_rows(pieces: Sequence[Rows]) -> Rows:
    """Return the rows of all pieces, sorted. Per tag, earlier pieces must have smaller seqnums."""
    if len(pieces) == 1:
        return pieces[0]
    tags, seqnums, shards = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(tags, kind="stable")
    return Rows(tags[order], seqnums[order], shards[order])


def merged(base: Iterable[Rows], recent: Rows) -> Iterator[Rows]:
    """Yield the rows of `base` and `recent`, sorted. Per tag, `base` must have smaller seqnums.

    Only one piece of `base` is in memory at a time.
    """
    taken = 0
    for piece in base:
        # The last tag of this piece may have further rows in the next piece. The recent rows of
        # this tag follow those.
        until = int(np.searchsorted(recent.tags, piece.tags[-1], side="left"))
        yield sorted_rows([piece, recent.part(taken, max(taken, until))])
        taken = max(taken, until)
    if taken < len(recent.tags):
        yield recent.part(taken, len(recent.tags))


def dead_in(
    groups: RowGroups, floors: SnapshotFloors, read: Callable[[int], Rows]
) -> NDArray[np.uint64]:
    """Return the seqnums, ascending, of discarded records and of those below their logs' floors.

    Reads the row groups of those logs' own tags.
    """
    found = [floors.discarded]
    for tag, until in zip(floors.log_tags, floors.log_untils, strict=True):
        first = int(np.searchsorted(groups.last_tags, tag, side="left"))
        for group in range(first, int(np.searchsorted(groups.first_tags, tag, side="right"))):
            rows = read(group)
            found.append(rows.seqnums[(rows.tags == tag) & (rows.seqnums < until)])
    return np.unique(np.concatenate(found))


def untrimmed(
    pieces: Iterable[Rows], floors: SnapshotFloors, dead: NDArray[np.uint64]
) -> Iterator[Rows]:
    """Yield the rows except those of dead records and those below the floor of their tag."""
    for rows in pieces:
        below = np.isin(rows.seqnums, dead)
        for tags, untils in ((floors.log_tags, floors.log_untils), (floors.tags, floors.untils)):
            if len(tags):
                places = np.minimum(np.searchsorted(tags, rows.tags), len(tags) - 1)
                below |= (tags[places] == rows.tags) & (rows.seqnums < untils[places])
        if not below.any():
            yield rows
        elif not below.all():
            left = ~below
            yield Rows(rows.tags[left], rows.seqnums[left], rows.shards[left])


def regrouped(pieces: Iterable[Rows], group_rows: int = GROUP_ROWS) -> Iterator[Rows]:
    """Yield the same rows in groups of `group_rows`; the last one may be smaller."""
    held: list[Rows] = []
    count = 0
    assert group_rows > 0
    for piece in pieces:
        held.append(piece)
        count += len(piece.tags)
        if count >= group_rows:
            joined = Rows(*(np.concatenate(column) for column in zip(*held, strict=True)))
            whole = count - count % group_rows
            for start in range(0, whole, group_rows):
                yield joined.part(start, start + group_rows)
            held = [joined.part(whole, count)]
            count -= whole
    if count:
        yield Rows(*(np.concatenate(column) for column in zip(*held, strict=True)))


# --- files


def snapshot_name(position: MetalogPosition, crc: int) -> str:
    """Return the name of the snapshot of `position` whose file has that CRC32C."""
    return f"snapshot-{position:020d}-{crc:08x}.parquet"


def snapshot_files(directory: Path) -> list[tuple[MetalogPosition, Path]]:
    """Return the snapshots in `directory`, newest first, intact or not."""
    if not directory.is_dir():
        return []
    found = [(m, path) for path in directory.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted(((int(m["position"]), path) for m, path in found), reverse=True)


def filtered(pieces: Iterable[Rows], tags: TagFilterBuilder) -> Iterator[Rows]:
    """Yield the sorted rows unchanged, and add each of their tags to `tags` once."""
    last: NDArray[np.uint64] = np.empty(0, np.uint64)
    for rows in pieces:
        found = np.unique(rows.tags)
        tags.add(found[found != last[-1]] if len(last) else found)
        last = found
        yield rows


def write_rows(
    file: Path, info: SnapshotInfo, pieces: Iterable[Rows], tags: TagFilterBuilder
) -> None:
    """Write a snapshot to `file` and sync it; the caller names the file. `tags` must be empty."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            pa.field("tag", pa.uint64(), nullable=False),
            pa.field("seqnum", pa.uint64(), nullable=False),
            pa.field("shard", pa.uint16(), nullable=False),
        ],
        metadata={
            _VERSION_KEY: str(SNAPSHOT_VERSION).encode(),
            _INFO_KEY: msgspec.json.encode(info),
        },
    )
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"tag": "DELTA_BINARY_PACKED", "seqnum": "DELTA_BINARY_PACKED"},
        write_page_checksum=True,
    ) as writer:
        for rows in filtered(regrouped(pieces), tags):
            columns = [pa.array(column) for column in rows]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), GROUP_ROWS)
        filter_text = b64encode(tags.built().bits).decode()
        writer.add_key_value_metadata({_TAGS_KEY.decode(): filter_text})
    with file.open("rb+") as written:
        os.fsync(written.fileno())


def file_crc(file: Path) -> int:
    """Return the CRC32C of a file."""
    crc = 0
    with file.open("rb") as read:
        while chunk := read.read(_CHUNK_BYTES):
            crc = crc32c(chunk, crc)
    return crc


def check_file(file: Path) -> None:
    """Check the CRC of a file against its name.

    Raises:
        MalformedFrameError: the file is damaged.
    """
    name = _NAME.fullmatch(file.name)
    assert name is not None, "files are found by their names"
    if file_crc(file) != int(name["crc"], 16):
        raise MalformedFrameError(f"{file} is damaged: its CRC differs from its name's.")


def opened_snapshot(file: Path) -> tuple[ParquetFile, IndexSnapshot]:
    """Open a snapshot whose CRC was checked.

    Raises:
        MalformedFrameError: the file is no snapshot, or one of another version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise MalformedFrameError(f"{file} is no Parquet file: {error}") from error
    metadata = parquet.metadata.metadata or {}
    if (version := metadata.get(_VERSION_KEY)) != str(SNAPSHOT_VERSION).encode():
        raise MalformedFrameError(
            f"{file} is an index snapshot of version {version!r}; this release reads version "
            f"{SNAPSHOT_VERSION}."
        )
    try:
        info = msgspec.json.decode(metadata[_INFO_KEY], type=SnapshotInfo)
        tags = TagFilter(b64decode(metadata[_TAGS_KEY]))
    except (KeyError, ValueError) as error:
        raise MalformedFrameError(f"{file} does not state what it covers: {error}") from error
    return parquet, IndexSnapshot(info, _groups_of(parquet), parquet.metadata.num_rows, tags)


def _groups_of(parquet: ParquetFile) -> RowGroups:
    """Return the bounds of the row groups, from the statistics of a file.

    Raises:
        MalformedFrameError: the file has no statistics.
    """
    metadata = parquet.metadata
    bounds: list[list[int]] = [[], [], [], []]
    for group in range(metadata.num_row_groups):
        for column in (0, 1):
            statistics = metadata.row_group(group).column(column).statistics
            if statistics is None or statistics.min is None or statistics.max is None:
                raise MalformedFrameError(f"row group {group} has no statistics")
            bounds[2 * column].append(statistics.min)
            bounds[2 * column + 1].append(statistics.max)
    return RowGroups(*(np.array(values, np.uint64) for values in bounds))


def read_rows(parquet: ParquetFile, group: int) -> Rows:
    """Read a row group.

    Raises:
        MalformedFrameError: its bytes are damaged.
    """
    import pyarrow as pa

    try:
        table = parquet.read_row_group(group)
    except (OSError, pa.ArrowException) as error:
        raise MalformedFrameError(f"row group {group} cannot be read: {error}") from error
    tags, seqnums, shards = (table.column(n).to_numpy() for n in range(3))
    return Rows(tags, seqnums, shards)
