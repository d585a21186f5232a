"""Claims about the index in memory and on the disk."""

from __future__ import annotations

import sys
import tracemalloc
from array import array

import numpy as np

from indilog.base.ids import ShardId
from indilog.kernel.index_schedule import IndexEra
from indilog.kernel.index_snapshot import ReadRows, SnapshotFloors, SnapshotInfo, WriteSnapshot
from indilog.kernel.metalog import Floor
from indilog.wire.messages import Direction, ShardTags
from indilog_index.index_store import IndexStore, Search
from tests.support.snapshot_disk import SnapshotDisk

TAG = 7
MANY = 10**9


def part(first: int, *tags: int) -> ShardTags:
    """Consecutive records with a tag each."""
    return ShardTags(
        ShardId(0), first, len(tags), bytes([1]) * len(tags), array("Q", tags).tobytes()
    )


def stored(store: IndexStore, disk: SnapshotDisk, position: int) -> None:
    """Write a snapshot of everything that the store has."""
    base = store.base.info.position if store.base is not None else None
    position, tail, rows, discarded = store.close_generation(position)
    info = SnapshotInfo(index_shard=0, position=position, tail=tail, eras=(IndexEra(0, (0,)),))
    none = np.empty(0, np.uint64)
    floors = SnapshotFloors(none, none, none, none, discarded)
    store.written(disk.write(WriteSnapshot(info, base, rows, floors)))


def is_due(store: IndexStore) -> bool:
    return store.due


def is_full(store: IndexStore) -> bool:
    return store.full


def is_sweeping(store: IndexStore) -> bool:
    return store.sweeping


def finished(store: IndexStore, disk: SnapshotDisk, search: Search) -> list[int]:
    while (needed := store.search(search)) is not None:
        rows = disk.rows(needed.position, needed.group)
        assert rows is not None
        store.keep(needed.group, rows)
    return search.seqnums


def test_a_search_that_waits_while_generations_are_dropped_skips_nothing() -> None:
    """The row group before the one it waits for had records that were in memory at that time."""
    store, disk = IndexStore(memory_bytes_max=2_500, entries_min=1), SnapshotDisk(group_rows=3)
    for position, tags in ((1, (TAG, 9)), (2, (TAG, TAG))):
        store.add(part(store.end, *tags))
        stored(store, disk, position)
    store.add(part(store.end, *range(100, 105)))
    store.shrink()
    assert store.memory_from == 2, "the second generation is in memory, and in the snapshot"
    search = Search(Direction.NEXT, TAG, 0, 4, 10)
    needed = store.search(search)
    assert isinstance(needed, ReadRows)
    rows = disk.rows(needed.position, needed.group)
    assert rows is not None
    assert rows.seqnums.tolist() == [3, 0, 2], "the end of the empty tag, and two of ours"
    store.keep(needed.group, rows)
    store.search(search)
    store.add(part(store.end, *range(200, 210)))
    store.shrink()
    assert store.memory_from == 4
    assert finished(store, disk, search) == [0, 2, 3]


def test_an_absent_record_is_proven_by_one_read_at_most() -> None:
    store, disk = IndexStore(memory_bytes_max=1, entries_min=1), SnapshotDisk(group_rows=3)
    store.add(part(0, *range(10, 100)))
    stored(store, disk, 1)
    assert store.memory_from == store.end
    reads = 0
    search = Search(Direction.NEXT, 55_555, 0, MANY, 1)
    while (needed := store.search(search)) is not None:
        reads += 1
        rows = disk.rows(needed.position, needed.group)
        assert rows is not None
        store.keep(needed.group, rows)
    assert (search.seqnums, reads <= 1) == ([], True)


def test_a_snapshot_is_due_when_new_entries_are_half_of_the_last_one() -> None:
    store, disk = IndexStore(memory_bytes_max=MANY, entries_min=10), SnapshotDisk(group_rows=100)
    store.add(part(0, *[TAG] * 4))
    assert not is_due(store)
    store.add(part(4, TAG))
    assert is_due(store), "five records, each with a tag and the empty one"
    stored(store, disk, 1)
    store.add(part(5, *[TAG] * 20))
    stored(store, disk, 2)
    store.add(part(25, *[TAG] * 12))
    assert not is_due(store)
    store.add(part(37, TAG))
    assert is_due(store)


def test_when_memory_is_short_only_generations_in_the_snapshot_are_dropped() -> None:
    store, disk = IndexStore(memory_bytes_max=2_000, entries_min=1), SnapshotDisk(group_rows=100)
    store.add(part(0, *range(1, 30)))
    store.shrink()
    assert store.memory_from == 0, "it is nowhere else"
    assert is_full(store)
    stored(store, disk, 1)
    assert store.memory_from == 29
    assert not is_full(store)


def test_a_write_that_failed_leaves_everything_in_memory_and_due() -> None:
    store = IndexStore(memory_bytes_max=100, entries_min=1)
    store.add(part(0, TAG))
    for _ in range(3):
        store.add(part(store.end, 9))
        unwritten = store.close_generation(5)
        assert not is_due(store), "one at a time"
        assert unwritten.tail == 2, "that which failed is tried again, not more"
        store.written(None)
        assert is_due(store)
    assert store.status()["generations"] == 2
    assert finished(store, SnapshotDisk(), Search(Direction.NEXT, TAG, 0, 1, 1)) == [0]


def test_trimmed_records_leave_the_memory_and_the_next_checkpoint() -> None:
    """Besides the index, the store keeps its index data as it arrived, for checkpoints (decision
    0028).
    """
    store, log, own = IndexStore(memory_bytes_max=MANY, entries_min=MANY), 50, range(60, 65)
    model: list[tuple[int, int, int]] = []

    def add(shard: int, count: int) -> None:
        first = store.end
        tags = [(log, own[n % 5]) for n in range(first, first + count)]
        columns = bytes([2]) * count, array("Q", [t for pair in tags for t in pair]).tobytes()
        store.add(ShardTags(ShardId(shard), first, count, *columns))
        for n, pair in enumerate(tags, first):
            model.extend((tag, n, shard) for tag in (0, *pair))

    for turn in range(100):
        add(turn % 2, 10)
    before = store.memory_bytes
    for until in (500, 903):
        store.trim(Floor(log, until, of_log=True))
        while store.sweeping:
            store.sweep(1)
    store.trim(Floor(own[0], 950, of_log=False))
    assert store.memory_bytes < before * 0.2
    add(1, 7)  # continues the last run
    add(0, 2)
    store.check_invariants()
    rows = store.unwritten_rows()()
    found = list(zip(rows.tags.tolist(), rows.seqnums.tolist(), rows.shards.tolist(), strict=True))
    assert len(found) < len(model) * 0.2
    assert set(found) <= set(model)
    kept = {row for row in model if row[1] >= 903 and (row[0] != own[0] or row[1] >= 950)}
    assert kept <= set(found)
    assert found == sorted(found)


def test_counted_bytes_equal_the_used_memory() -> None:
    """Within a fifth, for tags with one record each, and a tag with very many."""
    for tags in (range(1, 40_001), [TAG] * 400_000):
        columns = [part(first, *tags[first : first + 200]) for first in range(0, len(tags), 200)]
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        store = IndexStore(memory_bytes_max=MANY, entries_min=MANY)
        for column in columns:
            store.add(column)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert 0.8 < store.memory_bytes / taken < 1.25, sys.version


def test_discarded_records_leave_the_memory_and_the_next_snapshot() -> None:
    disk = SnapshotDisk()
    store = IndexStore(memory_bytes_max=1 << 20, entries_min=1)
    store.add(part(0, 5, 6, 7, 8))
    stored(store, disk, 1)
    store.add(part(4, 9, 10))
    bounds = store.runs()[ShardId(0)]
    assert bounds.tolist() == [[0, 4], [4, 6]]
    store.forget(np.array([[1, 3], [5, 6]], np.uint64))
    while store.sweeping:
        store.sweep(100)
    assert store.entries == 3
    for tag, seqnum in ((5, 0), (8, 3), (9, 4)):
        assert finished(store, disk, Search(Direction.NEXT, tag, 0, 6, 2)) == [seqnum]
    stored(store, disk, 2)
    kept = [group.seqnums[group.tags != 0].tolist() for group in disk.groups(2)]
    assert sorted(seqnum for group in kept for seqnum in group) == [0, 3, 4]


LOG_TAG, OWN = 50, 60


def of_log(first: int, count: int) -> ShardTags:
    """Consecutive records of one log, each with a tag that all of them have."""
    tags = array("Q", [LOG_TAG, OWN] * count)
    return ShardTags(ShardId(0), first, count, bytes([2]) * count, tags.tobytes())


def on_disk(disk: SnapshotDisk, position: int) -> set[int]:
    """The seqnums of all rows of a snapshot."""
    return {int(seqnum) for group in disk.groups(position) for seqnum in group.seqnums}


def test_a_snapshot_written_amid_a_sweep_has_no_forgotten_records() -> None:
    """Otherwise the snapshot would keep them: storage is not asked again about records that are
    only in a snapshot.
    """
    store, disk = IndexStore(memory_bytes_max=MANY, entries_min=1), SnapshotDisk()
    store.add(of_log(0, 10))
    store.forget(np.array([[2, 4]], np.uint64))
    store.sweep(1)
    assert is_sweeping(store)
    stored(store, disk, 1)
    assert on_disk(disk, 1) == {0, 1, *range(4, 10)}
    while store.sweeping:
        store.sweep(10)
    store.check_invariants()


def test_a_snapshot_written_amid_a_sweep_has_no_records_of_the_trimmed_log() -> None:
    store, disk = IndexStore(memory_bytes_max=MANY, entries_min=1), SnapshotDisk()
    store.add(of_log(0, 10))
    store.trim(Floor(LOG_TAG, 7, of_log=True))
    store.sweep(1)
    assert is_sweeping(store)
    stored(store, disk, 1)
    assert on_disk(disk, 1) == {7, 8, 9}


def test_records_discarded_during_a_snapshot_leave_memory_and_the_next_one() -> None:
    store, disk = IndexStore(memory_bytes_max=MANY, entries_min=1), SnapshotDisk()
    store.add(of_log(0, 10))
    position, tail, rows, discarded = store.close_generation(1)
    info = SnapshotInfo(index_shard=0, position=position, tail=tail, eras=(IndexEra(0, (0,)),))
    before = store.memory_bytes
    store.forget(np.array([[2, 4]], np.uint64))
    none = np.empty(0, np.uint64)
    floors = SnapshotFloors(none, none, none, none, discarded)
    store.written(disk.write(WriteSnapshot(info, None, rows, floors)))
    assert store.memory_bytes > before, "what is to be removed takes memory, too"
    while store.sweeping:
        store.sweep(10)
    assert store.entries == 16
    assert finished(store, disk, Search(Direction.NEXT, OWN, 0, 6, 9)) == [0, 1, 4, 5]
    store.add(of_log(10, 2))
    stored(store, disk, 2)
    assert on_disk(disk, 2) == {0, 1, *range(4, 12)}
