"""The snapshots of an index node: decides when it writes one, and from which one it starts.

In thesis 5.6.2 a failed index node fetches all its index data from storage. Here the node starts
from its snapshot, and fetches only newer data.

`IndexNode` owns the one `Snapshots`. Its effects ask the shell to open and to write the files.
"""

from __future__ import annotations

from indilog.base.ids import Instant, MetalogPosition, SeqNum
from indilog.config import NodeConfig
from indilog.kernel.floors import Trimmed
from indilog.kernel.index_schedule import NO_POSITION, eras_below
from indilog.kernel.index_snapshot import (
    IndexSnapshot,
    OpenSnapshot,
    SnapshotFloors,
    SnapshotInfo,
    WriteSnapshot,
)
from indilog.kernel.lineage import Lineage
from indilog.kernel.placement import Placement
from indilog.roles.role import AskSnapshots
from indilog_index.index_store import IndexStore


class Snapshots:
    """The snapshots of one index node.

    Attributes:
        opening: whether the node still waits for the snapshot to start from.
        written: number of snapshots that were written.
        failed: number of snapshots that could not be written.
    """

    def __init__(self, placement: Placement, index_shard: int, config: NodeConfig) -> None:
        self._placement = placement
        self._index_shard = index_shard
        self._retry_s = config.index_tier.index_snapshot_retry_s
        self._writing: SnapshotInfo | None = None
        self._trimmed_until: SeqNum = 0
        """The highest floor of a log when a snapshot was last written."""
        self._retry_at: Instant | None = None
        self._wanted: MetalogPosition | None = None
        self.opening = False
        self.written = 0
        self.failed = 0

    def open(self, below: MetalogPosition = NO_POSITION + 1) -> AskSnapshots:
        """Request the newest snapshot below a position. The result of a write that is in progress
        now will be ignored.
        """
        self.opening = True
        self._writing = self._retry_at = None
        return AskSnapshots(OpenSnapshot(below))

    def want(self, position: MetalogPosition) -> None:
        """Make a snapshot up to `position` due, once all positions below it are applied."""
        self._wanted = max(position, self._wanted or 0)

    @property
    def writing(self) -> MetalogPosition:
        """The position of the snapshot that is being written; 0: no write is in progress."""
        return self._writing.position if self._writing is not None else 0

    @property
    def wanted(self) -> bool:
        """Whether a snapshot was requested and is not written yet."""
        return self._wanted is not None

    def is_ours(self, snapshot: IndexSnapshot) -> bool:
        """Whether a snapshot has exactly the index data of this index shard below its position.

        A snapshot that was written under another schedule may have positions of other index shards.
        """
        return self.covers_ours(snapshot.info)

    def covers_ours(self, info: SnapshotInfo) -> bool:
        """Whether a snapshot or a checkpoint has the index data of this index shard below its
        position.
        """
        return (
            info.logspace == self._placement.view.logspace
            and info.index_shard == self._index_shard
            and info.eras == eras_below(self._placement.view.eras, info.position)
        )

    def write(
        self,
        store: IndexStore,
        trimmed: Trimmed,
        position: MetalogPosition,
        lineage: Lineage,
        now: Instant,
    ) -> list[AskSnapshots]:
        """Request a snapshot of everything below `position`, if one is due.

        A snapshot is also due when half of the records in the last snapshot may have been trimmed.
        """
        if self._writing is not None or (self._retry_at is not None and now < self._retry_at):
            return []
        self._retry_at = None
        asked = self._is_asked_for(store, position)
        if not (asked or store.due or self._much_is_trimmed(store, trimmed)):
            return []
        base = store.base.info.position if store.base is not None else None
        unwritten = store.close_generation(position)
        assert unwritten.position <= position, "a snapshot that failed is written first"
        self._writing = SnapshotInfo(
            logspace=self._placement.view.logspace,
            index_shard=self._index_shard,
            position=unwritten.position,
            tail=unwritten.tail,
            eras=eras_below(self._placement.view.eras, unwritten.position),
            lost=tuple(lost for lost in store.lost if lost.start < unwritten.tail),
            lineage=lineage.copied(unwritten.position),
        )
        self._trimmed_until = trimmed.logs.highest
        floors = SnapshotFloors(
            *trimmed.logs.columns()[:2], *trimmed.tags.columns()[:2], unwritten.discarded
        )
        write = WriteSnapshot(self._writing, base, unwritten.rows, floors, store.filter_bytes_max)
        return [AskSnapshots(write)]

    def _is_asked_for(self, store: IndexStore, position: MetalogPosition) -> bool:
        """Whether a requested snapshot can be written now; an empty index has none."""
        if self._wanted is None or position < self._wanted:
            return False
        base = store.base.info.position if store.base is not None else 0
        if base >= self._wanted or not store.end:
            self._wanted = None
            return False
        return True

    def _much_is_trimmed(self, store: IndexStore, trimmed: Trimmed) -> bool:
        base, since = store.base, self._trimmed_until
        if base is None or store.end == base.info.tail:
            return False
        return min(trimmed.logs.highest, base.info.tail) - since > (base.info.tail - since) // 2

    def info(self, store: IndexStore, position: MetalogPosition, lineage: Lineage) -> SnapshotInfo:
        """Return the extent that `store` covers: everything below `position`."""
        return SnapshotInfo(
            logspace=self._placement.view.logspace,
            index_shard=self._index_shard,
            position=position,
            tail=store.end,
            eras=eras_below(self._placement.view.eras, position),
            lost=tuple(store.lost),
            lineage=lineage.copied(),
        )

    def on_written(self, position: MetalogPosition, *, stored: bool, now: Instant) -> bool:
        """Note that a snapshot was written, or failed; False: it is not the awaited snapshot."""
        if self._writing is None or self._writing.position != position:
            return False
        self._writing = None
        self.written += stored
        self.failed += not stored
        if not stored:
            self._retry_at = Instant(now + self._retry_s)
        return True

    def deadline(self) -> Instant | None:
        """When to retry a snapshot that could not be written; None: the last one was written."""
        return self._retry_at
