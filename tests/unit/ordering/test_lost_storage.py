"""The primary and lost storage nodes, through its sequencer role (decisions 0048 and 0070)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.config import ClusterConfig
from indilog.kernel.metalog import Entry, NewReplicas, NewView, NewWriters
from indilog.kernel.view import NO_WRITER, view_of
from indilog.roles.role import Effect, Received
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

SHARD = ShardId(0)
A, B, C = (NodeId(f"storage-{number}") for number in range(3))
LOST_S, REPLACED_S = 5.0, 60.0


def with_a_spare() -> tuple[Sequencer, Instant]:
    """A primary whose third entry lets the spare replace the first of two storage nodes."""
    node = running("remove_replace")
    _, later = lose_the_first(node)
    node.handle([persisted(3), stored(3)], later)
    return node, later


def running(policy: Literal["finalize_add", "remove_replace"]) -> Sequencer:
    """A primary whose two entries are committed."""
    view = view_of(sequencers=3, storage_nodes=3, replicas=2)
    node, _ = elected(view, cluster=ClusterConfig(lost_storage_policy=policy))
    node.handle([persisted(1), stored(1)], T0)
    node.handle([progress(4, sender=sender) for sender in (A, B)], T0)
    node.handle([persisted(2), stored(2)], T0)
    return node


def lose_the_first(node: Sequencer, *others: NodeId) -> tuple[list[Entry], Instant]:
    """Let the first of two storage nodes be silent until it is lost; return the entries that the
    primary then proposes. `others`: the storage nodes that send heartbeats.
    """
    later, effects = T0, list[Effect]()
    while later < T0 + LOST_S:
        later = Instant(later + 1.0)
        effects += node.handle([alive(sender, 2) for sender in others or (B, C)], later)
    proposed = [entry for _, message in sent(effects, MetalogAppend) for entry in message.entries]
    return _once(proposed), later


def _once(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for number, entry in enumerate(entries) if entry not in entries[:number]]


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


def test_a_shard_that_waits_for_a_lost_node_is_finalized_and_its_writer_gets_another() -> None:
    """A14, `finalize_add` (Scalog, Table 2): no append waits for the lost node or for a copy."""
    node = running("finalize_add")
    proposed, later = lose_the_first(node)
    [view, replicas, writers] = proposed
    assert isinstance(view, NewView)
    old, new = view.following.shards[SHARD], view.following.shards[ShardId(1)]
    assert (old.finalized, old.writer, old.ended) == (True, NO_WRITER, Epoch(1))
    assert (set(new.replicas), new.writer) == ({B, C}, ENGINE)
    assert isinstance(writers, NewWriters)
    assert writers.writers == {ShardId(1): Epoch(1)}
    assert isinstance(replicas, NewReplicas)
    assert replicas.replicas == {SHARD: (B, A)}, "the lost node is asked last, and may come back"
    late = [
        Received(n, ShardProgress(Epoch(5), {SHARD: (Epoch(1), 9)}, 9), Epoch(1)) for n in (A, B)
    ]
    effects = node.handle(late, later)
    assert sent(effects, MetalogAppend) == [], "nothing of the shard is ordered any more"


def test_the_copies_of_a_finalized_shard_are_restored_when_the_node_stays_away() -> None:
    node = running("finalize_add")
    _, later = lose_the_first(node)
    node.handle([persisted(3), persisted(4), persisted(5), stored(5)], later)
    effects = list[Effect]()
    while later < T0 + REPLACED_S:
        later = Instant(later + 1.0)
        effects += node.handle([alive(sender, 5) for sender in (B, C)], later)
    entries = [entry for _, message in sent(effects, MetalogAppend) for entry in message.entries]
    [moved] = _once([entry for entry in entries if isinstance(entry, NewReplicas)])
    assert isinstance(moved, NewReplicas)
    assert moved.replicas == {SHARD: (B, C, A)}


def test_without_enough_storage_nodes_no_shard_is_finalized() -> None:
    proposed, _ = lose_the_first(running("finalize_add"), B)
    assert not any(isinstance(entry, NewView) for entry in proposed)


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


def test_a_report_from_before_the_move_does_not_count_after_it() -> None:
    node = running("remove_replace")
    node.handle([progress(6, sender=A)], T0)
    _, later = lose_the_first(node)
    node.handle([persisted(3), stored(3)], later)
    known = ShardProgress(Epoch(5), {SHARD: (Epoch(1), 6)}, 3)
    effects = node.handle([Received(B, known, Epoch(1))], later)
    assert sent(effects, MetalogAppend) == [], "the new replica has not reported"
    effects = node.handle([Received(C, known, Epoch(1))], later)
    assert len(sent(effects, MetalogAppend)) == 1


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
