"""Which records may be ordered, given the reports of storage nodes."""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, NodeId, ShardId
from indilog.config import ClusterConfig
from indilog.kernel.metalog import Replicas
from indilog.kernel.placement import Placement
from indilog.kernel.view import View, view_of
from indilog_ordering.progress import Reports, ShardReports

A, B, C = NodeId("storage-0"), NodeId("storage-1"), NodeId("storage-2")


def two_replicas() -> View:
    return view_of(storage_nodes=2, replicas=2, engines=2, sequencers=1)


def reports_of(view: View) -> Reports:
    """Return reports about shards whose writer is 1."""
    writers = dict.fromkeys(view.shards, Epoch(1))
    return Reports(Placement(view), ClusterConfig(), writers, entries_may_be_lost=False)


def test_progress_is_the_minimum_over_all_replicas_of_a_shard() -> None:
    """Scalog 4.1: "assume f = 1 and suppose the ordering layer has received from the two storage
    servers r1 and r2 in shard s the local cuts v1 = <3, 3> and v2 = <2, 4>. Then, <2, 3> expresses
    all durable records in shard s".
    """
    reports = reports_of(two_replicas())
    for shard, (first, second) in enumerate([(3, 2), (3, 4)]):
        assert reports.note(A, ShardId(shard), Epoch(1), first) is None
        assert reports.note(B, ShardId(shard), Epoch(1), second) is None
    assert reports.pop_changed() == [(ShardId(0), 2), (ShardId(1), 3)]


def test_cut_waits_for_the_slowest_replica() -> None:
    reports = reports_of(two_replicas())
    reports.note(A, ShardId(0), Epoch(1), 100)
    assert reports.pop_changed() == [(ShardId(0), 0)]


def test_a_smaller_ack_quorum_takes_the_quorum_th_largest_prefix() -> None:
    shard = ShardReports(2, Epoch(1))
    for replica, stored in ((A, 9), (B, 7), (C, 3)):
        shard.note(replica, Epoch(1), stored)
    assert shard.progress == 7


def test_only_reports_under_the_writer_of_the_shard_count() -> None:
    shard = ShardReports(2, Epoch(2))
    assert not shard.note(A, Epoch(1), 10)
    assert not shard.note(B, Epoch(3), 10)
    assert not shard.known
    assert shard.note(A, Epoch(2), 6)
    assert shard.note(B, Epoch(2), 5)
    assert (shard.known, shard.progress) == (True, 5)


def test_reports_of_an_earlier_writer_do_not_count_for_a_new_one() -> None:
    shard = ShardReports(1, Epoch(1))
    shard.note(A, Epoch(1), 10)
    shard.begin(Epoch(2))
    assert (shard.known, shard.progress) == (False, 0)
    assert shard.note(A, Epoch(2), 6)
    assert shard.progress == 6


def test_a_shard_is_ordered_when_its_replicas_have_reported_nothing_beyond() -> None:
    view = two_replicas()
    writers = {ShardId(0): Epoch(1)}
    reports = Reports(Placement(view), ClusterConfig(), writers, entries_may_be_lost=False)
    ordered = [reports.is_ordered(ShardId(0), 3)]
    for replica, stored in ((A, 5), (B, 3)):
        reports.note(replica, ShardId(0), Epoch(1), stored)
        ordered.append(reports.is_ordered(ShardId(0), 3))
    reports.note(B, ShardId(0), Epoch(1), 4)
    ordered.append(reports.is_ordered(ShardId(0), 3))
    assert ordered == [False, False, True, False]
    assert reports.is_ordered(ShardId(1), 0), "it never had a writer"


@pytest.mark.parametrize(("may_be_lost", "known"), [(False, True), (True, False)])
def test_a_shard_gets_another_writer_while_a_replica_is_down(
    may_be_lost: bool, known: bool
) -> None:
    """Unless entries may be lost: then the missing report may be about acknowledged records."""
    view = view_of(storage_nodes=3, replicas=3)
    config = ClusterConfig(storage_nodes=3, replicas=3, ack_quorum=2)
    reports = Reports(
        Placement(view), config, {ShardId(0): Epoch(1)}, entries_may_be_lost=may_be_lost
    )
    for replica, stored in ((A, 5), (B, 3)):
        reports.note(replica, ShardId(0), Epoch(1), stored)
    assert reports.pop_changed() == [(ShardId(0), 3)]
    assert reports.is_ordered(ShardId(0), 3) == known
    assert reports.missing(ShardId(0)) == [C]


def test_a_repeated_or_late_report_changes_nothing() -> None:
    shard = ShardReports(1, Epoch(1))
    assert shard.note(A, Epoch(1), 10)
    assert not shard.note(A, Epoch(1), 10)
    assert not shard.note(A, Epoch(1), 4)
    assert shard.progress == 10


@pytest.mark.parametrize(
    ("replica", "shard", "epoch", "stored", "reason"),
    [
        (A, 9, 1, 1, "a shard that is not in this view"),
        (C, 0, 1, 1, "a node that is no counting replica of the shard"),
        (A, 0, 1, -1, "an epoch below 1 or a prefix below 0"),
        (A, 0, 0, 1, "an epoch below 1 or a prefix below 0"),
    ],
)
def test_an_impossible_report_is_refused_with_a_reason(
    replica: NodeId, shard: int, epoch: int, stored: int, reason: str
) -> None:
    reports = reports_of(two_replicas())
    assert reports.note(replica, ShardId(shard), Epoch(epoch), stored) == f"progress of {reason}"
    assert not reports.changed


def test_reports_from_before_a_move_do_not_count() -> None:
    """Else a record could be ordered with the report of a node that no longer keeps the shard."""
    placement = Placement(view_of(storage_nodes=3, replicas=2, sequencers=3))
    reports = Reports(placement, ClusterConfig(), {ShardId(0): Epoch(1)}, entries_may_be_lost=False)
    for replica in (A, B):
        assert reports.note(replica, ShardId(0), Epoch(1), 7) is None
    reports.pop_changed()
    placement.move({ShardId(0): Replicas(5, (B, C))})
    reports.move([ShardId(0)])
    assert reports.missing(ShardId(0)) == [B, C]
    assert reports.note(B, ShardId(0), Epoch(1), 9, position=5) is not None, "it lacks the entry"
    assert reports.note(B, ShardId(0), Epoch(1), 9, position=6) is None
    assert reports.pop_changed() == [(ShardId(0), 0)]
    assert reports.note(C, ShardId(0), Epoch(1), 8, position=6) is None
    assert reports.pop_changed() == [(ShardId(0), 8)]


def test_growth_is_returned_once_and_ascends_by_shard() -> None:
    reports = reports_of(view_of(engines=3))
    for shard in (2, 0, 1):
        reports.note(A, ShardId(shard), Epoch(1), shard + 1)
    before = reports.changed
    assert reports.pop_changed() == [
        (ShardId(0), 1),
        (ShardId(1), 2),
        (ShardId(2), 3),
    ]
    assert (before, reports.changed) == (True, False)
    assert reports.pop_changed() == []
