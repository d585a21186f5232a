"""Claims about an index node and its snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from indilog.base.ids import Epoch, Instant
from indilog.kernel.index_schedule import IndexEra
from indilog.kernel.index_snapshot import (
    IndexSnapshot,
    OpenSnapshot,
    ReadRows,
    RowGroups,
    Rows,
    RowsRead,
    SnapshotAnswer,
    SnapshotInfo,
    SnapshotOpened,
    SnapshotRequest,
    SnapshotWritten,
    WriteSnapshot,
)
from indilog.kernel.tag_filter import TagFilter
from indilog.roles.role import AskSnapshots, Effect, Received, SnapshotsAnswered, Started
from indilog.wire.messages import IndexData
from indilog.wire.tag_messages import SnapshotWanted
from indilog_index.index_node import IndexNode
from tests.unit.index_tier.test_index_node import (
    ENGINE,
    EVERYTHING,
    NO_SNAPSHOT,
    T0,
    TAG,
    A,
    B,
    answers,
    asked,
    block,
    data,
    index_node,
    lookup,
    one,
    reasons,
    tags,
)


def asked_of_disk(effects: Sequence[Effect]) -> list[SnapshotRequest]:
    return [effect.request for effect in effects if isinstance(effect, AskSnapshots)]


def reported(answer: SnapshotAnswer) -> SnapshotsAnswered:
    return SnapshotsAnswered(answer)


def snapshot_of(position: int, *, index_shard: int = 1, era: int = 0) -> IndexSnapshot:
    """A snapshot whose only row says that record 0 has `TAG`."""
    eras = (IndexEra(0, (0, 1)), *([IndexEra(era, (1,))] if era else []))
    info = SnapshotInfo(index_shard=index_shard, position=position, tail=4, eras=eras)
    column = np.array([TAG], np.uint64), np.array([0], np.uint64)
    return IndexSnapshot(
        info, RowGroups(column[0], column[0], column[1], column[1]), 1, TagFilter.of(column[0])
    )


ROW = Rows(np.array([TAG], np.uint64), np.array([0], np.uint64), np.array([0], np.uint16))


def with_snapshot(**settings: float) -> IndexNode:
    """A node that has begun with a snapshot of everything below position 5, and has the rest."""
    node = index_node(started=False, **settings)
    (request,) = asked_of_disk(node.handle([Started(Epoch(1))], T0))
    assert isinstance(request, OpenSnapshot)
    effects = node.handle([reported(SnapshotOpened(snapshot_of(5)))], T0)
    assert asked(effects) == [(A, 5, EVERYTHING), (B, 5, EVERYTHING)]
    node.handle([Received(A, IndexData(()), Epoch(1)), Received(B, IndexData(()), Epoch(1))], T0)
    return node


def test_a_node_begins_with_its_snapshot_and_fetches_the_rest_only() -> None:
    node = with_snapshot()
    assert (node.position, node.tail) == (5, 4)
    assert node.handle([data(one(5, 7))], T0) == []
    assert answers(node.handle([lookup(4, position=7)], T0)) == [(7,)]


@pytest.mark.parametrize(
    "foreign", [snapshot_of(5, index_shard=0), snapshot_of(5, era=3), snapshot_of(5, era=4)]
)
def test_a_snapshot_of_another_index_shard_or_schedule_is_not_used(foreign: IndexSnapshot) -> None:
    """Its positions are not those that this index shard has now."""
    node = index_node(started=False)
    node.handle([Started(Epoch(1))], T0)
    effects = node.handle([reported(SnapshotOpened(foreign))], T0)
    assert asked_of_disk(effects) == [OpenSnapshot(5)]
    assert asked(node.handle([NO_SNAPSHOT], T0)) == [(A, 1, EVERYTHING), (B, 1, EVERYTHING)]


def test_lookups_of_a_row_group_on_disk_share_one_read() -> None:
    node = with_snapshot()
    effects = node.handle([lookup(0, position=5), lookup(0, position=5, request=2)], T0)
    assert asked_of_disk(effects) == [ReadRows(5, 0)]
    assert node.status()["reading"] == 2
    assert answers(node.handle([reported(RowsRead(5, 0, ROW))], T0)) == [(0,), (0,)]
    assert answers(node.handle([lookup(0, position=5, request=3)], T0)) == [(0,)]
    assert node.status()["reading"] == 0


def test_no_more_lookups_wait_for_the_disk_than_configured() -> None:
    node = with_snapshot(lookups_pending_max=1)
    effects = node.handle([lookup(0, position=5), lookup(0, position=5, request=2)], T0)
    assert reasons(effects) == ["too many lookups wait for the snapshot"]


def test_a_damaged_snapshot_in_use_is_dropped_and_its_rows_are_fetched() -> None:
    """Lookups that wait for it are answered from the rebuilt index, never from less."""
    node = with_snapshot()
    node.handle([lookup(0, position=5)], T0)
    effects = node.handle([reported(RowsRead(5, 0, None))], T0)
    assert asked_of_disk(effects) == [OpenSnapshot(5)]
    assert answers(effects) == []
    fetched = asked(node.handle([NO_SNAPSHOT], T0))
    assert sorted(fetched) == [(A, 1, EVERYTHING), (B, 1, EVERYTHING)]
    assert answers(node.handle([data(one(1, 0))], T0)) == []
    assert answers(node.handle([data(block(3, 1, []))], T0)) == [(0,)]


def test_a_snapshot_is_written_when_enough_is_new() -> None:
    node = index_node(index_snapshot_entries_min=5)
    assert asked_of_disk(node.handle([data(one(1, 4))], T0)) == []
    (request,) = asked_of_disk(node.handle([data(one(3, 7))], T0))
    assert isinstance(request, WriteSnapshot)
    assert (request.info.position, request.info.tail, request.base) == (5, 8, None)
    rows = zip(*(column.tolist() for column in request.recent()), strict=True)
    assert list(rows) == [(0, 4, 0), (0, 7, 0), (5, 4, 0), (5, 7, 0), (1000, 4, 0), (1000, 7, 0)]


def wanted(position: int) -> Received:
    return Received(ENGINE, SnapshotWanted(position), Epoch(1))


def test_a_snapshot_that_is_asked_for_is_written_when_all_below_its_position_is_applied() -> None:
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    assert asked_of_disk(node.handle([wanted(5)], T0)) == []
    (request,) = asked_of_disk(node.handle([data(one(3, 7))], T0))
    assert isinstance(request, WriteSnapshot)
    assert (request.info.position, request.info.tail) == (5, 8)
    assert asked_of_disk(node.handle([wanted(5)], T0)) == []
    assert node.status()["snapshot_position"] == 0
    written = snapshot_of(5)._replace(info=request.info)
    node.handle([reported(SnapshotWritten(5, written))], T0)
    assert node.status()["snapshot_position"] == 5
    assert asked_of_disk(node.handle([wanted(5)], T0)) == []
    (again,) = asked_of_disk(node.handle([data(one(5, 9)), wanted(6)], T0))
    assert isinstance(again, WriteSnapshot)
    assert (again.info.position, again.base) == (7, 5)


def test_an_index_without_records_writes_no_snapshot() -> None:
    assert asked_of_disk(index_node().handle([wanted(1)], T0)) == []


def test_a_snapshot_is_wanted_by_engines_only() -> None:
    event = wanted(1)._replace(sender=A)
    assert reasons(index_node().handle([event], T0)) == [
        "an index node does not handle SnapshotWanted"
    ]


def test_a_snapshot_that_could_not_be_written_is_retried_later() -> None:
    node = index_node(index_snapshot_entries_min=2, index_snapshot_retry_s=7.0)
    node.handle([data(one(1, 4))], T0)
    assert asked_of_disk(node.handle([reported(SnapshotWritten(3, None))], T0)) == []
    assert node.deadline() == T0 + 7.0
    assert asked_of_disk(node.handle([data(one(3, 7))], Instant(T0 + 6.9))) == []
    (request,) = asked_of_disk(node.handle([], Instant(T0 + 7.0)))
    assert isinstance(request, WriteSnapshot)
    assert request.info.position == 3, "that which failed, before what came since"
    assert node.status()["snapshots_failed"] == 1
    assert node.deadline() is None


def test_index_data_for_which_there_is_no_memory_waits_for_the_snapshot() -> None:
    node = index_node(index_memory_bytes_max=500, index_snapshot_entries_min=10**6)
    effects = node.handle([data(one(1, 4), one(3, 7), one(5, 9))], T0)
    (request,) = asked_of_disk(effects)
    assert isinstance(request, WriteSnapshot)
    stopped = node.position
    assert node.handle([data(one(7, 12), one(9, 14))], T0) == []
    assert node.position == stopped < 9
    written = IndexSnapshot(request.info, snapshot_of(0).groups, 1, snapshot_of(0).tags)
    node.handle([reported(SnapshotWritten(request.info.position, written))], T0)
    assert node.position > stopped


def test_a_node_whose_memory_is_full_after_a_snapshot_writes_the_next_one() -> None:
    """Nothing more is applied then, so no other event would begin the write."""
    node = index_node(index_memory_bytes_max=500, index_snapshot_entries_min=10**6)
    (first,) = asked_of_disk(node.handle([data(one(1, 4))], T0))
    assert isinstance(first, WriteSnapshot)
    node.handle([data(block(3, 8, [0], tags(7, (1, 2, 3))))], T0)
    written = IndexSnapshot(first.info, snapshot_of(0).groups, 1, snapshot_of(0).tags)
    (second,) = asked_of_disk(node.handle([reported(SnapshotWritten(3, written))], T0))
    assert isinstance(second, WriteSnapshot)
    assert (second.base, second.info.position) == (3, 5)


def test_a_snapshot_that_is_lost_when_the_next_one_is_written_is_rebuilt() -> None:
    node = with_snapshot(index_snapshot_entries_min=1)
    (request,) = asked_of_disk(node.handle([data(one(5, 7))], T0))
    assert isinstance(request, WriteSnapshot)
    effects = node.handle([reported(SnapshotWritten(7, None, base_lost=True))], T0)
    assert asked_of_disk(effects) == [OpenSnapshot(5)]
    fetched = asked(node.handle([NO_SNAPSHOT], T0))
    assert sorted(fetched) == [(A, 1, EVERYTHING), (B, 1, EVERYTHING)]
