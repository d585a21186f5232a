"""The nodes of the cluster and the replicas of each shard, as metalog entries change them.

A view names the nodes, and the first replicas of each shard. One kind of entry installs the next
view (`NewView`, decision 0049). Another kind moves shards between storage nodes (`NewReplicas`,
decision 0048). Each role keeps a `Placement` of its own, because roles apply the same entry at
different times.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from indilog.base.ids import Epoch, MetalogPosition, NodeId, ShardId
from indilog.kernel.metalog import NO_INCARNATION, Replicas
from indilog.kernel.view import FIRST_VIEW, NO_WRITER, View

_ANNOUNCERS: Final = 2
"""How many storage nodes send data that belongs to no shard: two, so that one of them may be
down.
"""


class Placement:
    """The newest view, and the replicas of all shards, as one role knows them.

    The first replicas of a shard are its *counting* ones, as many as the view gives the shard.
    Their reports decide what is ordered. Further replicas are kept until the counting ones have
    every record. Until then, new batches are sent to the further replicas, too.

    Attributes:
        view: the newest view that was installed.
        moved: the replicas that metalog entries name, by shard. All other shards have the view's
            replicas.
    """

    __slots__ = ("_first", "moved", "view")

    def __init__(self, view: View) -> None:
        self._first = self.view = view
        self.moved: dict[ShardId, Replicas] = {}

    @property
    def shards(self) -> AbstractSet[ShardId]:
        """All shards."""
        return self.view.shards.keys()

    @property
    def is_changed(self) -> bool:
        """Whether an entry has changed the first view of the cluster or its replicas."""
        return bool(self.moved) or self.view.number > FIRST_VIEW

    def replicas(self, shard: ShardId) -> tuple[NodeId, ...]:
        """Return all replicas of a shard, in order of preference; empty: it is not known."""
        if (moved := self.moved.get(shard)) is not None:
            return moved.nodes
        placed = self.view.shards.get(shard)
        return placed.replicas if placed is not None else ()

    def counting(self, shard: ShardId) -> tuple[NodeId, ...]:
        """Return the replicas of a shard whose reports decide what is ordered; empty: the shard is
        not known.
        """
        placed = self.view.shards.get(shard)
        return self.replicas(shard)[: len(placed.replicas)] if placed is not None else ()

    def since(self, shard: ShardId) -> MetalogPosition:
        """Return the position of the entry that moved a shard last; -1: it was never moved."""
        moved = self.moved.get(shard)
        return moved.since if moved is not None else -1

    def writer(self, shard: ShardId) -> NodeId:
        """Return the engine that writes a shard; `NO_WRITER`: none does, or the view has no such
        shard.
        """
        placed = self.view.shards.get(shard)
        return placed.writer if placed is not None else NO_WRITER

    def is_finalized(self, shard: ShardId) -> bool:
        """Whether a shard gets no further records."""
        placed = self.view.shards.get(shard)
        return placed is not None and placed.finalized

    def has_ended(self, shard: ShardId, epoch: Epoch) -> bool:
        """Whether a view took a shard from the compute node of this writer. Records of the writer
        that were not ordered before the entry of that view are never ordered.
        """
        placed = self.view.shards.get(shard)
        return placed is not None and NO_INCARNATION < epoch <= placed.ended

    def shards_of(self, node: NodeId) -> tuple[ShardId, ...]:
        """Return the shards of which `node` is a replica, ascending."""
        return tuple(shard for shard in sorted(self.shards) if node in self.replicas(shard))

    @property
    def announcers(self) -> tuple[NodeId, ...]:
        """The storage nodes that announce facts of no shard: trims, and positions without records.
        Receivers skip repeated announcements.
        """
        counting = {node for shard in self.shards for node in self.counting(shard)}
        return tuple(sorted(counting)[:_ANNOUNCERS])

    def move(self, replicas: Mapping[ShardId, Replicas]) -> None:
        """Note new replicas, unless those of a newer entry are known."""
        for shard, moved in replicas.items():
            if moved.since >= self.since(shard):
                self.moved[shard] = moved

    def install(self, view: View) -> bool:
        """Note the view of an entry; return whether it is newer than the known one."""
        if view.number <= self.view.number:
            return False
        self.view = view
        return True

    def restore(self, replicas: Mapping[ShardId, Replicas], view: View | None) -> None:
        """Replace all known replicas and the view by what the applied entries name."""
        self.moved = dict(replicas)
        self.view = self._first
        if view is not None:
            self.install(view)
