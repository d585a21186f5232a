"""The index in memory and on disk against a list of all records, with rows in any place and
searches that wait at any step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import EMPTY_TAG, ShardId
from indilog.kernel.index_schedule import IndexEra
from indilog.kernel.index_snapshot import (
    Rows,
    SnapshotInfo,
    WriteSnapshot,
    merged,
    opened_snapshot,
    read_rows,
    write_rows,
)
from indilog.kernel.tag_filter import TagFilterBuilder
from indilog.wire.messages import Direction, ShardTags
from indilog_index.checkpoint import CheckpointRows
from indilog_index.index_store import IndexStore, Search
from tests.support.snapshot_disk import SnapshotDisk

TAGS = (1, 2, 3, 2**64 - 1, 2**63 + 5)
ERAS = (IndexEra(0, (0,)),)


class Ordered(NamedTuple):
    """A record of the model."""

    seqnum: int
    shard: int
    tags: tuple[int, ...]


class Story:
    """One store, its disk, the model, and the searches in progress."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.disk = SnapshotDisk(chance.choice([1, 2, 3, 7]))
        self.memory_max = chance.choice([400, 2_000, 5_000, 8_000, 10**9])
        self.store = self.fresh()
        self.records: list[Ordered] = []
        self.next = 0
        self.position = 0
        self.writing: tuple[SnapshotInfo, Callable[[], Rows]] | None = None
        self.searches: list[tuple[Search, int]] = []
        self.kept: CheckpointRows | None = None

    def fresh(self) -> IndexStore:
        return IndexStore(
            memory_bytes_max=self.memory_max, entries_min=self.chance.choice([1, 20, 1000])
        )

    def add(self) -> None:
        self.next += self.chance.choice([0, 0, 1, 5])
        first, shard = self.next, self.chance.randint(0, 2)
        new = [
            Ordered(first + n, shard, tuple(self.chance.sample(TAGS, self.chance.randint(0, 3))))
            for n in range(self.chance.randint(1, 5))
        ]
        self.next = first + len(new)
        self.position += 1
        self.records += new
        self.store.add(part_of(new))

    def close(self) -> None:
        covered = self.store.base.info.tail if self.store.base is not None else 0
        new = self.store.end > covered and self.chance.random() < 0.3
        if self.writing is None and (self.store.due or new):
            position, tail, rows, _ = self.store.close_generation(self.position)
            info = SnapshotInfo(index_shard=0, position=position, tail=tail, eras=ERAS)
            self.writing = info, rows

    def written(self, *, fails: bool = True) -> None:
        if self.writing is None:
            return
        info, recent = self.writing
        self.writing = None
        if fails and self.chance.random() < 0.2:
            self.store.written(None)
        else:
            base = self.store.base.info.position if self.store.base is not None else None
            self.store.written(self.disk.write(WriteSnapshot(info, base, recent)))

    def restart(self) -> None:
        """Restart from the snapshot, with or without a checkpoint; later records are added
        again.
        """
        base = self.store.base
        kept = self.kept if self.chance.random() < 0.5 else None
        self.searches.clear()
        self.writing = None
        self.store = self.fresh()
        if base is not None:
            self.store.restore(base)
        if kept is not None and kept.follows(base.info if base is not None else None):
            self.store.add_checkpoint(kept.rows, kept.info)
        for record in self.records:
            if record.seqnum >= self.store.end:
                self.store.add(part_of([record]))

    def checkpoint(self) -> None:
        info = SnapshotInfo(index_shard=0, position=self.position, tail=self.store.end, eras=ERAS)
        rows = self.store.unwritten_rows()
        self.add()  # later records are not in it
        base = self.store.base.info.position if self.store.base is not None else None
        self.kept = CheckpointRows(info, base, rows())

    def shrink(self) -> None:
        self.store.shrink()

    def ask(self) -> None:
        limit = self.chance.randint(0, self.next)  # all records below it are known
        bound = self.chance.choice([self.chance.randint(0, self.next + 2), 2**63 - 1])
        direction = self.chance.choice(list(Direction))
        tag = self.chance.choice((EMPTY_TAG, *TAGS, 4))
        count = self.chance.choice([1, 1, 3, 1000])
        self.searches.append((Search(direction, tag, bound, limit, count), bound))
        self.go_on(len(self.searches) - 1)

    def go_on(self, which: int) -> None:
        """Run a search until it waits for the disk; the disk may answer at once."""
        if not self.searches:
            return
        which %= len(self.searches)
        search, bound = self.searches[which]
        needed = self.store.search(search)
        if needed is None:
            del self.searches[which]
            assert list(zip(*search.matches, strict=True)) == self.expected(search, bound)
        else:
            assert self.store.base is not None
            assert needed.position == self.store.base.info.position
            rows = self.disk.rows(needed.position, needed.group)
            assert rows is not None
            self.store.keep(needed.group, rows)

    def expected(self, search: Search, bound: int) -> list[tuple[int, int]]:
        count = search.left + len(search.seqnums)
        matching = [
            (r.seqnum, r.shard)
            for r in self.records
            if r.seqnum < search.limit and (search.tag == EMPTY_TAG or search.tag in r.tags)
        ]
        if search.direction is Direction.NEXT:
            return [m for m in matching if m[0] >= bound][:count]
        return [m for m in matching[::-1] if m[0] <= bound][:count]


def part_of(records: list[Ordered]) -> ShardTags:
    tags = [tag for record in records for tag in record.tags]
    return ShardTags(
        ShardId(records[0].shard),
        records[0].seqnum,
        len(records),
        bytes(len(record.tags) for record in records),
        array("Q", tags).tobytes(),
    )


@given(seed=st.integers(0, 2**32))
def test_a_search_over_memory_and_disk_finds_what_a_scan_finds(seed: int) -> None:
    """While a search waits, snapshots may be written or fail, and generations may be dropped."""
    chance = Random(seed)
    story = Story(chance)
    steps = (
        [story.add] * 6
        + [story.checkpoint, story.close, story.written, story.restart]
        + [story.ask] * 5
    )
    steps += [story.shrink] * 3
    for _ in range(150):
        chance.choice(steps)()
        if chance.random() < 0.7:
            story.go_on(chance.randrange(64))
        story.store.check_invariants()
    while story.searches:
        story.go_on(0)


@given(seed=st.integers(0, 2**32))
def test_memory_exceeds_its_limit_only_until_a_snapshot_is_written(seed: int) -> None:
    """The rest in memory stays within the share of generations, and the total within the limit."""
    story = Story(Random(seed))
    story.memory_max = 4_000
    story.store = story.fresh()
    spilled = 0
    for _ in range(60):
        story.add()
        story.store.shrink()
        if story.store.due:
            story.close()
            story.written(fails=False)
        story.ask()
        while story.searches:
            story.go_on(0)
        assert story.store.resident_bytes <= 4_000 // 2
        groups = story.store.base and len(story.store.base.groups.lowest)
        assert story.store.memory_bytes <= 4_000 + 32 * (groups or 0)
        spilled += story.store.status()["spilled_rows"] > 0
    assert spilled


def new_filter() -> TagFilterBuilder:
    return TagFilterBuilder(1000, bytes_max=4096)


@given(seed=st.integers(0, 2**32))
def test_rows_survive_a_round_trip_through_a_file(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The round trip of the format, against the model's own list of rows."""
    chance = Random(seed)
    story = Story(chance)
    for _ in range(chance.randint(1, 30)):
        story.add()
    info = SnapshotInfo(index_shard=3, position=story.position, tail=story.next, eras=ERAS)
    file = tmp_path_factory.mktemp("snapshot") / "rows.parquet"
    write_rows(file, info, merged([], story.store.close_generation(9).rows()), new_filter())
    parquet, snapshot = opened_snapshot(file)
    assert snapshot.info == info
    expected = sorted((t, r.seqnum, r.shard) for r in story.records for t in (0, *r.tags))
    groups = [read_rows(parquet, group) for group in range(len(snapshot.groups.lowest))]
    found = [tuple(row) for g in groups for row in zip(*(c.tolist() for c in g), strict=True)]
    assert found == expected
    assert snapshot.rows == len(expected)


def test_a_file_in_many_row_groups_is_found_by_its_statistics(tmp_path: Path) -> None:
    """The statistics that `GroupDirectory` reads from a real file equal those of the rows."""
    store = IndexStore(memory_bytes_max=10**9, entries_min=1)
    counts = 60_000
    tags = np.repeat(np.array([7, 2**63 + 1], np.uint64)[None, :], counts, 0).tobytes()
    store.add(ShardTags(ShardId(5), 10, counts, bytes([2]) * counts, tags))
    info = SnapshotInfo(index_shard=0, position=9, tail=store.end, eras=ERAS)
    write_rows(
        tmp_path / "rows.parquet", info, merged([], store.close_generation(9).rows()), new_filter()
    )
    parquet, snapshot = opened_snapshot(tmp_path / "rows.parquet")
    store = IndexStore(memory_bytes_max=10**9, entries_min=1)
    store.restore(snapshot)
    for direction, tag, bound, expected in (
        (Direction.NEXT, 7, 50_000, [50_000, 50_001]),
        (Direction.PREV, 7, 50_000, [50_000, 49_999]),
        (Direction.NEXT, 2**63 + 1, 0, [10, 11]),
        (Direction.PREV, 0, 2**62, [60_009, 60_008]),
        (Direction.NEXT, 8, 0, []),
    ):
        search = Search(direction, tag, bound, 2**62, 2)
        reads = 0
        while (needed := store.search(search)) is not None:
            store.keep(needed.group, read_rows(parquet, needed.group))
            reads += 1
        assert search.seqnums == expected
        assert search.shards == [5] * len(expected)
        assert reads <= 2
