"""Repairs a replica: fetches the batches of its holes from other replicas (ARCHITECTURE 11,
decision 0009, PITFALLS 14, 15 and 17).

One request is in flight at a time, and `repair_bytes_per_s` limits the rate, so a wiped replica
does not slow down the others. Only ordered records are requested and sent, because these are the
same on all replicas. A received batch is persisted as a `REPAIRED` frame and then fills its hole,
so repair continues after a restart.

Replicas are asked in rotation. Replicas that did not answer the last request are asked last, so a
moved shard is copied even while one of its replicas is lost (decision 0048). If no replica has a
batch, the batch is requested again after a pause that doubles up to `repair_retry_s_max`. Another
replica may have repaired itself by then, and such requests are cheap.

A replica that lost a requested batch reports the loss if its disk shows it (`Batches.lacking_to`).
If all other replicas have reported the loss, the records are *given up*: they are lost (decision
0024). Missing records of a shard without another replica are lost, too. A stopped replica reports
nothing, so records that it may have are not given up. Records that were given up are still
requested. If a replica then sends them, they are no longer lost.

`DiskCare` runs `Repair`. `StorageNode` answers the requests of other replicas with `BatchPage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Instant, LocalId, NodeId, ShardId
from indilog.config import NodeConfig
from indilog.kernel.records import RecordBatch
from indilog.roles.role import Effect, FrameKind, Ignore, Location, Persist, Received, Send
from indilog.wire.messages import Batches, BatchesWanted
from indilog_storage.batch_reads import BatchTask
from indilog_storage.moved_shards import MovedShards
from indilog_storage.ordering import Ordering
from indilog_storage.shard import Shard

_RETRY_S: Final = 1.0
_RESENDS_MAX: Final = 8
"""An answer is awaited for this many times `resend_s`, because the replica reads from its disk."""
_GONE_MAX: Final = 4096
"""Largest number of discarded ranges in one answer."""


class Repair:
    """Requests missing batches and stores them.

    Attributes:
        paused: whether the disk is full.
        repaired: records repaired in this incarnation.
    """

    def __init__(self, moved: MovedShards, config: NodeConfig) -> None:
        self._shards: Mapping[ShardId, Shard] = moved.shards
        self._others = moved.others
        self._bytes_per_s = config.storage.repair_bytes_per_s
        self._timeout_s = _RESENDS_MAX * config.messages.resend_s
        self._retry_s_max = config.storage.repair_retry_s_max
        self._turn = 0
        self._asked: BatchesWanted | None = None
        self._asked_node: NodeId | None = None
        self._silent: set[NodeId] = set()
        """Replicas that did not answer the last request."""
        self._next_at: Instant | None = None
        """When to send the next request or resend; None: nothing can be requested."""
        self._failures: dict[tuple[ShardId, LocalId], tuple[int, Instant]] = {}
        """For each hole that no asked replica could fill: the number of failed requests in a row,
        and when to ask again.
        """
        self._lacking: dict[tuple[ShardId, LocalId], dict[NodeId, LocalId]] = {}
        """By hole and replica, the end of the range that the replica has lost."""
        self._persisting: dict[int, tuple[Shard, RecordBatch]] = {}
        self._last_token = 0
        self.paused = False
        self.repaired = 0

    # --- asking

    def conclude(self, now: Instant) -> list[Effect]:
        """Request the next missing batches, if a request is due."""
        if self._next_at is not None and now < self._next_at:
            return []
        if self._asked is not None:
            self._unanswered(self._asked, now)
            self._asked = None
        if self._persisting or self.paused:
            self._next_at = None
            return []
        return self._ask(now)

    def _ask(self, now: Instant) -> list[Effect]:
        self._next_at = None
        for shard in self._shards.values():
            if not shard.holes or not (others := self._others(shard.id)):
                continue
            if (wanted := self._missing(shard, now)) is None:
                continue
            self._asked, self._asked_node = wanted, self._next_replica(wanted, others)
            self._next_at = Instant(now + self._timeout_s)
            return [Send(self._asked_node, wanted)]
        return []

    def _next_replica(self, wanted: BatchesWanted, others: Sequence[NodeId]) -> NodeId:
        """Return the replica to ask next. Every replica is asked before any replica is asked again
        for the same hole.
        """
        times = self._failures.get((wanted.shard, wanted.first), (0, None))[0]
        if not times:
            self._turn += 1
        start = self._turn % len(others)
        rotated = (*others[start:], *others[:start])
        return sorted(rotated, key=self._silent.__contains__)[times % len(others)]

    def _missing(self, shard: Shard, now: Instant) -> BatchesWanted | None:
        """Return the next missing range that may be requested now."""
        for first, end in sorted(shard.holes.items(), key=lambda hole: hole[0] in shard.given_up):
            if first >= shard.ordered:
                continue
            if (when := self._failures.get((shard.id, first), (0, now))[1]) <= now:
                return BatchesWanted(shard.id, first, min(end, shard.ordered))
            self._next_at = min(self._next_at or when, when)
        return None

    def _unanswered(self, asked: BatchesWanted, now: Instant) -> None:
        """Note that a replica did not answer. The first missing answer of a replica is no failure:
        it only changes the order in which replicas are asked.
        """
        node = self._asked_node
        assert node is not None, "a request was sent to it"
        if node in self._silent:
            self._failed(asked, now)
        self._silent.add(node)

    def _failed(self, asked: BatchesWanted, now: Instant) -> None:
        """Note that a replica had no part of the requested range. The next replica is asked at
        once. After all replicas were asked, there is a pause.
        """
        key = asked.shard, asked.first
        times = self._failures.get(key, (0, now))[0] + 1
        rounds, rest = divmod(times, max(1, len(self._others(asked.shard))))
        pause_s = 0.0 if rest else min(self._retry_s_max, _RETRY_S * 2.0 ** min(rounds - 1, 30))
        self._failures = {hole: tried for hole, tried in self._failures.items() if self._is(hole)}
        self._lacking = {hole: known for hole, known in self._lacking.items() if self._is(hole)}
        self._failures[key] = (times, Instant(now + pause_s))

    def _is(self, hole: tuple[ShardId, LocalId]) -> bool:
        return hole[0] in self._shards and hole[1] in self._shards[hole[0]].holes

    def _lacks(self, asked: BatchesWanted, replica: NodeId, end: LocalId) -> None:
        """Note that `replica` has lost the requested records below `end`. If all other replicas
        have reported a loss, give up the records that all of them have lost.
        """
        key = asked.shard, asked.first
        known = self._lacking.setdefault(key, {})
        known[replica] = end
        ends = [known.get(other, asked.first) for other in self._others(asked.shard)]
        if (least := min(ends, default=asked.first)) > asked.first:
            self._shards[asked.shard].give_up(asked.first, least)

    def note_moved(self) -> None:
        """Forget which records the replicas lack, because a moved shard has other replicas. A
        replica may also have got records from a node that is no longer a replica.
        """
        self._lacking.clear()
        self._silent.clear()

    def deadline(self) -> Instant | None:
        """When to send the next request."""
        return self._next_at

    # --- taking in

    def on_batches(
        self, event: Received, message: Batches, now: Instant, *, rests_on_applied: bool
    ) -> list[Effect]:
        """Persist received batches that are missing here.

        `rests_on_applied`: whether this node has applied all trims that the sender has applied. If
        not, batches that the sender has discarded stay missing, because this node does not know the
        trims behind the discard.
        """
        asked = self._asked
        self._silent.discard(event.sender)
        if asked is None or (message.shard, message.first) != (asked.shard, asked.first):
            return [Ignore(event, "batches that were not requested, or are no longer needed")]
        if event.sender not in self._others(asked.shard) or asked.shard not in self._shards:
            return [Ignore(event, "batches of a node that is no replica of the shard")]
        self._asked = None
        shard = self._shards[asked.shard]
        effects = [e for b in message.batches for e in self._take(event, shard, b, asked.end)]
        taken = sum(len(e.payload) for e in effects if isinstance(e, Persist))
        discarded = message.gone if rests_on_applied else ()
        gone = [shard.fill_gone(first, end) for first, end in discarded]
        if any(gone) and not taken:
            self._next_at = now
        elif not taken:
            self._lacks(asked, event.sender, message.lacking_to)
            self._failed(asked, now)
            self._next_at = now
        else:
            self._failures.pop((asked.shard, asked.first), None)
            self._next_at = Instant(now + taken / self._bytes_per_s)
        return effects

    def _take(self, event: Received, shard: Shard, buffer: bytes, end: LocalId) -> Sequence[Effect]:
        try:
            batch = RecordBatch(buffer)
        except MalformedFrameError:
            return [Ignore(event, "not an intact record batch")]
        header = batch.header
        lacking = shard.lacks(header.first, header.end)
        if header.shard != shard.id or header.end > end or not lacking:
            return [Ignore(event, "a batch that is not missing here")]
        self._last_token -= 1
        self._persisting[self._last_token] = (shard, batch)
        return [Persist(FrameKind.REPAIRED, buffer, self._last_token)]

    def on_persisted(self, token: int, location: Location) -> None:
        """Fill the hole of a repaired batch; tokens of repairs are negative."""
        shard, batch = self._persisting.pop(token)
        if self._shards.get(shard.id) is not shard:
            return  # the shard was dropped meanwhile
        if shard.fill(batch.header.first, batch.header.end, location):
            self.repaired += batch.header.records

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        assert self._asked is None or self._next_at is not None, "an awaited answer has a deadline"


class BatchPage(BatchTask):
    """Collects the answer to one `BatchesWanted`: intact batches of ordered records."""

    def __init__(
        self,
        to: NodeId,
        message: BatchesWanted,
        shard: Shard,
        ordering: Ordering,
        *,
        bytes_max: int,
    ) -> None:
        self._message = message
        self._known = ordering.trim_extent
        self._end = min(message.end, shard.ordered)
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: list[tuple[LocalId, bytes]] = []
        gone = shard.gone_in(message.first, self._end)
        self._gone = tuple(gone[:_GONE_MAX])
        self._lacking_to = min(shard.lacking_to(message.first), self._end)
        super().__init__(to, self._places(shard))

    def _places(self, shard: Shard) -> list[Location]:
        """Return the places of the batches that fit into the page. A wiped replica requests a whole
        shard.
        """
        places: list[Location] = []
        at, size = self._message.first, 0
        while size < self._bytes_max and (batch := shard.batch_from(at)) is not None:
            _, at, location = batch
            if at > self._end:
                break
            places.append(location)
            size += location.length
        return places

    @property
    def full(self) -> bool:
        """Whether the page has reached its byte limit."""
        return self._bytes >= self._bytes_max

    def take(self, location: Location, batch: RecordBatch | None) -> None:
        """Add a whole batch."""
        if batch is None or batch.damaged or batch.header.end > self._end or self.full:
            return
        if batch.header.shard == self._message.shard and batch.header.first >= self._message.first:
            self._batches.append((batch.header.first, batch.buffer))
            self._bytes += location.length

    def answer(self) -> Batches:
        """Return the batches, ascending."""
        batches = tuple(buffer for _, buffer in sorted(self._batches))
        message = self._message
        known = self._known.trims, self._known.copy_of
        return Batches(message.shard, message.first, batches, self._gone, self._lacking_to, *known)
