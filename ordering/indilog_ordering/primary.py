"""The primary sequencer: turns reports of storage nodes into metalog entries (Scalog 4.1,
ARCHITECTURE 8.3).

An entry is *proposed* when the progress of any shard has grown. It is persisted and sent to the
backups at once, so that the syncs of all sequencers overlap (decision 0006). It is *stored* when it
is durable here, and *committed* when a majority of the sequencers, including this one, has it.
After that it is *published*: sent to engines and storage nodes. Several entries are in flight at
once.

After a crash, backups may have entries that the primary lost. These were never published: an entry
is stored here before it is published. After a restart the primary continues from its disk. It asks
each backup what it has, and counts the entries that equal its own (`StoredMetalog.agreement`). It
sends the entries after these, which commits the recovered entries. Its new entries replace those
that it lost (`indilog_ordering.backup`).

Entries that every storage node has in both of its checkpoints (`MetalogCovered`) are folded into
the base, here and at the backups. A node that requests one of them receives the base (decision
0030).

A primary whose disk lost entries fetches them first (`indilog_ordering.rebuild`). If a backup has
lost entries, the primary notifies it as soon as it has all of them again
(`MetalogAppend.completes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, assert_never

from indilog.base.errors import DataDirectoryError
from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, SeqNum, ShardId, majority
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import NewRecords, Trim
from indilog.kernel.view import View
from indilog.roles.disk_full import DiskFullNotifier
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.base_messages import MetalogBase, MetalogCovered
from indilog.wire.messages import (
    ForSequencer,
    MetalogEntries,
    MetalogWanted,
    ShardProgress,
    TailIs,
    TailWanted,
)
from indilog.wire.sequencer_messages import (
    NO_INCARNATION,
    MetalogAppend,
    MetalogCopy,
    MetalogCopyWanted,
    MetalogStored,
)
from indilog.wire.tag_messages import TrimWanted
from indilog_ordering.backup_progress import BackupProgress
from indilog_ordering.entry_clock import EntryClock
from indilog_ordering.progress import Reports
from indilog_ordering.stored_metalog import StoredMetalog
from indilog_ordering.trims import TrimRequests

_TAIL_UNKNOWN: Final = "it is not known yet which recovered entries are committed"


class Primary:
    """Proposes, replicates, commits and publishes metalog entries.

    Guarantees: a published entry is on the disks of a majority of sequencers. A record is ordered
    only after the ack quorum of its shard has reported it. At most `metalog_entries_in_flight_max`
    entries are proposed and not committed; later reports go into the next entry.
    """

    def __init__(
        self, view: View, config: Config, metalog: StoredMetalog, epoch: Epoch, now: Instant
    ) -> None:
        self._view = view
        self._epoch = epoch
        self._page_entries = config.node.ordering.metalog_entries_in_flight_max
        self._page_bytes = config.node.messages.page_bytes_max
        self._resend_s = config.node.messages.resend_s, config.node.messages.resend_s_max
        self._metalog = metalog
        self._recovered = len(metalog)
        _check_new(epoch, metalog.epoch_before(len(metalog)))
        self._reports = Reports(view)
        self._backups = {node: BackupProgress(Resend(*self._resend_s)) for node in view.backups}
        self._majority = majority(view.sequencers)
        self._engines = frozenset(view.engines)
        self._readers = view.engines + view.storage_nodes
        """Engines first: callers wait for them."""
        self._reader_set = frozenset(self._readers)
        self._disk_full_notifier = DiskFullNotifier(view.engines)
        self._published: MetalogPosition | None = None
        """How many entries are published; None: this incarnation has not published yet."""
        recovered = metalog.iterate(metalog.committed.position, len(metalog))
        proposed = metalog.committed.base().with_entries(recovered)
        self._clock = EntryClock(proposed.time_us, now, config.node.ordering.clock_gap_s_max)
        self._cut = proposed.cut
        """How far each shard is ordered by all entries, committed or not."""
        self._trims = proposed.trims
        """How many of all entries are trims."""
        self._trim_requests = TrimRequests(requests_max=config.node.trims.trims_pending_max)
        self._covered = dict.fromkeys(view.storage_nodes, Extent(NO_INCARNATION, 0))
        """What both checkpoints of each storage node cover."""
        self._covered_by_all: MetalogPosition = 0

    @property
    def committed(self) -> MetalogPosition:
        """How many entries are committed, as far as this primary knows."""
        return self._metalog.committed.position

    @property
    def tail(self) -> SeqNum:
        """The first seqnum that no committed entry has ordered."""
        return self._metalog.committed.tail

    @property
    def tail_unknown(self) -> bool:
        """Whether some recovered entries are not yet known to be committed."""
        return self.committed < self._recovered

    @property
    def time_behind_s(self) -> int:
        """How many seconds the time of entries lagged the wall clock at the start."""
        return round(self._clock.behind_s)

    def begin_iteration(self, now: Instant) -> None:
        """Note the time, which holds for all answers and proposals of the iteration."""
        self._clock.advance(now)

    def on_received(self, event: Received, message: ForSequencer) -> list[Effect]:
        """Handle one message; `advance` acts on all messages of the iteration."""
        match message:
            case ShardProgress():
                effects = self._on_shard_progress(event, message)
            case MetalogStored():
                effects = self._on_metalog_stored(event, message)
            case MetalogWanted():
                effects = self._on_metalog_wanted(event, message)
            case MetalogCovered():
                effects = self._on_metalog_covered(event, message)
            case TailWanted():
                effects = self._on_tail_wanted(event, message)
            case TrimWanted():
                effects = self._on_trim_wanted(event, message)
            case MetalogAppend() | MetalogCopyWanted() | MetalogCopy():
                effects = [Ignore(event, f"a primary has no use for {type(message).__name__}")]
            case unreachable:
                assert_never(unreachable)
        return effects

    def forget(self, node: NodeId) -> None:
        """Forget what `node` reported before it restarted: it may have lost its disk."""
        self._reports.forget(node)
        if node in self._covered:
            self._cover(node, Extent(NO_INCARNATION, 0))
        if node in self._backups:
            self._backups[node] = BackupProgress(Resend(*self._resend_s))

    def advance(self, now: Instant) -> list[Effect]:
        """Commit and publish entries, propose at most one entry of each kind, and send backups the
        entries that they lack.
        """
        effects = self._commit()
        if self._reports.changed:
            effects += self._propose()
        if self._trim_requests.wanted:
            effects += self._propose_trim()
        effects += self._disk_full_notifier.conclude(now)
        self._metalog.fold(min(self._covered_by_all, self.committed))
        for node, backup in self._backups.items():
            effects += self._replicate(node, backup, now)
        return effects

    def deadline(self) -> Instant | None:
        """When to resend to a silent backup, or to repeat a disk-full notification."""
        due = self._disk_full_notifier.deadline()
        for backup in self._backups.values():
            if (again := backup.resend.due) is not None and (due is None or again < due):
                due = again
        return due

    def on_space_changed(self, *, full: bool, now: Instant) -> None:
        """Notify engines whether this disk has room; entries continue, because they need little."""
        self._disk_full_notifier.changed(full=full, now=now)

    def check_invariants(self) -> None:
        """Assert that entries pass through their stages in order."""
        stored = self._metalog.stored
        assert self.committed <= stored <= len(self._metalog)
        in_flight_max = max(self._page_entries, self._recovered)
        assert len(self._metalog) - self.committed <= in_flight_max
        assert self._published is None or self._published <= self.committed
        assert self._covered_by_all <= len(self._metalog), "only what equals this metalog counts"
        assert self.tail == sum(self._metalog.committed.cut.values())
        assert all(self._cut[s] >= length for s, length in self._metalog.committed.cut.items())
        assert all(b.stored <= b.sent <= len(self._metalog) for b in self._backups.values())
        self._trim_requests.check_invariants()

    # --- messages

    def _on_shard_progress(self, event: Received, message: ShardProgress) -> list[Effect]:
        effects: list[Effect] = []
        for shard, (epoch, stored) in message.stored.items():
            if (reason := self._reports.note(event.sender, shard, epoch, stored)) is not None:
                effects.append(Ignore(event, reason))
        return effects

    def _on_metalog_stored(self, event: Received, message: MetalogStored) -> list[Effect]:
        backup = self._backups.get(event.sender)
        if backup is None:
            return [Ignore(event, "metalog stored by a node that is no backup")]
        epoch, length = message.epoch, message.length
        misfits = length < 0 or not 0 <= message.base <= length
        if misfits or (epoch == self._epoch and length > len(self._metalog)):
            return [Ignore(event, "the backup has entries that were never sent to it")]
        if epoch > self._epoch:
            return [Ignore(event, "the backup has entries of an incarnation still to come")]
        equal = self._metalog.agreement(epoch, length)
        backup.on_stored(equal, message.incomplete, message.base, event.incarnation)
        return []

    def _on_metalog_covered(self, event: Received, message: MetalogCovered) -> list[Effect]:
        if event.sender not in self._covered or message.position < 0:
            return [Ignore(event, "covered by a node that keeps no records, or below 0")]
        self._cover(event.sender, Extent(message.epoch, message.position))
        return []

    def _cover(self, node: NodeId, covered: Extent) -> None:
        """Note what a storage node covers; only what equals the metalog here counts."""
        self._covered[node] = covered
        agreement = self._metalog.agreement
        self._covered_by_all = min(agreement(*extent) for extent in self._covered.values())

    def _on_metalog_wanted(self, event: Received, message: MetalogWanted) -> list[Effect]:
        if event.sender not in self._reader_set:
            return [Ignore(event, "asked by a node that is neither engine nor storage")]
        if message.start < 0:
            return [Ignore(event, "a position is never negative")]
        if self.tail_unknown:
            # The answer would present entries as uncommitted that were published before the
            # restart.
            return [Ignore(event, _TAIL_UNKNOWN)]
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
        if self.tail_unknown:
            # Some recovered entries may have been published before the restart. A tail without them
            # would be lower than one that was returned before. The engine asks again.
            return [Ignore(event, _TAIL_UNKNOWN)]
        committed = self._metalog.committed
        return [
            Send(
                event.sender,
                TailIs(
                    message.request,
                    committed.position,
                    committed.tail,
                    dict(committed.cut),
                    self._metalog.epoch_before(committed.position),
                    committed.trims,
                    self._clock.now_us,
                ),
            )
        ]

    def _on_trim_wanted(self, event: Received, message: TrimWanted) -> list[Effect]:
        if event.sender not in self._reader_set:
            return [Ignore(event, "a trim wanted by a node that is neither engine nor storage")]
        tag, until, _, log = message.floor
        if not (0 <= tag < 2**64 and 0 <= log < 2**64 and until >= 0):
            return [Ignore(event, "a floor of no possible tag or seqnum")]
        if self.tail_unknown:
            return [Ignore(event, _TAIL_UNKNOWN)]
        effects = self._trim_requests.on_wanted(event.sender, message, self.tail)
        return [Ignore(event, "too many trims are under way")] if effects is None else effects

    # --- what follows

    def _commit(self) -> list[Effect]:
        """Commit the entries that a majority has, and publish those that were committed since the
        last call.

        Nothing is published before all recovered entries are committed. Some of them may have been
        published before, and readers treat the committed position as the end of the log. The first
        message has the last page of recovered entries, or none. From it readers learn the new
        incarnation, and then have their copies confirmed. A reader that lags further sees a gap and
        requests entries.
        """
        end, committed = self._majority_length(), self._metalog.committed
        if end > committed.position:
            self._metalog.commit(end)
            committed = self._metalog.committed
        published = self._published
        if published == committed.position or self.tail_unknown:
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
        return effects + self._trim_requests.commit(end, committed.tail)

    def _majority_length(self) -> MetalogPosition:
        """How many entries are on a majority of disks."""
        if not self._backups:
            return self._metalog.stored
        lengths = sorted((b.stored for b in self._backups.values()), reverse=True)
        # The primary is always part of the majority, even if the backups alone form one. It may
        # lose an entry that it has not stored, so no reader may have seen that entry.
        return min(self._metalog.stored, lengths[self._majority - 2])

    def _replicate(self, node: NodeId, backup: BackupProgress, now: Instant) -> Iterator[Effect]:
        """Send a backup its next page, or a probe, within the window."""
        if backup.resend.is_due(now):
            backup.go_back()
        metalog, length = self._metalog, len(self._metalog)
        start = end = length
        needs_base = backup.needs_base(metalog.base.position)
        base = metalog.base if needs_base and not backup.base_sent else None
        if base is not None:
            start, end = base.position, min(length, base.position + self._page_entries)
        elif not (backup.probed or needs_base):
            start, end = backup.sent, min(length, backup.stored + self._page_entries)
        entries = metalog.page(start, end, self._page_bytes) if start < end else ()
        end = min(end, start + len(entries))
        completes = backup.incomplete if end == length else NO_INCARNATION
        says = backup.probed or (completes and backup.stored == length)
        if start < end or base is not None or (says and backup.resend.due is None):
            yield Send(
                node,
                MetalogAppend(
                    self._epoch,
                    start,
                    metalog.epoch_before(start),
                    entries,
                    self.committed,
                    completes,
                    metalog.base.position,
                    base,
                    backup.life if base is not None else NO_INCARNATION,
                ),
            )
            backup.sent = max(backup.stored, end)
            backup.base_sent = base is not None
        awaited = backup.probed or needs_base or backup.stored < length or backup.incomplete
        if backup.resend.due is None and awaited:
            backup.resend.sent(now)

    def _propose(self) -> list[Effect]:
        """Order all records that shards stored since the last entry, with one new entry."""
        if len(self._metalog) - self.committed >= self._page_entries:
            return []
        counts: dict[ShardId, int] = {}
        writers: dict[ShardId, Epoch] = {}
        for shard, progress, writer in self._reports.pop_changed():
            ordered = self._cut.get(shard, 0)
            if progress > ordered:
                counts[shard], writers[shard] = progress - ordered, writer
                self._cut[shard] = progress
        if not counts:
            return []
        position = len(self._metalog)
        number, epoch, time_us = self._view.number, self._epoch, self._clock.now_us
        entry = NewRecords(position, number, epoch, counts, writers, time_us)
        return [self._metalog.append(entry)]

    def _propose_trim(self) -> list[Effect]:
        """Put all requested trims into one entry."""
        if len(self._metalog) - self.committed >= self._page_entries:
            return []
        position = len(self._metalog)
        floors = self._trim_requests.propose(position)
        entry = Trim(position, self._view.number, self._epoch, self._trims, floors)
        self._trims += 1
        return [self._metalog.append(entry)]


def _check_new(epoch: Epoch, before: Epoch) -> None:
    """Refuse an incarnation that is not newer than the one that wrote the metalog.

    Raises:
        DataDirectoryError: it is not newer, so the metadata file, which assigns epochs, is an old
            copy.
    """
    if epoch <= before:
        raise DataDirectoryError(
            f"The metadata file is older than the journals: it gave epoch {epoch}, the metalog was "
            f"written under {before}; put back the newest one, or choose another directory."
        )
