"""The reports of storage nodes, and the *progress* of each shard: the number of its records that
may be ordered (Scalog 4.1).

Scalog takes the element-wise minimum over the replicas of a shard. Here the progress is the
ack-quorum-th largest prefix (`ack_quorum`). If the quorum is all replicas, this is the minimum.
`Primary` owns the one `Reports`.

Not every report counts:

- Only reports under the shard's current writer count, because a replica drops unordered records of
  earlier writers (`NewWriters`).
- After a shard was moved (`NewReplicas`), only reports of nodes that have applied that entry count.
  Such a node may have dropped the shard and got it again.
- After an entry took a shard from its compute node (`NewView`), no report under the writer of that
  compute node counts.
- A replica that restarted may have lost its disk. The first message of its new incarnation voids
  its earlier reports. So no record is ordered because of a replica that no longer has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from indilog.base.ids import MAX_SEQNUM, Epoch, LocalId, MetalogPosition, NodeId, ShardId
from indilog.config import ClusterConfig
from indilog.kernel.metalog import NO_INCARNATION
from indilog.kernel.placement import Placement


class ShardReports:
    """The newest report of each counting replica of one shard."""

    __slots__ = ("_ack_quorum", "_ended", "_needed", "_stored", "epoch")

    def __init__(self, ack_quorum: int, epoch: Epoch, needed: int | None = None) -> None:
        self._ack_quorum = ack_quorum
        self._needed = ack_quorum if needed is None else needed
        """Number of replicas that must have reported before the shard gets another writer."""
        self._stored: dict[NodeId, LocalId] = {}
        """The stored prefix of each replica that has reported under `epoch`."""
        self._ended = False
        """Whether no further records of the shard's writer are ordered."""
        self.epoch = epoch
        """The shard's writer; 0: the shard has no writer yet."""

    def begin(self, epoch: Epoch) -> None:
        """Change the writer; reports under the previous writer are dropped."""
        assert epoch > self.epoch, "writers are numbered upwards"
        self.epoch = epoch
        self._ended = False
        self._stored.clear()

    def end(self) -> None:
        """Order no further records of the shard's writer, because a view took the shard from it."""
        self._ended = True
        self._stored.clear()

    def move(self) -> None:
        """Drop all reports, because the shard was moved."""
        self._stored.clear()

    def note(self, replica: NodeId, epoch: Epoch, stored: LocalId) -> bool:
        """Note a report; return whether the report changes anything.

        The largest prefix counts, so reports may be repeated and arrive in any order.
        """
        if epoch != self.epoch or self._ended or self._stored.get(replica, -1) >= stored:
            return False
        self._stored[replica] = stored
        return True

    def forget(self, replica: NodeId) -> None:
        """Drop the report of a replica that has restarted."""
        self._stored.pop(replica, None)

    def has(self, replica: NodeId) -> bool:
        """Whether a replica has reported under the shard's writer."""
        return replica in self._stored

    @property
    def known(self) -> bool:
        """Whether enough replicas have reported for the shard to get another writer."""
        return not self.epoch or self._ended or len(self._stored) >= self._needed

    @property
    def progress(self) -> LocalId:
        """The longest prefix that the ack quorum has; 0 while too few replicas have reported."""
        if len(self._stored) < self._ack_quorum:
            return 0
        return sorted(self._stored.values(), reverse=True)[self._ack_quorum - 1]


class Reports:
    """The reports about all shards, and which shards have new reports.

    `entries_may_be_lost`: whether committed entries may be lost, as with a sole sequencer. A shard
    then gets another writer only after all its replicas have reported.
    """

    __slots__ = ("_changed", "_config", "_entries_may_be_lost", "_placement", "_shards")

    def __init__(
        self,
        placement: Placement,
        config: ClusterConfig,
        writers: Mapping[ShardId, Epoch],
        *,
        entries_may_be_lost: bool,
    ) -> None:
        self._placement = placement
        self._config = config
        self._entries_may_be_lost = entries_may_be_lost
        self._shards: dict[ShardId, ShardReports] = {}
        self._changed: set[ShardId] = set()
        self.follow_view(writers)

    def follow_view(self, writers: Mapping[ShardId, Epoch]) -> None:
        """Add the unknown shards of the placement, with their writers. End the shards that the
        newest view took from their writers.
        """
        for shard in self._placement.shards - self._shards.keys():
            replicas = len(self._placement.counting(shard))
            quorum = self._config.quorum_of(replicas)
            needed = replicas if self._entries_may_be_lost else quorum
            epoch = writers.get(shard, NO_INCARNATION)
            self._shards[shard] = ShardReports(quorum, epoch, needed)
        for shard, reported in self._shards.items():
            if self._placement.has_ended(shard, reported.epoch):
                reported.end()

    def note(
        self,
        replica: NodeId,
        shard: ShardId,
        epoch: Epoch,
        stored: LocalId,
        position: MetalogPosition = MAX_SEQNUM,
    ) -> str | None:
        """Note a report of a node that has applied `position` entries. Return why it was refused,
        or None.
        """
        if shard not in self._shards:
            return "progress of a shard that is not in this view"
        if epoch < 1 or stored < 0:
            return "progress of an epoch below 1 or a prefix below 0"
        if position <= self._placement.since(shard):
            return "progress of a node that does not know of the move of the shard"
        if replica not in self._placement.counting(shard):
            return "progress of a node that is no counting replica of the shard"
        if self._shards[shard].note(replica, epoch, stored):
            self._changed.add(shard)
        return None

    def forget(self, replica: NodeId) -> None:
        """Drop all reports of an earlier incarnation of a storage node."""
        for reported in self._shards.values():
            reported.forget(replica)

    def writer(self, shard: ShardId) -> Epoch:
        """Return the writer of a shard; 0: it has none yet."""
        return self._shards[shard].epoch

    def missing(self, shard: ShardId) -> list[NodeId]:
        """Return the replicas of a shard that have not reported under its writer."""
        reported = self._shards[shard]
        counting = self._placement.counting(shard)
        return sorted(node for node in counting if not reported.has(node))

    def is_ordered(self, shard: ShardId, ordered: LocalId) -> bool:
        """Whether enough replicas have reported, and no prefix of an ack quorum exceeds
        `ordered`.
        """
        reported = self._shards[shard]
        return reported.known and reported.progress <= ordered

    def begin(self, writers: Mapping[ShardId, Epoch]) -> None:
        """Give shards to new writers. Reports under earlier writers no longer count."""
        for shard, epoch in writers.items():
            self._shards[shard].begin(epoch)

    def move(self, shards: Iterable[ShardId]) -> None:
        """Drop the reports of moved shards; the placement already names their new replicas."""
        for shard in shards:
            self._shards[shard].move()

    @property
    def changed(self) -> bool:
        """Whether any shard was reported on since the last call of `pop_changed`."""
        return bool(self._changed)

    def pop_changed(self) -> list[tuple[ShardId, LocalId]]:
        """Return the shards that were reported on since the last call, ascending, with their
        progress.
        """
        changed = [(shard, self._shards[shard].progress) for shard in sorted(self._changed)]
        self._changed.clear()
        return changed
