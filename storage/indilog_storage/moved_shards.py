"""The shards that a storage node keeps, as metalog entries move them (decision 0048).

A node that gets a shard knows from the applied entries which records are ordered. It has none of
these records at first, and `Repair` fetches them. When an entry takes a shard away from the node,
the node drops its copy: the other replicas have reported to the primary that their copies are
complete. The bytes of the copy are freed when both newest checkpoints (`Covered`) contain this
entry. A restart from a checkpoint without the entry would need these bytes.

`StorageNode` owns the one `MovedShards`. Its other parts share the dictionary `MovedShards.shards`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from indilog.base.ids import Epoch, LocalId, MetalogPosition, NodeId, ShardId
from indilog.kernel.metalog import NO_INCARNATION
from indilog.kernel.placement import Placement
from indilog.kernel.tombstones import GoneRecords, encode_gone
from indilog.roles.role import Discard, Effect, FrameKind, Location, Persist
from indilog_storage.batch_reads import FIRST_COLD_SEGMENT
from indilog_storage.ordering import Ordering
from indilog_storage.shard import GONE, Shard

FIRST_TOKEN: Final = -(2**62)
"""Tokens of notes about freed bytes are below this number."""
_NOTES_MAX: Final = 256
"""Largest number of notes about freed batches that are not durable yet."""


class DroppedShard:
    """A shard that the node no longer keeps, and whose bytes are to be freed.

    Attributes:
        position: position of the entry that moved the shard away. For batches that only a restart
            found, the number of entries applied at that restart.
        at: the first localid whose bytes are not freed yet.
    """

    __slots__ = ("at", "position", "shard")

    def __init__(self, shard: Shard, position: MetalogPosition) -> None:
        self.shard = shard
        self.position = position
        self.at: LocalId = 0


class UnownedBatch(NamedTuple):
    """A batch that replay of the journal finds while the node does not keep its shard.

    The entry that gives the shard to the node may be applied later, because entries from other
    storage nodes are not journaled.
    """

    first: LocalId
    end: LocalId
    location: Location
    writer: Epoch


class MovedShards:
    """Keeps `shards` equal to the placement.

    Attributes:
        shards: the shards that the node keeps; other parts of the node share this dictionary.
        announces: whether the node announces trims, views and other facts that belong to no shard
            (`Placement.announcers`).
        dropped: shards that the node no longer keeps, in the order in which they were dropped.
        has_freed: whether all bytes of a shard were freed since this flag was last cleared.
    """

    def __init__(self, node: NodeId, placement: Placement) -> None:
        self._node = node
        self.placement = placement
        self.shards: dict[ShardId, Shard] = {}
        self.dropped: list[DroppedShard] = []
        self._unowned: dict[ShardId, Shard] = {}
        """Shards that the node no longer keeps but still has batches of. If the node gets such a
        shard again, it uses these batches.
        """
        self._unowned_batches: dict[ShardId, list[UnownedBatch]] = {}
        """Further batches of these shards, in the order of the journal."""
        self.has_freed = False
        self._noted: dict[int, Location] = {}
        self._last_token = FIRST_TOKEN
        self.announces = False
        self.sync()

    def sync(self, ordering: Ordering | None = None, *, drops: bool = True) -> None:
        """Add and drop shards according to the placement.

        Args:
            ordering: the applied entries, which tell the order of an added shard; None: the caller
                restores the added shards.
            drops: whether shards are dropped in this call. If not, a later call drops them.
        """
        placement, node = self.placement, self._node
        for shard_id in sorted(placement.shards):
            replicas = placement.replicas(shard_id)
            shard = self.shards.get(shard_id)
            if node not in replicas:
                if shard is not None and drops:
                    del self.shards[shard_id]
                    self.add_dropped(shard, placement.since(shard_id))
                continue
            if shard is None:
                shard = self.shards[shard_id] = self._restore(shard_id)
                if ordering is not None:
                    history = ordering.history_of(shard_id)
                    shard.catch_up(history)
                    for unowned in self._unowned_batches.pop(shard_id, ()):
                        if history.may_have(unowned.first, unowned.writer):
                            shard.fill(*unowned)
            shard.leading, shard.alone = replicas[0] == node, len(replicas) == 1
        self.announces = node in placement.announcers

    def add_dropped(self, shard: Shard, position: MetalogPosition) -> None:
        """Keep the batches of a shard until they are freed. The entry at `position` moved the shard
        away.
        """
        self._unowned[shard.id] = shard
        self.dropped.append(DroppedShard(shard, position))

    def _restore(self, shard: ShardId) -> Shard:
        if (restored := self._unowned.pop(shard, None)) is None:
            return Shard(shard)
        self.dropped = [one for one in self.dropped if one.shard is not restored]
        restored.written = restored.stored  # batches in flight at the drop do not count
        return restored

    def kept_or_dropped(self, shard: ShardId) -> Shard | None:
        """Return a shard that is kept, or that was dropped and still has batches."""
        return self.shards.get(shard) or self._unowned.get(shard)

    def add_unowned(self, shard: ShardId, batch: UnownedBatch) -> None:
        """Note a replayed batch of a shard that the node does not keep."""
        if shard not in self._unowned:
            self._unowned[shard] = Shard(shard)
        self._unowned_batches.setdefault(shard, []).append(batch)

    def pop_unowned(self, shard: ShardId, first: LocalId, end: LocalId) -> list[UnownedBatch]:
        """Remove and return the unowned batches within [first, end)."""
        taken: list[UnownedBatch] = []
        left: list[UnownedBatch] = []
        for batch in self._unowned_batches.get(shard, ()):
            (taken if first <= batch.first and batch.end <= end else left).append(batch)
        if taken:
            self._unowned_batches[shard] = left
        return taken

    def unowned_of(self, shard: ShardId) -> tuple[UnownedBatch, ...]:
        """Return the unowned batches of a shard, for a checkpoint."""
        return tuple(self._unowned_batches.get(shard, ()))

    def start(self, position: MetalogPosition) -> None:
        """After recovery, queue all shards that the node does not keep, to free their bytes."""
        known = {one.shard.id for one in self.dropped}
        for shard in [*self._unowned.values()]:
            if shard.id not in known:
                self.add_dropped(shard, position)

    def clear(self) -> None:
        """Begin without any shard, before a checkpoint is restored."""
        self.shards.clear()
        self.dropped.clear()
        self._unowned.clear()
        self._unowned_batches.clear()

    def apply_placement(self, ordering: Ordering, *, drops: bool = True) -> None:
        """Set the placement to the placement of the applied entries, then add and drop shards
        (`sync`).
        """
        self.placement.restore(ordering.replicas, ordering.view)
        self.sync(ordering, drops=drops)

    def others(self, shard: ShardId) -> tuple[NodeId, ...]:
        """Return the other replicas of a shard."""
        return tuple(node for node in self.placement.replicas(shard) if node != self._node)

    @property
    def complete(self) -> tuple[ShardId, ...]:
        """The shards of which this node has every ordered record that any replica has."""
        return tuple(shard.id for shard in self.shards.values() if shard.is_complete)

    def free_dropped(self, covered: MetalogPosition) -> list[Effect]:
        """Write notes that batches of dropped shards are freed.

        The bytes of a batch are freed when its note is durable. Batches on cold storage are noted,
        too; their objects are deleted once all batches of the shard are freed (`has_freed`).

        Both newest checkpoints contain all entries below position `covered`. A shard is freed only
        if the entry that moved it away is one of them.
        """
        effects: list[Effect] = []
        while self.dropped and self.dropped[0].position < covered:
            if len(self._noted) >= _NOTES_MAX:
                break
            dropped = self.dropped[0]
            if unowned := self._unowned_batches.get(dropped.shard.id):
                first, end, location, _ = unowned.pop()
                if location != GONE:
                    effects.append(self._note_freed(dropped.shard.id, first, end, location))
                continue
            if (batch := dropped.shard.batch_from(dropped.at)) is not None:
                first, dropped.at, location = batch
                dropped.shard.free(first, dropped.at)
                effects.append(self._note_freed(dropped.shard.id, first, dropped.at, location))
                continue
            if self._noted:
                break  # until all notes are durable, a restart may find batches of the shard
            del self.dropped[0]
            self._unowned.pop(dropped.shard.id, None)
            self.has_freed = True
        return effects

    def _note_freed(
        self, shard: ShardId, first: LocalId, end: LocalId, location: Location
    ) -> Effect:
        self._last_token -= 1
        self._noted[self._last_token] = location
        gone = GoneRecords(shard, NO_INCARNATION, first, end, repaired=False)
        return Persist(FrameKind.FREED, encode_gone(gone), self._last_token)

    def on_persisted(self, token: int) -> list[Effect]:
        """Free a batch whose note is durable."""
        location = self._noted.pop(token)
        return [Discard(location)] if location.segment < FIRST_COLD_SEGMENT else []

    def awaits_checkpoint(self, covered: MetalogPosition, applied: MetalogPosition) -> bool:
        """Whether bytes of a dropped shard could be freed after checkpoints at position `applied`,
        but not yet with the checkpoints that contain all entries below `covered`.
        """
        return bool(self.dropped) and covered <= self.dropped[-1].position < applied
