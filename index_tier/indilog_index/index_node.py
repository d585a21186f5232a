"""The index node role: the index of one index shard, and lookups in it (thesis 5.3.1, 5.4, 5.6.1).

The schedule gives each metalog position to one index shard (`indilog.kernel.index_schedule`). The
node applies its positions strictly in order. A position is applied when the parts of all its
productive shards have arrived. The node answers a lookup under two conditions: it has applied all
its positions below the lookup's `position`, and it knows all trims that the lookup names
(`TrimFeed`). The node searches only below the lookup's `limit`. So all index shards answer about
the same prefix of the log (ARCHITECTURE 9.2).

As the master of a lookup (thesis 5.2, "master-slave-mode") the node merges the answers of all index
shards, like an aggregator.

A published metalog entry may be replaced by another entry (`indilog.kernel.lineage`, decision
0031). So for each of its positions, the node keeps the epoch of the entry: the incarnation of the
primary that proposed the entry. A lookup names an incarnation. The node answers only after storage
has confirmed that the metalog of that incarnation, or of a later incarnation, has all applied
entries. If an entry was replaced, the node rebuilds its index from a snapshot below that entry's
position.

The node writes snapshots to its disk. Checkpoints contain the index data that the newest snapshot
lacks. After a restart the node loads snapshot and checkpoint, and fetches the rest from storage.
Memory is bounded: rarely used rows are in the snapshot only, and a lookup that needs such rows
waits until they are read (`IndexStore`).

A shell of `indilog.runtime` passes events to `IndexNode.handle` and executes the returned effects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Final, assert_never

from indilog.base.ids import MAX_SEQNUM, Epoch, Instant, MetalogPosition, NodeId, SeqNum, ShardId
from indilog.base.log import READ_RANGE_LIMIT_MAX
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.index_schedule import NO_POSITION, IndexPositions, first_difference, last_below
from indilog.kernel.index_snapshot import (
    IndexSnapshot,
    ReadRows,
    RowsRead,
    SnapshotAnswer,
    SnapshotInfo,
    SnapshotOpened,
    SnapshotWritten,
)
from indilog.kernel.lineage import Lineage
from indilog.kernel.lost_ranges import within
from indilog.kernel.placement import Placement
from indilog.kernel.view import View, Views
from indilog.roles.index_feed import IndexFeed, ReadyBlock
from indilog.roles.role import (
    AskSnapshots,
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
from indilog.wire.messages import (
    Direction,
    IndexAnswer,
    IndexBlock,
    IndexData,
    IndexDataWanted,
    IndexLookup,
    ReadRecords,
)
from indilog.wire.replica_messages import PlacementIs
from indilog.wire.tag_messages import (
    NO_RECORD,
    NOT_KNOWN,
    Discarded,
    SnapshotWanted,
    TagFirsts,
    TagFirstsWanted,
    TagFloors,
)
from indilog_index.checkpoint import CheckpointRows, checkpoint_of, restored
from indilog_index.discards import DiscardQuestions, Runs
from indilog_index.fetch import Fetch, sources_of
from indilog_index.index_store import IndexStore, Search
from indilog_index.lost_records import crossed
from indilog_index.merging import Merging
from indilog_index.snapshots import Snapshots
from indilog_index.spilled_lookups import SpilledLookup, SpilledLookups
from indilog_index.tag_index import Matches
from indilog_index.trim_feed import TrimFeed, without_trimmed
from indilog_index.waiting import WaitingLookups

_DAMAGED: Final = "a damaged snapshot; the index is rebuilt"
_REPLACED: Final = "index data of metalog entries that were replaced; the index is rebuilt"
_RESCHEDULED: Final = "index data that another index shard gets; the index is rebuilt"
_OUTDATED: Final = "index data of entries that may have been replaced"
_SWEEP_PAUSE_S: Final = 0.005
"""Seconds between two steps of a sweep. Other work runs in these pauses."""


def index_shard_of(node: NodeId, view: View) -> int:
    """Return the index shard of a node, from its name `index-SHARD-REPLICA`. The node may be in no
    view yet.
    """
    for shard, replicas in enumerate(view.index_shards):
        if node in replicas:
            return shard
    assert node.startswith("index-"), f"{node} is named after its role"
    return int(node.split("-")[1])


class IndexNode:
    """One replica of one index shard.

    Guarantees: each answer is complete for this index shard's part of the prefix that the lookup
    asks about. A lookup that cannot be answered within `read_timeout_s` is dropped; no incomplete
    answer is sent. If no replica has the index data of a position, all lookups beyond that position
    wait, because the node never guesses that a record is absent.
    """

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        view = views[-1]
        self._node = node
        self._placement = Placement(view)
        self.index_shard = index_shard_of(node, view)
        self._note_view()
        self._config = config.node
        self._store = self._empty_store()
        self._feed = self._feed_from(0)
        self._snapshots = Snapshots(self._placement, self.index_shard, config.node)
        self._spilled = SpilledLookups(config.node.reads.lookups_pending_max)
        self._waiting = WaitingLookups(
            lookups_max=config.node.reads.lookups_pending_max,
            timeout_s=config.node.reads.read_timeout_s,
        )
        self._floors = TrimFeed(self._placement, config.node)
        self._lineage = Lineage()
        """The epochs of the entries at the applied positions."""
        self._copy_of = Epoch(0)
        """The newest incarnation whose metalog is known to have all applied entries."""
        self._not_before = Epoch(0)
        """Index data from copies of earlier incarnations is ignored, because their entries may have
        been replaced. It is at least `_copy_of`.
        """
        self._rebuilds = 0
        self._discards = DiscardQuestions(self._placement, self._floors, config.node)
        self._swept_at = Instant(0.0)
        self._merging = Merging(self._placement, config.node)
        """The lookups whose master this node is."""
        self._fetch: Fetch | None = None
        self._attempts = 0
        self._unsaved = 0
        self._kept: CheckpointRows | None = None
        """The restored checkpoint, until the snapshot is open."""
        self._kept_payload = b""
        self._resend = Resend(config.node.messages.resend_s, config.node.messages.resend_s_max)
        """When to begin a new fetch if nothing arrives; `due` is None while nothing is missing."""

    def _note_view(self) -> None:
        """Use the nodes of the newest view, and the positions that it gives to this index shard."""
        view = self._placement.view
        self._storage_nodes = frozenset(view.storage_nodes)
        self._engines = frozenset(view.engines)
        self._merging_nodes = frozenset((*view.aggregators, *view.index_nodes))
        self._positions = IndexPositions.of(view.eras, self.index_shard)

    @property
    def position(self) -> MetalogPosition:
        """All positions of this index shard below this position are applied. If the index shard is
        retired, the result is at most the end of its positions.
        """
        return min(self._feed.position, self._positions.end)

    @property
    def tail(self) -> SeqNum:
        """The seqnum after the last record in the index."""
        return self._store.end

    def status(self) -> dict[str, int]:
        """Return the status for operators: index size, memory in bytes, waiting lookups."""
        base = self._store.base
        return {
            "position": self.position,
            "tail": self.tail,
            **self._store.status(),
            "snapshot_position": base.info.position if base is not None else 0,
            "snapshots_written": self._snapshots.written,
            "snapshots_failed": self._snapshots.failed,
            "reading": len(self._spilled),
            "trims": self._floors.trims,
            "floors": len(self._floors.trimmed.logs) + len(self._floors.trimmed.tags),
            "sweeping": int(self._store.sweeping),
            "waiting": len(self._waiting),
            "merging": len(self._merging),
            "rebuilds": self._rebuilds,
            "discarded": self._discards.records,
        }

    @property
    def derived(self) -> bool:
        """True: the state can be derived again from storage nodes and snapshots."""
        return True

    @property
    def unsaved(self) -> int:
        """Positions that were applied since the last checkpoint."""
        return self._unsaved

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the rows that the snapshot lacks; return a function that encodes them, in any
        thread.
        """
        self._unsaved = 0
        if self._snapshots.opening:
            kept = self._kept_payload
            return lambda: kept
        info = self._snapshots.info(self._store, self.position, self._lineage)
        return checkpoint_of(self._store, self._floors, info)

    def restore(self, payload: bytes, gone: Collection[int], /) -> None:
        """Keep a checkpoint until the snapshot is open; the index then begins with both.

        Raises:
            MalformedFrameError: the checkpoint is of a version that this release does not know.
        """
        assert not self._store.end, f"restored before all else; {len(gone)} segments are gone"
        if payload:
            self._kept_payload = payload
            self._kept = restored(payload, self._floors)

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Never called: an index node persists nothing."""
        raise AssertionError(f"no {kind.name} frame of {len(payload)} bytes at {location} is ours")

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Apply index data, answer ready lookups, and fetch missing index data and trims."""
        position = self._feed.position
        effects = self._merging.expire(now)
        for event in events:
            effects += self._on_event(event, now)
        advanced = self._feed.position > position
        for origin, lookup, _ in self._waiting.take_ready(
            self._feed.position, self._rests_on_known
        ):
            effects += self._answer_any(origin, lookup, now)
        effects += self._rebuild_for_lookups(now)
        if advanced:
            if self._fetch is not None:
                effects += self._fetch.resume(self._feed.position)
            self._store.shrink()
        due = self._snapshots.wanted or self._snapshots.deadline() is not None
        if advanced or self._store.full or due:
            effects += self._snapshots.write(
                self._store, self._floors.trimmed, self.position, self._lineage, now
            )
        waited_for = self._waiting.has_unconfirmed
        effects += self._floors.on_time(now, waited_for=waited_for)
        if self._store.sweeping and now >= self._swept_at + _SWEEP_PAUSE_S:
            self._swept_at = now
            self._store.sweep(self._config.trims.sweep_tags_per_iteration)
        effects += self._ask_for_discarded(now)
        for waiting in self._waiting.take_expired(now):
            effects.append(Ignore(waiting, "a lookup waited too long for index data"))
        return effects + self._catch_up(now, advanced=advanced)

    def deadline(self) -> Instant | None:
        """When a lookup expires, a fetch is resent, or a sweep continues; None: never."""
        instants = (
            self._resend.due,
            self._waiting.deadline,
            self._merging.deadline(),
            self._snapshots.deadline(),
            self._floors.deadline(),
            self._discards.deadline(),
            Instant(self._swept_at + _SWEEP_PAUSE_S) if self._store.sweeping else None,
        )
        return min((instant for instant in instants if instant is not None), default=None)

    def check_invariants(self) -> None:
        """Assert that positions belong to this shard, and that no answerable lookup waits."""
        assert self._feed.position in self._positions or self._feed.position == NO_POSITION
        first = self._waiting.first_position
        assert first is None or first > self._feed.position, "an answerable lookup was answered"
        assert (self._resend.due is None) == (not self._missing)
        assert self._lineage.last <= self._copy_of
        assert self._copy_of <= self._not_before
        assert self._lineage.position <= self._feed.position
        self._lineage.check_invariants()
        self._floors.check_invariants()
        self._waiting.check_invariants()
        self._merging.check_invariants()
        self._store.check_invariants()

    # --- events

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received():
                return self._on_received(event, now)
            case TermBegun() | MembersWanted():
                return []
            case Started():
                return [self._snapshots.open(), *self._floors.start(now)]
            case SnapshotsAnswered(answer):
                return self._on_snapshots(answer, now)
            case Persisted() | FrameRead() | SpaceChanged() | ColdAnswered() | CellsAnswered():
                raise AssertionError("an index node has no journal")
            case unreachable:
                assert_never(unreachable)

    def _on_received(self, event: Received, now: Instant) -> list[Effect]:
        match event.message:
            case IndexLookup() as lookup:
                return self._on_lookup(event, lookup, now)
            case TagFirstsWanted() as wanted:
                return self._on_firsts_wanted(event, wanted, now)
            case IndexAnswer() as answer:
                return self._merging.add(event.sender, answer, now)
            case IndexData() as data:
                return self._on_index_data(event, data, now)
            case TagFloors() as floors:
                return self._on_floors(event, floors, now)
            case message:
                return self._on_seldom(event, message, now)

    def _on_seldom(self, event: Received, message: object, now: Instant) -> list[Effect]:
        if isinstance(message, SnapshotWanted) and event.sender in self._engines:
            self._snapshots.want(min(message.position, self._positions.end))
            return []
        if isinstance(message, Discarded):
            found, sent = self._discards.on_answer(event.sender, message, self._copy_of, now)
            return self._forget(found, sent)
        if isinstance(message, PlacementIs):
            return self._on_placement(event, message, now)
        return [Ignore(event, f"an index node does not handle {type(message).__name__}")]

    def _on_placement(self, event: Received, message: PlacementIs, now: Instant) -> list[Effect]:
        """Install the newest view, which may give positions to this index shard or take them away.

        The view changes only positions after the entry that installed it. The index may already
        have such positions, because they were fetched before the view was known. The index is then
        rebuilt, because another index shard has these positions, too. The index is also rebuilt if
        a snapshot claims positions that belonged to another index shard.
        """
        if event.sender not in {*message.view.storage_nodes, *self._storage_nodes}:
            return [Ignore(event, "the placement, sent by a node that is no storage node")]
        self._placement.move(message.replicas)
        before = self._placement.view.eras
        if not self._placement.install(message.view):
            return []
        self._note_view()
        changed = first_difference(before, message.view.eras)
        claimed = max(self._snapshots.writing, self._store.closed_position)
        if max(self._lineage.position, claimed) > changed:
            return self._rebuild(changed + 1, _RESCHEDULED, now)
        self._feed.set_positions(self._positions, changed)
        self._waiting.wait_for_positions()  # the next position may now be an earlier one
        self._fetch = None
        return [] if self._snapshots.opening else self._begin_fetch(NO_POSITION)

    # --- index data

    def _on_index_data(self, event: Received, data: IndexData, now: Instant) -> list[Effect]:
        blocks = data.blocks
        if event.sender not in self._storage_nodes:
            return [Ignore(event, "index data from a node that is no storage node")]
        if not all(self._is_plausible(block, data.copy_of) for block in blocks):
            return [Ignore(event, "index data that contradicts itself")]
        if self._snapshots.opening:
            return []  # fetched later, from the position where the snapshot ends
        if data.copy_of < self._not_before:
            return [Ignore(event, _OUTDATED)]
        if (replaced := self._replaced_by(data)) is not None:
            return self._rebuild_below(replaced, data.copy_of, now)
        position, horizon = self._feed.position, self._feed.horizon
        self._feed.put(blocks, data.copy_of)
        effects = self._apply(event, now)
        if self._fetch is not None and self._fetch.is_answer(event.sender, blocks):
            effects += self._fetch.on_answer(event.sender, blocks, position, horizon)
            self._resend.stop()
        return effects

    def _replaced_by(self, data: IndexData) -> MetalogPosition | None:
        """Compare applied entries with a newer copy of the metalog.

        Returns the first position where they differ; None: no difference is known. An older copy is
        not compared, because it may have entries that were replaced.
        """
        applied = self._lineage.position
        for block in data.blocks:
            if block.position < applied and data.copy_of > self._copy_of:
                if block.epoch != self._lineage.before(block.position + 1):
                    return block.position
                if block.position == self._last_applied:
                    self._confirm(data.copy_of)
        return None

    def _replaced_after(self, lookup: IndexLookup | TagFirstsWanted) -> MetalogPosition | None:
        """Return the first applied position that contradicts the entry that a lookup names; None:
        no position contradicts it.

        Epochs ascend along a copy of the metalog. So if an applied entry at or after the lookup's
        entry has an older epoch, this applied entry is of another copy. `_copy_of` shows which of
        the two copies is newer.
        """
        position = self._positions.first_from(max(0, lookup.position - 1))
        if position >= self._lineage.position:
            return None
        return position if (self._lineage.before(position + 1) or 0) < lookup.epoch else None

    def _confirm(self, copy_of: Epoch) -> None:
        """Note that the metalog of incarnation `copy_of` has all applied entries."""
        self._copy_of = max(self._copy_of, copy_of)
        self._not_before = max(self._not_before, copy_of)

    @property
    def _last_applied(self) -> MetalogPosition:
        """The last applied position of this index shard; -1: none is applied."""
        return last_below(self._placement.view.eras, self.index_shard, self._lineage.position)

    def _apply(self, event: Event, now: Instant) -> list[Effect]:
        """Index complete positions in order, while there is memory for them."""
        ready = self._feed.take()
        while not self._store.full and (block := next(ready, None)) is not None:
            if block.previous != self._lineage.last:
                self._feed.reject(block)
                if block.copy_of > self._copy_of:
                    return self._rebuild_below(self._last_applied, block.copy_of, now)
                return [Ignore(event, "index data that follows on entries that were replaced")]
            if block.copy_of < self._not_before:
                self._feed.reject(block)  # received before this node knew of a newer copy
                return [Ignore(event, _OUTDATED)]
            self._unsaved += 1
            if not self._is_consistent(block):
                self._feed.reject(block)
                return [Ignore(event, "index data that contradicts the log before its position")]
            self._lineage.append(block.epoch, block.position)
            self._confirm(block.copy_of)
            for part in block.parts:
                left = without_trimmed(part, self._floors.trimmed)
                if part.tags and not left.tags and not part.lost:
                    self._store.skip(part.first_seqnum + part.count)
                else:
                    self._store.add(left)
        return []

    def _on_floors(self, event: Received, message: TagFloors, now: Instant) -> list[Effect]:
        """Drop records below new floors. If a log was trimmed, a sweep removes its records from
        other tags.
        """
        if event.sender not in self._storage_nodes:
            return [Ignore(event, "floors from a node that is no storage node")]
        risen, effects = self._floors.on_floors(event.sender, message, now)
        for floor in risen:
            self._store.trim(floor)
        return list(effects)

    def _ask_for_discarded(self, now: Instant) -> list[Effect]:
        """Ask storage for discarded records when the index has grown and no sweep is running."""
        found, asked = self._discards.on_time(now)
        effects = self._forget(found, asked)
        if self._store.sweeping or self._snapshots.opening:
            return effects
        entries = self._store.entries
        self._discards.note_entries(entries)
        if self._discards.is_worth_it(entries):
            effects += self._discards.begin(entries, self._store.runs(), now)
        return effects

    def _forget(self, found: Runs | None, sent: Sequence[Effect]) -> list[Effect]:
        if found is not None:
            self._store.forget(found)
        return list(sent)

    def _is_plausible(self, block: IndexBlock, copy_of: Epoch) -> bool:
        """Whether a block belongs to this index shard and its columns have consistent lengths."""
        if block.position not in self._positions or block.tail > MAX_SEQNUM:
            return False
        if not block.previous <= block.epoch <= copy_of:
            return False
        return all(
            part.shard in block.productive
            and part.shard in self._placement.shards
            and 0 < part.count == len(part.tag_counts)
            and 8 * sum(part.tag_counts) == len(part.tags)
            and part.first_seqnum >= 0
            and within(part.lost, part.first_seqnum, part.first_seqnum + part.count)
            for part in block.parts
        )

    def _is_consistent(self, block: ReadyBlock) -> bool:
        """Whether the parts are consecutive, end at the block's tail, and follow the indexed
        records.
        """
        if not block.parts:
            return True
        end = block.parts[0].first_seqnum
        if end < self._store.end:
            return False
        for part in block.parts:
            if part.first_seqnum != end:
                return False
            end += part.count
        return end == block.tail

    # --- lookups

    def _on_lookup(self, event: Received, lookup: IndexLookup, now: Instant) -> list[Effect]:
        if not 1 <= lookup.count <= READ_RANGE_LIMIT_MAX:
            return [Ignore(event, "a lookup for too many records, or for none")]
        return self._answer_in_time(event, lookup, now)

    def _on_firsts_wanted(
        self, event: Received, wanted: TagFirstsWanted, now: Instant
    ) -> list[Effect]:
        if len(wanted.tags) % 8 or not 0 < len(wanted.tags) <= 8 * READ_RANGE_LIMIT_MAX:
            return [Ignore(event, "a question about too many tags, or about none")]
        return self._answer_in_time(event, wanted, now)

    def _answer_in_time(
        self, event: Received, lookup: IndexLookup | TagFirstsWanted, now: Instant
    ) -> list[Effect]:
        """Answer a lookup, or let it wait until the needed positions and trims are known here."""
        if lookup.position <= self._feed.position and self._rests_on_known(lookup):
            return self._answer_any(event.sender, lookup, now)
        if not self._waiting.put(event.sender, lookup, now):
            return [Ignore(event, "too many lookups wait for index data")]
        return []

    def _rests_on_known(self, lookup: IndexLookup | TagFirstsWanted) -> bool:
        """Whether the entries and trims that a lookup names are applied and known here."""
        if lookup.view > self._placement.view.number:
            return False
        of_its_copy = lookup.epoch <= self._copy_of or not self._lineage.position
        return of_its_copy and self._floors.known.covers(lookup.trims, lookup.epoch)

    def _rebuild_for_lookups(self, now: Instant) -> list[Effect]:
        """Rebuild if a waiting lookup names an entry that replaced one of the applied entries.

        While the log is idle, storage cannot show the replacement. The newest metalog may end
        before the last position of this shard, so storage has no index data there.
        """
        for lookup in self._waiting.unconfirmed():
            position = self._replaced_after(lookup)
            if position is not None and lookup.epoch > self._copy_of:
                return self._rebuild_below(position, lookup.epoch, now)
        return []

    def _answer_any(
        self, origin: NodeId, lookup: IndexLookup | TagFirstsWanted, now: Instant
    ) -> list[Effect]:
        if origin not in self._engines:
            return [Ignore(lookup, "a lookup from a node that is no engine")]
        if isinstance(lookup, IndexLookup) and lookup.aggregator not in self._merging_nodes:
            return [Ignore(lookup, "a lookup that names no merging node")]
        below = min(lookup.position, self._lineage.position)
        is_older = (self._lineage.before(below) or 0) > lookup.epoch
        if is_older or self._replaced_after(lookup) is not None:
            return [Ignore(lookup, "a lookup that depends on entries that were replaced")]
        if isinstance(lookup, IndexLookup):
            return self._answer(origin, lookup, now)
        seqnums, shards = array("Q"), array("H")
        for tag in array("Q", lookup.tags):
            search = Search(Direction.NEXT, tag, 0, lookup.limit, 1)
            if self._floors.trimmed.tags.of(tag) or self._store.search(search) is not None:
                search.take(([NOT_KNOWN], [ShardId(0)]))  # trimmed, or may be on the disk
            elif self._store.lost.any(0, *search.seqnums or [lookup.limit]):
                search.seqnums, search.shards = [NOT_KNOWN], [ShardId(0)]
            seqnums.extend(search.seqnums or [NO_RECORD])
            shards.extend(search.shards or [ShardId(0)])
        columns = seqnums.tobytes(), shards.tobytes()
        return [Send(origin, TagFirsts(lookup.request, self.index_shard, *columns))]

    def _answer(self, origin: NodeId, lookup: IndexLookup, now: Instant) -> list[Effect]:
        if lookup.bound < self._floors_of(lookup)[0]:
            return self._found(origin, lookup, ((), ()), now)
        search = Search(lookup.direction, lookup.tag, lookup.bound, lookup.limit, lookup.count)
        return self._resume(SpilledLookup(origin, lookup, search), now)

    def _floors_of(self, lookup: IndexLookup) -> tuple[SeqNum, SeqNum]:
        """Return the floor that applies to a lookup, and the floor of its log."""
        trimmed = self._floors.trimmed
        log_floor = max(trimmed.logs.of(lookup.log), trimmed.logs.of(lookup.tag))
        return max(trimmed.tags.of(lookup.tag), log_floor), log_floor

    def _resume(self, waiting: SpilledLookup, now: Instant) -> list[Effect]:
        """Search to the end, or until a row group of the snapshot is needed."""
        needed = self._store.search(waiting.search)
        if needed is None:
            return self._found(waiting.origin, waiting.lookup, waiting.search.matches, now)
        if self._spilled.full:
            return [Ignore(waiting.lookup, "too many lookups wait for the snapshot")]
        return [AskSnapshots(needed)] if self._spilled.put(needed, waiting) else []

    def _found(
        self, origin: NodeId, lookup: IndexLookup, matches: Matches, now: Instant
    ) -> list[Effect]:
        """Send matches above the floor to the merging node; send an exact match to storage, too."""
        floor, log_floor = self._floors_of(lookup)
        seqnums, shards = matches
        if lookup.bound < floor:
            seqnums, shards = (), ()
        elif lookup.direction is Direction.PREV:
            kept = sum(1 for seqnum in seqnums if seqnum >= floor)
            seqnums, shards = seqnums[:kept], shards[:kept]
        exact = lookup.count == 1 and bool(seqnums) and seqnums[0] == lookup.bound
        lost = () if exact else crossed(self._store.lost, lookup, (seqnums, shards), floor)
        answer = IndexAnswer(
            lookup.request, origin, lookup.direction, self.index_shard,
            lookup.count, exact, seqnums, shards, lookup.names_first,
            lookup.bound, floor, log_floor, lookup.trims, self._floors.position,
            lookup.epoch, lost, lookup.index_shards,
        )  # fmt: skip
        if lookup.aggregator == self._node:
            effects = self._merging.add(self._node, answer, now)
        else:
            effects = [Send(lookup.aggregator, answer)]
        if exact:
            replicas = self._placement.counting(shards[0])
            assert replicas, "only records of known shards are indexed"
            replica = replicas[lookup.request % len(replicas)]
            read = ReadRecords(
                lookup.request, origin, shards[0], seqnums, lookup.trims, lookup.epoch
            )
            effects.insert(0, Send(replica, read))
        return effects

    # --- snapshots

    def _empty_store(self) -> IndexStore:
        return IndexStore(
            memory_bytes_max=self._config.index_tier.index_memory_bytes_max,
            entries_min=self._config.index_tier.index_snapshot_entries_min,
            lost_max=self._config.index_tier.lost_ranges_max,
        )

    def _feed_from(self, position: MetalogPosition) -> IndexFeed:
        return IndexFeed(
            position,
            positions=self._positions,
            positions_max=self._config.index_tier.index_positions_ahead_max,
            bytes_max=self._config.index_tier.index_ahead_bytes_max,
        )

    def _on_snapshots(self, answer: SnapshotAnswer, now: Instant) -> list[Effect]:
        match answer:
            case SnapshotOpened(snapshot):
                return self._on_opened(snapshot)
            case SnapshotWritten():
                return self._on_written(answer, now)
            case RowsRead():
                return self._on_rows(answer, now)
            case unreachable:
                assert_never(unreachable)

    def _on_opened(self, snapshot: IndexSnapshot | None) -> list[Effect]:
        """Begin with a snapshot of this index shard, if there is one; fetch the rest."""
        if not self._snapshots.opening:
            return [Ignore(snapshot, "a snapshot that was not asked for")]
        if snapshot is not None and not self._snapshots.is_ours(snapshot):
            return [self._snapshots.open(below=snapshot.info.position)]
        self._snapshots.opening = False
        if snapshot is not None:
            self._store.restore(snapshot)
            self._resume_from(snapshot.info)
        kept, self._kept, self._kept_payload = self._kept, None, b""
        info = snapshot.info if snapshot is not None else None
        if kept is not None and kept.follows(info) and self._snapshots.covers_ours(kept.info):
            self._store.add_checkpoint(kept.rows, kept.info)
            self._resume_from(kept.info)
        return self._begin_fetch(NO_POSITION)

    def _on_written(self, answer: SnapshotWritten, now: Instant) -> list[Effect]:
        stored, base = answer.snapshot is not None, self._store.base
        if not self._snapshots.on_written(answer.position, stored=stored, now=now):
            return []
        if answer.base_lost and base is not None:
            return self._rebuild(base.info.position, _DAMAGED, now)
        self._store.written(answer.snapshot)
        return self._apply(SnapshotsAnswered(answer), now)

    def _on_rows(self, answer: RowsRead, now: Instant) -> list[Effect]:
        """Resume the lookups that waited for rows; if they are damaged, rebuild the index."""
        position, group, rows = answer
        effects: list[Effect] = []
        base = self._store.base
        if base is not None and base.info.position == position:
            if rows is None:
                effects = self._rebuild(position, _DAMAGED, now)
            else:
                self._store.keep(group, rows)
        for waiting in self._spilled.take(ReadRows(position, group)):
            effects += self._resume(waiting, now)
        return effects

    def _resume_from(self, info: SnapshotInfo) -> None:
        """Count the positions that a snapshot or a checkpoint covers as applied, with their
        epochs.
        """
        self._feed = self._feed_from(info.position)
        self._lineage = Lineage.restored(info.lineage)
        self._confirm(self._lineage.last)

    def _rebuild_below(
        self, replaced: MetalogPosition, copy_of: Epoch, now: Instant
    ) -> list[Effect]:
        """Rebuild the index without the position `replaced` and those after it.

        The metalog of incarnation `copy_of` has another entry there.
        """
        self._not_before = max(self._not_before, copy_of)
        return self._rebuild(replaced + 1, _REPLACED, now)

    def _rebuild(self, below: MetalogPosition, reason: str, now: Instant) -> list[Effect]:
        """Rebuild the index from a snapshot of a position below `below`, and from storage.

        Lookups in flight wait. Their searches then start again.
        """
        self._store = self._empty_store()
        self._feed = self._feed_from(0)
        self._lineage, self._copy_of = Lineage(), Epoch(0)
        self._fetch = None
        self._discards.stop()
        self._rebuilds += 1
        effects: list[Effect] = [Ignore(below, reason), self._snapshots.open(below)]
        self._waiting.wait_for_positions()
        return effects + [
            Ignore(waiting.lookup, "too many lookups wait for index data")
            for waiting in self._spilled.clear()
            if not self._waiting.put(waiting.origin, waiting.lookup, now)
        ]

    # --- missing index data

    @property
    def _missing(self) -> bool:
        if self._snapshots.opening or self._store.full:
            return False  # index data that arrived could not be kept
        return self._fetch is not None or self._feed.behind or bool(self._waiting)

    def _catch_up(self, now: Instant, *, advanced: bool) -> list[Effect]:
        """Begin a new fetch after a pause without progress, if index data is missing."""
        if self._fetch is not None and self._fetch.over:
            self._fetch = None
        if not self._missing:
            self._resend.stop()
            return []
        if advanced:
            self._resend.stop()
        effects: list[Effect] = []
        if self._resend.is_due(now):
            end = max(self._feed.end, self._waiting.end, self._fetch.end if self._fetch else 0)
            effects = self._begin_fetch(end)
        if effects or self._resend.due is None:
            self._resend.sent(now)
        return effects

    def _begin_fetch(self, end: MetalogPosition) -> list[Effect]:
        """Ask storage nodes for missing index data; each attempt asks other nodes (`sources_of`).

        The request to one node also covers the last applied position. The answer of this node shows
        whether the entry at that position was replaced.
        """
        sources, last = (
            sources_of(self._placement, self._placement.view.storage_nodes, self._attempts),
            self._last_applied,
        )
        self._fetch = Fetch(sources, start=self._feed.position, end=end, positions=self._positions)
        self._attempts += 1
        confirm = [Send(sources[0], IndexDataWanted(last, last + 1, 1))] if last >= 0 else []
        return [*confirm, *self._fetch.first_pages()]
