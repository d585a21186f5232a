"""Makes a new platform from a backup (decision 0045).

Storage nodes get journals as if they had stored every batch and applied every entry themselves.
Sequencers get a base that replaces all entries. Index nodes get nothing: they fetch their data from
the storage nodes when they start. So the new platform may have another number of sequencers,
storage nodes, replicas or index shards.

Two kinds of entries follow the entries of the backup. The first kind orders records that do not
exist. These entries cover a *hole*: seqnums after the backup that readers of the old platform may
have seen. So the new platform never assigns these seqnums. The records of the hole count as
discarded. The second kind consists of trims with all floors.

Logs of other kinds than `shared` are written first (`cell_logs`). The catalog's records are
replaced in their batches, because these logs now have other places.

The directory is built under another name, and renamed when all of it is durable. The command
`indilog backup` calls `restore`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from indilog.base.errors import ConfigError, DataDirectoryError
from indilog.base.ids import MAX_SEQNUM, Epoch, LocalId, NodeId, SeqNum, ShardId, ViewNumber
from indilog.config import Config, node_config
from indilog.kernel.lineage import Extent, Lineage
from indilog.kernel.metalog import (
    NO_INCARNATION,
    TRIM_FLOORS_MAX,
    Base,
    Entry,
    Floor,
    GrowingBase,
    NewRecords,
    NewWriters,
    Trim,
    encode_entries,
)
from indilog.kernel.tombstones import GoneRecords, encode_gone
from indilog.kernel.view import View
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.cluster_state import Arrangement, layout_in
from indilog.runtime.cluster.layout import make_metadata
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.journal.segment import synced_directory
from indilog_compute.log_kinds.catalog_records import MovedCatalog
from indilog_ordering.metalog_state import MetalogState, encode_state
from indilog_pipeline.backup.catalog import moved_batch
from indilog_pipeline.backup.cell_logs import new_segments, write_segments
from indilog_pipeline.backup.files import (
    Manifest,
    OrderFile,
    Plan,
    StoredBatch,
    batches_in,
    order_in,
    verify,
)

HOLE: Final = 1 << 20
"""Default size of the hole: seqnums that a restored platform skips after those of the backup."""
HOLE_MAX: Final = 1 << 24
"""The largest hole, in seqnums. An index node keeps 18 bytes for each seqnum of the hole."""
_HOLE_OF_ENTRY: Final = 1 << 13
"""Seqnums of the hole that one entry covers. A message to an index node has up to 1,024 entries
with a byte for each such seqnum, and the size of a message is limited.
"""
_ENTRIES_OF_FRAME: Final = 512
_VIEW: Final = ViewNumber(1)

Progress = Callable[[int, int], None]
"""Called with the number of parts read so far, and the number of all parts."""


class Restored(NamedTuple):
    """A new platform.

    Attributes:
        tail: all seqnums of the backup's `shared` logs are below this seqnum.
        kept: number of records of `shared` logs.
        next_seqnum: the first seqnum that the platform assigns to a record of a `shared` log.
        segments: number of segments of logs of other kinds.
        left_out: the logs without which the backup was made; their reads raise `DataLossError`.
    """

    tail: SeqNum
    kept: int
    next_seqnum: SeqNum
    segments: int
    left_out: Sequence[str]


def restore(
    source: Path,
    config: Config,
    arrangement: Arrangement,
    *,
    next_seqnum: SeqNum | None = None,
    progress: Progress = lambda *_: None,
) -> Restored:
    """Make a new platform from the backup `source` in the data directory of `config`.

    Args:
        source: the directory of a whole backup.
        config: configuration of the new platform; its `data_dir` must be missing or empty.
        arrangement: how the new platform runs.
        next_seqnum: first seqnum that the new platform assigns. It must be above every seqnum of
            the old platform that a program may have seen. None: 2^20 above the backup's tail.
        progress: called with the number of parts read, and the number of all parts.

    Raises:
        ConfigError: the directory is not empty, the layout does not fit the backup, or
            `next_seqnum` is out of its range.
        DataDirectoryError: the backup is not whole or is damaged, or the directory cannot be
            written.
        NotReadyError: the object store of the new platform does not answer.
    """
    plan, manifest = verify(source)
    data = config.node.data_dir
    if config.node.metadata.metadata_store != "embedded":
        raise ConfigError(
            'A backup is restored with metadata_store = "embedded"; ZooKeeper has no part of it.'
        )
    if data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise ConfigError(f"{data} is not empty; choose a new data directory.")
    after = _checked(plan, manifest, next_seqnum)
    new = data.with_name(f"{data.name}.restoring")
    try:
        shutil.rmtree(new, ignore_errors=True)  # left by an interrupted restore
        new.parent.mkdir(parents=True, exist_ok=True)
        into = Config(cluster=config.cluster, node=node_config(config.node, data_dir=new))
        view = make_metadata(into, arrangement, Epoch(manifest.epoch + 1), plan.shards)
        _check_layout(plan, view)
        entries = _Entries(plan, manifest, order_in(source), after, view)
        segments = new_segments(manifest, into, view)
        write_segments(source, manifest, into, view, segments)
        parts = _parts(source, plan, MovedCatalog(segments), progress)
        _write_journals(parts, into, view, entries)
        if data.exists():
            data.rmdir()
        new.rename(data)
        synced_directory(data.parent)
    except OSError as error:
        raise DataDirectoryError(
            f"{new} cannot be written: {error.strerror or error}; make room, and restore again."
        ) from error
    return Restored(plan.tail, manifest.kept, after, manifest.copied, manifest.left_out)


def _checked(plan: Plan, manifest: Manifest, next_seqnum: SeqNum | None) -> SeqNum:
    """Return the first seqnum to assign: above every seqnum of the backup, and not below any
    floor.
    """
    least = max([plan.tail, *(until for _, until, _, _ in manifest.floors)])
    most = min(plan.tail + HOLE_MAX, MAX_SEQNUM)
    after = max(least, plan.tail + HOLE) if next_seqnum is None else next_seqnum
    if not least <= after <= most:
        raise ConfigError(
            f"The next seqnum is {least} to {most}, not {after}: the backup ends below "
            f"{plan.tail}, and its trims at {least}."
        )
    return after


def _check_layout(plan: Plan, view: View) -> None:
    if len(view.engines) > len(plan.shards):
        raise ConfigError(
            f"The backup has {len(plan.shards)} shards, and each compute node writes one of them: "
            f"set engines to at most {len(plan.shards)}, not {len(view.engines)}."
        )


class _Entries:
    """The metalog of the new platform.

    Attributes:
        base: the base that replaces all entries.
        cuts: number of records of each shard in the backup.
        ends: number of records of each shard, including the hole.
        epoch: epoch of the entries after those of the backup.
    """

    def __init__(
        self, plan: Plan, manifest: Manifest, order: OrderFile, after: SeqNum, view: View
    ) -> None:
        self._plan = plan
        self._order = order
        self._floors = [Floor(*floor) for floor in manifest.floors]
        self._hole = after - plan.tail
        self._shard = min(view.shards)
        self.epoch = Epoch(manifest.epoch + 1)
        growing = GrowingBase(Base())
        self._writers: dict[ShardId, list[tuple[LocalId, Epoch]]] = {}
        """The writers of each shard, ascending, and the localid where each began."""
        for entry in self:
            growing.apply(entry)
            if isinstance(entry, NewWriters):
                for shard, writer in entry.writers.items():
                    start = growing.cut.get(shard, 0)
                    self._writers.setdefault(shard, []).append((start, writer))
        self.base = growing.base()
        self.ends: Mapping[ShardId, LocalId] = self.base.cut
        self.cuts = dict(self.ends)
        if self._hole:
            self.cuts[self._shard] -= self._hole
        if self.base.tail != after:
            raise DataDirectoryError("The order in the backup is not that of its records.")

    def __iter__(self) -> Iterator[Entry]:
        yield from self._of_backup()
        yield from self._added()

    def by_writer(
        self, shard: ShardId, first: LocalId, end: LocalId
    ) -> Iterator[tuple[LocalId, LocalId, Epoch]]:
        """Yield the parts of [first, end), each with the epoch of the writer that wrote it; 0: no
        entry names the writer.
        """
        writers = [(0, NO_INCARNATION), *self._writers.get(shard, ())]
        ends = [*(start for start, _ in writers[1:]), end]
        for (start, writer), stop in zip(writers, ends, strict=True):
            if (begin := max(start, first)) < (stop := min(stop, end)):
                yield begin, stop, writer

    def frames(self) -> Iterator[bytes]:
        """Yield the payloads of `ORDERING` frames with all entries."""
        page: list[Entry] = []
        for entry in self:
            page.append(entry)
            if len(page) == _ENTRIES_OF_FRAME:
                yield encode_entries(page)
                page = []
        if page:
            yield encode_entries(page)

    def _of_backup(self) -> Iterator[Entry]:
        """Yield the entries of the backup; those of trims order nothing here."""
        order, span, spans = self._order, 0, len(self._order.positions)
        lineage = Lineage.restored(self._plan.lineage)
        writers: dict[int, dict[ShardId, Epoch]] = {}
        for position, shard, writer in order.writers.tolist():
            writers.setdefault(position, {})[ShardId(shard)] = Epoch(writer)
        for position, time_us in enumerate(order.times.tolist()):
            counts: dict[ShardId, int] = {}
            while span < spans and order.positions[span] == position:
                counts[ShardId(int(order.shards[span]))] = int(order.lengths[span])
                span += 1
            epoch = lineage.before(position + 1)
            assert epoch is not None, "the lineage has every position"
            if position in writers:
                yield NewWriters(position, _VIEW, epoch, writers[position])
            else:
                yield NewRecords(position, _VIEW, epoch, counts, time_us)

    def _added(self) -> Iterator[Entry]:
        position, time_us = self._plan.position, int(self._order.times[-1:].sum())
        for start in range(0, self._hole, _HOLE_OF_ENTRY):
            counts = {self._shard: min(_HOLE_OF_ENTRY, self._hole - start)}
            yield NewRecords(position, _VIEW, self.epoch, counts, time_us)
            position += 1
        for number, start in enumerate(range(0, len(self._floors), TRIM_FLOORS_MAX)):
            floors = tuple(self._floors[start : start + TRIM_FLOORS_MAX])
            yield Trim(position, _VIEW, self.epoch, number, floors)
            position += 1


class _Shards:
    """Tracks how far the new journal of a storage node has each of its shards."""

    def __init__(self, node: NodeId, view: View, entries: _Entries) -> None:
        self._entries = entries
        self._ends: dict[ShardId, LocalId] = {
            shard: 0 for shard, placed in view.shards.items() if node in placed.replicas
        }

    def frames_of(self, batch: StoredBatch) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the frames of a batch, if the node keeps its shard."""
        if batch.shard not in self._ends:
            return
        yield from self._gone_until(batch.shard, batch.first)
        self._ends[batch.shard] = batch.first + batch.records
        yield FrameKind.RECORDS, batch.payload

    def last_frames(self) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the frames after all batches."""
        for shard in self._ends:
            yield from self._gone_until(shard, self._entries.cuts.get(shard, 0))
            yield from self._gone_until(shard, self._entries.ends.get(shard, 0))

    def _gone_until(self, shard: ShardId, end: LocalId) -> Iterator[tuple[FrameKind, bytes]]:
        first = self._ends[shard]
        self._ends[shard] = max(first, end)
        for start, stop, writer in self._entries.by_writer(shard, first, end):
            gone = GoneRecords(shard, writer, start, stop, repaired=False)
            yield FrameKind.GONE_RECORDS, encode_gone(gone)


def _parts(
    source: Path, plan: Plan, moved: MovedCatalog, progress: Progress
) -> Iterator[Iterator[StoredBatch]]:
    """Yield the batches of each part, with the new places of logs of other kinds."""
    for number in range(len(plan.starts)):
        progress(number, len(plan.starts))
        yield (moved_batch(batch, moved) for batch in batches_in(source, number))
    progress(len(plan.starts), len(plan.starts))


def _write_journals(
    parts: Iterable[Iterable[StoredBatch]], config: Config, view: View, entries: _Entries
) -> None:
    """Write the journals of all sequencers and storage nodes, and make them durable."""
    journals: dict[NodeId, Journal] = {}
    nodes = (*view.sequencers, *view.storage_nodes)
    data = config.node.data_dir
    try:
        for name, sharing in layout_in(data).journals(nodes).items():
            journal = Journal.open(
                data / name, segment_bytes=config.node.journal.segment_bytes, durability="fsync"
            )
            journals |= dict.fromkeys(sharing, journal)
            for _ in journal.recover():
                raise AssertionError("a new journal is empty")
        _write_records(parts, view, entries, journals)
        state = encode_state(
            MetalogState(
                entries.base.last,
                learner=False,
                extent=Extent(entries.base.last, entries.base.position),
                base=entries.base,
            )
        )
        for node in view.sequencers:
            journals[node].write(stream_of(node), FrameKind.METALOG_STATE, state)
        for journal in set(journals.values()):
            journal.sync()
            journal.record_synced_end()
    finally:
        for journal in set(journals.values()):
            journal.close()


def _write_records(
    parts: Iterable[Iterable[StoredBatch]],
    view: View,
    entries: _Entries,
    journals: Mapping[NodeId, Journal],
) -> None:
    shards = {node: _Shards(node, view, entries) for node in view.storage_nodes}
    for part in parts:
        for batch in part:
            for node, kept in shards.items():
                for kind, payload in kept.frames_of(batch):
                    journals[node].write(stream_of(node), kind, payload)
        for journal in set(journals.values()):
            journal.sync()
    for node, kept in shards.items():
        for kind, payload in kept.last_frames():
            journals[node].write(stream_of(node), kind, payload)
    for payload in entries.frames():
        for node in view.storage_nodes:
            journals[node].write(stream_of(node), FrameKind.ORDERING, payload)
