"""What a storage node makes of its journal at a start (ARCHITECTURE 11, decision 0009)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from indilog.base.errors import DataLossError, MalformedFrameError
from indilog.base.ids import Epoch, LocalId, ShardId
from indilog.kernel.metalog import Entry, entries_decoded
from indilog.kernel.records import batch_header
from indilog.kernel.tombstones import gone_decoded
from indilog.roles.role import FrameKind, Location, Lost
from indilog_storage.batch_reads import DamagedBatch, batch_read
from indilog_storage.ordering import Ordering
from indilog_storage.shard import Shard, state_decoded

BATCHES: Final = frozenset({FrameKind.RECORDS, FrameKind.REPAIRED, FrameKind.GONE})
"""Frames of which damage can tell which records were in them."""


class Recovery:
    """Takes in frames in the order of the journal, and what was lost in between."""

    def __init__(self, shards: Mapping[ShardId, Shard], ordering: Ordering) -> None:
        self._shards = shards
        self._ordering = ordering
        self._gap = False
        """Whether entries are missing in the ordering journal before the next frame, or may have
        been replaced there: by damage, or because another storage node gave them.
        """
        self._lossy = False
        """Whether something else was."""

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Take in a frame that was persisted before.

        Raises:
            DataLossError: it does not follow on the frames before it.
        """
        try:
            match kind:
                case FrameKind.RECORDS:
                    self._batch(payload, location)
                case FrameKind.REPAIRED:
                    self._repaired(payload, location)
                case FrameKind.SHARD_STATE:
                    self._state(payload)
                case FrameKind.ORDERING:
                    self._entries(payload, location)
                case FrameKind.GONE:
                    self._gone(payload, location)
                case FrameKind.GONE_RECORDS | FrameKind.DISCARDED:
                    self._gone_records(kind, payload, location)
                case (
                    FrameKind.CHECKPOINT
                    | FrameKind.MOVED
                    | FrameKind.METALOG
                    | FrameKind.METALOG_FETCHED
                    | FrameKind.METALOG_FILLED
                    | FrameKind.METALOG_STATE
                ):
                    raise AssertionError(f"a storage node writes no {kind.name} frames")
        except MalformedFrameError as error:
            raise DataLossError(f"The frame at {location} cannot be read: {error}.") from error

    def _batch(self, payload: bytes, location: Location) -> None:
        header = batch_header(payload)
        if (shard := self._shards.get(header.shard)) is not None:
            self._records(shard, header.first, header.end, header.epoch, location)

    def _records(
        self, shard: Shard, first: LocalId, end: LocalId, epoch: Epoch, location: Location
    ) -> None:
        """Take in records that follow on.

        If they leave a gap within one epoch, this replica had learned from the metalog that it
        lacked something: its newest batch was damaged, and seemed to be a torn tail (0009).
        """
        if self._lossy or (first > shard.stored and epoch == shard.opened):
            shard.found(first, epoch)
            shard.fill(first, end, location)
        elif first == shard.stored:
            shard.store(first, end, location)
        else:
            raise DataLossError(
                f"Shard {shard.id} continues at localid {first} at {location}, "
                f"but {shard.stored} were recovered."
            )

    def _gone(self, payload: bytes, location: Location) -> None:
        """Take in what was a batch until all its records were trimmed."""
        self._batch(payload, location)
        if (shard := self._shards.get((header := batch_header(payload)).shard)) is not None:
            shard.discard(header.first, location)

    def _gone_records(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Take in what were batches until their segment was rewritten, or until here: then they may
        lie before the checkpoint.
        """
        gone = gone_decoded(payload)
        if (shard := self._shards.get(gone.shard)) is None:
            return
        if kind is FrameKind.DISCARDED:
            shard.discard_all(gone.first, gone.end)
            return
        if gone.repaired:
            shard.fill(gone.first, gone.end, location)
        else:
            self._records(shard, gone.first, gone.end, gone.epoch, location)
        shard.discard(gone.first, location)

    def _repaired(self, payload: bytes, location: Location) -> None:
        """Take in what filled a hole; one of a batch that seemed intact at the checkpoint, too."""
        header = batch_header(payload)
        if (shard := self._shards.get(header.shard)) is not None and not shard.fill(
            header.first, header.end, location
        ):
            shard.replace(header.first, header.end, location)

    def _state(self, payload: bytes) -> None:
        state = state_decoded(payload)
        if (shard := self._shards.get(state.shard)) is not None:
            shard.apply(state)

    def _entries(self, payload: bytes, location: Location) -> None:
        entries = entries_decoded(payload)
        self._gap = self._gap or not entries  # it stands for what another storage node gave
        for entry in entries:
            self._entry(entry, location)

    def _entry(self, entry: Entry, location: Location) -> None:
        ordering = self._ordering
        if entry.position < ordering.position and entry.epoch == ordering.epoch_at(entry.position):
            self._gap = False  # all entries before it are those that were before it here, too
            return
        if self._gap and not self._follows_gap(entry):
            return
        self._gap = False
        if entry.position < ordering.position:
            ordering.reader.lineage.cut_off(entry.position)  # it replaces what was there before
            ordering.cut_off(entry.position)
            for shard in self._shards.values():
                shard.cut_off(ordering.tail, ordering.cut_of(shard.id))
        if entry.position != ordering.position:
            raise DataLossError(
                f"The ordering journal continues at position {entry.position} at {location}, "
                f"but {ordering.position} were recovered."
            )
        for span in ordering.recover(entry):
            if (of_span := self._shards.get(span.shard)) is not None:
                of_span.order(span)

    def _follows_gap(self, entry: Entry) -> bool:
        """Whether an entry after a gap is known to follow on the last one that was recovered.

        What is missing may have replaced that one. It has not if the same incarnation of the
        primary proposed both: such copies are equal up to the first one (`indilog.kernel.lineage`).
        What does not follow is dropped, and fetched again.
        """
        follows = entry.position == self._ordering.position
        return follows and (not entry.position or entry.epoch == self._ordering.last)

    # --- damage

    def lost(self, frame: Lost) -> None:
        """Take note that a frame cannot be read; what it held is fetched from others."""
        match frame.kind:
            case FrameKind.RECORDS | FrameKind.REPAIRED | FrameKind.GONE:
                self._lost_batch(frame)
            case FrameKind.ORDERING:
                self._gap = True
            case FrameKind.DISCARDED | FrameKind.CHECKPOINT | FrameKind.MOVED:
                pass  # it says nothing of writers, or of where a shard ends
            case (
                FrameKind.SHARD_STATE
                | FrameKind.GONE_RECORDS
                | FrameKind.METALOG
                | FrameKind.METALOG_FETCHED
                | FrameKind.METALOG_FILLED
                | FrameKind.METALOG_STATE
                | None
            ):
                self._gap = self._gap or frame.kind is None
                self._doubt()

    def _lost_batch(self, frame: Lost) -> None:
        """Of a batch whose own header is intact it is known which records it held."""
        try:
            header = batch_header(frame.payload)
        except MalformedFrameError:
            self._doubt()
            return
        if (shard := self._shards.get(header.shard)) is None:
            return
        if frame.kind is FrameKind.REPAIRED:
            # What it replaced may have left no trace: the end of a segment, cut as a torn tail.
            shard.fill(header.first, header.end, frame.location)
        else:
            self._batch(frame.payload, frame.location)
        _, damage = batch_read(frame.location, frame.payload)
        shard.lose(damage or DamagedBatch(frame.location, readable=True))

    def _doubt(self) -> None:
        self._lossy = True
        for shard in self._shards.values():
            shard.doubt()
