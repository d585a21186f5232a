"""Which shards a storage node keeps, as metalog entries move them (decision 0048).

A node that gets a shard knows from the applied entries which records are ordered; all of them are
missing here at first, and `Repair` fetches them. A node that an entry leaves out drops its copy:
the others have told the primary that they have all of it. Its bytes are freed when both checkpoints
have the entry: until then a restart may not know of it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from indilog.base.ids import Epoch, LocalId, MetalogPosition, NodeId, ShardId
from indilog.kernel.metalog import NO_INCARNATION
from indilog.kernel.placement import Placement
from indilog.kernel.tombstones import GoneRecords, gone_encoded
from indilog.roles.role import Discard, Effect, FrameKind, Location, Persist
from indilog_storage.batch_reads import FIRST_COLD_SEGMENT
from indilog_storage.ordering import Ordering
from indilog_storage.shard import GONE, Shard

FIRST_TOKEN: Final = -(2**62)
"""Tokens of notes about freed bytes begin below it."""
_NOTES_MAX: Final = 256
"""Notes about freed batches that are not durable yet."""


class DroppedShard:
    """A shard that is not kept here any more, and whose bytes are to be freed.

    Attributes:
        position: of the entry that moved it away, or the position of the node when it found the
            batches after a restart.
        at: from which localid on the bytes are not freed yet.
    """

    __slots__ = ("at", "position", "shard")

    def __init__(self, shard: Shard, position: MetalogPosition) -> None:
        self.shard = shard
        self.position = position
        self.at: LocalId = 0


class LateBatch(NamedTuple):
    """A batch in the journal of a shard that the node does not keep when it is replayed: the entry
    that gives it the shard comes later, because entries from other storage nodes are not journaled.
    """

    first: LocalId
    end: LocalId
    location: Location
    writer: Epoch


class MovedShards:
    """Keeps `shards` equal to what the placement says.

    Attributes:
        shards: the shards that the node keeps; other parts of the node hold this dictionary, too.
        announces: whether it announces what belongs to no shard (`Placement.announcers`).
        dropped: shards that it does not keep any more, the oldest first.
        has_freed: whether all bytes of a shard were freed since this was last cleared.
    """

    def __init__(self, node: NodeId, placement: Placement) -> None:
        self._node = node
        self.placement = placement
        self.shards: dict[ShardId, Shard] = {}
        self.dropped: list[DroppedShard] = []
        self._aside: dict[ShardId, Shard] = {}
        """Shards that are not kept; their batches are used if the node is given the shard again."""
        self._late: dict[ShardId, list[LateBatch]] = {}
        """Further batches of these, in the order of the journal."""
        self.has_freed = False
        self._noted: dict[int, Location] = {}
        self._last_token = FIRST_TOKEN
        self.announces = False
        self.sync()

    def sync(self, ordering: Ordering | None = None, *, drops: bool = True) -> None:
        """Add and drop shards.

        `ordering`: the applied entries, from which new shards learn what is ordered. None: they are
        restored otherwise. `drops`: whether shards are dropped now; otherwise the next move does.
        """
        placement, node = self.placement, self._node
        for shard_id in sorted(placement.shards):
            replicas = placement.replicas(shard_id)
            shard = self.shards.get(shard_id)
            if node not in replicas:
                if shard is not None and drops:
                    del self.shards[shard_id]
                    self.set_aside(shard, placement.since(shard_id))
                continue
            if shard is None:
                shard = self.shards[shard_id] = self._take_back(shard_id)
                if ordering is not None:
                    history = ordering.history_of(shard_id)
                    shard.catch_up(history)
                    for late in self._late.pop(shard_id, ()):
                        if history.may_have(late.first, late.writer):
                            shard.fill(*late)
            shard.leading, shard.alone = replicas[0] == node, len(replicas) == 1
        self.announces = node in placement.announcers

    def set_aside(self, shard: Shard, position: MetalogPosition) -> None:
        """Keep a shard that the entry at `position` moved away, until its bytes are freed."""
        self._aside[shard.id] = shard
        self.dropped.append(DroppedShard(shard, position))

    def _take_back(self, shard: ShardId) -> Shard:
        if (back := self._aside.pop(shard, None)) is None:
            return Shard(shard)
        self.dropped = [one for one in self.dropped if one.shard is not back]
        back.written = back.stored  # what was being written when it was dropped does not count
        return back

    def of(self, shard: ShardId) -> Shard | None:
        """Return a shard that is kept, or may come back with its batches."""
        return self.shards.get(shard) or self._aside.get(shard)

    def add_late(self, shard: ShardId, batch: LateBatch) -> None:
        """Note a replayed batch of a shard that the node does not keep."""
        if shard not in self._aside:
            self._aside[shard] = Shard(shard)
        self._late.setdefault(shard, []).append(batch)

    def take_late(self, shard: ShardId, first: LocalId, end: LocalId) -> list[LateBatch]:
        """Remove and return the late batches within [first, end)."""
        taken: list[LateBatch] = []
        left: list[LateBatch] = []
        for batch in self._late.get(shard, ()):
            (taken if first <= batch.first and batch.end <= end else left).append(batch)
        if taken:
            self._late[shard] = left
        return taken

    def late_of(self, shard: ShardId) -> tuple[LateBatch, ...]:
        """Return the late batches of a shard, for a checkpoint."""
        return tuple(self._late.get(shard, ()))

    def start(self, position: MetalogPosition) -> None:
        """After recovery, queue the shards that the node does not keep to free their bytes."""
        known = {one.shard.id for one in self.dropped}
        for shard in [*self._aside.values()]:
            if shard.id not in known:
                self.set_aside(shard, position)

    def forget_all(self) -> None:
        """Begin without any shard, before a checkpoint is restored."""
        self.shards.clear()
        self.dropped.clear()
        self._aside.clear()
        self._late.clear()

    def follow(self, ordering: Ordering, *, drops: bool = True) -> None:
        """Restore the placement from the applied entries, then add and drop shards (`sync`)."""
        self.placement.restore(ordering.replicas, ordering.view)
        self.sync(ordering, drops=drops)

    def others(self, shard: ShardId) -> tuple[NodeId, ...]:
        """Return the other replicas of a shard."""
        return tuple(node for node in self.placement.replicas(shard) if node != self._node)

    @property
    def complete(self) -> tuple[ShardId, ...]:
        """The shards of which this node has every ordered record that any replica has."""
        return tuple(shard.id for shard in self.shards.values() if shard.is_complete)

    def freed(self, covered: MetalogPosition) -> list[Effect]:
        """Note that batches of dropped shards are to be freed; both checkpoints have the entries
        below `covered`. Their bytes are freed when the note is durable.

        Batches on cold storage are noted, too. Their objects are deleted when the shard is no
        longer set aside (`has_freed`).
        """
        effects: list[Effect] = []
        while self.dropped and self.dropped[0].position < covered:
            if len(self._noted) >= _NOTES_MAX:
                break
            dropped = self.dropped[0]
            if late := self._late.get(dropped.shard.id):
                first, end, location, _ = late.pop()
                if location != GONE:
                    effects.append(self._freed(dropped.shard.id, first, end, location))
                continue
            if (batch := dropped.shard.batch_from(dropped.at)) is not None:
                first, dropped.at, location = batch
                dropped.shard.free(first, dropped.at)
                effects.append(self._freed(dropped.shard.id, first, dropped.at, location))
                continue
            if self._noted:
                break  # until all of it is durable, the shard may come back by a restart
            del self.dropped[0]
            self._aside.pop(dropped.shard.id, None)
            self.has_freed = True
        return effects

    def _freed(self, shard: ShardId, first: LocalId, end: LocalId, location: Location) -> Effect:
        self._last_token -= 1
        self._noted[self._last_token] = location
        gone = GoneRecords(shard, NO_INCARNATION, first, end, repaired=False)
        return Persist(FrameKind.FREED, gone_encoded(gone), self._last_token)

    def on_persisted(self, token: int) -> list[Effect]:
        """Free a batch whose note is durable."""
        location = self._noted.pop(token)
        return [Discard(location)] if location.segment < FIRST_COLD_SEGMENT else []

    def awaits(self, covered: MetalogPosition, applied: MetalogPosition) -> bool:
        """Whether the bytes of a dropped shard wait for checkpoints at the `applied` position."""
        return bool(self.dropped) and covered <= self.dropped[-1].position < applied
