"""The rows of a snapshot after a trim, against a list of records."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indilog.kernel.index_schedule import IndexEra
from indilog.kernel.index_snapshot import Rows, SnapshotFloors, SnapshotInfo, WriteSnapshot
from tests.support.snapshot_disk import SnapshotDisk

LOGS = (100, 2**63 + 7)
TAGS = (1, 2, 2**64 - 1)


def rows_of(records: list[tuple[int, int, set[int]]]) -> Rows:
    """All rows of records: seqnum, log, tags."""
    rows = sorted((tag, s) for s, log, tags in records for tag in (0, log, *tags))
    columns = list(zip(*rows, strict=True)) or [(), ()]
    tags, seqnums = (np.array(column, np.uint64) for column in columns)
    return Rows(tags, seqnums, np.zeros(len(tags), np.uint16))


def floors_of(logs: dict[int, int], tags: dict[int, int]) -> SnapshotFloors:
    columns = [
        np.array([value for _, value in sorted(zip(floors, column, strict=True))], np.uint64)
        for floors in (logs, tags)
        for column in (floors.keys(), floors.values())
    ]
    return SnapshotFloors(*columns)


@given(seed=st.integers(0, 2**32))
def test_a_merge_drops_exactly_the_trimmed_rows(seed: int) -> None:
    """A record whose log is trimmed is dropped with all its rows, also rows of untrimmed tags."""
    chance = Random(seed)
    records = [
        (s, chance.choice(LOGS), set(chance.sample(TAGS, chance.randint(0, 3))))
        for s in range(chance.randint(0, 25))
    ]
    logs = {log: chance.randint(1, 30) for log in LOGS if chance.random() < 0.5}
    tags = {tag: chance.randint(1, 30) for tag in TAGS if chance.random() < 0.5}
    disk = SnapshotDisk(chance.randint(1, 5))
    eras = (IndexEra(0, (0,)),)
    for position, base in ((1, None), (2, 1)):
        info = SnapshotInfo(index_shard=0, position=position, tail=30, eras=eras)
        recent = rows_of(records if base is None else [])
        disk.write(WriteSnapshot(info, base, lambda rows=recent: rows, floors_of(logs, tags)))  # type: ignore[misc]
    left = {
        (tag, s)
        for s, log, its in records
        if s >= logs.get(log, 0)
        for tag in (0, log, *its)
        if s >= tags.get(tag, 0)
    }
    found = [
        (int(tag), int(seqnum))
        for rows in disk.groups(2)
        for tag, seqnum in zip(rows.tags, rows.seqnums, strict=True)
    ]
    assert found == sorted(left)
