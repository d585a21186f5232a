"""The cost of ordering, and appends during its outages, with all roles (PITFALLS A15, A16)."""

from __future__ import annotations

import pytest

from indilog.base.ids import NodeId
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.view import view_of
from tests.support.repeated import first_of
from tests.support.role_cluster import RoleCluster, Waiter


def cluster_of(*, seed: int, delay: float = 0.0, **settings: int) -> RoleCluster:
    view = view_of(engines=2, storage_nodes=2, replicas=2, sequencers=3, index_shards=2)
    config = Config(cluster=ClusterConfig(), node=node_config(**settings))
    return RoleCluster(view, config, seed=seed, delay=delay)


@pytest.mark.parametrize("stopped", [1, 3])
@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_appends_accepted_during_a_2_s_ordering_outage_commit_afterwards(
    seed: int, stopped: int
) -> None:
    """A15: the outage of the primary alone, or of all sequencers; the appends fill several
    frames.
    """
    cluster = cluster_of(seed=seed, delay=0.1, frame_records_max=16)
    waiters: list[Waiter] = []

    def append(count: int) -> None:
        first = len(waiters)
        waiters.extend(
            cluster.append(b"%d" % n, "a", engine=n % 2) for n in range(first, first + count)
        )

    append(20)
    cluster.stopped = frozenset(NodeId(f"sequencer-{n}") for n in range(stopped))
    start = cluster.now
    while cluster.now < start + 2.0:
        append(cluster.random.randint(1, 20))
        cluster.pass_seconds(0.1)
    unordered = sum(waiter.seqnum is None for waiter in waiters)
    assert unordered > 100, "nothing can be ordered during the outage"
    cluster.stopped = frozenset()
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(len(waiters)))
    assert {waiter.seqnum for waiter in waiters} == set(range(len(waiters)))


def metalog_bytes(appends_a_turn: int, turns: int = 400) -> int:
    """Return the bytes of the entries published during the same number of network iterations."""
    cluster = cluster_of(seed=1, record_cache_bytes_max=0)
    waiters = []
    for _ in range(turns):
        for engine in (0, 1):
            waiters += [
                cluster.append(b"x", "a", engine=engine) for _ in range(appends_a_turn // 2)
            ]
        cluster.lockstep()
    cluster.settle()
    assert all(waiter.seqnum is not None for waiter in waiters)
    return sum(cluster.oracle.entry_bytes.values())


def test_ten_times_the_appends_make_the_metalog_grow_by_less_than_a_tenth() -> None:
    """A16: in equal time. An entry holds the number of ordered records of a shard, not the
    records.
    """
    few, many = metalog_bytes(4), metalog_bytes(40)
    assert few > 0
    assert many < 1.1 * few
