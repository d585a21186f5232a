"""The storage node: one role for all shards of which it keeps a replica (ARCHITECTURE 8 and 9).

Appends: a batch of the writer that has opened its shard, and that follows on, goes into the journal;
when it is durable, the shard's stored prefix grows, and the primary is told once per turn. Whatever
else a writer sends is answered with the prefix. Order: metalog entries are applied without gaps, go
into the journal (unsynced: they can be fetched again), and say which seqnums the records got. For
each position the first replica of a shard sends the tags on (type-S data). Reads by seqnum wait
until the metalog is applied up to them.

What this replica does not have, because its disk was lost or damaged, it calls unknown, never
absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachetools import LRUCache

from indilog.config import Config
from indilog.errors import DataLossError, MalformedFrameError
from indilog.ids import Instant, MetalogPosition, NodeId, SeqNum, ShardId
from indilog.messages import (
    AppendBatch,
    AuxSet,
    IndexBlock,
    IndexDataWanted,
    MetalogEntries,
    MetalogWanted,
    ReadRecords,
    ShardClaim,
    ShardClaimed,
    ShardOpen,
    ShardOpened,
    ShardProgress,
    ShardStored,
)
from indilog.metalog import Span, entry_decoded, entry_encoded
from indilog.records import RecordBatch, batch_header
from indilog.roles import (
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from indilog.view import Views, placement_of
from storage.batch_reads import BatchReads
from storage.catch_up import CatchUp
from storage.index_data import IndexPage, columns_of, index_block, part_of, unasked
from storage.ordering import Ordering
from storage.record_reads import RecordPage, WaitingReads
from storage.shard import Shard, ShardState, state_decoded, state_encoded

_ENTRIES_AHEAD_MAX: Final = 4096
"""Metalog entries that wait for an earlier one."""
_ORDERING_TOKEN: Final = 0
"""Nothing waits for an entry of the ordering journal."""
_AUX_OVERHEAD_BYTES: Final = 64
"""What aux data costs beside its bytes, roughly."""


class StorageNode:
    """One storage node; see the module."""

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        self._views = views
        self._cluster = config.cluster
        self._config = config.node
        self._shards = _shards_of(node, views)
        self._speaks_for_empty = views[-1].storage_nodes[0] == node
        self._ordering = Ordering(ahead_max=_ENTRIES_AHEAD_MAX)
        self._catch_up = CatchUp(config.node.resend_s)
        self._waiting = WaitingReads(
            reads_max=config.node.lookups_pending_max, timeout_s=config.node.read_timeout_s
        )
        self._reads = BatchReads(
            bytes_max=config.node.record_cache_bytes_max,
            reading_bytes_max=config.node.page_bytes_max,
            tasks_max=config.node.lookups_pending_max,
        )
        self._aux: LRUCache[SeqNum, bytes] = LRUCache(
            config.node.aux_cache_bytes_max, getsizeof=lambda aux: len(aux) + _AUX_OVERHEAD_BYTES
        )
        self._unordered_bytes = 0
        self._next_token = _ORDERING_TOKEN
        self._batches_in_flight: dict[int, tuple[Shard, RecordBatch]] = {}
        self._states_in_flight: dict[int, tuple[NodeId, ShardState]] = {}
        self._report_at: Instant | None = None
        # What one call of `handle` collects, to be said once at its end.
        self._progressed: set[ShardId] = set()
        self._refused: dict[tuple[NodeId, ShardId], None] = {}
        self._blocks: list[IndexBlock] = []

    # --- figures for people

    @property
    def records(self) -> int:
        """How many records are stored here, over all shards."""
        return sum(shard.stored for shard in self._shards.values())

    @property
    def bytes(self) -> int:
        """Bytes of the batches that hold them."""
        return sum(shard.bytes for shard in self._shards.values())

    @property
    def position(self) -> MetalogPosition:
        """How many metalog entries are applied."""
        return self._ordering.position

    # --- recovery

    def recover(self, kind: FrameKind, payload: bytes, location: Location, /) -> None:
        """Take in a frame that was persisted before.

        Raises:
            DataLossError: it does not follow on the frames before it.
        """
        try:
            match kind:
                case FrameKind.RECORDS:
                    self._recover_batch(payload, location)
                case FrameKind.SHARD_STATE:
                    state = state_decoded(payload)
                    if (shard := self._shards.get(state.shard)) is not None:
                        shard.apply(state)
                case FrameKind.ORDERING:
                    self._recover_entry(payload, location)
                case FrameKind.METALOG:
                    raise MalformedFrameError("a storage node writes no metalog")
        except MalformedFrameError as error:
            raise DataLossError(f"The frame at {location} cannot be read: {error}.") from error

    def _recover_batch(self, payload: bytes, location: Location) -> None:
        header = batch_header(payload)
        if (shard := self._shards.get(header.shard)) is None:
            return
        if header.first != shard.stored:
            raise DataLossError(
                f"Shard {shard.id} continues at localid {header.first} at {location}, "
                f"but {shard.stored} were recovered."
            )
        shard.store(header.first, header.end, location)

    def _recover_entry(self, payload: bytes, location: Location) -> None:
        entry = entry_decoded(payload)
        if entry.position != self._ordering.position:
            raise DataLossError(
                f"The ordering journal continues at position {entry.position} at {location}, "
                f"but {self._ordering.position} were recovered."
            )
        for _, spans in self._ordering.put((entry,)):
            for span in spans:
                if (shard := self._shards.get(span.shard)) is not None:
                    shard.order(span)

    # --- the role

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """React to events; say once what they add up to."""
        effects: list[Effect] = []
        for event in events:
            effects += self._on_event(event, now)
        return effects + self._conclude(now)

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received():
                return self._on_message(event, now)
            case Persisted(token, location):
                return self._on_persisted(token, location)
            case FrameRead(token, payload):
                return self._reads.on_read(token, payload)
            case Started():
                self._progressed.update(self._shards)
                self._catch_up.start()
                return []

    def _on_message(self, event: Received, now: Instant) -> list[Effect]:
        match event.message:
            case AppendBatch(batch):
                return self._on_append_batch(event, batch)
            case MetalogEntries() as message:
                return self._on_metalog_entries(event, message)
            case ReadRecords() as message:
                return self._on_read_records(event, message, now)
            case IndexDataWanted() as message:
                return self._on_index_data_wanted(event, message)
            case AuxSet() as message:
                return self._on_aux_set(event, message)
            case ShardClaim() as message:
                return self._on_shard_claim(event, message)
            case ShardOpen() as message:
                return self._on_shard_open(event, message)
            case _:
                return [Ignore(event, "not a message for a storage node")]

    def deadline(self) -> Instant | None:
        """When something is to be said again, or a read has waited too long."""
        times = (self._report_at, self._catch_up.deadline(), self._waiting.deadline())
        return min((time for time in times if time is not None), default=None)

    def _conclude(self, now: Instant) -> list[Effect]:
        """Say what this turn's events add up to, and what is due."""
        effects = self._refusals() + self._progress(now)
        if self._blocks:
            blocks, self._blocks = self._blocks, []
            effects += unasked(self._views[-1], blocks)
        effects += [
            Ignore(read, "waited too long for its metalog position")
            for read in self._waiting.expired(now)
        ]
        effects += self._reads.advance()
        if self._catch_up.due(self.position, now, waiting=len(self._waiting) > 0):
            effects.append(Send(self._views[-1].primary, MetalogWanted(self.position)))
        return effects

    # --- appends

    def _on_append_batch(self, event: Received, buffer: bytes) -> list[Effect]:
        if len(buffer) > self._cluster.batch_bytes_max:
            return [Ignore(event, "a batch larger than batch_bytes_max")]
        try:
            batch = RecordBatch(buffer)
        except MalformedFrameError:
            return [Ignore(event, "not an intact record batch")]
        header = batch.header
        shard = self._shards.get(header.shard)
        if shard is None or header.logspace != self._views[-1].logspace:
            return [Ignore(event, "a batch of a shard that is not kept here")]
        if not header.records:
            return [Ignore(event, "a batch without records")]
        if header.epoch > shard.opened and header.epoch >= shard.claimed:
            # No answer: a writer that is not open here could only send the same again, at once.
            return [Ignore(event, "a batch of a writer that has not opened the shard here")]
        if header.epoch != shard.claimed or header.first != shard.written:
            self._refused[event.sender, shard.id] = None
            return []
        return self._accept(shard, batch)

    def _accept(self, shard: Shard, batch: RecordBatch) -> list[Effect]:
        shard.written = batch.header.end
        shard.unordered.append(batch)
        self._unordered_bytes += len(batch.buffer)
        while self._unordered_bytes > self._config.append_pending_bytes_max and shard.unordered:
            # Its tags are read back from the disk when index nodes ask for them.
            self._unordered_bytes -= len(shard.unordered.popleft().buffer)
        token = self._token()
        self._batches_in_flight[token] = (shard, batch)
        return [Persist(FrameKind.RECORDS, batch.buffer, token)]

    def _token(self) -> int:
        self._next_token += 1
        return self._next_token

    def _on_persisted(self, token: int, location: Location) -> list[Effect]:
        if token == _ORDERING_TOKEN:
            return []
        if (written := self._batches_in_flight.pop(token, None)) is None:
            return self._on_state_persisted(*self._states_in_flight.pop(token))
        shard, batch = written
        if batch.header.epoch == shard.opened:
            shard.store(batch.header.first, batch.header.end, location)
            self._reads.remember(location, batch)
            self._progressed.add(shard.id)
        return []

    def _refusals(self) -> list[Effect]:
        """Tell writers, once a turn, how far their shards are here."""
        if not self._refused:
            return []
        refused, self._refused = self._refused, {}
        effects: list[Effect] = []
        for sender, shard_id in refused:
            shard = self._shards[shard_id]
            effects.append(Send(sender, ShardStored(shard_id, shard.claimed, shard.written)))
        return effects

    def _progress(self, now: Instant) -> list[Effect]:
        """Tell the primary how far shards are stored; again while something is unordered."""
        if self._report_at is not None and now >= self._report_at:
            self._report_at = None
            self._progressed.update(s.id for s in self._shards.values() if s.stored > s.ordered)
        if not self._progressed:
            return []
        shards = [self._shards[shard] for shard in sorted(self._progressed)]
        self._progressed.clear()
        stored = {shard.id: (shard.opened, shard.stored) for shard in shards if shard.open}
        if not stored:
            return []
        if self._report_at is None:
            self._report_at = Instant(now + self._config.resend_s)
        return [Send(self._views[-1].primary, ShardProgress(stored))]

    # --- writers

    def _on_shard_claim(self, event: Received, message: ShardClaim) -> list[Effect]:
        if (shard := self._shards.get(message.shard)) is None:
            return [Ignore(event, "a claim of a shard that is not kept here")]
        if message.epoch < max(shard.claimed, 0):
            return [Ignore(event, "a claim of an older writer")]
        if message.epoch == shard.claimed:
            if shard.changing:
                return []
            return [Send(event.sender, ShardClaimed(shard.id, shard.claimed, shard.stored))]
        return self._change(event.sender, shard, ShardState(shard.id, message.epoch, None))

    def _on_shard_open(self, event: Received, message: ShardOpen) -> list[Effect]:
        shard = self._shards.get(message.shard)
        if shard is None or message.epoch != shard.claimed or message.epoch < 0:
            return [Ignore(event, "opening a shard that this writer has not claimed here")]
        if shard.changing:
            return []
        if shard.open:
            return [Send(event.sender, ShardOpened(shard.id, shard.opened, message.start))]
        if not shard.can_open_at(message.start):
            return [Ignore(event, "opening a shard below what is ordered, or not at a batch")]
        state = ShardState(shard.id, message.epoch, message.start)
        return self._change(event.sender, shard, state)

    def _change(self, sender: NodeId, shard: Shard, state: ShardState) -> list[Effect]:
        """Apply a state at once, in the order of the journal; it is answered when it is durable."""
        self._unordered_bytes -= sum(len(batch.buffer) for batch in shard.unordered)
        shard.apply(state)
        self._unordered_bytes += sum(len(batch.buffer) for batch in shard.unordered)
        shard.changing += 1
        token = self._token()
        self._states_in_flight[token] = (sender, state)
        return [Persist(FrameKind.SHARD_STATE, state_encoded(state), token)]

    def _on_state_persisted(self, sender: NodeId, state: ShardState) -> list[Effect]:
        shard = self._shards[state.shard]
        shard.changing -= 1
        if state.start is None:
            return [Send(sender, ShardClaimed(shard.id, state.epoch, shard.stored))]
        self._progressed.add(shard.id)
        return [Send(sender, ShardOpened(shard.id, state.epoch, state.start))]

    # --- order

    def _on_metalog_entries(self, event: Received, message: MetalogEntries) -> list[Effect]:
        if event.sender != self._views[-1].primary:
            return [Ignore(event, "metalog entries of somebody who is not the primary")]
        applied = self._ordering.put(message.entries)
        self._catch_up.heard(news=bool(applied), gap=self._ordering.gap)
        effects: list[Effect] = []
        for entry, spans in applied:
            effects.append(Persist(FrameKind.ORDERING, entry_encoded(entry), _ORDERING_TOKEN))
            self._order(entry.position, spans)
        for read in self._waiting.ready(self._ordering.tail):
            self._start_read(read)
        return effects

    def _order(self, position: MetalogPosition, spans: Sequence[Span]) -> None:
        """Give records their seqnums; collect the index data for which this replica speaks."""
        speaks = not spans and self._speaks_for_empty
        parts = []
        tail = self._ordering.spans_at(position)[0]
        for span in spans:
            if (shard := self._shards.get(span.shard)) is None:
                continue
            batches = shard.order(span)
            self._unordered_bytes -= sum(len(batch.buffer) for batch in batches)
            if shard.leading:
                speaks = True
                parts.append(part_of(span, map(columns_of, batches)))
        if speaks:
            self._blocks.append(index_block(position, tail, spans, parts))

    # --- reads

    def _on_read_records(self, event: Received, message: ReadRecords, now: Instant) -> list[Effect]:
        if message.shard not in self._shards:
            return [Ignore(event, "a read of a shard that is not kept here")]
        if not message.seqnums or min(message.seqnums) < 0:
            return [Ignore(event, "a read of nothing, or of negative seqnums")]
        if max(message.seqnums) < self._ordering.tail:
            return self._started(event, self._start_read(message))
        if not self._waiting.add(message, now):
            return [Ignore(event, "too many reads wait for their metalog position")]
        return []

    def _start_read(self, message: ReadRecords) -> bool:
        page = RecordPage(
            message,
            self._shards[message.shard],
            self._aux,
            bytes_max=self._config.page_bytes_max,
        )
        return self._reads.start(page)

    def _on_index_data_wanted(self, event: Received, message: IndexDataWanted) -> list[Effect]:
        if message.start < 0 or message.step < 1:
            return [Ignore(event, "index data of no sensible range of positions")]
        end = min(message.end, self._ordering.position)
        positions = range(message.start, end, message.step)
        page = IndexPage(event.sender, positions, self._ordering, self._shards)
        return self._started(event, self._reads.start(page))

    def _started(self, event: Received, started: bool) -> list[Effect]:
        return [] if started else [Ignore(event, "too many reads are under way")]

    def _on_aux_set(self, event: Received, message: AuxSet) -> list[Effect]:
        size = len(message.aux)
        if message.shard not in self._shards:
            return [Ignore(event, "aux data for a shard that is not kept here")]
        if size > self._cluster.aux_bytes_max:
            return [Ignore(event, "aux data larger than aux_bytes_max")]
        if size + _AUX_OVERHEAD_BYTES <= self._config.aux_cache_bytes_max:
            self._aux[message.seqnum] = message.aux
        return []

    # --- checks

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        for shard in self._shards.values():
            shard.check_invariants()
        self._ordering.check_invariants()
        self._reads.check_invariants()
        held = [batch for shard in self._shards.values() for batch in shard.unordered]
        assert self._unordered_bytes == sum(len(batch.buffer) for batch in held)
        assert not (self._progressed or self._refused or self._blocks), "said at the turn's end"


def _shards_of(node: NodeId, views: Views) -> dict[ShardId, Shard]:
    """Return the shards that `node` keeps in any view; it leads those that name it first."""
    shards: dict[ShardId, Shard] = {}
    for shard in sorted({shard for view in views for shard in view.shards_of(node)}):
        placement = placement_of(views, shard)
        assert placement is not None, "a view names it"
        shards[shard] = Shard(shard, leading=placement.replicas[0] == node)
    return shards
