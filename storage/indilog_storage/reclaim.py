"""Frees disk space: finds the batches whose records are all trimmed (ARCHITECTURE 13, decision
0008).

Whether a record is dead depends on its tags, which are in its batch. So when floors rise, a pass
reads the batches below the highest floor, oldest first, at most `reclaim_bytes_per_s`. The pass
discards batches whose records are all dead. For partly live batches, it adds up the dead bytes by
segment, to find the segments that are worth rewriting (decision 0016). A later pass reads the
partly live batches again.

Pauses separate the reads of a pass, because a burst of reads would delay every append. The pauses
grow with the number of batches as well as with their bytes, because a small batch costs more time
than its bytes suggest.

`DiskCare` runs `Reclaim`. The shell executes its `Discard` and `ReclaimableBytes` effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from indilog.base.ids import Instant, LocalId, SeqNum, ShardId
from indilog.config import KIB, NodeConfig
from indilog.kernel.floors import Trimmed
from indilog.kernel.tombstones import GoneRecords, encode_gone, gone_of
from indilog.roles.role import (
    Discard,
    Effect,
    FrameKind,
    Location,
    Persist,
    ReadFrame,
    ReclaimableBytes,
)
from indilog_storage.batch_reads import parse_batch
from indilog_storage.rewritten import reclaimable_bytes
from indilog_storage.shard import Shard

FIRST_TOKEN: Final = -(1 << 60)
"""The tokens of reclaim are this number and smaller ones."""
_CHUNK_BYTES: Final = 1024 * KIB
_BATCHES_MAX: Final = 32
"""Largest number of batches in one step. `_CHUNK_BYTES` limits its bytes."""
_BATCH_REST_S: Final = 0.0004
"""Pause after a batch, in seconds: about four times the time that a small batch takes."""
_REST: Final = 10
"""The pauses in and after a pass last at least this many times as long as the work of the pass."""


class _CandidateBatch(NamedTuple):
    shard: Shard
    first: LocalId
    seqnum: SeqNum
    location: Location


class Reclaim:
    """Finds dead batches in small steps.

    Attributes:
        bytes: bytes of the discarded batches.
        batches: number of discarded batches.
    """

    def __init__(
        self, shards: Mapping[ShardId, Shard], floors: Trimmed, config: NodeConfig
    ) -> None:
        self._shards = shards
        self._floors = floors
        self._bytes_per_s = config.storage.reclaim_bytes_per_s
        self._rest_s_min = config.storage.reclaim_rest_s_min
        self._wanted = False
        """Whether floors have risen since the last pass began."""
        self._began: Instant | None = None
        self._due = Instant(0.0)
        self._rested_s = 0.0
        """Seconds of pauses within the current pass."""
        self._todo: list[ShardId] = []
        """Shards that this pass has not finished; the current shard is last."""
        self._at: LocalId = 0
        self._reading: dict[int, _CandidateBatch] = {}
        self._last_token = FIRST_TOKEN
        self._notes: list[tuple[GoneRecords, list[Location]]] = []
        """Batches that this iteration found to be dead."""
        self._noting: dict[int, list[Location]] = {}
        """Batches whose note is not durable yet, by the token of the note. The batches are
        discarded when the note is durable.
        """
        self._reclaimable: Counter[int] = Counter()
        """Dead bytes in partly live batches, by segment, as far as this pass has read."""
        self.bytes = 0
        self.batches = 0

    def note_risen_floors(self) -> None:
        """Note that floors have risen."""
        self._wanted = True

    @property
    def busy(self) -> bool:
        """Whether a pass is running, or will begin after a rest."""
        return self._wanted or self._began is not None

    def conclude(self, now: Instant) -> list[Effect]:
        """Note the dead batches that were found; read the next batches, if a read is due."""
        return self._written_notes() + self._read_on(now)

    def _read_on(self, now: Instant) -> list[Effect]:
        if self._reading or now < self._due:
            return []
        if self._began is None:
            if not self._wanted:
                return []
            self._wanted = False
            self._began, self._rested_s = now, 0.0
            self._todo, self._at = sorted(self._shards, reverse=True), 0
        effects: list[Effect] = []
        size = 0
        while self._todo and size < _CHUNK_BYTES and len(effects) < _BATCHES_MAX:
            shard = self._shards.get(self._todo[-1])
            if shard is None or (reading := self._next(shard)) is None:
                self._todo.pop()
                self._at = 0
                continue
            size += reading.location.length
            self._last_token -= 1
            self._reading[self._last_token] = reading
            effects.append(ReadFrame(reading.location, self._last_token))
        rest_s = _BATCH_REST_S * len(effects)
        self._rested_s += rest_s
        self._due = Instant(now + rest_s + size / self._bytes_per_s)
        if not effects:
            worked_s = now - self._began - self._rested_s
            rest_s = max(self._rest_s_min, _REST * worked_s - self._rested_s)
            self._due = Instant(now + rest_s)
            effects.append(ReclaimableBytes(dict(self._reclaimable), self._began))
            self._began = None
            self._reclaimable.clear()
        return effects

    def _next(self, shard: Shard) -> _CandidateBatch | None:
        """Return the next batch that may be dead; None: this shard has no more."""
        if (batch := shard.batch_from(self._at, local=True)) is None:
            return None
        first, end, location = batch
        if end > shard.ordered or shard.seqnum_of(first) >= self._floors.highest:
            return None
        self._at = end
        return _CandidateBatch(shard, first, shard.seqnum_of(first), location)

    def on_read(self, token: int, payload: bytes | None) -> list[Effect]:
        """Discard a batch whose records are all dead; leave a damaged batch to scrub and repair."""
        shard, first, seqnum, location = self._reading.pop(token)
        batch, _ = parse_batch(location, payload)
        if batch is None or (batch.header.shard, batch.header.first) != (shard.id, first):
            return []
        dead = self._floors.dead(seqnum, *batch.tag_columns())
        if not dead.all():
            if size := reclaimable_bytes(batch, dead):
                self._reclaimable[location.segment] += size
            return []
        if not shard.discard(first, location):
            return []
        self.bytes += location.length
        self.batches += 1
        self._note(gone_of(batch.header, repaired=False), location)
        return []

    def _note(self, gone: GoneRecords, location: Location) -> None:
        """Note a discarded batch; consecutive batches share one note."""
        if self._notes:
            before, locations = self._notes[-1]
            if (joined := before.joined(gone)) is not None:
                self._notes[-1] = (joined, [*locations, location])
                return
        self._notes.append((gone, [location]))

    def _written_notes(self) -> list[Effect]:
        effects: list[Effect] = []
        for gone, locations in self._notes:
            self._last_token -= 1
            self._noting[self._last_token] = locations
            effects.append(Persist(FrameKind.DISCARDED, encode_gone(gone), self._last_token))
        self._notes.clear()
        return effects

    def on_persisted(self, token: int) -> list[Effect]:
        """Discard batches whose note is durable."""
        return [Discard(location) for location in self._noting.pop(token)]

    def deadline(self) -> Instant | None:
        """When to read the next batches."""
        if self._reading or (self._began is None and not self._wanted):
            return None
        return self._due
