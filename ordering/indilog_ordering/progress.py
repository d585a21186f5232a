"""What storage nodes have reported, and how far each shard may therefore be ordered (Scalog 4.1).

Scalog takes the element-wise minimum over the replicas of a shard. Here it is the ack-quorum-th
largest prefix, which is the minimum as long as the quorum is all replicas, and only replicas that
live under the newest known writer count: what a replica stored under an older one may be dropped.

A replica that restarted may have lost its disk. Its earlier reports count no more as soon as the
primary hears anything of the new incarnation, so a record is never ordered on the word of a replica
that has it no longer.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, LocalId, NodeId, ShardId
from indilog.kernel.view import View


class ShardReports:
    """The newest report of each replica of one shard."""

    __slots__ = ("_ack_quorum", "_stored", "epoch")

    def __init__(self, ack_quorum: int) -> None:
        self._ack_quorum = ack_quorum
        self._stored: dict[NodeId, LocalId] = {}
        """Prefixes under `epoch`; a replica that reports an older one is not in it."""
        self.epoch = Epoch(-1)
        """The newest writer that any replica knows."""

    def note(self, replica: NodeId, epoch: Epoch, stored: LocalId) -> bool:
        """Take in one report; tell whether it says anything new.

        A newer epoch replaces even a larger prefix; within an epoch the largest counts, so reports
        may be repeated and come in any order.
        """
        if epoch > self.epoch:
            self.epoch = epoch
            self._stored.clear()
        elif epoch < self.epoch or self._stored.get(replica, -1) >= stored:
            return False
        self._stored[replica] = stored
        return True

    def forget(self, replica: NodeId) -> None:
        """Drop the report of a replica that has restarted."""
        self._stored.pop(replica, None)

    @property
    def progress(self) -> LocalId:
        """The longest prefix that the ack quorum has; 0 while too few replicas have reported."""
        if len(self._stored) < self._ack_quorum:
            return 0
        return sorted(self._stored.values(), reverse=True)[self._ack_quorum - 1]


class Reports:
    """The reports about all shards of a view, and the shards about which there is news."""

    __slots__ = ("_changed", "_replicas", "_shards")

    def __init__(self, view: View) -> None:
        self._replicas = {shard: frozenset(p.replicas) for shard, p in view.shards.items()}
        self._shards = {shard: ShardReports(view.ack_quorum(shard)) for shard in view.shards}
        self._changed: set[ShardId] = set()

    def note(self, replica: NodeId, shard: ShardId, epoch: Epoch, stored: LocalId) -> str | None:
        """Take in one report; return why it was refused, or None."""
        replicas = self._replicas.get(shard)
        if replicas is None:
            return "progress of a shard that is not in this view"
        if replica not in replicas:
            return "progress of a node that is no replica of the shard"
        if epoch < 0 or stored < 0:
            return "progress of an epoch or a prefix below 0"
        if self._shards[shard].note(replica, epoch, stored):
            self._changed.add(shard)
        return None

    def forget(self, replica: NodeId) -> None:
        """Drop all that an earlier incarnation of a storage node reported."""
        for shard, replicas in self._replicas.items():
            if replica in replicas:
                self._shards[shard].forget(replica)

    @property
    def changed(self) -> bool:
        """Whether there is news since `news` was last taken."""
        return bool(self._changed)

    def news(self) -> list[tuple[ShardId, LocalId, Epoch]]:
        """Return the shards that were reported on since the last call, ascending, with their
        progress and their newest writer.
        """
        news: list[tuple[ShardId, LocalId, Epoch]] = []
        for shard in sorted(self._changed):
            reported = self._shards[shard]
            news.append((shard, reported.progress, reported.epoch))
        self._changed.clear()
        return news
