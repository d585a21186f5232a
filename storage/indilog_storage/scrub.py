"""Verifies all batches periodically, so that damage is found while another replica can repair it
(ARCHITECTURE 11, decision 0009).

A pass begins every `scrub_interval_s`. It reads and verifies all batches of all shards, oldest
first, at most `scrub_bytes_per_s`, with a pause after each batch. A damaged batch becomes a hole,
which repair fills. After a start that replayed the whole journal, the first pass begins one
interval later. After a start from a checkpoint, the first pass begins at once.

`DiskCare` runs `Scrub`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from indilog.base.ids import Instant, LocalId, ShardId
from indilog.config import KIB, NodeConfig
from indilog.roles.role import Effect, Ignore, Location, ReadFrame
from indilog_storage.batch_reads import DamagedBatch, parse_batch
from indilog_storage.shard import Shard

_CHUNK_BYTES: Final = 256 * KIB
_BATCHES_MAX: Final = 256
"""Largest number of batches in one step. `_CHUNK_BYTES` limits its bytes."""
_BATCH_REST_S: Final = 0.0002
"""Pause after a batch, in seconds: many times the time that a small batch takes."""


class _Reading(NamedTuple):
    shard: ShardId
    first: LocalId
    location: Location


class Scrub:
    """Verifies batches in small steps; its tokens are negative.

    Attributes:
        passes: number of complete passes.
        bytes: bytes read over all passes.
        damaged: damage found since `DiskCare` last emptied the list.
    """

    def __init__(self, shards: Mapping[ShardId, Shard], config: NodeConfig) -> None:
        self._shards = shards
        self._bytes_per_s = config.storage.scrub_bytes_per_s
        self._interval_s = config.storage.scrub_interval_s
        self._began: Instant | None = None
        self._due: Instant | None = None
        self._todo: list[ShardId] = []
        """Shards that this pass has not finished; the current shard is last."""
        self._at: LocalId = 0
        self._reading: dict[int, _Reading] = {}
        self._last_token = 0
        self.passes = 0
        self.bytes = 0
        self.damaged: list[DamagedBatch] = []

    def start(self, now: Instant, *, unread: bool) -> None:
        """Begin after recovery; `unread`: recovery has not read all batches."""
        self._due = now if unread else Instant(now + self._interval_s)

    def conclude(self, now: Instant) -> list[Effect]:
        """Read the next batches, if a read is due."""
        if self._due is None or now < self._due or self._reading:
            return []
        if self._began is None:
            self._began = now
            self._todo = sorted(self._shards, reverse=True)
            self._at = 0
        effects: list[Effect] = []
        size = 0
        while self._todo and size < _CHUNK_BYTES and len(effects) < _BATCHES_MAX:
            shard = self._shards.get(self._todo[-1])
            if shard is None or (batch := shard.batch_from(self._at, local=True)) is None:
                self._todo.pop()
                self._at = 0
                continue
            first, self._at, location = batch
            size += location.length
            self._last_token -= 1
            self._reading[self._last_token] = _Reading(shard.id, first, location)
            effects.append(ReadFrame(location, self._last_token))
        self.bytes += size
        rest_s = max(size / self._bytes_per_s, _BATCH_REST_S * len(effects))
        self._due = Instant(now + rest_s)
        if not self._todo and not effects:
            self._due = Instant(max(now, self._began + self._interval_s))
            self._began = None
            self.passes += 1
        return effects

    def on_read(self, token: int, payload: bytes | None) -> list[Effect]:
        """Verify a batch."""
        reading = self._reading.pop(token)
        batch, damage = parse_batch(reading.location, payload)
        if batch is not None and (batch.header.shard, batch.header.first) != reading[:2]:
            damage = DamagedBatch(reading.location, readable=True)
        if damage is None:
            return []
        self.damaged.append(damage)
        return [Ignore(reading.location, "a record batch on disk is damaged")]

    def deadline(self) -> Instant | None:
        """When to read the next batches."""
        return self._due if not self._reading else None
