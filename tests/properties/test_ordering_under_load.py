"""What ordering costs and survives, with all roles (PITFALLS A15, A16)."""

from __future__ import annotations

import pytest

from indilog.base.ids import NodeId
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.view import view_of
from tests.support.role_cluster import RoleCluster, Waiter


def cluster_of(*, seed: int, delay: float = 0.0, **settings: int) -> RoleCluster:
    view = view_of(engines=2, storage_nodes=2, replicas=2, sequencers=3, index_shards=2)
    config = Config(cluster=ClusterConfig(), node=node_config(**settings))
    return RoleCluster(view, config, seed=seed, delay=delay)


@pytest.mark.parametrize("stopped", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a15_what_was_accepted_while_ordering_stood_still_for_2_s_commits_afterwards(
    seed: int, stopped: int
) -> None:
    """The primary alone, or all sequencers; more than one frame of records comes meanwhile."""
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
    assert unordered > 100, "nothing can be ordered meanwhile"
    cluster.stopped = frozenset()
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(len(waiters)))
    assert {waiter.seqnum for waiter in waiters} == set(range(len(waiters)))


def metalog_bytes(appends_a_turn: int, turns: int = 400) -> int:
    """Return the bytes of the entries published while as many turns of the network pass."""
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


def test_a16_ten_times_the_appends_make_the_metalog_grow_by_less_than_a_tenth() -> None:
    """In the same time: an entry says how many records of a shard are ordered, not which."""
    few, many = metalog_bytes(4), metalog_bytes(40)
    assert few > 0
    assert many < 1.1 * few
