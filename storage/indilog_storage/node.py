"""The storage node: one role for all shards of which the node keeps a replica (ARCHITECTURE 8 and
9).

`Appends` stores the batches of writers. Metalog entries are applied in order, without gaps; an
entry gives records their seqnums. The applied entries are journaled in batches and without a sync,
because a node can fetch entries again. For each position, the first replica of a shard sends the
tags of the shard's ordered records to the index (type-S data). A read by seqnum waits until the
metalog is applied up to this seqnum.

If the disk lost or damaged records, the replica reports them as unknown, never as absent. `Repair`
fetches them from another replica.

A shell of `indilog.runtime` passes events to `StorageNode.handle` and executes the returned
effects. Writers, readers, index nodes, the primary and other storage nodes send the messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, assert_never

from cachetools import LRUCache

from indilog.base.ids import Instant, MetalogPosition, NodeId, SeqNum, ShardId
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.cold import ColdAnswer, ColdBatchRead, ColdObject
from indilog.kernel.index_schedule import NO_POSITION
from indilog.kernel.metalog import (
    Entry,
    NewRecords,
    NewReplicas,
    NewView,
    NewWriters,
    Span,
    Trim,
)
from indilog.kernel.placement import Placement
from indilog.kernel.view import View, Views
from indilog.roles.catch_up import CatchUp
from indilog.roles.disk_full import DiskFullNotifier
from indilog.roles.leadership import Leadership
from indilog.roles.role import (
    CellsAnswered,
    ColdAnswered,
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Lost,
    MembersWanted,
    Persist,
    Persisted,
    Received,
    Send,
    SnapshotsAnswered,
    SpaceChanged,
    Started,
    TermBegun,
)
from indilog.wire.base_messages import History, HistoryWanted, MetalogBase, MetalogCovered
from indilog.wire.cell_messages import CellQuestion
from indilog.wire.messages import (
    AppendBatch,
    AuxSet,
    Batches,
    BatchesWanted,
    IndexBlock,
    IndexDataWanted,
    MetalogEntries,
    ReadRecords,
    ShardStoredWanted,
    TermIs,
)
from indilog.wire.order_lookup_messages import PlacesFound, PlacesLookup, TimeFound, TimeLookup
from indilog.wire.tag_messages import DiscardedWanted, TagFloors, TagFloorsWanted
from indilog_storage.appends import Appends
from indilog_storage.batch_reads import BatchReads, BatchTask
from indilog_storage.cells import serve_cells
from indilog_storage.checkpoint import Covered, checkpoint_of, restore
from indilog_storage.cold_tier import ColdObjectsKept, ColdTier
from indilog_storage.discarded import answer_discarded
from indilog_storage.disk_care import DiskCare
from indilog_storage.heartbeat import StorageHeartbeat
from indilog_storage.history import HistoryFetch, history_for
from indilog_storage.index_data import (
    IndexPage,
    announce_incarnation,
    columns_of,
    distribute,
    index_block,
    part_of,
)
from indilog_storage.moved_shards import MovedShards
from indilog_storage.ordering import Ordering
from indilog_storage.ordering_journal import TOKEN as ORDERING_TOKEN
from indilog_storage.ordering_journal import OrderingJournal
from indilog_storage.record_reads import RecordPage, WaitingReads, unmet
from indilog_storage.recovery import BATCHES, Recovery, cut_off
from indilog_storage.repair import BatchPage
from indilog_storage.rewritten import needed
from indilog_storage.shard import Shard
from indilog_storage.trims import (
    announce_trim,
    announce_trims,
    floors_page,
)

_NEVER: Final = Instant(math.inf)
_COLD_READS: Final = 4
"""Largest number of requested reads of cold storage, per read that the process can execute
at once.
"""
_PLACES_MAX: Final = 4096
"""Largest number of spans in one answer."""
_AUX_OVERHEAD_BYTES: Final = 64
"""About how many bytes of memory an entry of aux data takes besides its own bytes."""


class StorageNode:
    """The role of one storage node."""

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        self._leadership = Leadership(views[-1])
        self._config = config.node
        self._aux_bytes_max = config.cluster.aux_bytes_max
        self._moved = MovedShards(node, Placement(views[-1]))
        self._shards: Mapping[ShardId, Shard] = self._moved.shards
        self._appends = Appends(self._moved, views[-1].logspace, config)
        self._ordering = Ordering()
        self._cold = ColdObjectsKept()
        self._recovery = Recovery(self._moved, self._ordering, self._cold)
        self._catch_up = CatchUp(
            self._ordering.reader,
            Resend(config.node.messages.resend_s, config.node.messages.resend_s_max),
        )
        self._history = HistoryFetch(node, self._moved.placement, self._ordering, config.node)
        self._unsaved = 0
        """Entries fetched from other storage nodes that no durable checkpoint holds yet."""
        self._saving = 0
        """Number of unsaved entries in the checkpoint that is being written."""
        self._covered = Covered()
        self._waiting = WaitingReads(
            reads_max=config.node.reads.lookups_pending_max,
            timeout_s=config.node.reads.read_timeout_s,
        )
        self._reads = BatchReads(
            bytes_max=config.node.caches.record_cache_bytes_max,
            reading_bytes_max=config.node.messages.page_bytes_max,
            tasks_max=config.node.reads.lookups_pending_max,
            cold_max=_COLD_READS * config.node.cold.cold_requests_max,
            objects=self._cold.objects,
        )
        self._aux: LRUCache[SeqNum, bytes] = LRUCache(
            config.node.caches.aux_cache_bytes_max,
            getsizeof=lambda aux: len(aux) + _AUX_OVERHEAD_BYTES,
        )
        cold = ColdTier(self._cold, self._moved, self._ordering, self._covered, config.node)
        floors = self._ordering.floors
        self._care = DiskCare(self._moved, floors, cold, config.node)
        self._heartbeat = StorageHeartbeat(self._moved, self._ordering, config.node)
        self._disk_full_notifier = DiskFullNotifier(views[-1].engines)
        self._blocks: list[IndexBlock] = []
        self._journal = OrderingJournal()
        self.replaced = 0
        """Entries that were applied in this incarnation and later replaced by the primary."""
        self._needs_upkeep = False
        """Whether upkeep is due, because this iteration had other events than batches and entries.
        """
        self._upkeep_at = Instant(0.0)
        self._restored = False
        """Whether this incarnation started from a checkpoint."""

    # --- for programs that read a data directory (decision 0035)

    @property
    def shards(self) -> Mapping[ShardId, Shard]:
        """The shards of which the node keeps a replica. The caller must not change them."""
        return self._shards

    @property
    def ordering(self) -> Ordering:
        """The applied entries. The caller must not change them."""
        return self._ordering

    @property
    def cold_objects(self) -> Mapping[int, ColdObject]:
        """The node's objects on cold storage, by number. The caller must not change them."""
        return self._cold.objects

    @property
    def _view(self) -> View:
        """The newest view that the applied entries install."""
        return self._moved.placement.view

    # --- figures for operators

    @property
    def records(self) -> int:
        """Number of records stored here, over all shards."""
        return sum(shard.stored for shard in self._shards.values())

    @property
    def position(self) -> MetalogPosition:
        """Number of applied metalog entries."""
        return self._ordering.position

    def status(self) -> dict[str, Any]:
        """Return figures for operators; `bytes` is the size of the stored batches."""
        return {
            "records": self.records,
            "bytes": sum(shard.bytes for shard in self._shards.values()),
            "position": self.position,
            "tail": self._ordering.tail,
            "cached_bytes": self._reads.cached_bytes,
            "read_only": int(self._appends.room is not None),
            "reads_waiting": len(self._waiting),
            "replaced_entries": self.replaced,
            "trims": self._ordering.trims,
            "floors": len(self._ordering.floors.logs) + len(self._ordering.floors.tags),
            **self._care.status(),
            **self._cold_status(),
        }

    def _cold_status(self) -> dict[str, int]:
        if not self._cold.objects:
            return {}
        return {"cold_reads": self._reads.cold_reads, "cold_misses": self._reads.cold_misses}

    # --- recovery, and what recovery needs

    def recover(self, kind: FrameKind, payload: bytes, location: Location, /) -> None:
        """Replay a frame of the journal.

        Raises:
            DataLossError: the frame does not follow on the frames before it.
        """
        self._recovery.recover(kind, payload, location)
        if kind is FrameKind.ORDERING:
            self._journal.recover(payload)

    def lost(self, frame: Lost, /) -> None:
        """Note that a frame cannot be read; its content is fetched from other replicas."""
        self._care.damaged += frame.kind in BATCHES
        self._recovery.lost(frame)

    def needed(self, kind: FrameKind, payload: bytes, location: Location, /) -> bytes | None:
        """Return what must remain of a batch when its segment is rewritten (decision 0016)."""
        return needed(self._moved.kept_or_dropped, self._ordering.floors, kind, payload, location)

    @property
    def derived(self) -> bool:
        """False: the journal of a storage node cannot be rebuilt from other nodes."""
        return False

    @property
    def unsaved(self) -> int:
        """Number of applied entries that are neither journaled nor in a durable checkpoint."""
        return self._unsaved

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the bytes of a dropped shard wait for a checkpoint. A node with few shards writes
        so little that the size of its journal would not cause a checkpoint for a long time.
        """
        waits = self._moved.awaits_checkpoint(self._covered.older.length, self.position)
        return waits and not self._ordering.reader.behind

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the state of the node. The returned function encodes the copy, and may run in any
        thread.
        """
        self._saving = self._unsaved
        before = self._covered.take(self._ordering.extent)
        objects = self._cold.objects
        return checkpoint_of(self._ordering, self._moved, self._journal, before, objects)

    def checkpointed(self) -> None:
        """Note that the last checkpoint is durable. The primary is then notified which entries the
        checkpoints cover.
        """
        self._unsaved -= self._saving
        self._saving = 0
        self._covered.note_written()
        self._needs_upkeep = True

    def restore(self, payload: bytes, gone: Collection[int], /) -> None:
        """Start from a checkpoint; batches in segments that are `gone` are missing.

        Raises:
            MalformedFrameError: the checkpoint is of a version that this release does not know.
        """
        restore(
            payload, gone, self._ordering, self._moved, self._covered, self._journal,
            self._cold.objects,
        )  # fmt: skip
        self._restored = True

    def recovered(self) -> None:
        """Accept any damage: a storage node serves what it has and repairs the rest."""

    # --- the role

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Apply a batch of events; report the result of all of them once."""
        effects: list[Effect] = []
        for event in events:
            effects += self._on_event(event, now)
        effects += self._appends.conclude(self._leadership, self.position, now)
        if self._blocks:
            blocks, self._blocks = self._blocks, []
            effects += distribute(self._view, blocks, self._ordering.last)
        if self._needs_upkeep or now >= self._upkeep_at:
            effects += self._upkeep(now)
        elif events:
            self._upkeep_at = min(self._upkeep_at, Instant(now + self._config.messages.resend_s))
        return effects

    def _on_event(  # noqa: C901, PLR0911 one a kind
        self, event: Event, now: Instant
    ) -> list[Effect]:
        match event:
            case Received():
                return self._on_message(event, now)
            case Persisted(token, location):
                return self._on_persisted(token, location)
            case FrameRead(token, payload):
                self._needs_upkeep = True
                return (self._care if token < 0 else self._reads).on_read(token, payload)
            case SpaceChanged(room):
                self._needs_upkeep = True
                self._appends.room = room
                self._care.repair.paused = room is not None
                self._disk_full_notifier.changed(full=room is not None, now=now)
                self._heartbeat.has_room = room is None
                return []
            case Started(epoch):
                self._needs_upkeep = True
                self._appends.start()
                self._moved.start(self.position)
                self._care.start(now, unread=self._restored)
                self._ordering.reader.start(epoch)
                self._history.start(epoch)
                self._ordering.reader.mark_unconfirmed()
                return []
            case TermBegun():
                return self._on_term(event)
            case MembersWanted():
                return []
            case ColdAnswered(answer):
                return self._on_cold(answer, now)
            case CellsAnswered(to, answer):
                return [Send(to, answer)]
            case SnapshotsAnswered():
                raise AssertionError("a storage node has no snapshots")

    def _on_term(self, event: TermBegun, sender: NodeId | None = None) -> list[Effect]:
        """Report all shards to the primary of a new term, and ask it to confirm the copy of the
        metalog here.
        """
        before = self._leadership.primary
        if self._leadership.begin(event, sender):
            self._needs_upkeep = True
            self._ordering.reader.begin_term(elsewhere=event.primary != before)
            self._appends.report()
            self._heartbeat.make_due()
            self._covered.is_unreported = True
        return []

    def _on_cold(self, answer: ColdAnswer, now: Instant) -> list[Effect]:
        self._needs_upkeep = True
        if isinstance(answer, ColdBatchRead):
            return self._reads.on_cold_read(answer)
        return self._care.cold.on_answer(answer, now)

    def _on_message(self, event: Received, now: Instant) -> list[Effect]:
        match event.message:
            case AppendBatch(batch):
                effects = self._appends.on_batch(event, batch)
                self._needs_upkeep = self._needs_upkeep or bool(self._appends.awaited)
                return effects
            case MetalogEntries() as message:
                return self._on_metalog_entries(event, message)
            case _:
                self._needs_upkeep = True
                return self._on_other_message(event, now)

    def _on_other_message(  # noqa: PLR0911 one a kind
        self, event: Received, now: Instant
    ) -> list[Effect]:
        match event.message:
            case MetalogBase() | History() | HistoryWanted() | TagFloors() as message:
                return self._on_history(event, message)
            case BatchesWanted() | Batches() | DiscardedWanted() | TagFloorsWanted() as message:
                return self._on_copies(event, message, now)
            case ShardStoredWanted() as message:
                return self._appends.on_stored_wanted(event, message)
            case (
                ReadRecords() | IndexDataWanted() | TimeLookup() | PlacesLookup() | AuxSet()
            ) as message:
                return [*self._heartbeat.inform(event), *self._on_reader(event, message, now)]
            case message if isinstance(message, CellQuestion):
                room = self._appends.room is None
                return [serve_cells(event, message, self._view.engines, has_room=room)]
            case TermIs(term, primary):
                return self._on_term(TermBegun(term, primary), event.sender)
            case _:
                return [Ignore(event, "not a message for a storage node")]

    def _on_reader(
        self,
        event: Received,
        message: ReadRecords | IndexDataWanted | TimeLookup | PlacesLookup | AuxSet,
        now: Instant,
    ) -> list[Effect]:
        match message:
            case ReadRecords():
                return self._on_read_records(event, message, now)
            case IndexDataWanted():
                return self._on_index_data_wanted(event, message)
            case TimeLookup():
                return self._on_time_lookup(event, message)
            case PlacesLookup():
                return self._on_places_lookup(event, message)
            case AuxSet():
                return self._on_aux_set(event, message)

    def _on_copies(
        self,
        event: Received,
        message: BatchesWanted | Batches | DiscardedWanted | TagFloorsWanted,
        now: Instant,
    ) -> list[Effect]:
        """Answer nodes that lack records or floors; store batches that this node lacks."""
        match message:
            case BatchesWanted():
                return self._on_batches_wanted(event, message)
            case Batches():
                return self._on_batches(event, message, now)
            case DiscardedWanted():
                shard = self._shards.get(message.shard)
                return [answer_discarded(event, message, shard, self._ordering)]
            case TagFloorsWanted():
                # The sender may know of a trim that is not applied here.
                self._ordering.reader.mark_unconfirmed()
                return [floors_page(self._ordering, message, event.sender)]

    def _on_persisted(self, token: int, location: Location) -> list[Effect]:
        if token == ORDERING_TOKEN:
            return []
        if token < ORDERING_TOKEN:
            self._needs_upkeep = True
            return self._care.on_persisted(token, location)
        if (stored := self._appends.on_persisted(token, location)) is not None:
            self._reads.remember(stored.location, stored.batch)
        return []

    def deadline(self) -> Instant | None:
        """When to resend a message, or to end a read that has waited too long."""
        own = self._appends.deadline()
        due = self._upkeep_at if own is None else min(own, self._upkeep_at)
        return due if due < _NEVER else None

    def _upkeep(self, now: Instant) -> list[Effect]:
        """Do the work that is skipped in an iteration with only batches and entries."""
        effects = self._disk_full_notifier.conclude(now)
        effects += [
            Ignore(read, "waited too long for its metalog position")
            for read in self._waiting.pop_expired(now)
        ]
        self._reads.note_moved(self._care.cold.pop_moved())
        effects += self._reads.advance()
        effects += self._care.conclude(now, self._reads.damaged)
        wanted = self._catch_up.ask(now, waiting=self._awaits_entries())
        if wanted is not None:
            effects.append(Send(self._leadership.primary, wanted))
        epoch, position = self._covered.older
        if position and (wanted is not None or self._covered.is_unreported):
            self._covered.is_unreported = False
            term, primary = self._leadership.term, self._leadership.primary
            effects.append(Send(primary, MetalogCovered(term, position, epoch)))
        effects += self._history.conclude(now)
        if not self._ordering.reader.behind:  # a missing entry may move the shard here again
            effects += self._moved.free_dropped(self._covered.older.length)
        if self._moved.has_freed:
            self._moved.has_freed = False
            self._care.cold.note_risen_floors()
        effects += self._heartbeat.conclude(self._leadership, now)
        self._needs_upkeep = False
        parts = (
            self._catch_up, self._waiting, self._disk_full_notifier, self._care, self._history,
            self._heartbeat,
        )  # fmt: skip
        times = (part.deadline() for part in parts)
        self._upkeep_at = min((time for time in times if time is not None), default=_NEVER)
        return effects

    def _awaits_entries(self) -> bool:
        """Whether entries may exist that are not applied here: a read waits, stored records are
        unordered, or a writer is not known.
        """
        if self._waiting or self._appends.awaited:
            return True
        return any(s.stored > s.ordered for s in self._shards.values())

    # --- order

    def _on_metalog_entries(self, event: Received, message: MetalogEntries) -> list[Effect]:
        if event.sender != self._leadership.primary:
            return [Ignore(event, "metalog entries of a node that is not the primary")]
        reader = self._ordering.reader
        was_behind, last = reader.behind, reader.lineage.last
        taken = reader.take(event, message)
        if taken.refused is not None:
            return [Ignore(event, taken.refused)]
        self._needs_upkeep = self._needs_upkeep or was_behind or reader.behind
        effects: list[Effect] = []
        if taken.entries:
            self._history.end()
        if taken.restarted:
            self._appends.report()  # the primary has forgotten earlier reports
        if taken.wrong_from is not None:
            effects += self._cut_off(taken.wrong_from)
        for entry in taken.entries:
            effects += self._apply(entry)
        if last and self._ordering.last != last and self._moved.announces:
            effects += announce_incarnation(self._view, self._ordering)
            effects += announce_trims(self._view, self._ordering)
            effects += self._heartbeat.announce()
        if len(self._journal.pending) >= self._config.ordering.ordering_frame_entries:
            effects += self._journal.flush()
        for read in self._waiting.pop_ready(self._ordering):
            effects += self._start_read(event, read)
        return effects

    def _apply(self, entry: Entry) -> list[Effect]:
        spans = self._ordering.apply(entry)
        effects: list[Effect] = [*self._journal.add(entry)]
        self._order(entry.position, spans)
        match entry:
            case NewRecords():
                pass
            case NewWriters():
                self._begin_writers(entry)
                # On disk the entry must come before the batches of the writers that it names.
                effects += self._journal.flush()
            case NewReplicas() | NewView():
                self._apply_placement()
                effects += self._journal.flush()
                effects += self._heartbeat.announce()
            case Trim():
                self._needs_upkeep = True
                self._care.note_risen_floors()
                if self._moved.announces:
                    effects += announce_trim(entry, self._view, self._ordering)
            case unreachable:
                assert_never(unreachable)
        return effects

    def _begin_writers(self, entry: NewWriters) -> None:
        for shard, epoch in entry.writers.items():
            if (given := self._shards.get(shard)) is not None:
                self._appends.begin(given, epoch)

    def _apply_placement(self) -> None:
        """Add and drop shards as the applied entries say, and notify the nodes of the newest
        view.
        """
        self._moved.apply_placement(self._ordering)
        self._disk_full_notifier.set_receivers(self._view.engines)
        self._appends.note_moved()
        self._care.repair.note_moved()
        self._heartbeat.make_due()
        self._needs_upkeep = True

    def _on_history(
        self, event: Received, message: MetalogBase | History | HistoryWanted | TagFloors
    ) -> list[Effect]:
        """Fetch old entries from other storage nodes, or send them old entries."""
        match message:
            case MetalogBase():
                if event.sender != self._leadership.primary:
                    return [Ignore(event, "a base of a node that is not the primary")]
                return self._on_base(event, message)
            case HistoryWanted():
                lacking = self._history.base is not None
                answer = history_for(message, self._ordering, lacking=lacking)
                if answer is None:
                    self._ordering.reader.mark_unconfirmed()
                    return [Ignore(event, "what old entries ordered is not known here yet")]
                return [Send(event.sender, answer)]
            case TagFloors():
                return self._history.on_floors(event, message)
            case History():
                return self._adopt(event, message)

    def _on_base(self, event: Received, message: MetalogBase) -> list[Effect]:
        reader = self._ordering.reader
        if reader.note_incarnation(event.incarnation):
            self._appends.report()  # the primary has forgotten earlier reports
        if (reason := reader.refused_base(event, message)) is not None:
            return [Ignore(event, reason)]
        self._history.begin(message.base)
        return []

    def _adopt(self, event: Received, message: History) -> list[Effect]:
        """Apply entries from another storage node. Index nodes request the index data of these
        entries if they lack it.
        """
        entries = self._history.on_history(event, message)
        if not entries:
            return []
        effects: list[Effect] = []
        if message.start < self.position:
            self._ordering.reader.lineage.cut_off(message.start)
            effects += self._cut_off(message.start)
        for entry in entries:
            for span in self._ordering.recover(entry):
                if (shard := self._shards.get(span.shard)) is not None:
                    self._appends.order(shard, span)
            match entry:
                case NewWriters():
                    self._begin_writers(entry)
                case NewReplicas() | NewView():
                    self._apply_placement()
                case NewRecords() | Trim():
                    pass
                case unreachable:
                    assert_never(unreachable)
        self._unsaved += len(entries)
        self._journal.skip()
        base = self._history.base
        if base is not None and self._ordering.has(base.position, base.last):
            self._history.end()
            self._ordering.reader.mark_unconfirmed()
            self._care.note_risen_floors()
            effects += self._journal.flush()
        return effects

    def _cut_off(self, position: MetalogPosition) -> list[Effect]:
        """Remove the entries from `position` on, and their seqnums, because the primary has
        replaced these entries.

        Index nodes detect their outdated entries by the epochs in new index data (decision 0031).
        """
        replaced = self.position - position
        self.replaced += replaced
        cut_off(position, self._ordering, self._moved)
        self._appends.note_moved()
        self._care.repair.note_moved()
        self._journal.cut_off(position)
        self._blocks = [block for block in self._blocks if block.position < position]
        self._aux.clear()
        self._reads.drop_tasks()
        return [
            Ignore(position, f"{replaced:,} metalog entries were replaced after they were read")
        ]

    def _after_entries(self, effects: list[Effect]) -> list[Effect]:
        """Journal the pending entries before repaired batches, because replay of such a batch must
        know which records were ordered.
        """
        if self._journal.pending and any(isinstance(effect, Persist) for effect in effects):
            return [*self._journal.flush(), *effects]
        return effects

    def _order(self, position: MetalogPosition, spans: Sequence[Span]) -> None:
        """Assign seqnums to records; collect the index data that this replica must send."""
        announces = not spans and self._moved.announces
        parts = []
        for span in spans:
            if (shard := self._shards.get(span.shard)) is None:
                continue
            batches = self._appends.order(shard, span)
            self._needs_upkeep = self._needs_upkeep or bool(shard.holes)
            if shard.leading:
                announces = True
                parts.append(part_of(span, map(columns_of, batches)))
        if announces:
            self._blocks.append(index_block(self._view, position, self._ordering, spans, parts))

    # --- reads

    def _on_read_records(self, event: Received, message: ReadRecords, now: Instant) -> list[Effect]:
        if message.shard not in self._shards:
            return [Ignore(event, "a read of a shard that is not kept here")]
        if not message.seqnums or min(message.seqnums) < 0:
            return [Ignore(event, "a read of nothing, or of negative seqnums")]
        if (awaited := unmet(message, self._ordering)) is None:
            return self._start_read(event, message)
        if not self._waiting.add(message, awaited, now):
            return [Ignore(event, "too many reads wait for their metalog position")]
        return []

    def _start_read(self, event: Received, message: ReadRecords) -> list[Effect]:
        if (shard := self._shards.get(message.shard)) is None:
            return [Ignore(event, "a read of a shard that was moved while it waited")]
        page = RecordPage(
            message,
            shard,
            self._aux,
            self._ordering,
            since=self._moved.placement.since(message.shard),
            bytes_max=self._config.messages.page_bytes_max,
        )
        return self._start(event, page)

    def _on_index_data_wanted(self, event: Received, message: IndexDataWanted) -> list[Effect]:
        if message.start < 0 or message.step < 1:
            return [Ignore(event, "index data of a range of positions that cannot exist")]
        end = min(message.end, self._ordering.position)
        if end < message.end < NO_POSITION:
            # The sender may know of entries that are not applied here.
            self._ordering.reader.mark_unconfirmed()
        positions = range(message.start, end, message.step)
        page = IndexPage(event.sender, positions, self._view, self._ordering, self._shards)
        return self._start(event, page)

    def _on_batches_wanted(self, event: Received, message: BatchesWanted) -> list[Effect]:
        if (shard := self._shards.get(message.shard)) is None:
            return [Ignore(event, "batches wanted of a shard that is not kept here")]
        page = BatchPage(
            event.sender,
            message,
            shard,
            self._ordering,
            bytes_max=self._config.messages.page_bytes_max,
        )
        return self._start(event, page)

    def _on_batches(self, event: Received, message: Batches, now: Instant) -> list[Effect]:
        rests_on_applied = self._ordering.knows(message.trims, message.copy_of)
        if message.gone and not rests_on_applied:
            self._ordering.reader.mark_unconfirmed()
        effects = self._care.repair.on_batches(
            event, message, now, rests_on_applied=rests_on_applied
        )
        return self._after_entries(effects)

    def _start(self, event: Received, task: BatchTask) -> list[Effect]:
        """Queue a task that reads batches; it is served at the end of the iteration."""
        self._needs_upkeep = True
        if not self._reads.start(task):
            return [Ignore(event, "too many reads are under way")]
        return []

    def _on_time_lookup(self, event: Received, message: TimeLookup) -> list[Effect]:
        ordering = self._ordering
        if (position := ordering.find_time(message.time_us)) is None:
            answer = TimeFound(message.request, ordering.tail, ordering.position, found=False)
        else:
            seqnum = ordering.tail_before(position)
            answer = TimeFound(message.request, seqnum, position + 1, found=True)
        return [Send(event.sender, answer)]

    def _on_places_lookup(self, event: Received, message: PlacesLookup) -> list[Effect]:
        if not 0 <= message.start < message.end:
            return [Ignore(event, "places of a range of seqnums that cannot exist")]
        ordering = self._ordering
        spans = ordering.places(message.start, message.end, _PLACES_MAX)
        answer = PlacesFound(message.request, ordering.position, bool(spans), spans)
        return [Send(event.sender, answer)]

    def _on_aux_set(self, event: Received, message: AuxSet) -> list[Effect]:
        size = len(message.aux)
        if message.shard not in self._shards:
            return [Ignore(event, "aux data for a shard that is not kept here")]
        if size > self._aux_bytes_max:
            return [Ignore(event, "aux data larger than aux_bytes_max")]
        if size + _AUX_OVERHEAD_BYTES <= self._config.caches.aux_cache_bytes_max:
            self._aux[message.seqnum] = message.aux
        return []

    # --- checks

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        self._appends.check_invariants()
        self._ordering.check_invariants()
        self._reads.check_invariants()
        self._waiting.check_invariants()
        assert self._saving <= self._unsaved
        pending = self._journal.pending
        assert not pending or pending[-1].position < self.position, "only applied entries"
        self._care.repair.check_invariants()
        assert not self._blocks, "sent at the end of the iteration"
