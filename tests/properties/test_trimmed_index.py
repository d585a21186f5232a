"""A tag index amid trims, against a plain list of records: lookups are exact, and sweeping frees
all memory.
"""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import ShardId
from indilog.kernel.floors import Trimmed
from indilog.kernel.metalog import Floor
from indilog.wire.messages import ShardTags
from indilog_index.tag_index import TagIndex
from indilog_index.trim_feed import without_trimmed

LOGS = {1: [10, 11, 12], 2: [20, 21]}
Records = dict[int, tuple[int, ...]]


class Model:
    """All records and trim floors, and the records above them."""

    def __init__(self) -> None:
        self.records: Records = {}
        self.floors: dict[tuple[int, bool], int] = {}

    def add(self, records: Records, *, filtered: bool) -> None:
        """Add records; `filtered`: without those that are trimmed in all their tags already."""
        for seqnum, (log, *tags) in records.items():
            dead = tags and all(seqnum < self.floors.get((tag, False), 0) for tag in tags)
            if not (filtered and dead):
                self.records[seqnum] = (log, *tags)

    def trim(self, floor: Floor) -> None:
        key = floor.tag, floor.of_log
        self.floors[key] = max(floor.until, self.floors.get(key, 0))

    def left(self, tag: int) -> list[int]:
        return [
            seqnum
            for seqnum, (log, *tags) in self.records.items()
            if (tag == log or tag in tags)
            and seqnum >= self.floors.get((tag, False), 0)
            and seqnum >= self.floors.get((log, True), 0)
        ]


def part(first: int, shard: int, records: list[tuple[int, ...]]) -> ShardTags:
    column = array("Q", [tag for tags in records for tag in tags])
    counts = bytes(map(len, records))
    return ShardTags(ShardId(shard), first, len(records), counts, column.tobytes())


@given(st.integers(0, 2**32), st.booleans())
def test_exactly_the_untrimmed_records_are_found_and_kept(seed: int, late: bool) -> None:
    chaos = random.Random(seed)
    index, model, trimmed = TagIndex(), Model(), Trimmed()
    for _ in range(chaos.randrange(1, 25)):
        first = index.end + chaos.randrange(3)  # others have the positions between
        records = []
        for _ in range(chaos.randrange(1, 6)):
            log = chaos.choice(list(LOGS))
            records.append((log, *chaos.sample(LOGS[log], chaos.randrange(3))))
        model.add(dict(enumerate(records, first)), filtered=late)
        block = part(first, chaos.randrange(3), records)
        index.add(without_trimmed(block, trimmed) if late else block)
        if chaos.random() < 0.4:
            log = chaos.choice(list(LOGS))
            # A floor may precede its index data, where that data is filtered.
            ahead = chaos.randrange(5) if late else 0
            of_log = chaos.random() < 0.5
            tag = log if of_log else chaos.choice(LOGS[log])
            floor = Floor(tag, chaos.randrange(index.end + 1) + ahead, of_log)
            model.trim(floor)
            for news in trimmed.apply([floor]):
                index.trim(news)
        if chaos.random() < 0.3:
            index.sweep(chaos.randrange(1, 4))
    while index.sweeping:
        index.sweep(2)
    everything = index.end + 1
    for tag in (*LOGS, *LOGS[1], *LOGS[2]):
        seqnums, shards = index.next(tag, 0, everything, everything)
        assert list(seqnums) == model.left(tag)
        assert len(shards) == len(seqnums)
    assert index.entries == sum(len(model.left(t)) for t in (*LOGS, *LOGS[1], *LOGS[2]))
    assert index.tags == sum(1 for t in (*LOGS, *LOGS[1], *LOGS[2]) if model.left(t))


def test_sweeping_frees_the_tags_and_spans_of_a_trimmed_log() -> None:
    index = TagIndex()
    for seqnum in range(4000):
        log = 2 if seqnum % 100 == 0 else 1
        index.add(part(seqnum, seqnum % 2, [(log, 1000 + seqnum)]))
    before = index.memory_bytes
    index.trim(Floor(1, 3900, of_log=True))
    turns = 0
    while index.sweeping:
        index.sweep(100)
        turns += 1
    assert turns > 35, "a step visits at most the allowed number of tags"
    # 39 records of log 2 below, and the untrimmed ones.
    assert index.tags == 2 + 39 + 100
    assert index.spans < 150
    assert index.memory_bytes < before * 0.1
    assert index.next(1000 + 300, 0, 4000, 1) == ((300,), (ShardId(0),))
