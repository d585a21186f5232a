"""The claims of Scalog (NSDI 2020) that this project keeps, each with its words.

Section 4.4.2 and Table 2: the three policies for lost storage nodes (A14), on a simulated cluster.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal, NamedTuple

import pytest

from indilog.base.ids import NodeId, ShardId
from indilog.client import Client
from indilog.config import Config, node_config
from indilog.testing.simulation import SimulatedCluster
from indilog.testing.simulation.cluster import SMALL
from tests.properties.test_joins import LOG, WITHIN_S, Appender, written_by

LOST_S, REPLACED_S = 0.4, 1.0
PAUSE_S = 0.02
SHARD = ShardId(0)
LOST, OTHER = NodeId("storage-0"), NodeId("storage-2")


def cluster_with(
    policy: Literal["finalize_add", "remove_replace", "mask"], replicas: int, quorum: int = 0
) -> SimulatedCluster:
    cluster = dataclasses.replace(
        SMALL.cluster,
        sequencers=3,
        storage_nodes=4,
        replicas=replicas,
        ack_quorum=quorum,
        engines=2,
        lost_storage_policy=policy,
    )
    node = node_config(SMALL.node, storage_lost_s=LOST_S, storage_replaced_s=REPLACED_S)
    return SimulatedCluster("policies", Config(cluster=cluster, node=node))


class Recovery(NamedTuple):
    """What callers notice when a replica of shard 0 is lost permanently.

    Attributes:
        normal_s: the longest time between two appends before that.
        affected_s, other_s: the longest times since, at the compute node of shard 0 and at one
            whose shard has other replicas.
        shard: the shard that the affected compute node then writes.
        replicas: those of shard 0 finally.
    """

    normal_s: float
    affected_s: float
    other_s: float
    shard: ShardId | None
    replicas: tuple[NodeId, ...]


def lose_a_replica(cluster: SimulatedCluster) -> Recovery:
    """Append at both compute nodes, and let the first replica of shard 0 never come back."""
    with cluster:
        world = cluster.world
        affected, other = cluster.view.engines
        world.run_until(cluster.ready, WITHIN_S)
        appenders = [Appender(cluster, node, pause_s=PAUSE_S) for node in (affected, other)]
        world.run_for(0.5)
        normal_s = max(one.longest_pause_s(world.now_s - 0.4) for one in appenders)
        began = world.now_s
        lost = cluster.process_of(LOST)
        lost.crash(power=True)
        world.run_for(3 * LOST_S)
        affected_s, other_s = (one.longest_pause_s(began) for one in appenders)
        engine = cluster.process_of(affected).logs[affected].engine

        def restored() -> bool:
            placement = engine.placement
            return LOST not in placement.replicas(SHARD)

        world.run_until(restored, WITHIN_S)
        world.run_for(0.2)
        for one in appenders:
            assert not one.task.done(), "no append failed"
            one.task.cancel()
        appended = Counter[bytes]()
        for one in appenders:
            appended.update(b"%d" % number for number in range(len(one.acknowledged_at)))
        world.run_for(0.2)

        async def read(client: Client) -> Counter[bytes]:
            found, bound = Counter[bytes](), 0
            while page := await client.log(LOG).read_range(bound=bound, limit=500, fresh=True):
                found.update(record.data for record in page)
                bound = page[-1].seqnum + 1
            return found

        unacknowledged = cluster.run(read) - appended
        assert appended - cluster.run(read) == Counter[Any](), "acknowledged records are there"
        assert unacknowledged.total() <= len(appenders), "each at most once"
        return Recovery(
            normal_s,
            affected_s,
            other_s,
            written_by(cluster, affected),
            engine.placement.replicas(SHARD),
        )


def test_with_finalize_and_add_the_writer_continues_on_a_new_shard() -> None:
    """A14: "its entire shard s is finalized" and "a new shard is added". f + 1 replicas, no data
    locality, short recovery.
    """
    found = lose_a_replica(cluster_with("finalize_add", replicas=2))
    assert found.shard not in {SHARD, None}, "the writer continues elsewhere"
    assert LOST_S / 2 < found.affected_s <= LOST_S + 8 * found.normal_s
    assert found.other_s <= 2 * found.normal_s, "non-faulty shards are unaffected"
    assert len(found.replicas) == 2, "the copies of the old shard are restored"


def test_with_remove_and_replace_another_node_takes_the_place_of_the_lost_one() -> None:
    """A14: "replace a failed storage server with a new one". f + 1 replicas, data locality. Here
    writes continue while records are copied, so recovery is not long.
    """
    found = lose_a_replica(cluster_with("remove_replace", replicas=2))
    assert found.shard == SHARD
    assert LOST_S / 2 < found.affected_s <= LOST_S + 8 * found.normal_s
    assert found.other_s <= 2 * found.normal_s
    assert len(found.replicas) == 2


def test_with_a_mask_appends_and_reads_do_not_wait() -> None:
    """A14: "a shard will continue to process both reads and writes". 2f + 1 replicas, data
    locality, no recovery time. "For long-term availability, new storage servers can be added".
    """
    found = lose_a_replica(cluster_with("mask", replicas=3, quorum=2))
    assert found.shard == SHARD
    assert found.affected_s <= 3 * found.normal_s
    assert found.other_s <= 3 * found.normal_s
    assert len(found.replicas) == 3


@pytest.mark.parametrize("policy", ["finalize_add", "remove_replace"])
def test_a_node_that_comes_back_soon_keeps_its_finalized_shard(
    policy: Literal["finalize_add", "remove_replace"],
) -> None:
    """`finalize_add` copies nothing if the node returns within `storage_replaced_s`."""
    with cluster_with(policy, replicas=2) as cluster:
        world = cluster.world
        world.run_until(cluster.ready, WITHIN_S)
        node = cluster.view.engines[0]
        appender = Appender(cluster, node, pause_s=PAUSE_S)
        world.run_for(0.2)
        lost = cluster.process_of(LOST)
        lost.crash(power=True)
        world.run_for(2 * LOST_S)
        lost.start()
        world.run_for(2 * REPLACED_S)
        assert not appender.task.done()
        placement = cluster.process_of(node).logs[node].engine.placement
        assert (LOST in placement.counting(SHARD)) == (policy == "finalize_add")
        assert placement.replicas(SHARD) == placement.counting(SHARD)
