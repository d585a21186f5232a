"""Compute nodes that join and leave a simulated cluster (decision 0049; PITFALLS A11, A12, A26)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from indilog.base.errors import ConditionFailedError, IndilogError
from indilog.base.ids import NodeId, ShardId
from indilog.base.log import After, Entry, Log
from indilog.client import Client
from indilog.config import Config, node_config
from indilog.kernel.view import View
from indilog.testing.simulation import SimulatedCluster
from indilog.testing.simulation.cluster import SMALL
from indilog_compute.shard_writer import ShardWriter
from tests.support.repeated import repeated

LOG = "orders"
JOINING = NodeId("engine-1")
WITHIN_S = 30.0
CALLS = 40
RECORDS = 1200
RETRIED = 120


@pytest.fixture
def cluster() -> SimulatedCluster:
    wanted = dataclasses.replace(SMALL.cluster, sequencers=3, storage_nodes=3, replicas=2)
    return SimulatedCluster("joins", Config(cluster=wanted, node=SMALL.node))


class Appender:
    """Appends one record after another at a compute node; `acknowledged_at` has the times of the
    acknowledgements.

    Args:
        pause_s: simulated seconds after each acknowledgement.
    """

    def __init__(self, cluster: SimulatedCluster, node: NodeId, *, pause_s: float = 0.0) -> None:
        self._cluster = cluster
        self.acknowledged_at: list[float] = []
        process = cluster.process_of(node)
        log = Client(process.logs[node]).log(LOG)

        async def append() -> None:
            while True:
                await log.append(b"%d" % len(self.acknowledged_at))
                self.acknowledged_at.append(cluster.world.now_s)
                await asyncio.sleep(pause_s)

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


@pytest.mark.repeated("tests/properties/test_joins.py")
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


def finalize(cluster: SimulatedCluster, shard: ShardId, cuts: int) -> None:
    version = cluster.members.version + 1
    finalized = {**cluster.members.finalized, shard: cuts}
    cluster.want_members(
        msgspec.structs.replace(cluster.members, finalized=finalized, version=version)
    )


def written_by(cluster: SimulatedCluster, node: NodeId) -> ShardId | None:
    """Return the shard that a compute node writes, as it knows it."""
    view: View = cluster.process_of(node).logs[node].engine.placement.view
    return view.shard_written_by(node)


@pytest.mark.parametrize("cuts", [0, repeated(10)])
def test_other_shards_do_not_notice_that_a_shard_is_finalized(
    cluster: SimulatedCluster, cuts: int
) -> None:
    """A12: the compute node of the finalized shard continues on a new one, and the other compute
    node appends as before.
    """
    with cluster:
        world = cluster.world
        first = cluster.view.engines[0]
        cluster.add_process((JOINING,))
        set_engines(cluster, first, JOINING)
        world.run_until(cluster.ready, WITHIN_S)
        other, own = Appender(cluster, first), Appender(cluster, JOINING)
        world.run_for(0.5)
        before = other.longest_pause_s(world.now_s - 0.4)
        began, old = world.now_s, written_by(cluster, JOINING)
        assert old is not None
        finalize(cluster, old, cuts)
        world.run_until(lambda: written_by(cluster, JOINING) != old, WITHIN_S)
        world.run_for(0.5)
        assert written_by(cluster, first) == ShardId(0)
        assert other.longest_pause_s(began) <= 2 * before
        assert not own.task.done(), "no append failed"
        assert own.longest_pause_s(began) <= 4 * before, "two commits more than one append"


@pytest.fixture
def small_batches() -> SimulatedCluster:
    """Under load, batches wait to be sent."""
    wanted = dataclasses.replace(SMALL.cluster, sequencers=3, storage_nodes=3, replicas=2)
    node = node_config(SMALL.node, frames_in_flight_max=2, frame_records_max=3)
    return SimulatedCluster("joins", Config(cluster=wanted, node=node))


@pytest.mark.parametrize("cuts", [0, 3])
def test_unordered_records_of_a_finalized_shard_are_resent_exactly_once(
    small_batches: SimulatedCluster, monkeypatch: pytest.MonkeyPatch, cuts: int
) -> None:
    """A12: every append succeeds, and its record is in the log once, in the order of the calls."""
    resent: list[int] = []
    continue_on = ShardWriter.continue_on

    def counted(writer: ShardWriter, shard: ShardId, replicas: Sequence[NodeId]) -> None:
        resent.append(len(writer._in_flight))
        continue_on(writer, shard, replicas)

    monkeypatch.setattr(ShardWriter, "continue_on", counted)
    cluster = small_batches
    with cluster:
        world = cluster.world
        world.run_until(cluster.ready, WITHIN_S)
        node = cluster.view.engines[0]
        process = cluster.process_of(node)
        log = Client(process.logs[node]).log(LOG)
        seqnums: dict[bytes, int] = {}
        shards = set()

        async def append(data: bytes) -> None:
            seqnums[data] = await log.append(data)

        async def appends() -> None:
            calls = []
            for number in range(RECORDS):
                if number % 250 == 100:
                    shard = written_by(cluster, node)
                    assert shard is not None
                    shards.add(shard)
                    finalize(cluster, shard, cuts)
                calls.append(asyncio.ensure_future(append(b"%d" % number)))
                await asyncio.sleep(0.0002)
            await asyncio.gather(*calls)

        task = cluster.call(process, appends)
        world.run_until(task.done, WITHIN_S)
        task.result()
        world.run_until(lambda: written_by(cluster, node) not in shards, WITHIN_S)

        async def read(client: Client) -> list[tuple[bytes, int]]:
            found: list[tuple[bytes, int]] = []
            while records := await client.log(LOG).read_range(
                bound=len(found), limit=500, fresh=True
            ):
                found += [(record.data, record.seqnum) for record in records]
            return found

        found = cluster.run(read)
        assert Counter(found) == Counter(seqnums.items())
        assert [int(data) for data, _ in found] == list(range(RECORDS))
        assert len(shards) >= 3
        assert sum(resent) > 0


async def put(log: Log, number: int, failures: Counter[str]) -> None:
    """Repeat an append with its condition until it succeeds or was done before."""
    tag = f"order {number}"
    while True:
        try:
            await log.append_batch([Entry(b"%d" % number, [tag])], after=After(tag))
        except ConditionFailedError:
            failures["done before"] += 1
            return
        except IndilogError as error:
            failures[type(error).__name__] += 1
            await asyncio.sleep(0.02)
        else:
            return


@pytest.fixture
def impatient() -> SimulatedCluster:
    """Callers soon get unknown outcomes."""
    wanted = dataclasses.replace(SMALL.cluster, sequencers=3, storage_nodes=3, replicas=2)
    node = node_config(
        SMALL.node, resend_s=0.02, append_timeout_s=0.02, lookup_timeout_s=0.05, read_timeout_s=0.05
    )
    return SimulatedCluster("joins", Config(cluster=wanted, node=node))


def test_a_retried_append_is_in_the_log_once_whatever_changes_meanwhile(
    impatient: SimulatedCluster,
) -> None:
    """A26: shards are finalized, views change, and a compute node and a storage node die."""
    cluster = impatient
    with cluster:
        world = cluster.world
        first = cluster.view.engines[0]
        cluster.add_process((JOINING,))
        set_engines(cluster, first, JOINING)
        world.run_until(cluster.ready, WITHIN_S)
        log = Client(cluster.process_of(first).logs[first]).log(LOG)
        failures = Counter[str]()

        async def puts() -> None:
            calls = []
            for number in range(RETRIED):
                calls.append(asyncio.ensure_future(put(log, number, failures)))
                await asyncio.sleep(0.01)
            await asyncio.gather(*calls)

        task = cluster.call(cluster.process_of(first), puts)
        home, storage = (cluster.process_of(node) for node in (JOINING, NodeId("storage-1")))
        for change in range(4):
            world.run_for(0.1)
            home.crash(power=True)
            storage.crash(power=True)
            world.run_for(0.1)
            home.start()
            storage.start()
            shard = written_by(cluster, first)
            assert shard is not None
            finalize(cluster, shard, cuts=change % 2)
            if change == 2:
                set_engines(cluster, first)
        world.run_until(task.done, WITHIN_S)
        task.result()

        async def read(client: Client) -> list[bytes]:
            return [r.data for r in await client.log(LOG).read_range(limit=1000, fresh=True)]

        found = Counter(cluster.run(read))
        assert found == Counter(b"%d" % number for number in range(RETRIED))
        assert failures["AppendOutcomeUnknownError"] > 0
        assert failures["done before"] > 0, "a repetition found the first attempt"
