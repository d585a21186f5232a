"""Compute nodes that join and leave a simulated cluster (decision 0049; PITFALLS A11, A12, A26)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter

import msgspec
import pytest

from indilog.base.errors import IndilogError
from indilog.base.ids import NodeId
from indilog.client import Client
from indilog.config import Config
from indilog.testing.simulation import SimulatedCluster
from indilog.testing.simulation.cluster import SMALL

LOG = "orders"
JOINING = NodeId("engine-1")
WITHIN_S = 30.0
CALLS = 40


@pytest.fixture
def cluster() -> SimulatedCluster:
    wanted = dataclasses.replace(SMALL.cluster, sequencers=3, storage_nodes=3, replicas=2)
    return SimulatedCluster("joins", Config(cluster=wanted, node=SMALL.node))


class Appender:
    """Appends one record after another at a compute node; `acknowledged_at` has the times of the
    acknowledgements.
    """

    def __init__(self, cluster: SimulatedCluster, node: NodeId) -> None:
        self._cluster = cluster
        self.acknowledged_at: list[float] = []
        process = cluster.process_of(node)
        log = Client(process.logs[node]).log(LOG)

        async def append() -> None:
            while True:
                await log.append(b"%d" % len(self.acknowledged_at))
                self.acknowledged_at.append(cluster.world.now_s)

        self.task = cluster.call(process, append)

    def longest_pause_s(self, since: float) -> float:
        times = [
            since,
            *(at for at in self.acknowledged_at if at > since),
            self._cluster.world.now_s,
        ]
        return max(after - before for before, after in itertools.pairwise(times))


def set_engines(cluster: SimulatedCluster, *engines: NodeId) -> None:
    version = cluster.members.version + 1
    members = msgspec.structs.replace(cluster.members, engines=engines, version=version)
    cluster.want_members(members)


def test_other_shards_do_not_notice_that_a_shard_is_added_or_finalized(
    cluster: SimulatedCluster,
) -> None:
    """A11, A12: appends at the other compute node pause no longer than before."""
    with cluster:
        world = cluster.world
        first = cluster.view.engines[0]
        world.run_until(cluster.ready, WITHIN_S)
        appender = Appender(cluster, first)
        world.run_for(0.5)
        before = appender.longest_pause_s(world.now_s - 0.4)
        began = world.now_s
        cluster.add_process((JOINING,))
        set_engines(cluster, first, JOINING)
        world.run_until(cluster.ready, WITHIN_S)
        other = Appender(cluster, JOINING)
        world.run_for(0.5)
        set_engines(cluster, first)
        world.run_until(other.task.done, WITHIN_S)
        world.run_for(0.2)
        assert len(other.acknowledged_at) > 50
        assert appender.longest_pause_s(began) <= 2 * before


def test_an_append_whose_shard_is_finalized_is_in_the_log_at_most_once(
    cluster: SimulatedCluster,
) -> None:
    """A26: every acknowledged record is there once, and one of an unknown outcome at most once."""
    with cluster:
        world = cluster.world
        first = cluster.view.engines[0]
        cluster.add_process((JOINING,))
        set_engines(cluster, first, JOINING)
        world.run_until(cluster.ready, WITHIN_S)
        process = cluster.process_of(JOINING)
        log = Client(process.logs[JOINING]).log(LOG)
        outcomes: dict[bytes, bool] = {}

        async def append(data: bytes) -> None:
            try:
                await log.append(data)
                outcomes[data] = True
            except IndilogError:
                outcomes[data] = False

        async def appends() -> None:
            for number in range(CALLS):
                if number == CALLS // 2:
                    set_engines(cluster, first)
                calls = [append(b"%d %d" % (number, other)) for other in range(20)]
                await asyncio.gather(*calls)
                await asyncio.sleep(0.02)

        task = cluster.call(process, appends)
        world.run_until(task.done, WITHIN_S)
        task.result()
        world.run_for(1.0)

        async def read(client: Client) -> list[bytes]:
            return [record.data for record in await client.log(LOG).read_range(limit=1000)]

        found = Counter(cluster.run(read))
        acknowledged = {data for data, done in outcomes.items() if done}
        assert 0 < len(acknowledged) < len(outcomes) == CALLS * 20
        assert acknowledged <= found.keys()
        assert set(found.values()) == {1}
