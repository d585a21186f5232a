"""Loss of a batch on all replicas of a shard in a simulation (decision 0024). On each disk the tags
of the batch are damaged, or the data of one record.

The checkers get the seqnums that may be lost, and check that no read silently skips one of them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from indilog.base.ids import LocalId, NodeId, ShardId
from indilog.kernel.records import HEADER_BYTES, BatchHeader, batch_header
from indilog.roles.role import FrameKind
from indilog.runtime.journal.journal import stream_of
from indilog.runtime.journal.segment_files import segment_files
from indilog.runtime.journal.segment_scan import Damage, SegmentScan
from indilog.testing.simulation import SimulatedCluster, SimulatedProcess
from tests.simulation.random_events import RandomEvents

_SHARE: Final = 0.35
"""The share of runs in which batches are lost."""
_MEAN_S: Final = 0.15
"""Simulated seconds between two losses, on average."""
_STRIKES_MAX: Final = 3


class _Copy(NamedTuple):
    """A batch on the disk of a replica."""

    process: SimulatedProcess
    file: str
    offset: int
    header: BatchHeader


class LostBatches(RandomEvents):
    """Damages all replicas of a batch, a few times in a run.

    Attributes:
        lost: for each shard, the localids [first, end) of the damaged batches.
    """

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        super().__init__(cluster, injected, "batches lost on all disks")
        self._left = self._chance.randint(1, _STRIKES_MAX)
        self.lost: dict[ShardId, list[tuple[LocalId, LocalId]]] = defaultdict(list)
        if self._chance.random() < _SHARE:
            self._begin(_MEAN_S)

    def seqnums(self, shards: Sequence[ShardId]) -> frozenset[int]:
        """Return which seqnums may be lost, given the shard of each."""
        found: set[int] = set()
        for shard, batches in self.lost.items():
            ordered = [seqnum for seqnum, of in enumerate(shards) if of == shard]
            found.update(seqnum for first, end in batches for seqnum in ordered[first:end])
        return frozenset(found)

    def _happen(self) -> None:
        self._left -= 1
        self._over = not self._left
        chance, view = self._chance, self._cluster.view
        shard = chance.choice(sorted(view.shards))
        replicas = view.shards[shard].replicas
        copies = [self._copies(node, shard) for node in replicas]
        common = set.intersection(*map(set, copies))
        if common:
            chosen = chance.choice(sorted(common))
            self._lose(shard, [of_replica[chosen] for of_replica in copies])

    def _copies(self, node: NodeId, shard: ShardId) -> dict[tuple[LocalId, LocalId], _Copy]:
        """Return the batches of a shard at one replica, except those in a possible torn tail."""
        process = self._cluster.process_of(node)
        found: dict[tuple[LocalId, LocalId], _Copy] = {}
        for file in segment_files(process.disk.directory / "journal"):
            scan = SegmentScan(file.path, file.first, newest=True)
            frames = [frame for frame in scan if not isinstance(frame, Damage)]
            synced = max((header.synced for header, _, _ in frames), default=0)
            for header, payload, place in frames:
                if header.stream != stream_of(node) or header.kind not in _BATCHES:
                    continue
                batch = batch_header(payload)
                if batch.shard == shard and place.offset + place.length < synced:
                    name = f"journal/{file.path.name}"
                    found[batch.first, batch.end] = _Copy(process, name, place.offset, batch)
        return found

    def _lose(self, shard: ShardId, copies: Sequence[_Copy]) -> None:
        chance, header = self._chance, copies[0].header
        self.lost[shard].append((header.first, header.end))
        kind = "lost_data" if header.data_bytes and chance.random() < 0.5 else "lost_tags"
        for process, file, offset, _ in copies:
            for at in _bytes_of(header, kind, chance):
                process.disk.flip_bit(file, offset + at, chance.randrange(8))
        if chance.random() < 0.7:
            for process in {copy.process.name: copy.process for copy in copies}.values():
                process.crash(power=False)
                self._cluster.world.after(chance.choice((0.005, 0.05, 0.2)), process.start)
        self._count(kind)


_BATCHES: Final = frozenset({FrameKind.RECORDS, FrameKind.REPAIRED})


def _bytes_of(header: BatchHeader, kind: str, chance: random.Random) -> Iterator[int]:
    """Yield the offsets of the damaged bytes: one in the data, or three in the columns."""
    columns_end = HEADER_BYTES + header.columns_bytes
    if kind == "lost_data":
        yield columns_end + chance.randrange(header.data_bytes)
    else:
        yield from chance.sample(range(HEADER_BYTES, columns_end), 3)
