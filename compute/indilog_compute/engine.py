"""The engine: the compute node's role between functions and the log (ARCHITECTURE 8-10, thesis 5).

The engine appends to its shard (`ShardWriter`). It applies type-O data (metalog entries) to the
suffix of its local index; these entries give appends their seqnums. It applies type-S data (index
data) to its tag cache. Reads are answered from the local index and the record cache. A read that
they cannot answer goes to the index tier and storage (`Reads`).

Callers in this process (`LocalLogs`) use direct methods, which put work into the open batch or
answer at once. The caller then wakes the shell, which calls `handle`. Outcomes are `AnswerAppends`
and `Answer` effects.

`position` counts the applied metalog entries, which show which records exist and where. Reads by
tag reflect only the first `tag_position` entries: those whose index data is also applied. An engine
starts at the primary's committed position, and has no local index of older records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, assert_never

from indilog.base.errors import NotReadyError
from indilog.base.ids import (
    EMPTY_TAG,
    Epoch,
    Instant,
    MetalogPosition,
    NodeId,
    SeqNum,
    ShardId,
    TagColumns,
    TagHash,
    unpack_tags,
)
from indilog.base.log import Record
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.metalog import (
    NO_INCARNATION,
    Entry,
    MetalogReplay,
    NewReplicas,
    NewView,
    NewWriters,
    Span,
    Trim,
    replicas_in,
)
from indilog.kernel.placement import Placement
from indilog.kernel.view import Views
from indilog.roles.catch_up import CatchUp
from indilog.roles.index_feed import IndexFeed
from indilog.roles.leadership import Leadership
from indilog.roles.metalog_reader import MetalogReader
from indilog.roles.role import (
    Answer,
    CellsAnswered,
    ColdAnswered,
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    MembersWanted,
    Persisted,
    Received,
    Send,
    SnapshotsAnswered,
    SpaceChanged,
    Started,
    TermBegun,
)
from indilog.wire.base_messages import MetalogBase
from indilog.wire.cell_messages import CellAnswer
from indilog.wire.conditional_messages import (
    ConditionalAnswer,
    ConditionalAppend,
    HomeIs,
    HomeWanted,
)
from indilog.wire.growth_messages import GrowthWanted, LogGrew
from indilog.wire.messages import (
    AuxSet,
    Direction,
    DiskFull,
    IndexData,
    LookupResult,
    MetalogEntries,
    MetalogWanted,
    RecordsRead,
    ShardStored,
    TailIs,
    TailWanted,
    TermIs,
)
from indilog.wire.order_lookup_messages import PlacesFound, TimeFound
from indilog.wire.owner_messages import OwnerAnswer, OwnerAppend
from indilog.wire.tag_messages import SnapshotWanted, TagFirsts, TrimIs
from indilog_compute.cell_questions import CellQuestions
from indilog_compute.conditional.conditional_appends import ConditionalAppends
from indilog_compute.conditional.home import Conditional
from indilog_compute.index_fetch import IndexFetch
from indilog_compute.local_index import LocalIndex
from indilog_compute.log_growth import LogGrowth
from indilog_compute.owner_appends import OwnerAppends
from indilog_compute.reads.local_reads import LocalReads
from indilog_compute.reads.log_floors import LogFloors
from indilog_compute.reads.operation import PENDING, Operation, Pending, Stage
from indilog_compute.reads.order_lookups import OrderLookups
from indilog_compute.reads.reads import Reads
from indilog_compute.reads.record_cache import RecordCache
from indilog_compute.reads.watches import ReadyWaiters, Watches
from indilog_compute.shard_writer import ShardWriter, Takeover, acknowledgements
from indilog_compute.trims import Trims

_NEVER: Final = Instant(math.inf)
_REQUESTS_PER_EPOCH: Final = 1 << 32
"""An incarnation numbers its requests from its epoch times this number on."""


class Engine:
    """One compute node's role.

    Attributes:
        cells: asks storage nodes about write-once cells, for callers in this process.
        owner_appends: appends through the owners of logs, and appends for other compute nodes.
        growth: waits for the growth of logs to which other nodes append.
        order_lookups: finds seqnums by time and places of records, for callers in this process.
        placement: which nodes have which shards, according to the applied entries.
        watches: callers that wait for a record; answered when index data may contain the record.
    """

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        self._node = node
        self.placement = Placement(views[-1])
        self._config = config
        self._leadership = Leadership(views[-1])
        self._extended = config.node.caches.local_index == "extended"
        self._begin()
        self.order_lookups = OrderLookups(self.placement, config.node)
        self.trims = Trims(self._leadership, config.node)
        self.cells = CellQuestions(config.node)
        self.owner_appends = OwnerAppends(config.node)
        self.growth = LogGrowth(config.node)
        self._parts = self.order_lookups, self.trims, self.cells, self.owner_appends, self.growth
        self._writer: ShardWriter | None = None
        self._conditional = ConditionalAppends(node, self.placement, config.node)
        self.watches = Watches(config.node.reads.lookups_pending_max)
        self._outbox: list[Effect] = []
        self._upkeep_at, self._watches_known = Instant(0.0), 0
        self._ready_waiters = ReadyWaiters(config.node.reads.lookups_pending_max)
        self._join = self._new_resend()
        self._join_request = 0
        self._catch_up = CatchUp(MetalogReader(), self._new_resend())
        self._index_fetch = IndexFetch(self.placement, self._new_resend())
        self._epoch = Epoch(0)
        self._own_shards: set[ShardId] = set()
        """The shards that this incarnation has written."""
        self._had_shard = False
        """Whether a view has taken away a shard that this incarnation wrote."""

    def _new_resend(self) -> Resend:
        messages = self._config.node.messages
        return Resend(messages.resend_s, messages.resend_s_max)

    def _begin(self) -> None:
        """Begin with empty caches and without a local index; the engine must then join."""
        node = self._config.node
        self._cache = RecordCache(
            node.caches.record_cache_bytes_max, aux_bytes_max=node.caches.aux_cache_bytes_max
        )
        self._floors = LogFloors(node.trims.log_floors_max)
        self._local_reads = LocalReads(self._cache, self._floors)
        self._reads = Reads(
            self._node, self.placement, self._config, self._cache,
            self._floors, self._leadership,
        )  # fmt: skip
        self._replay = MetalogReplay()
        self._local: LocalIndex | None = None
        self._feed = self._feed_from(0)

    # --- what callers in this process use

    @property
    def ready(self) -> bool:
        """Whether the node has joined, and owns its shard if it has one."""
        return self._local is not None and (
            self._writer is None or self._writer.takeover is Takeover.OPEN
        )

    @property
    def position(self) -> MetalogPosition:
        """How many metalog entries are applied."""
        return self._replay.position

    @property
    def tag_position(self) -> MetalogPosition:
        """How many metalog entries are applied with their index data; local reads reflect them."""
        return self._local.tag_position if self._local is not None else 0

    @property
    def shard(self) -> ShardId | None:
        """The shard that this node writes; None: it has none."""
        return None if self._writer is None else self._writer.shard

    @property
    def primary(self) -> NodeId:
        """The primary of the newest term that this node knows."""
        return self._leadership.primary

    @property
    def tail(self) -> SeqNum:
        """The first seqnum after the records that the applied entries order. The primary may have
        ordered more records.
        """
        return self._replay.tail

    def append(self, data: bytes, columns: TagColumns, waiter: object) -> bool:
        """Put a record into the open batch; the waiter gets `AnswerAppends` with its seqnum.

        Return whether the caller must wake the shell. False: an earlier append of the open batch
        has woken the shell already.

        Raises:
            OverloadedError, SealedError, DiskFullError: as `ShardWriter.add`.
            NotReadyError: this node has no shard, or has stopped.
        """
        if self._writer is None:
            raise self._without_shard()
        first = self._writer.add(data, columns, waiter)
        if self._extended:
            self._reads.questions.appended(unpack_tags(columns.tags))
        return first

    def append_batch(self, records: Sequence[tuple[bytes, TagColumns]], waiter: object) -> None:
        """Put all records into one batch, or none; the waiter gets the first seqnum.

        The caller must wake the shell.

        Raises: as `append`.
        """
        if self._writer is None:
            raise self._without_shard()
        self._writer.add_batch(records, waiter)
        if self._extended:
            for _, columns in records:
                self._reads.questions.appended(unpack_tags(columns.tags))

    def append_if(self, append: Conditional, waiter: object) -> None:
        """Append records if their condition holds; the home of the tag checks the condition.

        The waiter gets `Ordered`, or an error, or `Answered` with an error. The caller must wake
        the shell.

        Raises:
            OverloadedError: too many such appends are under way.
        """
        self._conditional.start(append, waiter)

    def _without_shard(self) -> NotReadyError:
        return NotReadyError("This compute node has no shard to append to.")

    def read(
        self,
        direction: Direction,
        tag: TagHash,
        bound: SeqNum,
        position: MetalogPosition,
        waiter: object,
        log_names: bytes | None = None,
        *,
        log: TagHash = 0,
        fresh: bool = False,
    ) -> Record | Pending | None:
        """Read the next or previous record with `tag`; the hot path of every read.

        `log` is the tag of the log that is read; the floor of the log holds for all its tags.
        Returns the record, or None if there is none as of `tag_position`, or `PENDING`. After
        `PENDING` the waiter gets an `Answered`. A `fresh` read reflects all entries that were
        committed when the read began.

        Raises:
            OverloadedError: too many reads wait already. TrimmedError: see `Log`.
        """
        local = self._local
        if local is not None and position <= local.tag_position and not fresh:
            answer = self._local_reads.answer(local, direction, tag, log, bound)
            if answer is not PENDING:
                return answer
        args = (direction, tag, bound, position, waiter)
        self._reads.start(Operation(*args, log=log, log_names=log_names, fresh=fresh))
        return PENDING

    def read_page(
        self,
        tag: TagHash,
        bound: SeqNum,
        position: MetalogPosition,
        limit: int,
        waiter: object,
        *,
        log: TagHash = 0,
        fresh: bool = False,
    ) -> None:
        """Read the first records with `tag` from `bound` on; the waiter gets `Answered(list)`.

        Raises:
            OverloadedError: too many reads wait already.
        """
        args = (Direction.NEXT, tag, bound, position, waiter)
        self._reads.start(Operation(*args, count=limit, page=True, log=log, fresh=fresh))

    def read_tail(self, waiter: object) -> None:
        """Ask the primary where the log ends; the waiter gets `Answered(Tail)`.

        Raises:
            OverloadedError: too many reads wait already.
        """
        operation = Operation(Direction.NEXT, EMPTY_TAG, 0, 0, waiter)
        operation.stage = Stage.TAIL
        self._reads.start(operation)

    def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Cache aux data of a record here and at the replicas of its shard, while there is room."""
        self._cache.set_aux(seqnum, aux)
        if self._local is not None and (shard := self._local.shard_of(seqnum)) is not None:
            message = AuxSet(shard, seqnum, aux)
            self._outbox += [Send(r, message) for r in self.placement.replicas(shard)]

    def request_snapshots(self) -> MetalogPosition:
        """Ask all index nodes for snapshots of all positions below the returned position."""
        wanted = SnapshotWanted(self.position)
        self._outbox += [Send(node, wanted) for node in self.placement.view.index_nodes]
        return self.position

    def when_ready(self, waiter: object) -> None:
        """Answer the waiter once this node has joined; raises as `ReadyWaiters.add`."""
        self._ready_waiters.add(waiter)

    def abandon(self) -> list[Effect]:
        """Fail every waiting caller, because the node stops.

        A record that was sent may still be ordered; an unsent record is not.
        """
        effects = self._writer.abandon() if self._writer is not None else []
        error = NotReadyError("The platform was closed while the call waited.")
        effects += self._reads.abandon(error)
        for part in self._parts:
            effects += part.abandon(error)
        effects = self._conditional.abandon(effects, error, self._reads)
        waiters = [*self._ready_waiters.take(), *self.watches.clear()]
        return effects + [Answer(waiter, error) for waiter in waiters]

    def status(self) -> dict[str, dict[str, int]]:
        """Return the status of every part, for operators."""
        parts = self._local.status() if self._local is not None else {}
        parts |= {"record_cache": self._cache.status()} | self._reads.status()
        parts["progress"] = {
            "position": self.position,
            "tag_position": self.tag_position,
            "tail": self.tail,
            "appends_pending": self._writer.pending if self._writer is not None else 0,
            "read_only": int(self._writer is not None and self._writer.is_read_only),
            "conditional_appends_pending": len(self._conditional),
            "reads_pending": self._reads.pending,
            "reads_hedged": self._reads.hedged,
            "watches": len(self.watches),
            "trims": self._replay.trims,
            "lost_ranges": self._local.lost_ranges if self._local is not None else 0,
        }
        return parts

    # --- the role

    def recover(self, _kind: FrameKind, _payload: bytes, _location: Location, /) -> None:
        """Fail: there are no frames to recover, because an engine persists nothing."""
        raise AssertionError("an engine persists nothing")

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Handle events, then send the appends and reads of callers."""
        effects, self._outbox = self._outbox, []
        self._reads.begin_iteration(now)
        for event in events:
            effects += self._on_event(event, now)
        if now >= self._upkeep_at or self._waited_for():
            effects += self._upkeep(now)
        elif events:
            self._index_fetch.note(now, self.position, self.tag_position)
            self._upkeep_at = min(
                self._upkeep_at, Instant(now + self._config.node.messages.resend_s)
            )
        writer = self._writer
        if writer is not None and (due := writer.deadline()) is not None and now >= due:
            effects += writer.on_time(now) + self._want_shard(writer, now)
            if self._local is not None:
                effects.append(self._to_primary(self._catch_up.reader.wanted()))
        if self._conditional.awaits_answers:
            effects = self._advance_conditional(effects, now)
        if writer is not None and self._local is not None:
            effects += writer.flush(now)
        return effects

    def _advance_conditional(self, effects: list[Effect], now: Instant) -> list[Effect]:
        """Pass answers to the checks of conditional appends; begin the appends that may begin."""
        while True:
            ordered = None
            if self._writer is not None and self._local is not None:
                ordered = self._replay.cut.get(self._writer.shard, 0)
            effects = self._conditional.advance(effects, now, self._reads, self._writer, ordered)
            if not (begun := self._reads.begin(now)):
                return effects
            effects += begun

    def _waited_for(self) -> bool:
        """Whether a caller waits for anything but an append."""
        if self._extended or self._local is None or self._reads.is_waiting:
            return True
        if self._ready_waiters or len(self.watches) > self._watches_known:
            return True
        return bool(self._conditional) or any(self._parts)

    def _upkeep(self, now: Instant) -> list[Effect]:
        """Send, resend and expire questions. An iteration that only appends skips this method."""
        effects = self._reads.begin(now) + self._on_time(now)
        effects += self.order_lookups.advance(now) + self.trims.advance(self.position, now)
        effects += self.cells.advance(now) + self.owner_appends.advance(now)
        effects += self.growth.advance(now)
        if self._ready_waiters and self.ready:
            effects += [Answer(waiter, None) for waiter in self._ready_waiters.take()]
        self._upkeep_at, self._watches_known = self._upkeep_due(), len(self.watches)
        return effects

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received(sender=sender, message=TermIs(term, primary)):
                return self._on_term(TermBegun(term, primary), now, sender)
            case Received():
                return self._on_message(event, now)
            case Started(epoch):
                return self._on_started(epoch, now)
            case TermBegun():
                return self._on_term(event, now)
            case MembersWanted():
                return []
            case (
                Persisted()
                | FrameRead()
                | SnapshotsAnswered()
                | SpaceChanged()
                | ColdAnswered()
                | CellsAnswered()
            ):
                return [Ignore(event, "an engine has no disk")]
            case unreachable:
                assert_never(unreachable)

    def _on_message(  # noqa: C901, PLR0911, PLR0912 - a flat match
        self, event: Received, now: Instant
    ) -> list[Effect]:
        message = event.message
        match message:
            case MetalogEntries() | MetalogBase() | TailIs() | TrimIs() if (
                event.sender != self._leadership.primary
            ):
                return [Ignore(event, "an answer of the primary, sent by another node")]
            case MetalogEntries() | MetalogBase():
                return self._on_metalog(event, message, now)
            case IndexData():
                return self._on_index_data(event, message, now)
            case RecordsRead() | LookupResult() | TagFirsts():
                return self._reads.on_message(event.sender, message, now)
            case TimeFound() | PlacesFound():
                return self.order_lookups.on_found(event.sender, message, now)
            case CellAnswer():
                return self.cells.on_answer(event.sender, message)
            case TailIs() | TrimIs():
                return self._on_primary_answer(event, message, now)
            case DiskFull(full=full):
                return self._on_disk_full(event, now, full=full)
            case ShardStored():
                if self._writer is None or message.shard != self._writer.shard:
                    return [
                        Ignore(message, "a message about a shard that this node does not write")
                    ]
                return self._writer.on_stored(event.sender, message, now)
            case HomeWanted() | HomeIs() | ConditionalAppend() | ConditionalAnswer():
                return self._conditional.on_message(event, now)
            case OwnerAppend() | OwnerAnswer() if event.sender in self.placement.view.engines:
                return self.owner_appends.on_message(event, now)
            case GrowthWanted() | LogGrew() if event.sender in self.placement.view.engines:
                return self.growth.on_message(event.sender, message, now)
            case _:
                return [Ignore(event, "not a message for an engine")]

    def _on_primary_answer(
        self, event: Received, message: TailIs | TrimIs, now: Instant
    ) -> list[Effect]:
        if self._catch_up.reader.note_incarnation(event.incarnation) is None:
            return [Ignore(event, "an answer of an earlier incarnation of the primary")]
        if isinstance(message, TrimIs):
            return self.trims.on_answer(message, self._catch_up.reader)
        if message.request == self._join_request:
            return self._on_joined(message, now)
        return self._reads.on_tail(message, now)

    def _on_disk_full(self, event: Received, now: Instant, *, full: bool) -> list[Effect]:
        writer = self._writer
        self.cells.full_disks.note(event.sender, full=full, now=now)
        if writer is None or event.sender not in (self._leadership.primary, *writer.replicas):
            return []
        return writer.on_disk_full(event.sender, full=full, now=now)

    def _on_term(
        self, event: TermBegun, now: Instant, sender: NodeId | None = None
    ) -> list[Effect]:
        """Send unanswered questions to the primary of a new term."""
        before = self._leadership.primary
        if not self._leadership.begin(event, sender):
            return []
        self._upkeep_at = now
        self._catch_up.reader.begin_term(elsewhere=event.primary != before)
        self._reads.begin_term(now)
        self.trims.make_due(now)
        if self._local is None:
            self._join.make_due(now)
        if (writer := self._writer) is None:
            return []
        writer.make_due()
        effects = self._want_shard(writer, now)
        if event.primary != before:
            effects += writer.on_disk_full(before, full=False, now=now)
        return effects

    # --- joining (thesis 5.5.1)

    def _on_started(self, epoch: Epoch, now: Instant) -> list[Effect]:
        self._epoch = epoch
        self._join_request = epoch * _REQUESTS_PER_EPOCH
        self._catch_up.reader.start(epoch)
        self._reads.number_from(self._join_request)
        for part in self._parts:
            part.number_from(self._join_request)
        self._conditional.started(epoch, self._join_request)
        return self._ask_to_join(now) + self._follow_view(now)

    def _follow_view(self, now: Instant) -> list[Effect]:
        """Request a shard that the view gives this node; stop appending to a shard that the view
        takes away.
        """
        shard, writer = self.placement.view.shard_written_by(self._node), self._writer
        if writer is not None and shard is not None and self._continues(writer, shard):
            writer.continue_on(shard, self.placement.replicas(shard))
            self._own_shards.add(shard)
            return self._want_shard(writer, now)
        if writer is not None and writer.shard != shard:
            self._writer = None
            self._had_shard = self._had_shard or writer.takeover is not Takeover.ASKING
            effects = writer.give_up()
            return effects if self._had_shard else effects + self._follow_view(now)
        if shard is None or writer is not None or self._had_shard:
            return []  # a second writer would have the same epoch as the first writer
        replicas = self.placement.replicas(shard)
        copies = len(self.placement.counting(shard))
        self._own_shards.add(shard)
        self._writer = ShardWriter(shard, replicas, self._epoch, self._config, copies=copies)
        return self._want_shard(self._writer, now)

    def _continues(self, writer: ShardWriter, shard: ShardId) -> bool:
        """Whether the writer's shard was finalized, and `shard` is a new one in its place."""
        is_new = self.placement.view.shards[shard].ended == NO_INCARNATION
        owns = writer.takeover in {Takeover.ASKING, Takeover.OPEN}
        return owns and is_new and self.placement.is_finalized(writer.shard)

    def _want_shard(self, writer: ShardWriter, now: Instant) -> list[Effect]:
        wanted = writer.want(now)
        return [] if wanted is None else [Send(self._leadership.primary, wanted)]

    def _ask_to_join(self, now: Instant) -> list[Effect]:
        self._join.sent(now)
        wanted = TailWanted(self._join_request, self.placement.view.number)
        return [Send(self._leadership.primary, wanted)]

    def _on_joined(self, message: TailIs, now: Instant) -> list[Effect]:
        if self._local is not None:
            return []
        self._join.stop()
        self._replay = MetalogReplay(
            message.position, message.tail, message.cut, message.trims, message.last
        )
        self._catch_up.reader.join(message.position, message.last)
        self._floors.joined(message.tail, message.trims)
        self.placement.moved = dict(message.replicas)
        if message.view is not None:
            self.placement.install(message.view)
        effects: list[Effect] = []
        if (writer := self._writer) is not None and self.placement.is_finalized(writer.shard):
            effects += self._note_ordered(writer, message)  # before it continues on another shard
        effects += self._follow_view(now) + self._conditional.follow_view(now)
        own = self._own_shards
        self._local = LocalIndex(self._config.node, message.position, message.tail, own)
        self._feed = self._feed_from(message.position)
        self._reads.joined(self._local, self._replay)
        effects += self._reads.advanced(now)
        if (writer := self._writer) is not None:
            effects += writer.move(self.placement.replicas(writer.shard))
            effects += self._note_ordered(writer, message)
            effects += self._want_shard(writer, now)
        return effects

    def _note_ordered(self, writer: ShardWriter, message: TailIs) -> list[Effect]:
        """Tell the writer how many records of its shard are ordered, and which node writes it."""
        epoch = message.writers.get(writer.shard, NO_INCARNATION)
        return writer.joined(epoch, message.cut.get(writer.shard, 0))

    def _join_again(self, now: Instant, reason: str) -> list[Effect]:
        """Join again, because applied entries were replaced, or because the sequencers no longer
        keep the next entries.

        The index and the caches depend on the applied entries, so they begin empty. Reads in flight
        fail as retryable. The writer keeps its shard; the answer to the join contains the number of
        its ordered records.
        """
        error = NotReadyError("This node lost track of the log and joins again; try again.")
        effects: list[Effect] = [
            Ignore(self.position, reason),
            *self._reads.abandon(error),
            *self.order_lookups.abandon(error),
            *self.trims.abandon(error),
        ]
        self._join_request = self._reads.last_request + 1
        self._begin()
        self._reads.number_from(self._join_request)
        self._reads.begin_iteration(now)
        return effects + self._ask_to_join(now)

    # --- type-O and type-S data

    def _on_metalog(
        self, event: Received, message: MetalogEntries | MetalogBase, now: Instant
    ) -> list[Effect]:
        if isinstance(message, MetalogEntries):
            return self._on_metalog_entries(event, message, now)
        reader = self._catch_up.reader
        reader.note_incarnation(event.incarnation)
        if (reason := reader.refused_base(event, message)) is not None:
            return [Ignore(event, reason)]
        if self._local is None:
            return []
        return self._join_again(now, "the next metalog entries are no longer kept")

    def _on_metalog_entries(
        self, event: Received, message: MetalogEntries, now: Instant
    ) -> list[Effect]:
        if self._local is None:
            return []
        taken = self._catch_up.reader.take(event, message)
        if taken.refused is not None:
            return [Ignore(event, taken.refused)]
        if taken.wrong_from is not None:
            return self._join_again(now, "metalog entries were replaced after they were read")
        effects: list[Effect] = []
        for entry in taken.entries:
            effects += self._apply_entry(entry, self._local, now)
        if (wanted := self._catch_up.ask_at_once(now)) is not None:
            effects.append(self._to_primary(wanted))
        if self._feed.behind or self._reads.parked:
            effects += self._apply_index_data(self._local, now)
        return effects

    def _apply_entry(self, entry: Entry, local: LocalIndex, now: Instant) -> list[Effect]:
        spans = self._replay.apply(entry)
        local.apply_spans(spans)
        if isinstance(entry, Trim):
            self._floors.apply(entry)
        elif isinstance(entry, NewReplicas):
            self.placement.move(replicas_in(entry))
            self._reads.note_moved()
        effects: list[Effect] = []
        if isinstance(entry, NewView) and self.placement.install(entry.following):
            self._reads.note_moved()
            effects += self._follow_view(now) + self._conditional.follow_view(now)
        if (writer := self._writer) is not None:
            for span in spans:
                if span.shard == writer.shard:
                    effects += self._acknowledge(writer, span, entry.time_us / 1e6)
            if isinstance(entry, NewWriters) and writer.shard in entry.writers:
                cut = self._replay.cut.get(writer.shard, 0)
                effects += writer.named(entry.writers[writer.shard], cut)
            elif isinstance(entry, NewReplicas) and writer.shard in entry.replicas:
                effects += writer.move(entry.replicas[writer.shard])
        return effects

    def _acknowledge(self, writer: ShardWriter, span: Span, ordered_at: float) -> list[Effect]:
        batches = writer.pop_ordered(span)
        for batch in batches:
            self._cache.add_span(
                batch.first_seqnum,
                batch.data,
                batch.names,
                batch.time,
                ordered_at,
                batch.size_bytes,
            )
        return acknowledgements(batches, self._replay.position)

    def _feed_from(self, position: MetalogPosition) -> IndexFeed:
        node = self._config.node
        return IndexFeed(
            position,
            positions_max=node.index_tier.index_positions_ahead_max,
            bytes_max=node.index_tier.index_ahead_bytes_max,
        )

    def _on_index_data(self, event: Received, message: IndexData, now: Instant) -> list[Effect]:
        local = self._local
        if local is None:
            return []
        before = self.tag_position
        self._feed.put(message.blocks, message.copy_of)
        effects = self._apply_index_data(local, now)
        if event.sender in self.placement.view.storage_nodes:
            effects += self._index_fetch.on_index_data(before, self.tag_position)
        return effects

    def _apply_index_data(self, local: LocalIndex, now: Instant) -> list[Effect]:
        """Apply index data in order, never ahead of the metalog, because lookups need both.

        Index data that belongs to another entry than the applied one at its position is ignored:
        one of these two entries was replaced.
        """
        effects: list[Effect] = []
        reader = self._catch_up.reader
        for block in self._feed.take(self._replay.position):
            if block.epoch != reader.lineage.before(block.position + 1):
                if block.epoch > reader.lineage.last:
                    reader.mark_unconfirmed()
                self._feed.reject(block)
                effects.append(Ignore(block.position, "index data of another metalog entry"))
                break
            if (reason := local.apply_block(block.position, block.parts)) is not None:
                effects.append(Ignore(block.position, reason))
                self._feed = self._feed_from(local.tag_position)
                break
            for floor in self._floors.pop_reached(block.position):
                local.forget_below(floor.tag, floor.until)
            if self.watches:
                effects += [Answer(w, None) for w in self.watches.fired_by(block)]
        return effects + self._reads.advanced(now)

    # --- time

    def _awaits_entries(self) -> bool:
        """Whether unapplied entries may exist, because index data or a caller waits for them."""
        ahead = self._feed.behind and self._feed.end > self.position
        return bool(ahead or self._reads.parked or self.watches)

    def _to_primary(self, message: MetalogWanted) -> Send:
        return Send(self._leadership.primary, message)

    def deadline(self) -> Instant | None:
        """The earliest deadline of all parts; None: no part has a deadline."""
        due = self._upkeep_at
        if self._writer is not None and (own := self._writer.deadline()) is not None:
            due = min(due, own)
        if (own := self._conditional.deadline()) is not None:
            due = min(due, own)
        return due if due < _NEVER else None

    def _upkeep_due(self) -> Instant:
        times = [self._reads.deadline(), *(part.deadline() for part in self._parts)]
        if self._local is None:
            times.append(self._join.due)
        times += [self._catch_up.deadline(), self._index_fetch.deadline()]
        return min((t for t in times if t is not None), default=_NEVER)

    def _on_time(self, now: Instant) -> list[Effect]:
        effects = self._reads.on_time(now)
        if self._local is None:
            if self._join.is_due(now):
                effects += self._ask_to_join(now)
            return effects
        wanted = self._catch_up.ask(now, waiting=self._awaits_entries())
        if wanted is not None:
            effects.append(self._to_primary(wanted))
        return effects + self._index_fetch.ask(now, self.position, self.tag_position)

    def check_invariants(self) -> None:
        """Assert that no index data is applied ahead of the metalog, and that sums are right."""
        assert self.tag_position <= self.position
        if self._local is not None:
            assert self._local.tag_tail <= self.tail, "index data is about ordered records"
        if self._writer is not None:
            self._writer.check_invariants()
        others = self._reads, self._floors, self.watches, self._conditional
        for part in (*self._parts, *others):
            part.check_invariants()
