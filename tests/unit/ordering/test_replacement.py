"""Which storage nodes replace lost ones (`indilog_ordering.replacement`)."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from indilog.base.ids import Epoch, Instant, NodeId, ShardId
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.metalog import MOVES_MAX, Replicas
from indilog.kernel.placement import Placement
from indilog.kernel.view import NO_WRITER, view_of
from indilog.wire.replica_messages import StorageAlive
from indilog_ordering.rebalancing import Rebalancing
from indilog_ordering.replacement import SHARDS_ADDED_MAX, Replacements

A, B, C, D = (NodeId(f"storage-{number}") for number in range(4))
SHARD = ShardId(0)
LOST_S, REPLACED_S = 5.0, 60.0


class Cluster:
    """Replacements, and storage nodes that send heartbeats while they are up."""

    def __init__(
        self,
        nodes: int = 4,
        replicas: int = 2,
        quorum: int = 0,
        engines: int = 1,
        zones: dict[NodeId, str] | None = None,
        policy: Literal["finalize_add", "mask", "remove_replace"] = "remove_replace",
    ) -> None:
        self.view = view_of(
            sequencers=3,
            storage_nodes=nodes,
            replicas=replicas,
            engines=engines,
            zones=zones,
        )
        cluster = ClusterConfig(
            storage_nodes=nodes,
            replicas=replicas,
            ack_quorum=quorum,
            lost_storage_policy=policy,
        )
        node = node_config(storage_lost_s=LOST_S, storage_replaced_s=REPLACED_S)
        self.now = Instant(100.0)
        self.placement = Placement(self.view)
        self.position = 10
        config = Config(cluster=cluster, node=node)
        nodes_of = self.view.storage_nodes
        self.replacements = Replacements(self.placement, nodes_of, config, self.now)
        self.copying: set[NodeId] = set()

    def pass_s(self, seconds: float, *down: NodeId) -> None:
        """Let time pass, with heartbeats of all other nodes, and move what is wanted."""
        for _ in range(int(seconds)):
            self.now = Instant(self.now + 1.0)
            self.replacements.note_time(self.now)
            for node in self.view.storage_nodes:
                if node not in down:
                    self.alive(node)
            if self.replacements.is_due(self.now):
                self.move()

    def alive(self, node: NodeId) -> None:
        kept = self.placement.shards_of(node) if node not in self.copying else ()
        message = StorageAlive(Epoch(1), self.position, kept)
        assert self.replacements.on_alive(node, message, self.now)

    def move(self) -> None:
        wanted = self.replacements.wanted(self.now)
        self.placement.move({s: Replicas(self.position, nodes) for s, nodes in wanted.items()})
        self.position += 1

    @property
    def replicas(self) -> tuple[NodeId, ...]:
        return self.placement.replicas(SHARD)


def test_a_spare_counts_for_a_lost_node_which_stays_until_all_records_are_copied() -> None:
    cluster = Cluster()
    cluster.copying = {C}
    cluster.pass_s(LOST_S - 1, A)
    before = cluster.replicas
    cluster.pass_s(2, A)
    while_copying = cluster.replicas
    cluster.pass_s(30, A)
    cluster.copying.clear()
    still = cluster.replicas
    cluster.pass_s(LOST_S + 1, A)
    assert (before, while_copying, still) == ((A, B), (B, C, A), (B, C, A))
    assert cluster.replicas == (B, C)


def test_a_heartbeat_from_before_the_move_was_known_makes_no_node_complete() -> None:
    cluster = Cluster()
    cluster.pass_s(LOST_S + 1, A)
    late = StorageAlive(Epoch(1), cluster.placement.since(SHARD), (SHARD,))
    cluster.replacements.on_alive(B, late, cluster.now)
    cluster.replacements.on_alive(C, late, cluster.now)
    assert cluster.replacements.wanted(cluster.now) == {}
    cluster.pass_s(2, A)
    assert cluster.replicas == (B, C)


def test_a_node_that_restarted_is_not_complete_until_its_heartbeat_reports_it() -> None:
    cluster = Cluster()
    cluster.copying = {C}
    cluster.pass_s(LOST_S + 1, A)
    cluster.copying.clear()
    cluster.alive(B)
    cluster.alive(C)
    cluster.replacements.forget(B)
    before = cluster.replacements.wanted(cluster.now)
    cluster.alive(B)
    assert (before, cluster.replacements.wanted(cluster.now)) == ({}, {SHARD: (B, C)})


def test_a_shard_with_an_ack_quorum_is_copied_late_and_its_list_changes_at_once() -> None:
    cluster = Cluster(replicas=3, quorum=2)
    cluster.copying = {D}
    cluster.pass_s(LOST_S + 1, A)
    soon = cluster.replicas
    cluster.pass_s(REPLACED_S, A)
    assert (soon, cluster.replicas) == ((B, C, A), (B, C, D, A))


def test_two_lost_nodes_of_three_are_replaced_at_once() -> None:
    cluster = Cluster(nodes=5, replicas=3, quorum=2)
    cluster.copying = {D}
    cluster.pass_s(LOST_S + 1, A, B)
    assert cluster.replicas == (C, D, NodeId("storage-4"), A, B)


def test_a_lost_node_is_masked_until_it_is_replaced() -> None:
    """A14, `mask`: appends do not wait for one of 2f + 1 replicas (Scalog, Table 2)."""
    cluster = Cluster(nodes=5, replicas=3, quorum=2, policy="mask")
    cluster.pass_s(LOST_S + 1, A, B)
    soon = cluster.placement.counting(SHARD)
    cluster.pass_s(REPLACED_S, A, B)
    assert soon == (C, A, B)
    assert cluster.placement.counting(SHARD) == (C, D, NodeId("storage-4"))


def finalizable(cluster: Cluster, *down: NodeId) -> list[ShardId]:
    """Return which shards are finalized when these nodes are lost."""
    cluster.pass_s(LOST_S + 1, *down)
    return cluster.replacements.to_finalize(cluster.now)


def test_a_shard_is_finalized_only_if_its_appends_wait() -> None:
    """A14, `finalize_add`."""
    assert finalizable(Cluster(policy="finalize_add"), A) == [SHARD]
    assert finalizable(Cluster(policy="finalize_add"), C) == []
    assert finalizable(Cluster(replicas=3, quorum=2, policy="finalize_add"), A) == []
    assert finalizable(Cluster(policy="remove_replace"), A) == []


def test_a_shard_that_can_be_finalized_keeps_its_replicas_meanwhile() -> None:
    cluster = Cluster(policy="finalize_add")
    cluster.pass_s(LOST_S + 1, A)
    assert cluster.replicas == (B, A)


def test_a_shard_is_not_finalized_if_too_few_storage_nodes_could_keep_another() -> None:
    assert finalizable(Cluster(nodes=2, policy="finalize_add"), A) == []
    leaving = Cluster(nodes=3, policy="finalize_add")
    leaving.replacements.set_nodes(leaving.view.storage_nodes, {C}, leaving.now)
    assert finalizable(leaving, A) == []


def test_with_very_many_shards_a_lost_node_is_replaced_in_them() -> None:
    """The number of a shard is never used again."""
    cluster = Cluster(nodes=3, policy="finalize_add")
    ended = msgspec.structs.replace(cluster.view.shards[SHARD], finalized=True, writer=NO_WRITER)
    finalized = {ShardId(1 + number): ended for number in range(SHARDS_ADDED_MAX - 1)}
    shards = cluster.view.shards | finalized
    cluster.placement.view = msgspec.structs.replace(cluster.view, shards=shards)
    assert finalizable(cluster, A) == []
    assert cluster.placement.counting(SHARD) == (B, C)


def test_without_a_spare_lost_replicas_go_to_the_end_of_the_list_and_return() -> None:
    cluster = Cluster(nodes=2)
    cluster.pass_s(LOST_S + 1, A)
    assert cluster.replicas == (B, A)
    cluster.pass_s(LOST_S + 1)
    assert cluster.replicas == cluster.placement.counting(SHARD) == (B, A)


def test_a_node_that_comes_back_during_the_copy_is_used_when_the_spare_is_lost() -> None:
    cluster = Cluster(nodes=3)
    cluster.copying = {C}
    cluster.pass_s(LOST_S + 1, A)
    assert cluster.replicas == (B, C, A)
    cluster.copying = {A, C}
    cluster.pass_s(LOST_S + 1, C)
    assert cluster.replicas == (B, A, C)


def test_shards_go_to_the_nodes_with_the_fewest() -> None:
    cluster = Cluster(nodes=4, replicas=1, engines=4)
    cluster.pass_s(LOST_S + 1, A)
    moved = {cluster.placement.counting(ShardId(shard)) for shard in range(4)}
    assert moved == {(B,), (C,), (D,)}
    assert cluster.replicas == (B,), "it has no more than the others, and comes first"


def test_nothing_moves_while_every_storage_node_sends_heartbeats() -> None:
    cluster = Cluster()
    cluster.pass_s(3 * REPLACED_S)
    assert cluster.placement.moved == {}


def test_a_paused_primary_counts_no_node_as_lost() -> None:
    cluster = Cluster()
    cluster.pass_s(2)
    cluster.now = Instant(cluster.now + REPLACED_S)
    cluster.replacements.note_time(cluster.now)
    cluster.alive(C)
    assert cluster.replacements.wanted(cluster.now) == {}
    cluster.pass_s(LOST_S - 1, A)
    before = cluster.replicas
    cluster.pass_s(2, A)
    assert (before, cluster.replicas[:2]) == ((A, B), (B, C))


def test_a_heartbeat_of_a_node_that_is_no_storage_node_is_refused() -> None:
    cluster = Cluster()
    message = StorageAlive(Epoch(1), 0, ())
    assert not cluster.replacements.on_alive(NodeId("engine-0"), message, cluster.now)


def test_a_spare_has_room_and_is_current_if_another_is() -> None:
    cluster = Cluster(nodes=5)
    full = StorageAlive(Epoch(1), 100, (), has_room=False)
    for _ in range(int(LOST_S) + 1):
        cluster.now = Instant(cluster.now + 1.0)
        cluster.replacements.note_time(cluster.now)
        for node, position in ((B, 10), (D, 0), (NodeId("storage-4"), 10)):
            message = StorageAlive(Epoch(1), position, ())
            cluster.replacements.on_alive(node, message, cluster.now)
        cluster.replacements.on_alive(C, full, cluster.now)
    assert cluster.replacements.wanted(cluster.now)[SHARD] == (B, NodeId("storage-4"), A)


def test_all_storage_nodes_are_lost_when_none_sends_heartbeats() -> None:
    cluster = Cluster()
    began = cluster.now
    while cluster.now < began + LOST_S:
        cluster.now = cluster.replacements.deadline()
        cluster.replacements.note_time(cluster.now)
        cluster.move()
    assert cluster.replacements.alive(cluster.now) == frozenset()
    assert cluster.now == began + LOST_S


@pytest.mark.parametrize("paused_s", [3.0, 4.0, 5.0, 5.5, 7.0, 100.0])
def test_no_node_is_lost_after_a_pause_of_any_length(paused_s: float) -> None:
    cluster = Cluster()
    cluster.pass_s(3)
    cluster.now = Instant(cluster.now + paused_s)
    cluster.replacements.note_time(cluster.now)
    assert cluster.replacements.alive(cluster.now) == {A, B, C, D}


def test_more_shards_than_fit_into_one_entry_follow_at_once() -> None:
    cluster = Cluster(nodes=2, replicas=1, engines=2 * (MOVES_MAX + 1))
    while cluster.replacements.alive(cluster.now) != {B}:
        cluster.now = Instant(cluster.now + 1.0)
        cluster.replacements.note_time(cluster.now)
        cluster.alive(B)
    cluster.move()
    assert (len(cluster.placement.moved), cluster.replacements.is_due(cluster.now)) == (
        MOVES_MAX,
        True,
    )
    cluster.move()
    assert len(cluster.placement.moved) == MOVES_MAX + 1


def test_the_node_that_leaves_counts_while_the_other_replica_is_lost() -> None:
    """It is alive and has all records; the spare has none of the old ones yet."""
    cluster = Cluster(nodes=3)
    cluster.copying = {C}
    cluster.replacements.set_nodes(cluster.view.storage_nodes, {A}, cluster.now)
    cluster.pass_s(1)
    cluster.pass_s(LOST_S + 2, B)
    assert cluster.placement.counting(SHARD) == (C, A)


def test_the_node_that_leaves_counts_again_when_the_spare_is_lost() -> None:
    cluster = Cluster(nodes=3)
    cluster.copying = {C}
    cluster.replacements.set_nodes(cluster.view.storage_nodes, {A}, cluster.now)
    cluster.pass_s(1)
    before = cluster.placement.counting(SHARD)
    cluster.pass_s(LOST_S + 100, C)
    assert (before, cluster.placement.counting(SHARD)) == ((B, C), (B, A))


def test_a_lost_node_is_replaced_by_one_in_a_zone_without_replica() -> None:
    cluster = Cluster(zones={A: "east", B: "west", C: "west", D: "east"})
    assert cluster.replicas == (A, B)
    cluster.pass_s(10, A)
    assert cluster.replicas[:2] == (B, D), "C comes first by name, but shares the zone of B"


def test_a_lost_node_is_replaced_in_the_same_zone_if_no_other_zone_has_a_node() -> None:
    cluster = Cluster(zones={A: "east", B: "west", C: "west", D: "west"})
    cluster.pass_s(10, A)
    assert cluster.replicas[:2] == (B, C)


def complete(cluster: Cluster) -> int:
    """Return the number of the rebalancing that is complete."""
    return cluster.replacements.rebalanced


def shards_of(cluster: Cluster) -> dict[NodeId, int]:
    """Return how many shards each storage node has."""
    of = cluster.placement.shards_of
    return {node: len(of(node)) for node in cluster.view.storage_nodes}


def with_spares(*spares: NodeId, quorum: int = 0) -> Cluster:
    """A cluster whose four shards are on two nodes, and nodes that joined later."""
    cluster = Cluster(nodes=2, engines=4, quorum=quorum)
    cluster.view = msgspec.structs.replace(cluster.view, spares=spares)
    cluster.placement.view = cluster.view
    cluster.replacements.set_nodes(cluster.view.storage_nodes, (), cluster.now)
    return cluster


def test_shards_are_rebalanced_only_if_it_is_wanted_and_then_evenly() -> None:
    cluster = with_spares(C, D)
    cluster.pass_s(10)
    assert shards_of(cluster) == {A: 4, B: 4, C: 0, D: 0}
    cluster.replacements.set_rebalancing(1)
    cluster.pass_s(20)
    assert shards_of(cluster) == {A: 2, B: 2, C: 2, D: 2}
    assert complete(cluster) == 1


def test_a_node_gets_one_shard_at_a_time_and_old_copies_stay_until_it_is_complete() -> None:
    cluster = with_spares(C)
    cluster.copying.add(C)
    cluster.replacements.set_rebalancing(1)
    cluster.pass_s(20)
    shards = cluster.view.shards
    moved = [shard for shard in shards if len(cluster.placement.replicas(shard)) == 3]
    assert len(moved) == 1
    assert cluster.placement.replicas(moved[0])[1:] == (C, A)
    assert complete(cluster) == 0
    cluster.copying.clear()
    cluster.pass_s(20)
    assert complete(cluster) == 1
    assert sorted(shards_of(cluster).values()) == [2, 3, 3]


def test_replicas_that_share_a_zone_are_moved_apart() -> None:
    cluster = Cluster(nodes=4, engines=4)
    zones = {A: "east", B: "east", C: "west", D: "west"}
    cluster.view = msgspec.structs.replace(cluster.view, zones=zones)
    cluster.placement.view = cluster.view
    cluster.replacements.set_rebalancing(1)
    cluster.pass_s(30)
    for shard in cluster.view.shards:
        assert {zones[node] for node in cluster.placement.replicas(shard)} == {"east", "west"}
    assert complete(cluster) == 1
    assert set(shards_of(cluster).values()) == {2}


def test_a_rebalancing_waits_while_a_node_is_lost() -> None:
    cluster = with_spares(C, quorum=1)
    cluster.pass_s(10, A)
    cluster.replacements.set_rebalancing(1)
    cluster.pass_s(20, A)
    assert shards_of(cluster)[C] == 0
    assert complete(cluster) == 0


def test_no_shard_is_moved_to_a_node_that_lags() -> None:
    """Until it has applied as many entries, its reports would not count, and appends would wait."""
    placement, nodes = Cluster(nodes=2, engines=4).placement, {A: 10, B: 10, C: 9}
    rebalancing = Rebalancing(1)
    assert rebalancing.moves(placement, nodes) == {}
    assert not rebalancing.is_complete
    assert len(rebalancing.moves(placement, nodes | {C: 10})) == 1
