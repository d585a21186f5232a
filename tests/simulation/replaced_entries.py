"""Checks the cluster after the directories of all sequencers were replaced by older copies.

The sequencers then lack published entries, and the primary proposes others at the same positions.
Records of lost entries may lose their order permanently. But no seqnum may have two records: all
replicas correct their copies of the metalog, and index nodes drop the index data of lost entries.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from pathlib import Path
from typing import Final

from indilog.base.errors import IndilogError
from indilog.base.ids import NodeId, SeqNum, ShardId, TagHash, tag_hash
from indilog.client import Client
from indilog.kernel.index_schedule import index_shard_at
from indilog.testing.simulation import SimulatedCluster, SimulatedProcess
from indilog.wire.messages import Direction
from indilog_index.index_node import IndexNode
from indilog_index.index_store import Search
from indilog_storage import StorageNode
from indilog_storage.ordering import Ordering
from tests.simulation.history import Violation
from tests.simulation.sequencer_faults import leading

_SHARE: Final = 0.5
"""The share of runs with this loss, among those whose sequencers have processes of their own."""
_READY_WITHIN_S: Final = 30.0
_AGREE_WITHIN_S: Final = 10.0
_LOG: Final = "replaced"


class ReplacedEntries:
    """Lets the sequencers lose published entries; appends each contradiction to `violations`."""

    def __init__(self, cluster: SimulatedCluster, violations: list[Violation]) -> None:
        self._cluster = cluster
        self._violations = violations
        self._chance = cluster.world.chance("replaced entries")
        self._tags: dict[TagHash, SeqNum | None] = {}
        """The tag of each record appended here, and its seqnum if it was acknowledged since the
        loss.
        """

    def happen(self, injected: dict[str, int]) -> None:
        """Replace the directories and check the result, if arrangement and seed want it."""
        processes = self._sequencers_alone()
        if not processes or self._chance.random() >= _SHARE:
            return
        injected["replaced_entries"] = injected.get("replaced_entries", 0) + 1
        cluster = self._cluster
        self._append(2)
        self._restart(processes)
        self._append(self._chance.randint(1, 4))
        for process in processes:
            process.crash(power=False)
        older = [Path(f"{process.disk.directory}.older") for process in processes]
        for process, copy in zip(processes, older, strict=True):
            shutil.copytree(process.disk.directory, copy)
            process.start()
        self._append(self._chance.randint(1, 4))
        for process in processes:
            process.crash(power=False)
        for process, copy in zip(processes, older, strict=True):
            process.disk.replace(copy)
            process.start()
        cluster.world.run_until(cluster.ready, _READY_WITHIN_S)
        self._tags = dict.fromkeys(self._tags)
        self._append(self._chance.randint(1, 8))
        self._check()

    def _restart(self, processes: list[SimulatedProcess]) -> None:
        for process in processes:
            process.crash(power=False)
            process.start()

    def _sequencers_alone(self) -> list[SimulatedProcess]:
        """Return the processes of all sequencers; none if they also run other nodes."""
        view = self._cluster.view
        if {*view.sequencers} != {*self._cluster.members.sequencers}:
            return []
        found = {id(p): p for p in map(self._cluster.process_of, view.sequencers)}
        alone = all(set(process.nodes) <= set(view.sequencers) for process in found.values())
        return [*found.values()] if alone and len(view.sequencers) > 1 else []

    def _append(self, count: int) -> None:
        """Append at each engine, so that entries order records of different shards."""
        for number in range(count):
            engine = self._chance.randrange(len(self._cluster.members.engines))
            data = b"replaced %d" % number
            name = f"tag {len(self._tags)}"
            tag = tag_hash(_LOG, name)
            self._tags[tag] = None

            async def append(
                client: Client, data: bytes = data, name: str = name, tag: TagHash = tag
            ) -> None:
                try:
                    self._tags[tag] = await client.log(_LOG).append(data, tags=[name])
                except IndilogError:
                    return  # its outcome may be unknown now

            self._cluster.run(append, engine=engine, within_s=_READY_WITHIN_S)

    def _check(self) -> None:
        """Wait until all storage nodes have the entries of the primary, and no others."""
        cluster = self._cluster
        cluster.world.run_for(_AGREE_WITHIN_S)
        primary = leading(cluster)
        assert primary is not None, "all were started"
        base = primary._metalog.base
        entries = primary._metalog.page(base.position, primary.committed)
        cut, tails, tail = dict(base.cut), [base.tail], base.tail
        for entry in entries:
            for shard, count in entry.counts.items():
                cut[shard] = cut.get(shard, 0) + count
                tail += count
            tails.append(tail)
        for node in cluster.storage_nodes:
            self._compare(node, base.position, tails, cut)
        # The entries below the base come from a storage node that agrees with the base.
        ordering = self._ordering_of(cluster.storage_nodes[0])
        entries = (*ordering.entries(0, base.position), *entries)
        tails = [*map(ordering.tail_at, range(base.position)), *tails[1:]]
        shards = [
            shard for entry in entries for shard in sorted(entry.counts)
            for _ in range(entry.counts[shard])
        ]  # fmt: skip
        for node in cluster.stored_view.index_nodes:
            self._look_into(node, shards, tails)

    def _ordering_of(self, node: NodeId) -> Ordering:
        shell = self._cluster.process_of(node).shell
        assert shell is not None, "healed"
        role = shell.roles[node]
        assert isinstance(role, StorageNode)
        return role._ordering

    def _compare(self, node: NodeId, base: int, tails: list[int], cut: dict[ShardId, int]) -> None:
        ordering = self._ordering_of(node)
        ours = [ordering.tail_before(position) for position in range(base, ordering.position + 1)]
        ordered = {shard: ordering.cut_of(shard) for shard in cut}
        if ours != tails or ordered != cut:
            what = (
                f"{node} has {len(ours)} entries up to {ordered}, the primary {len(tails)}: {cut}"
            )
            self._violations.append(Violation("replaced", what))

    def _look_into(self, node: NodeId, shards: list[ShardId], tails: list[SeqNum]) -> None:
        """Check that an index node finds each tag at the seqnum of its record, and nowhere else.

        Rows that are only on the node's disk are not checked.

        Args:
            node: the index node.
            shards: the shard of each seqnum.
            tails: the tail after each position.
        """
        shell = self._cluster.process_of(node).shell
        assert shell is not None, "healed"
        role = shell.roles[node]
        assert isinstance(role, IndexNode)
        for tag, acknowledged in self._tags.items():
            search = Search(Direction.NEXT, tag, 0, len(shards), 2)
            if role._store.search(search) is not None or acknowledged is None:
                continue
            position = bisect_right(tails, acknowledged)
            mine = role.index_shard == index_shard_at(self._cluster.stored_view.eras, position)
            found = list(zip(search.seqnums, search.shards, strict=True))
            if found != ([(acknowledged, shards[acknowledged])] if mine else []):
                what = f"{node} has {found} for a tag of the record at {acknowledged}"
                self._violations.append(Violation("replaced", what))
