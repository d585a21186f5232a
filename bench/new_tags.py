"""Measures how often an index node recognizes new tags when most of its index is only on disk
(thesis 5.7).

When a compute node appends a record with a tag that it does not know, it asks the index tier
whether the tag is new. An index node answers from memory only: a read of the disk would cost more
than the answer saves. Here the node's snapshots, in real files, have many tags with one record
each. The node is then asked about new and about existing tags. The side `unspilled` has everything
in memory. The side `without filter` has no filter, so any tag may be on the disk.

    python -m bench.new_tags [--tags 10000000] [--memory-mib 512] [--questions 20000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.support.harness import Report, command, table_of
from indilog.base.ids import ShardId
from indilog.base.telemetry import configure_logging
from indilog.kernel.index_schedule import IndexEra
from indilog.kernel.index_snapshot import SnapshotInfo, WriteSnapshot
from indilog.kernel.tag_filter import TagFilter
from indilog.runtime.snapshot_files import SnapshotFolder
from indilog.wire.messages import Direction, ShardTags
from indilog_index.index_store import IndexStore, Search

RECORDS = 4096
"""Records of one position."""
SEED = 1
MIB = 1024 * 1024
_ANY_TAG = TagFilter(b"\xff" * 8)


class DiskIndex:
    """The index of a node with a disk.

    Attributes:
        writing_s: seconds that its snapshots took.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        self.store = IndexStore(memory_bytes_max=memory_bytes, entries_min=1_000_000)
        self._folder = SnapshotFolder(directory)
        self._position = 0
        self.writing_s = 0.0

    def add(self, tags: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        """Index one position: a record for each tag."""
        store = self.store
        part = ShardTags(ShardId(0), store.end, len(tags), bytes([1]) * len(tags), tags.tobytes())
        store.add(part)
        self._position += 1
        if store.due:
            self.spill()

    def spill(self) -> None:
        """Write a snapshot of everything, and drop entries from memory while memory is short."""
        store = self.store
        base = store.base.info.position if store.base is not None else None
        unwritten = store.close_generation(self._position)
        info = SnapshotInfo(
            index_shard=0, position=self._position, tail=unwritten.tail,
            eras=(IndexEra(0, (0,)),),
        )  # fmt: skip
        start = time.perf_counter()
        request = WriteSnapshot(info, base, unwritten.rows, None, store.filter_bytes_max)
        store.written(self._folder.write(request).snapshot)
        self.writing_s += time.perf_counter() - start

    def knows_new(self, tag: int) -> bool:
        """Return whether the node knows, without its disk, that the tag was never used."""
        search = Search(Direction.NEXT, tag, 0, self.store.end, 1)
        return self.store.search(search) is None and not search.seqnums

    def without_filter(self) -> Callable[[int], bool]:
        """Return `knows_new` for the case without filter: any tag might be on the disk."""
        store = self.store
        kept = store.base

        def knows_new(tag: int) -> bool:
            assert kept is not None, "a snapshot was written"
            store._base = kept._replace(tags=_ANY_TAG)  # noqa: SLF001 - what it would be without
            try:
                return self.knows_new(tag)
            finally:
                store._base = kept  # noqa: SLF001

        return knows_new


async def main(asked: argparse.Namespace) -> None:
    """Fill an index, query it, print the results."""
    configure_logging("console", "warning")
    report = Report("new_tags", asked, records_a_position=RECORDS)
    chance = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as directory:
        node = DiskIndex(Path(directory), asked.memory_mib * MIB)
        known = array("Q")
        for _ in range(0, asked.tags, RECORDS):
            tags = chance.integers(1, 2**64 - 1, RECORDS, dtype=np.uint64)
            known.extend(tags[:: max(1, asked.tags // asked.questions)].tolist())
            node.add(tags)
        node.spill()
        fresh = chance.integers(1, 2**64 - 1, asked.questions, dtype=np.uint64).tolist()
        status = node.store.status()
        report.say(
            f"{status['snapshot_rows']:,} rows in the snapshot, {status['spilled_rows']:,} nowhere "
            f"else; snapshots took {node.writing_s:.1f} s"
        )
        table = table_of(
            "is this tag new?", "side", "new tags recognised", "used tags called new", "asked"
        )
        for side, knows_new in (
            ("with filter", node.knows_new),
            ("without filter", node.without_filter()),
        ):
            start = time.perf_counter()
            share_new = sum(map(knows_new, fresh)) / len(fresh)
            seconds = time.perf_counter() - start
            wrong = sum(map(knows_new, known))
            assert not wrong, "a tag that was used is never called new"
            report.keep(side, share_new)
            row = f"{seconds / len(fresh) * 1e6:.1f} µs each"
            table.add_row(side, f"{share_new:.2%}", f"{wrong} of {len(known):,}", row)
        table.add_row("unspilled", "100.00%", "0", "-")
        report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        tags={"type": int, "default": 10_000_000, "help": "tags in the index"},
        memory_mib={"type": int, "default": 512, "help": "what the node may keep in memory"},
        questions={"type": int, "default": 20_000, "help": "tags that are asked about"},
    )
