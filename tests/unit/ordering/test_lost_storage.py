"""The primary and lost storage nodes, through its sequencer role (decision 0048)."""

from __future__ import annotations

from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.kernel.metalog import NewReplicas
from indilog.kernel.view import view_of
from indilog.roles.role import Received
from indilog.wire.base_messages import MetalogCovered
from indilog.wire.messages import ShardProgress, TailIs, TailWanted
from indilog.wire.replica_messages import StorageAlive
from indilog.wire.sequencer_messages import MetalogAppend
from indilog_ordering.sequencer import Sequencer
from tests.unit.ordering.test_primary import (
    ENGINE,
    SECOND,
    T0,
    elected,
    entry,
    persisted,
    progress,
    reasons,
    sealed,
    sent,
    start,
    started,
    stored,
)

A, B, C = (NodeId(f"storage-{number}") for number in range(3))
LOST_S = 5.0


def with_a_spare() -> tuple[Sequencer, Instant]:
    """A primary whose third entry lets the spare replace the first of two storage nodes."""
    node, _ = elected(view_of(sequencers=3, storage_nodes=3, replicas=2))
    node.handle([persisted(1), stored(1)], T0)
    node.handle([progress(4, sender=sender) for sender in (A, B)], T0)
    node.handle([persisted(2), stored(2)], T0)
    later = T0
    while later < T0 + LOST_S:
        later = Instant(later + 1.0)
        node.handle([alive(sender, 2) for sender in (B, C)], later)
    node.handle([persisted(3), stored(3)], later)
    return node, later


def alive(sender: NodeId, position: int, *complete: int) -> Received:
    shards = tuple(map(ShardId, complete))
    return Received(sender, StorageAlive(Epoch(5), position, shards), Epoch(1))


def tail_of(node: Sequencer) -> TailIs:
    node.handle([Received(ENGINE, TailWanted(1), Epoch(1))], T0)
    effects = node.handle([sealed(3), sealed(3, sender=SECOND)], T0)
    return sent(effects, TailIs)[0][1]


def test_a_spare_replaces_a_storage_node_that_is_silent() -> None:
    node, _ = with_a_spare()
    assert [found.nodes for found in tail_of(node).replicas.values()] == [(B, C, A)]


def test_the_status_names_the_storage_nodes_that_are_silent_now() -> None:
    node, now = with_a_spare()
    while_silent = node.status()["lost_storage_nodes"]
    node.handle([alive(A, 3)], now)
    assert (while_silent, node.status()["lost_storage_nodes"]) == ([A], [])


def test_only_reports_of_nodes_that_know_of_the_move_count() -> None:
    node, now = with_a_spare()
    late = [progress(9, sender=sender) for sender in (A, B, C)]
    effects = node.handle(late, now)
    assert sent(effects, MetalogAppend) == []
    ignorant = "progress of a node that does not know of the move of the shard"
    assert reasons(effects) == [ignorant] * 3
    known = ShardProgress(Epoch(5), {ShardId(0): (Epoch(1), 6)}, 3)
    effects = node.handle([Received(sender, known, Epoch(1)) for sender in (A, B)], now)
    assert sent(effects, MetalogAppend) == []
    assert reasons(effects) == ["progress of a node that is no counting replica of the shard"]
    effects = node.handle([Received(C, known, Epoch(1))], now)
    ((_, message),) = sent(effects, MetalogAppend)
    assert message.entries == (entry(3, {0: 2}, at=now),)


def test_the_lost_node_is_dropped_when_the_others_have_every_record() -> None:
    node, now = with_a_spare()
    effects = node.handle([alive(B, 3, 0), alive(C, 3)], now)
    before = sent(effects, MetalogAppend)
    effects = node.handle([alive(C, 3, 0)], now)
    ((_, message),) = sent(effects, MetalogAppend)
    expected = NewReplicas(3, ViewNumber(1), Epoch(5), {ShardId(0): (B, C)})
    assert (before, message.entries) == ([], (expected,))


def test_the_metalog_is_folded_without_what_a_lost_node_covers() -> None:
    node, now = with_a_spare()
    covered = [Received(s, MetalogCovered(Epoch(5), 3, Epoch(5)), Epoch(1)) for s in (B, C)]
    node.handle(covered, now)
    assert node._primary is not None
    assert node._primary._covered_by_all == 3


def test_entries_that_one_storage_node_alone_covers_are_kept() -> None:
    """Otherwise the node's loss would take their history with it."""
    node, later = with_a_spare()
    for _ in range(int(LOST_S)):
        later = Instant(later + 1.0)
        node.handle([alive(B, 3)], later)
    node.handle([Received(B, MetalogCovered(Epoch(5), 3, Epoch(5)), Epoch(1))], later)
    assert node._primary is not None
    assert node._primary.lost_storage_nodes == [A, C]
    assert node._primary._covered_by_all == 0


def test_a_primary_that_cannot_propose_has_no_deadline_for_storage_nodes() -> None:
    node = started(view_of(sequencers=3, storage_nodes=2), in_flight_max=1)
    start(node)
    node.handle([persisted(0), sealed(1)], T0)
    node.handle([sealed(2)], T0)
    assert node._primary is not None
    assert node._primary.deadline() is None


def test_a_sole_sequencer_moves_nothing() -> None:
    node = started(view_of(storage_nodes=3, replicas=2))
    start(node)
    assert node.handle([], Instant(T0 + 100.0)) == []
    assert node.deadline() is None
    assert node.status()["lost_storage_nodes"] == [], "it gets no heartbeats"
