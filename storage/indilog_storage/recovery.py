"""Replay of a storage node's journal at a start (ARCHITECTURE 11, decision 0009).

`StorageNode` passes each frame, and each lost frame, to `Recovery`. `Recovery` changes the shards,
the `Ordering` and the notes of cold objects. Damaged records become holes. The replay ends with
`DataLossError` if a frame cannot be decoded or contradicts the frames before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, assert_never

from indilog.base.errors import DataLossError, MalformedFrameError
from indilog.base.ids import Epoch, LocalId, MetalogPosition, ShardId
from indilog.kernel.cold import ColdObject, decode_cold_object
from indilog.kernel.metalog import (
    Entry,
    NewRecords,
    NewReplicas,
    NewView,
    NewWriters,
    Trim,
    decode_entries,
)
from indilog.kernel.records import BatchHeader, batch_header
from indilog.kernel.tombstones import decode_gone
from indilog.roles.role import FrameKind, Location, Lost
from indilog_storage.batch_reads import FIRST_COLD_SEGMENT, DamagedBatch, parse_batch
from indilog_storage.cold_tier import ColdObjectsKept
from indilog_storage.moved_shards import MovedShards, UnownedBatch
from indilog_storage.ordering import Ordering
from indilog_storage.shard import GONE, Shard

BATCHES: Final = frozenset({FrameKind.RECORDS, FrameKind.REPAIRED, FrameKind.GONE})
"""Frame kinds whose header, if intact, still names the records of a damaged frame."""


def cut_off(position: MetalogPosition, ordering: Ordering, moved: MovedShards) -> None:
    """Remove the replaced entries from `position` on, and their effects on shards."""
    replaced = {shard: ordering.writers_from(position, shard) for shard in moved.shards}
    ordering.cut_off(position)
    moved.apply_placement(ordering, drops=False)  # an entry that was cut off may be ordered again
    for shard in moved.shards.values():
        ordered, writer = ordering.cut_of(shard.id), ordering.writer_of(shard.id)
        shard.cut_off(ordering.tail, ordered, writer, replaced.get(shard.id, ()))


class Recovery:
    """Replays frames in the order of the journal, and notes lost frames between them."""

    def __init__(self, moved: MovedShards, ordering: Ordering, cold: ColdObjectsKept) -> None:
        self._moved = moved
        self._shards: Mapping[ShardId, Shard] = moved.shards
        self._cold = cold
        self._ordering = ordering
        self._gap = False
        """Whether the entries before the next `ORDERING` frame may be incomplete or replaced. The
        cause is damage, or entries from another storage node, which are not journaled.
        """
        self._lossy = False
        """Whether a frame was lost that does not show which records or batches it held."""

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Replay a frame.

        Raises:
            DataLossError: the frame does not follow on the frames before it.
        """
        try:
            match kind:
                case FrameKind.RECORDS:
                    self._batch(payload, location)
                case FrameKind.REPAIRED:
                    self._repaired(payload, location)
                case FrameKind.ORDERING:
                    self._entries(payload, location)
                case FrameKind.GONE:
                    self._gone(payload, location)
                case FrameKind.GONE_RECORDS | FrameKind.DISCARDED:
                    self._gone_records(kind, payload, location)
                case FrameKind.FREED:
                    self._freed(payload)
                case FrameKind.COLD:
                    self._cold_object(decode_cold_object(payload))
                case (
                    FrameKind.CHECKPOINT
                    | FrameKind.MOVED
                    | FrameKind.METALOG
                    | FrameKind.METALOG_STATE
                ):
                    raise AssertionError(f"a storage node writes no {kind.name} frames")
        except MalformedFrameError as error:
            raise DataLossError(f"The frame at {location} cannot be read: {error}.") from error

    def _batch(self, payload: bytes, location: Location) -> None:
        header = batch_header(payload)
        if (shard := self._kept(header, location)) is not None:
            self._records(shard, header.first, header.end, header.epoch, location)

    def _kept(self, header: BatchHeader, location: Location) -> Shard | None:
        """Return the shard of a batch; None: this node does not keep the shard, so the batch is
        noted as unowned.
        """
        if (shard := self._shards.get(header.shard)) is None:
            batch = UnownedBatch(header.first, header.end, location, header.epoch)
            self._moved.add_unowned(header.shard, batch)
        return shard

    def _records(
        self, shard: Shard, first: LocalId, end: LocalId, epoch: Epoch, location: Location
    ) -> None:
        """Replay a batch of records, which usually continues the records before it.

        There are two exceptions. First, a gap within the records of one writer is possible
        (decision 0009). In an earlier start, the damaged newest batch was taken for a torn tail,
        and the metalog later showed the replica that records were missing. Second, the records may
        be stored already, because the writer resent the batch while it was being written.
        """
        if shard.replaces(first, epoch):
            shard.truncate(max(first, shard.ordered))
        if first < shard.stored or self._lossy or self._gap or epoch == shard.last_writer:
            shard.fill(first, end, location, epoch)
        elif first == shard.stored:
            shard.store(first, end, location, epoch)
        else:
            raise DataLossError(
                f"Shard {shard.id} continues at localid {first} at {location}, "
                f"but {shard.stored} were recovered."
            )

    def _gone(self, payload: bytes, location: Location) -> None:
        """Replay the frame of a batch that was discarded."""
        header = batch_header(payload)
        if header.shard not in self._shards:
            batch = UnownedBatch(header.first, header.end, GONE, header.epoch)
            self._moved.add_unowned(header.shard, batch)
            return
        self._batch(payload, location)
        self._shards[header.shard].discard(header.first, location)

    def _gone_records(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Replay a note of discarded batches.

        A `DISCARDED` frame discards batches that were here until this frame; the batches may
        precede the checkpoint. A `GONE_RECORDS` frame takes the place of batches that a rewrite of
        their segment left out.
        """
        gone = decode_gone(payload)
        if kind is FrameKind.DISCARDED:
            for batch in self._moved.pop_unowned(gone.shard, gone.first, gone.end):
                self._moved.add_unowned(gone.shard, batch._replace(location=GONE))
            if (shard := self._moved.kept_or_dropped(gone.shard)) is not None:
                shard.discard_all(gone.first, gone.end)
            return
        if (shard := self._shards.get(gone.shard)) is None:
            batch = UnownedBatch(gone.first, gone.end, GONE, gone.epoch)
            self._moved.add_unowned(gone.shard, batch)
            return
        if gone.repaired:
            shard.fill(gone.first, gone.end, location)
        else:
            self._records(shard, gone.first, gone.end, gone.epoch, location)
        shard.discard(gone.first, location)

    def _freed(self, payload: bytes) -> None:
        freed = decode_gone(payload)
        self._moved.pop_unowned(freed.shard, freed.first, freed.end)
        if (shard := self._moved.kept_or_dropped(freed.shard)) is not None:
            shard.free(freed.first, freed.end)

    def _cold_object(self, made: ColdObject) -> None:
        moved = self._cold.note(made, self._moved.kept_or_dropped(made.shard))
        self._cold.released += [before for before, _ in moved]
        for batch in self._moved.pop_unowned(made.shard, made.first, made.end):
            place = Location(FIRST_COLD_SEGMENT + made.number, batch.first, batch.location.length)
            self._moved.add_unowned(made.shard, batch._replace(location=place))
            self._cold.released.append(batch.location)

    def _repaired(self, payload: bytes, location: Location) -> None:
        """Replay a batch that filled a hole, or that replaced a batch which was intact at the
        checkpoint.
        """
        header = batch_header(payload)
        shard = self._kept(header, location)
        if shard is not None and not shard.fill(header.first, header.end, location, header.epoch):
            shard.replace(header.first, header.end, location)

    def _entries(self, payload: bytes, location: Location) -> None:
        entries = decode_entries(payload)
        self._gap = self._gap or not entries  # an empty frame is a gap
        for entry in entries:
            self._entry(entry, location)

    def _entry(self, entry: Entry, location: Location) -> None:
        ordering = self._ordering
        if entry.position < ordering.position and entry.epoch == ordering.epoch_at(entry.position):
            self._gap = False  # entries before equal entries are equal
            return
        if self._gap and not self._follows_gap(entry):
            return
        self._gap = False
        if entry.position < ordering.position:
            ordering.reader.lineage.cut_off(entry.position)  # it replaces an entry recovered before
            cut_off(entry.position, ordering, self._moved)
        if entry.position != ordering.position:
            raise DataLossError(
                f"The ordering journal continues at position {entry.position} at {location}, "
                f"but {ordering.position} were recovered."
            )
        self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        for span in self._ordering.recover(entry):
            if (shard := self._shards.get(span.shard)) is not None:
                shard.order(span)
        match entry:
            case NewWriters(writers=writers):
                for shard_id, writer in writers.items():
                    if (shard := self._shards.get(shard_id)) is not None:
                        shard.begin(writer)
            case NewReplicas() | NewView():
                self._moved.apply_placement(self._ordering)
            case NewRecords() | Trim():
                pass
            case unreachable:
                assert_never(unreachable)

    def _follows_gap(self, entry: Entry) -> bool:
        """Whether an entry after a gap certainly follows the last recovered entry.

        An entry in the gap may have replaced the last recovered entry. If the same incarnation of
        the primary proposed both, the last recovered entry was not replaced
        (`indilog.kernel.lineage`). Entries that do not follow are dropped and fetched again.
        """
        follows = entry.position == self._ordering.position
        return follows and (not entry.position or entry.epoch == self._ordering.last)

    # --- damage

    def lost(self, frame: Lost) -> None:
        """Note that a frame cannot be read; its content is fetched from other nodes."""
        match frame.kind:
            case FrameKind.RECORDS | FrameKind.REPAIRED | FrameKind.GONE:
                self._lost_batch(frame)
            case FrameKind.ORDERING:
                self._gap = True
            case FrameKind.DISCARDED | FrameKind.FREED | FrameKind.CHECKPOINT | FrameKind.MOVED:
                pass  # such a frame has no writers, and does not show where a shard ends
            case FrameKind.COLD:
                self._cold.may_lack_notes = True
            case FrameKind.GONE_RECORDS | FrameKind.METALOG | FrameKind.METALOG_STATE | None:
                self._gap = self._gap or frame.kind is None
                self._mark_lossy()

    def _lost_batch(self, frame: Lost) -> None:
        """Note a lost batch. If the batch's own header is intact, it names the lost records."""
        try:
            header = batch_header(frame.payload)
        except MalformedFrameError:
            self._mark_lossy()
            return
        if (shard := self._shards.get(header.shard)) is None:
            return
        if frame.kind is FrameKind.REPAIRED:
            # This batch may have replaced a batch without a trace, because a torn tail is cut off.
            shard.fill(header.first, header.end, frame.location)
        else:
            self._batch(frame.payload, frame.location)
        _, damage = parse_batch(frame.location, frame.payload)
        shard.lose(damage or DamagedBatch(frame.location, readable=True))

    def _mark_lossy(self) -> None:
        self._lossy = self._cold.may_lack_notes = True
