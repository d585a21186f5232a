"""The primary sequencer: turns reports of storage nodes into metalog entries (Scalog 4.1,
ARCHITECTURE 8.3).

An entry is *proposed* when the progress of any shard has grown. It is persisted and sent to the
other sequencers at once, so that the syncs of all sequencers overlap (decision 0006). It is
*committed* when a majority of the sequencers has it (`indilog_ordering.consensus`). After that it
is *published*: sent to engines and storage nodes. Several entries are in flight at once.

If there are other sequencers, the first entry of a term is the fence, a cut without records. When
the fence is committed, all earlier entries are committed, too. Nothing is published or answered
before the fence is committed.

When every running storage node has an entry in both of its checkpoints (`MetalogCovered`), the
entry is folded into the base, here and at the backups. A node that requests such an entry receives
the base (decision 0030).

`Sequencer` creates a `Primary` when its term has adopted a copy, and passes it the messages of
engines and storage nodes. `Primary` proposes entries by `Leader`. It asks `Reports`,
`Replacements`, `Finalizations` and `TrimRequests` which entries are due.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, assert_never

from indilog.base.errors import ConfigError, DataDirectoryError
from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, SeqNum, ShardId, ViewNumber
from indilog.config import Config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import (
    NO_INCARNATION,
    WRITERS_MAX,
    NewRecords,
    NewReplicas,
    NewView,
    NewWriters,
    Replicas,
    Trim,
)
from indilog.kernel.placement import Placement
from indilog.kernel.view import NO_WRITER, Members, View, view_with
from indilog.roles.disk_full import DiskFullNotifier
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.base_messages import MetalogBase, MetalogCovered
from indilog.wire.messages import (
    ForSequencer,
    MetalogEntries,
    MetalogWanted,
    ShardProgress,
    ShardWanted,
    TailIs,
    TailWanted,
    TermIs,
)
from indilog.wire.replica_messages import StorageAlive
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogStored,
    Seal,
    Sealed,
)
from indilog.wire.tag_messages import TrimWanted
from indilog_ordering.entry_clock import EntryClock
from indilog_ordering.finalization import Finalizations
from indilog_ordering.leader import Leader
from indilog_ordering.progress import Reports
from indilog_ordering.replacement import Replacements
from indilog_ordering.stored_metalog import StoredMetalog
from indilog_ordering.trims import TrimRequests

_TAILS_MAX: Final = 4096
"""Largest number of tail requests that wait for a round."""
_OTHER_TERM: Final = "a report that was sent to the primary of another term"


class Primary:
    """Proposes entries, and publishes those that are committed.

    Guarantees: a published entry is on the disks of a majority of sequencers. A record is ordered
    only after the ack quorum of its shard has reported it. At most `metalog_entries_in_flight_max`
    entries are proposed and not committed; later reports go into the next entry.

    Args:
        leader: the leader of the primary's term, which has adopted the metalog.
    """

    def __init__(
        self,
        node: NodeId,
        view: View,
        config: Config,
        metalog: StoredMetalog,
        epoch: Epoch,
        leader: Leader,
        now: Instant,
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._leader = leader
        self._cut_interval_s = config.cluster.cut_interval_s
        self._cut_at = Instant(now - self._cut_interval_s)  # when the newest cut was proposed
        self._merged_by_masters = config.cluster.aggregation == "master-slave"
        self._page_entries = config.node.ordering.metalog_entries_in_flight_max
        self._page_bytes = config.node.messages.page_bytes_max
        self._metalog = metalog
        self._published: MetalogPosition | None = None
        """Number of published entries; None: this incarnation has not published yet."""
        recovered = metalog.iterate(metalog.committed.position, len(metalog))
        proposed = metalog.committed.base().with_entries(recovered)
        self._last_us = proposed.time_us
        """The newest stamp of the entries that earlier terms proposed."""
        self._now = now
        self._clock = EntryClock(proposed.time_us, now, config.node.ordering.clock_gap_s_max)
        self._cut = proposed.cut
        """Records of each shard that all entries, committed or not, have ordered."""
        self._trims = proposed.trims
        """Number of trims among all entries."""
        self._placement = Placement(view)
        """The replicas of each shard according to all entries, committed or not."""
        self._placement.restore(proposed.replicas, proposed.view)
        self._set_readers(view := self._placement.view)
        self._disk_full_notifier = DiskFullNotifier(view.engines)
        self._leaving: dict[NodeId, MetalogPosition] = {}
        """Readers that have left, with the position of the entry that they must still receive."""
        self._finalizations = Finalizations(self._placement)
        self._members: Members | None = None
        """The nodes that the cluster should have; None: no change is wanted."""
        self._view_is_due = False
        """Whether the members or the replicas have changed since the last view was proposed."""
        self._replacements = Replacements(self._placement, view.storage_nodes, config, now)
        self._reports = Reports(
            self._placement, config.cluster, proposed.writers, entries_may_be_lost=leader.alone
        )
        """The stored prefixes of replicas, under the writers that all entries name."""
        self._wanted: dict[ShardId, Epoch] = {}
        """Writers that wait for their shards."""
        self._trim_requests = TrimRequests(requests_max=config.node.trims.trims_pending_max)
        widest = max(len(placed.replicas) for placed in view.shards.values())
        self._histories_min = max(2, widest)
        self._covered = dict.fromkeys(view.storage_nodes, Extent(NO_INCARNATION, 0))
        """The extent that both checkpoints of each storage node cover."""
        self._covered_by_all: MetalogPosition = 0
        self._tails: dict[tuple[NodeId, int], tuple[int, ViewNumber]] = {}
        """Tail requests, by reader and request number: the round that must be confirmed first, and
        the newest view that the reader knows.
        """

    def _set_readers(self, view: View) -> None:
        """Set the readers to the engines and storage nodes of a view; engines first, because
        callers wait for them.
        """
        self._engines = frozenset(view.engines)
        self._readers = view.engines + view.storage_nodes
        self._reader_set = frozenset(self._readers)

    @property
    def committed(self) -> MetalogPosition:
        """Number of committed entries, as far as this primary knows."""
        return self._metalog.committed.position

    @property
    def tail(self) -> SeqNum:
        """The first seqnum that no committed entry has ordered."""
        return self._metalog.committed.tail

    @property
    def time_behind_s(self) -> int:
        """Seconds by which the clock of entries lagged the wall clock when the term began."""
        return round(self._clock.behind_s)

    @property
    def lost_storage_nodes(self) -> list[NodeId]:
        """The storage nodes without a recent heartbeat, ascending. It is empty if no shard can
        move, because storage nodes then send no heartbeats.
        """
        if not self._placement.view.moves_shards:
            return []
        alive = self._replacements.alive(self._now)
        return [node for node in self._placement.view.storage_nodes if node not in alive]

    def begin_iteration(self, now: Instant) -> None:
        """Set the time, which applies to all answers and proposals of the iteration."""
        self._clock.advance(now)
        self._now = now
        self._replacements.note_time(now)

    def on_received(self, event: Received, message: ForSequencer) -> list[Effect]:
        """Handle one message; `advance` acts on all messages of the iteration."""
        match message:
            case ShardProgress():
                effects = self._on_shard_progress(event, message)
            case MetalogWanted():
                effects = self._on_metalog_wanted(event, message)
            case MetalogCovered():
                effects = self._on_metalog_covered(event, message)
            case TailWanted():
                effects = self._on_tail_wanted(event, message)
            case TrimWanted():
                effects = self._on_trim_wanted(event, message)
            case StorageAlive():
                effects = self._on_storage_alive(event, message)
            case ShardWanted():
                effects = self._on_shard_wanted(event, message)
            case MetalogAppend() | MetalogStored() | Seal() | Sealed():
                raise AssertionError("the consensus core handles these")
            case unreachable:
                assert_never(unreachable)
        return effects

    def forget(self, node: NodeId) -> None:
        """Drop the reports of `node` from before its restart, because it may have lost its disk."""
        self._reports.forget(node)
        self._replacements.forget(node)
        if node in self._covered:
            self._cover(node, Extent(NO_INCARNATION, 0))

    def begin(self) -> list[Effect]:
        """If there are other sequencers, notify readers that this node leads, and propose the
        fence.
        """
        if self._leader.alone:
            return []
        led = TermIs(self._epoch, self._node)
        notified: list[Effect] = [Send(reader, led) for reader in self._readers]
        return [*notified, self._cut_entry({}, self._last_us)]

    def advance(self, now: Instant) -> list[Effect]:
        """Publish committed entries, answer tails, and propose at most one entry of each kind."""
        effects = self._publish()
        if self._tails:
            effects += self._answer_tails()
        views_due = self._members is not None and self._may_propose_view(now)
        # Before a view ends a shard, all reported records of the shard are ordered.
        if self._reports.changed and (views_due or self._cut_is_due(now)):
            effects += self._propose()
        if self._members is not None and views_due:
            effects += self._propose_view(self._members, now)
        if self._placement.view.moves_shards and self._replacements.is_due(now):
            effects += self._propose_new_shards(now) + self._propose_replicas(now)
        if self._wanted:
            effects += self._propose_writers()
        if self._trim_requests.wanted:
            effects += self._propose_trim()
        effects += self._disk_full_notifier.conclude(now)
        self._metalog.fold(min(self._covered_by_all, self.committed))
        return effects

    def deadline(self) -> Instant | None:
        """When the next of these is due: a repeated disk-full notification, a cut, a finalization,
        or a check for lost storage nodes.
        """
        due = self._disk_full_notifier.deadline()
        if self._cut_interval_s and self._reports.changed and self._leader.has_room:
            cut = Instant(self._cut_at + self._cut_interval_s)
            due = cut if due is None else min(due, cut)
        moves = self._placement.view.moves_shards
        if not (moves and self._leader.settled and self._leader.has_room):
            return due
        lost = self._replacements.deadline()
        dues = (due, lost, self._finalizations.deadline())
        return min(due for due in dues if due is not None)

    def on_space_changed(self, *, full: bool, now: Instant) -> None:
        """Notify engines whether this disk has room. Entries continue, because they need little
        room.
        """
        self._disk_full_notifier.changed(full=full, now=now)

    def check_invariants(self) -> None:
        """Assert that entries pass through their stages in order."""
        assert len(self._tails) <= _TAILS_MAX
        assert self._published is None or self._published <= self.committed
        assert self._wanted.keys() <= self._placement.shards
        assert self._covered_by_all <= len(self._metalog), "only what equals this metalog counts"
        assert self.tail == sum(self._metalog.committed.cut.values())
        assert all(self._cut[s] >= length for s, length in self._metalog.committed.cut.items())
        self._trim_requests.check_invariants()

    # --- messages

    def _on_shard_progress(self, event: Received, message: ShardProgress) -> list[Effect]:
        if message.term != self._epoch:
            return [Ignore(event, _OTHER_TERM)]
        effects: list[Effect] = []
        for shard, (epoch, stored) in message.stored.items():
            if (
                reason := self._reports.note(event.sender, shard, epoch, stored, message.position)
            ) is not None:
                effects.append(Ignore(event, reason))
        return effects

    def _on_storage_alive(self, event: Received, message: StorageAlive) -> list[Effect]:
        if message.term != self._epoch:
            return [Ignore(event, _OTHER_TERM)]
        if not self._replacements.on_alive(event.sender, message, self._now):
            return [Ignore(event, "a heartbeat of a node that is no storage node")]
        return []

    def _on_metalog_covered(self, event: Received, message: MetalogCovered) -> list[Effect]:
        if message.term != self._epoch:
            return [Ignore(event, _OTHER_TERM)]
        if event.sender not in self._covered or message.position < 0:
            return [Ignore(event, "covered by a node that keeps no records, or below 0")]
        self._cover(event.sender, Extent(message.epoch, message.position))
        return []

    def _cover(self, node: NodeId, covered: Extent) -> None:
        """Note the extent that both checkpoints of a storage node cover. Only entries that equal
        the entries here count.
        """
        self._covered[node] = covered
        agreement = self._metalog.agreement
        nodes = frozenset(self._covered)
        if self._placement.view.moves_shards:
            alive = self._replacements.alive(self._now)
            # Lost nodes are left out if enough others keep the old entries: a lost node that
            # comes back fetches the old entries from those others.
            if len(alive) >= min(len(nodes), self._histories_min):
                nodes = alive
        lengths = [agreement(*self._covered[node]) for node in nodes]
        self._covered_by_all = min(lengths, default=0)

    def _on_metalog_wanted(self, event: Received, message: MetalogWanted) -> list[Effect]:
        """Send entries to any node, because a node that has left may lack the entry that removed
        it.
        """
        if message.start < 0:
            return [Ignore(event, "a position is never negative")]
        committed = self.committed
        start = min(self._metalog.agreement(message.last, message.start), committed)
        if start < self._metalog.base.position:
            return [Send(event.sender, MetalogBase(self._metalog.base, message.request))]
        end = min(start + self._page_entries, committed)
        page = self._metalog.page(start, end, self._page_bytes) if start < end else ()
        previous = self._metalog.epoch_before(start)
        answer = MetalogEntries(start, previous, page, committed, message.request)
        return [Send(event.sender, answer)]

    def _on_tail_wanted(self, event: Received, message: TailWanted) -> list[Effect]:
        if event.sender not in self._reader_set:
            return [Ignore(event, "asked by a node that is neither engine nor storage")]
        if len(self._tails) >= _TAILS_MAX:
            return [Ignore(event, "too many tails are asked for")]
        needed = 0 if self._leader.alone else self._leader.confirm()
        self._tails.setdefault((event.sender, message.request), (needed, message.view))
        return []

    def _answer_tails(self) -> list[Effect]:
        """Answer the tail requests whose round is confirmed: no newer primary had committed an
        entry when they arrived.
        """
        confirmed, committed = self._leader.confirmed, self._metalog.committed
        answered = [asked for asked, (needed, _) in self._tails.items() if needed <= confirmed]
        effects: list[Effect] = []
        for reader, request in answered:
            _, known = self._tails.pop((reader, request))
            answer = TailIs(
                request,
                committed.position,
                committed.tail,
                dict(committed.cut),
                committed.last,
                committed.trims,
                self._clock.now_us,
                committed.writers,
                committed.replicas,
                _newer(committed.view, known),
            )
            effects.append(Send(reader, answer))
        return effects

    def _on_trim_wanted(self, event: Received, message: TrimWanted) -> list[Effect]:
        if event.sender not in self._reader_set:
            return [Ignore(event, "a trim wanted by a node that is neither engine nor storage")]
        tag, until, _, log = message.floor
        if not (0 <= tag < 2**64 and 0 <= log < 2**64 and until >= 0):
            return [Ignore(event, "a floor of no possible tag or seqnum")]
        effects = self._trim_requests.on_wanted(event.sender, message, self.tail)
        return [Ignore(event, "too many trims are under way")] if effects is None else effects

    def _on_shard_wanted(self, event: Received, message: ShardWanted) -> list[Effect]:
        placed = self._placement.view.shards.get(message.shard)
        if placed is None or placed.writer != event.sender:
            return [Ignore(event, "a shard wanted by a node that is not its writer")]
        if message.epoch < (writer := self._reports.writer(message.shard)):
            return [Ignore(event, "a shard wanted by an earlier writer")]
        if message.epoch == writer:
            return []  # a repeated request
        earlier = self._wanted.get(message.shard, NO_INCARNATION)
        self._wanted[message.shard] = max(message.epoch, earlier)
        if message.epoch != earlier:
            return []
        # The report may be lost. A storage node that receives `TermIs` reports again.
        led = TermIs(self._epoch, self._node)
        return [Send(replica, led) for replica in self._reports.missing(message.shard)]

    # --- publishing and proposing

    def _publish(self) -> list[Effect]:
        """Publish the entries that were committed since the last call.

        The first message has the last page of recovered entries, or no entries. If this process is
        a new incarnation, the message shows this to readers, which then ask this primary to confirm
        their copies. A reader that lags by more than the page sees a gap and requests entries.
        """
        committed, published = self._metalog.committed, self._published
        if published == committed.position:
            return []
        end = self._published = committed.position
        first = max(published or 0, end - self._page_entries, self._metalog.base.position)
        entries = self._metalog.newest(first, end, self._page_bytes) if first < end else ()
        first = end - len(entries)
        previous = self._metalog.epoch_before(first)
        message = MetalogEntries(first, previous, entries, committed=end)
        # Urgent for engines only: their callers wait, and storage nodes already have the records.
        effects: list[Effect] = [
            Send(reader, message, reader in self._engines) for reader in self._readers
        ]
        if self._leaving:
            effects += [Send(reader, message) for reader in self._leaving]
            self._leaving = {node: at for node, at in self._leaving.items() if at >= end}
        return effects + self._trim_requests.commit(end, committed.tail)

    def _propose(self) -> list[Effect]:
        """Propose one entry that orders all records that shards have stored since the last
        entry.
        """
        if not self._leader.has_room:
            return []
        counts: dict[ShardId, int] = {}
        for shard, progress in self._reports.pop_changed():
            ordered = self._cut.get(shard, 0)
            if progress > ordered:
                counts[shard] = progress - ordered
                self._cut[shard] = progress
        if not counts:
            return []
        self._cut_at = self._now
        if self._finalizations:
            self._finalizations.note_cut(len(self._metalog))
        return [self._cut_entry(counts, self._clock.now_us)]

    def _cut_is_due(self, now: Instant) -> bool:
        """Whether the cut interval has passed, or the clock was set back."""
        return not 0 <= now - self._cut_at < self._cut_interval_s

    def _cut_entry(self, counts: dict[ShardId, int], time_us: int) -> Effect:
        """Propose an entry that orders these records."""
        position, number, epoch = len(self._metalog), self._placement.view.number, self._epoch
        return self._leader.append(NewRecords(position, number, epoch, counts, time_us))

    def _propose_writers(self) -> list[Effect]:
        """Give shards to new writers, with one entry.

        A shard waits until every record of the previous writer that its ack quorum stores is
        ordered. Some of these records may have been acknowledged before the entries that ordered
        them were lost.
        """
        if not self._leader.has_room:
            return []
        ready = [s for s in self._wanted if self._reports.is_ordered(s, self._cut.get(s, 0))]
        writers = {shard: self._wanted.pop(shard) for shard in sorted(ready)[:WRITERS_MAX]}
        if not writers:
            return []
        self._reports.begin(writers)
        position, number, epoch = len(self._metalog), self._placement.view.number, self._epoch
        return [self._leader.append(NewWriters(position, number, epoch, writers))]

    def _propose_new_shards(self, now: Instant) -> list[Effect]:
        """Finalize the shards whose appends wait for lost storage nodes. The compute nodes of these
        shards get new shards on other storage nodes (`finalize_add`, decision 0070).
        """
        if self._leader.alone or not self._leader.has_room:
            return []
        if not (lost := self._replacements.to_finalize(now)):
            return []
        before = self._placement.view
        view = self._view_with(before.members, now, finalize=lost)
        return [] if view is before else [self._install(view)]

    def _propose_replicas(self, now: Instant) -> list[Effect]:
        """Move shards away from lost storage nodes, and drop the copies that no longer count."""
        if not self._leader.has_room:
            return []
        wanted = self._replacements.wanted(now)
        if self._replacements.rebalanced:
            self._view_is_due = True
        if not wanted:
            return []
        position, number, epoch = len(self._metalog), self._placement.view.number, self._epoch
        self._placement.move({s: Replicas(position, nodes) for s, nodes in wanted.items()})
        self._reports.move(wanted)
        self._view_is_due = True
        return [self._leader.append(NewReplicas(position, number, epoch, wanted))]

    def want_members(self, members: Members) -> None:
        """Note the nodes that the cluster should have. Sequencers that are to join get entries."""
        self._members, self._view_is_due = members, True
        self._follow_wanted(members, self._now)
        if members.version >= self._placement.view.members_version and not self._leader.alone:
            self._leader.invite(members.sequencers)

    def _follow_wanted(self, members: Members, now: Instant) -> None:
        """Note the shards to finalize, and whether shards are to be rebalanced."""
        self._finalizations.want(members.finalized, now)
        rebalances = members.rebalance > self._placement.view.rebalanced
        self._replacements.set_rebalancing(members.rebalance if rebalances else None)

    def _may_propose_view(self, now: Instant) -> bool:
        """Whether a view may be possible now that was not possible at the last check."""
        if self._view_is_due or self._next_sequencers is not None:
            return True
        return bool(self._finalizations and self._finalizations.due(self.committed, now))

    @property
    def _next_sequencers(self) -> tuple[NodeId, ...] | None:
        """Return the sequencers after one of them was added or removed, as the wanted members
        require; None: no sequencer can be changed now. All are added before any is removed, and the
        primary is removed last.
        """
        now, members = self._placement.view.sequencers, self._members
        if members is None or not members.sequencers or members.sequencers == now:
            return None
        added = [node for node in members.sequencers if node not in now]
        removed = [node for node in now if node not in members.sequencers]
        removed.sort(key=lambda node: node == self._node)
        changes = [(*now, node) for node in added] or [
            tuple(node for node in now if node != gone) for gone in removed
        ]
        return next((nodes for nodes in changes if self._leader.can_install(nodes)), None)

    def _propose_view(self, members: Members, now: Instant) -> list[Effect]:
        """Install the view that has the wanted nodes, as far as that is possible now.

        A sole sequencer changes nothing, because it may lose the entry with its disk.
        """
        if self._leader.alone or not self._leader.has_room:
            return []
        self._view_is_due = False
        before = self._placement.view
        if members.version < before.members_version:
            self._members = None
            return []
        leaving = set(before.storage_nodes) - set(members.storage_nodes)
        try:
            finalize = self._finalizations.due(self.committed, now)
            view = self._view_with(members, now, self._next_sequencers, finalize=finalize)
        except ConfigError as error:
            return self._refuse_members(members, str(error), now)
        if not (members.aggregators or self._merged_by_masters):
            return self._refuse_members(members, "Lookups need an aggregator.", now)
        self._replacements.set_nodes(view.storage_nodes, leaving, now)
        if view is before:
            kept = not members.sequencers or set(members.sequencers) == set(before.sequencers)
            rebalances = members.rebalance > before.rebalanced
            if kept and not (leaving or rebalances or self._finalizations):
                self._members = None
            return []
        installed = self._install(view)
        self._follow_wanted(members, now)
        return [installed]

    def _view_with(
        self,
        members: Members,
        now: Instant,
        sequencers: tuple[NodeId, ...] | None = None,
        *,
        finalize: Collection[ShardId],
    ) -> View:
        """Return the view that the next entry can install. Errors are those of `view_with`."""
        return view_with(
            self._placement.view,
            members,
            len(self._metalog),
            self._placement.replicas,
            self._reports.writer,
            sequencers=sequencers,
            finalize=finalize,
            rebalanced=self._rebalanced(members),
            unusable=self._replacements.unusable(now),
        )

    def _rebalanced(self, members: Members) -> int:
        """Return the number of the newest complete rebalancing. If no shard can move, all
        rebalancings count as complete.
        """
        moves = self._placement.view.moves_shards
        return self._replacements.rebalanced if moves else members.rebalance

    def _install(self, view: View) -> Effect:
        """Propose the entry that installs a view. Afterwards, a further view may be possible."""
        self._view_is_due = self._members is not None
        before = self._placement.view
        entry = NewView(len(self._metalog), view.number, self._epoch, view)
        self._placement.install(view)
        self._note_view(before)
        return self._leader.append(entry)

    def _refuse_members(self, members: Members, reason: str, now: Instant) -> list[Effect]:
        """Keep the present nodes of the cluster, because the wanted members are not possible."""
        self._members = None
        self._replacements.set_nodes(self._placement.view.storage_nodes, (), now)
        return [Ignore(members, reason)]

    def _note_view(self, before: View) -> None:
        """Serve the nodes of the newest view, which the next entry installs."""
        view, readers = self._placement.view, self._readers
        self._set_readers(view)
        self._leaving |= {n: len(self._metalog) for n in readers if n not in self._readers}
        self._wanted = {
            shard: epoch
            for shard, epoch in self._wanted.items()
            if view.shards[shard].writer == before.shards[shard].writer
        }
        self._disk_full_notifier.set_receivers(view.engines)
        self._reports.follow_view({})
        self._wanted |= self._continued(before)
        nothing = Extent(NO_INCARNATION, 0)
        self._covered = {n: self._covered.get(n, nothing) for n in view.storage_nodes}

    def _continued(self, before: View) -> dict[ShardId, Epoch]:
        """Return the new shards, with their writers, of the compute nodes whose shard in the view
        `before` was finalized. The writers continue on the new shards at once, without a request.
        """
        continued: dict[ShardId, Epoch] = {}
        for shard, placed in self._placement.view.shards.items():
            old = before.shard_written_by(placed.writer) if placed.writer != NO_WRITER else None
            if shard in before.shards or old is None:
                continue
            if (epoch := self._reports.writer(old)) != NO_INCARNATION:
                continued[shard] = epoch
        return continued

    def _propose_trim(self) -> list[Effect]:
        """Put all requested trims into one entry."""
        if not self._leader.has_room:
            return []
        position = len(self._metalog)
        floors = self._trim_requests.propose(position)
        entry = Trim(position, self._placement.view.number, self._epoch, self._trims, floors)
        self._trims += 1
        return [self._leader.append(entry)]


def _newer(view: View | None, known: ViewNumber) -> View | None:
    """Return a view if it is newer than the known one."""
    return view if view is not None and view.number > known else None


def check_new(epoch: Epoch, before: Epoch) -> None:
    """Refuse an incarnation that is not newer than the one that wrote the metalog.

    Raises:
        DataDirectoryError: the incarnation is not newer, so the metadata file, which assigns
            epochs, is an old copy.
    """
    if epoch <= before:
        raise DataDirectoryError(
            f"The metadata file is older than the journals: it gave epoch {epoch}, the metalog was "
            f"written under {before}. Restore the newest one, or choose another directory."
        )
