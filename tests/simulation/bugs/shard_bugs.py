"""Planted bugs of shards that are finalized (decision 0055), moved (0048) or rebalanced (0056).

Each is a name, a file, the text that is replaced, and its replacement (`tests.simulation.planted`).
"""

from __future__ import annotations

from typing import Final

_PROGRESS: Final = "ordering/indilog_ordering/progress.py"
_REBALANCING: Final = "ordering/indilog_ordering/rebalancing.py"
_REPLACEMENT: Final = "ordering/indilog_ordering/replacement.py"
_VIEW: Final = "indilog/kernel/view.py"
_ENGINE: Final = "compute/indilog_compute/engine.py"
_WRITER: Final = "compute/indilog_compute/shard_writer.py"

FINALIZED: Final = (
    (
        "records of a finalized shard are ordered after its last entry",
        _PROGRESS,
        "                reported.end()\n",
        "                reported.forget(NodeId(''))\n",
    ),
    (
        "a view that ends a shard names an earlier writer",
        _VIEW,
        "NO_WRITER, writer_of(shard), ends)",
        "NO_WRITER, Epoch(writer_of(shard) - 1), ends)",
    ),
    (
        "a compute node acknowledges what its finalized shard has not ordered",
        _ENGINE,
        "            writer.continue_on(shard, self.placement.replicas(shard))\n",
        (
            "            cut = self._replay.cut.get(writer.shard, 0)\n"
            "            beyond = Span(writer.shard, cut, self._replay.tail, 1 << 20)\n"
            "            self._outbox += self._acknowledge(writer, beyond, 0.0)\n"
            "            writer.continue_on(shard, self.placement.replicas(shard))\n"
        ),
    ),
    (
        "records that a finalized shard has not ordered are dropped",
        _WRITER,
        "            if batch.expired:\n                self._forget(batch)\n",
        "            if batch.end >= 0:\n                self._forget(batch)\n",
    ),
    (
        "a compute node whose shard is finalized gets one that had a writer",
        _VIEW,
        "            reused = view.shard_written_by(engine) is None\n",
        "            reused = view.number >= 0\n",
    ),
)

MOVED: Final = (
    (
        "a lost storage node is dropped before the others are complete",
        _REPLACEMENT,
        "            return counting if complete else before",
        "            return counting",
    ),
    (
        "a node is complete by what it said before the move",
        _REPLACEMENT,
        "            and known.position > self._placement.since(shard)\n",
        "",
    ),
    (
        "all replicas count, also those that are kept only until the copy is complete",
        "indilog/kernel/placement.py",
        "        return self.replicas(shard)[: len(placed.replicas)] if placed is not None else ()",
        "        return self.replicas(shard)",
    ),
    (
        "freed records count as trimmed",
        "storage/indilog_storage/recovery.py",
        "            shard.free(freed.first, freed.end)",
        "            shard.discard_all(freed.first, freed.end)",
    ),
    (
        "a new replica says that it is complete before it has the records",
        "storage/indilog_storage/moved_shards.py",
        "for shard in self.shards.values() if shard.is_complete)",
        "for shard in self.shards.values())",
    ),
    (
        "a rebalanced shard loses its old replica at once",
        _REBALANCING,
        "if node != old), new, old)",
        "if node != old), new)",
    ),
    (
        "an index node uses the positions of a new view one too late",
        "index_tier/indilog_index/index_node.py",
        "        self._feed.set_positions(self._positions, changed)\n",
        "        self._feed.set_positions(self._positions, changed + 1)\n",
    ),
)
SHARD_BUGS: Final = (*FINALIZED, *MOVED)
