"""Maintenance of a storage node's disk: finds, counts and repairs damage, and frees space
(decisions 0008 and 0009).

`Scrub` looks for damage; reads and recovery find damage, too. Each damaged batch becomes a hole of
its shard, and `Repair` fetches the records of holes from other replicas. `Reclaim` discards batches
whose records are all trimmed. `ColdTier` moves old batches to cold storage.

`StorageNode` owns the one `DiskCare`, which runs these four parts.
"""

from __future__ import annotations

from typing import Any

from indilog.base.ids import Instant
from indilog.config import NodeConfig
from indilog.kernel.floors import Trimmed
from indilog.roles.role import Effect, Location
from indilog_storage.batch_reads import DamagedBatch
from indilog_storage.cold_tier import FIRST_TOKEN as FIRST_COLD_TOKEN
from indilog_storage.cold_tier import ColdTier
from indilog_storage.moved_shards import FIRST_TOKEN as FIRST_MOVED_TOKEN
from indilog_storage.moved_shards import MovedShards
from indilog_storage.reclaim import FIRST_TOKEN, Reclaim
from indilog_storage.repair import Repair
from indilog_storage.scrub import Scrub


class DiskCare:
    """Runs scrub, repair, reclaim and cold tier of one node; the tokens of their reads are
    negative.

    Attributes:
        damaged: batches found damaged in this incarnation.
    """

    def __init__(
        self,
        moved: MovedShards,
        floors: Trimmed,
        cold: ColdTier,
        config: NodeConfig,
    ) -> None:
        self.moved = moved
        shards = self._shards = moved.shards
        self.repair = Repair(moved, config)
        self.scrub = Scrub(shards, config)
        self.reclaim = Reclaim(shards, floors, config)
        self.cold = cold
        self.damaged = 0

    def start(self, now: Instant, *, unread: bool) -> None:
        """Begin after recovery. If recovery has not read all batches (`unread`), a scrub pass is
        due at once.
        """
        self.scrub.start(now, unread=unread)
        self.reclaim.note_risen_floors()
        self.cold.start(now)

    def note_risen_floors(self) -> None:
        """Note that floors have risen."""
        self.reclaim.note_risen_floors()
        self.cold.note_risen_floors()

    def on_read(self, token: int, payload: bytes | None) -> list[Effect]:
        """Handle a frame that scrub, reclaim or a move has requested."""
        if token < FIRST_COLD_TOKEN:
            return self.cold.on_read(token, payload)
        asked = self.reclaim if token < FIRST_TOKEN else self.scrub
        return asked.on_read(token, payload)

    def on_persisted(self, token: int, location: Location) -> list[Effect]:
        """Continue when a frame of this maintenance is durable: a repaired batch, or a note that
        batches were discarded, freed or moved.
        """
        if token < FIRST_MOVED_TOKEN:
            return self.moved.on_persisted(token)
        if token < FIRST_COLD_TOKEN:
            return self.cold.on_persisted(token)
        if token < FIRST_TOKEN:
            return self.reclaim.on_persisted(token)
        self.repair.on_persisted(token, location)
        return []

    def conclude(self, now: Instant, met: list[DamagedBatch]) -> list[Effect]:
        """Continue reading, and fetch missing batches.

        `met` is the damage that readers found; this method empties the list. Damage that is already
        known is not counted again.
        """
        effects = self.scrub.conclude(now) + self.reclaim.conclude(now) + self.cold.conclude(now)
        for found in (met, self.scrub.damaged):
            for damage in found:
                self.damaged += any(shard.lose(damage) for shard in self._shards.values())
            found.clear()
        return effects + self.repair.conclude(now)

    def deadline(self) -> Instant | None:
        """When to continue reading, or to ask a replica."""
        parts = (self.repair, self.scrub, self.reclaim, self.cold)
        times = (part.deadline() for part in parts)
        return min((time for time in times if time is not None), default=None)

    def status(self) -> dict[str, Any]:
        """Return figures for operators.

        `missing_by_shard` has the number of missing records of each shard that is being repaired
        from other replicas. `lost_records` counts missing records that no replica has. Lost records
        are counted even after a trim, because their log is unknown. `first_lost_seqnum` is present
        only if there are lost records.
        """
        first_lost = [s.first_lost for s in self._shards.values() if s.first_lost is not None]
        return {
            "damaged_batches": self.damaged,
            "missing_records": sum(shard.missing for shard in self._shards.values()),
            "missing_by_shard": {
                str(shard.id): shard.missing
                for shard in self._shards.values()
                if not (shard.alone or shard.is_complete)
            },
            "lost_records": sum(shard.lost for shard in self._shards.values()),
            **({"first_lost_seqnum": min(first_lost)} if first_lost else {}),
            "reclaiming": int(self.reclaim.busy),
            "discarded_batches": self.reclaim.batches,
            "discarded_bytes": self.reclaim.bytes,
            "scrubbed_bytes": self.scrub.bytes,
            "scrub_passes": self.scrub.passes,
            "repaired_records": self.repair.repaired,
            **self.cold.status(),
        }
