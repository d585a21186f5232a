"""The append side of a storage node: batches and writers of its shards (ARCHITECTURE 8, thesis
5.5.1).

A batch is accepted if the applied metalog entries name its writer, and if the batch continues the
records accepted before or fills a hole. An accepted batch counts as stored when it is durable in
the journal. Once per iteration of the event loop, the node reports the new stored prefixes of its
shards to the primary. The node repeats the report while stored records are not ordered.

After a refused batch, the node sends the writer the stored prefix of the shard, once per iteration.
The writer then resends the rest, or learns that a newer writer has the shard.

When an entry names a new writer, unordered records of earlier writers are dropped, and the new
writer gets the stored prefix. The entry is journaled before batches of the new writer, so replay
gives the same state.

`StorageNode` owns the one `Appends`, which changes the `Shard`s of `MovedShards`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, ShardId
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.metalog import NO_INCARNATION, Span
from indilog.kernel.records import BatchHeader, RecordBatch
from indilog.kernel.view import NO_WRITER
from indilog.roles.leadership import Leadership
from indilog.roles.role import Effect, FrameKind, Ignore, Location, Persist, Received, Send
from indilog.wire.messages import (
    ShardProgress,
    ShardStored,
    ShardStoredWanted,
)
from indilog_storage.moved_shards import MovedShards
from indilog_storage.shard import Shard

_FULL: Final = "a batch for which the disk has no room"
_FRAME_OVERHEAD_BYTES: Final = 40
"""The most bytes that a frame takes on disk besides its payload."""


class Stored:
    """A batch that became durable, and its place."""

    __slots__ = ("batch", "location")

    def __init__(self, batch: RecordBatch, location: Location) -> None:
        self.batch = batch
        self.location = location


_Keeper: TypeAlias = Callable[[Shard, RecordBatch], list[Effect]]


class Appends:
    """Handles the messages of writers; changes the given shards."""

    def __init__(self, moved: MovedShards, logspace: int, config: Config) -> None:
        self._shards: Mapping[ShardId, Shard] = moved.shards
        self._placement = moved.placement
        self._logspace = logspace
        self._batch_bytes_max = config.cluster.batch_bytes_max
        self._unordered_bytes_max = config.node.appends.append_pending_bytes_max
        self._report = Resend(config.node.messages.resend_s, config.node.messages.resend_s_max)
        """When to repeat a report while stored records are not ordered."""
        self._unordered_bytes = 0
        self.room: int | None = None
        """Bytes left on disk for batches in flight; None: no limit applies."""
        self._last_token = 0
        self._batches: dict[int, tuple[Shard, RecordBatch]] = {}
        self.awaited: Epoch = NO_INCARNATION
        """The newest epoch in a writer's message that no applied entry names yet; 0: none."""
        # Collected in an iteration, sent at its end.
        self._progressed: set[ShardId] = set()
        self._answered: set[tuple[NodeId, ShardId]] = set()
        """Writers to which the stored prefix of a shard must be sent."""

    def _token(self) -> int:
        self._last_token += 1
        return self._last_token

    # --- batches

    def on_batch(self, event: Received, buffer: bytes) -> list[Effect]:
        """Persist a batch. If it is refused, note that its writer must get an answer."""
        if len(buffer) > self._batch_bytes_max:
            return [Ignore(event, "a batch larger than batch_bytes_max")]
        try:
            batch = RecordBatch(buffer)
        except MalformedFrameError:
            return [Ignore(event, "not an intact record batch")]
        header = batch.header
        shard = self._shards.get(header.shard)
        if shard is None or header.logspace != self._logspace or not header.records:
            return [Ignore(event, "a batch of a shard that is not kept here, or without records")]
        if (keep := self._keeper(shard, header)) is not None:
            return keep(shard, batch) if self._has_room(buffer) else [Ignore(event, _FULL)]
        self._refuse(event.sender, shard, header.epoch)
        return []

    def _keeper(self, shard: Shard, header: BatchHeader) -> _Keeper | None:
        """Return the function that persists a batch; None: the batch is refused.

        A batch of the shard's writer is persisted if it is the next batch or fills a hole. After a
        view has taken the shard from the writer, further batches of this writer are refused,
        because the metalog would never order them.
        """
        if not shard.writer or header.epoch != shard.writer:
            return None
        if self._placement.has_ended(shard.id, shard.writer):
            return None
        if header.first == shard.written:
            return self._accept
        return self._refill if shard.misses(header.first, header.end) else None

    def _refuse(self, writer: NodeId, shard: Shard, epoch: Epoch) -> None:
        """Note that the node `writer` must get an answer: the shard's stored prefix and its writer.

        If `epoch` is newer than the shard's writer, the entry that names `epoch` is not applied
        here yet. The answer then comes from `begin`.
        """
        if epoch > shard.writer:
            self.awaited = max(self.awaited, epoch)
        else:
            self._answered.add((writer, shard.id))

    def on_stored_wanted(self, event: Received, message: ShardStoredWanted) -> list[Effect]:
        """Note that a writer must get the stored prefix of a shard."""
        if (shard := self._shards.get(message.shard)) is None:
            return [Ignore(event, "a question about a shard that is not kept here")]
        self._refuse(event.sender, shard, message.epoch)
        return []

    def _has_room(self, buffer: bytes) -> bool:
        """Whether the disk has room for another batch. A full disk still has room for some batches
        in flight.
        """
        if self.room is None:
            return True
        self.room -= len(buffer) + _FRAME_OVERHEAD_BYTES
        return self.room >= 0

    def _accept(self, shard: Shard, batch: RecordBatch) -> list[Effect]:
        shard.written = batch.header.end
        shard.unordered.append(batch)
        self._unordered_bytes += len(batch.buffer)
        while self._unordered_bytes > self._unordered_bytes_max and shard.unordered:
            # When index data needs the tags of this batch, they are read back from the disk.
            self._unordered_bytes -= len(shard.unordered.popleft().buffer)
        token = self._token()
        self._batches[token] = (shard, batch)
        return [Persist(FrameKind.RECORDS, batch.buffer, token)]

    def _refill(self, shard: Shard, batch: RecordBatch) -> list[Effect]:
        """Persist a resent batch whose damaged copy here is not ordered yet."""
        token = self._token()
        self._batches[token] = (shard, batch)
        return [Persist(FrameKind.REPAIRED, batch.buffer, token)]

    def on_persisted(self, token: int, location: Location) -> Stored | None:
        """Count a batch as stored; None: it was dropped, because the shard got a new writer or was
        moved to another storage node.
        """
        shard, batch = self._batches.pop(token)
        header = batch.header
        if header.epoch != shard.writer or self._shards.get(shard.id) is not shard:
            return None
        shard.fill(header.first, header.end, location, header.epoch)
        self._progressed.add(shard.id)
        return Stored(batch, location)

    def order(self, shard: Shard, span: Span) -> Sequence[RecordBatch]:
        """Assign seqnums to records; return their batches that are still in memory."""
        self._report.stop()
        before = len(shard.unordered)
        batches = shard.order(span)
        if len(shard.unordered) + len(batches) == before:
            self._unordered_bytes -= sum(len(batch.buffer) for batch in batches)
        else:  # batches of an unnamed writer were dropped
            self._unordered_bytes = sum(map(_unordered_bytes_of, self._shards.values()))
        return batches

    # --- writers

    def begin(self, shard: Shard, epoch: Epoch) -> None:
        """Give a shard to the writer that a metalog entry names, and notify this writer."""
        before = _unordered_bytes_of(shard)
        shard.begin(epoch)
        self._unordered_bytes += _unordered_bytes_of(shard) - before
        self._progressed.add(shard.id)
        self._answered.add((self._placement.writer(shard.id), shard.id))
        if epoch >= self.awaited:
            self.awaited = NO_INCARNATION

    def note_moved(self) -> None:
        """Report all shards again and answer their writers, because shards were added, were dropped
        or got other replicas.
        """
        self._unordered_bytes = sum(map(_unordered_bytes_of, self._shards.values()))
        self._progressed &= self._shards.keys()
        self._answered = {asked for asked in self._answered if asked[1] in self._shards}
        self.start()

    # --- the end of an iteration

    def start(self) -> None:
        """At the end of this iteration, report all shards and answer their writers. The writers
        then resend the batches that were lost in flight to an earlier incarnation of this node.
        """
        self.report()
        self._answered.update((self._placement.writer(shard), shard) for shard in self._shards)

    def report(self) -> None:
        """Report all shards at the end of this iteration, because a new primary has no reports
        yet.
        """
        self._progressed.update(self._shards)

    def conclude(
        self, leadership: Leadership, position: MetalogPosition, now: Instant
    ) -> list[Effect]:
        """Send stored prefixes to the primary, and to the writers that must get them."""
        effects: list[Effect] = []
        if self._answered:
            for writer, shard_id in sorted(self._answered):
                if writer == NO_WRITER:
                    continue  # its compute node has left
                shard = self._shards[shard_id]
                sound = shard.sound
                whole = shard.written if sound == shard.stored else sound
                effects.append(Send(writer, ShardStored(shard_id, shard.writer, whole)))
            self._answered.clear()
        report = self._report
        if report.due is not None and now >= report.due:
            report.due = None
            self._progressed.update(s.id for s in self._shards.values() if self._awaits_order(s))
        if self._progressed:
            effects += self._progress(leadership, position, now)
        if report.due is None:
            for shard in self._shards.values():
                if self._awaits_order(shard):
                    report.sent(now)
                    break
        return effects

    def _awaits_order(self, shard: Shard) -> bool:
        """Whether the shard has stored records that may still be ordered."""
        return shard.stored > shard.ordered and not self._placement.has_ended(
            shard.id, shard.writer
        )

    def _progress(
        self, leadership: Leadership, position: MetalogPosition, now: Instant
    ) -> list[Effect]:
        shards = [self._shards[shard] for shard in sorted(self._progressed)]
        self._progressed.clear()
        stored = {shard.id: (shard.writer, shard.sound) for shard in shards if shard.writer}
        if not stored:
            return []
        if self._report.due is None:
            self._report.sent(now)
        known = position if self._placement.moved else 0
        return [Send(leadership.primary, ShardProgress(leadership.term, stored, known))]

    def deadline(self) -> Instant | None:
        """When to repeat the report."""
        return self._report.due

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        for shard in self._shards.values():
            shard.check_invariants()
        unordered = [batch for shard in self._shards.values() for batch in shard.unordered]
        assert self._unordered_bytes == sum(len(batch.buffer) for batch in unordered)
        assert not self._progressed, "sent at the end of the iteration"
        assert not self._answered, "sent at the end of the iteration"


def _unordered_bytes_of(shard: Shard) -> int:
    return sum(len(batch.buffer) for batch in shard.unordered)
