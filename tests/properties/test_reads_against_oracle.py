"""A19 and A20 at the level of roles: reads through all tiers against a brute-force oracle.

Whatever the sizes of the caches, the number of index shards, and the order in which messages
arrive: a read answers exactly what a scan of the log below the position it reflects would, and that
position is the session's or a later one.
"""

from __future__ import annotations

import dataclasses

import pytest

from indilog.config import ClusterConfig, Config, NodeConfig
from indilog.ids import EMPTY_TAG, MAX_SEQNUM, NodeId, log_tag, tag_hash
from indilog.messages import Direction
from indilog.view import view_of
from tests.role_cluster import LOG, RoleCluster

TAGS = ("a", "b", "rare", "never")
SIZES: dict[str, dict[str, int]] = {
    "none": {
        "suffix_cuts_max": 0, "popularity_entries_max": 0, "tag_cache_seqnums_max": 0,
        "tag_cache_seqnums_per_tag_max": 0, "record_cache_bytes_max": 0,
    },
    "one": {
        "suffix_cuts_max": 1, "popularity_entries_max": 1, "tag_cache_seqnums_max": 1,
        "tag_cache_seqnums_per_tag_max": 1, "record_cache_bytes_max": 0,
    },
    "small": {
        "suffix_cuts_max": 4, "popularity_entries_max": 3, "tag_cache_seqnums_max": 12,
        "tag_cache_seqnums_per_tag_max": 5, "record_cache_bytes_max": 2000,
    },
    "default": {},
}  # fmt: skip


def cluster_with(
    sizes: str,
    index_shards: int,
    *,
    seed: int,
    lose: float = 0.0,
    delay: float = 0.0,
    repeat: float = 0.0,
    slow: frozenset[NodeId] = frozenset(),
) -> RoleCluster:
    node = dataclasses.replace(NodeConfig(frame_records_max=3), **SIZES[sizes])  # type: ignore[arg-type]
    view = view_of(engines=2, storage_nodes=2, replicas=2, sequencers=3, index_shards=index_shards)
    config = Config(cluster=ClusterConfig(), node=node)
    return RoleCluster(view, config, seed=seed, lose=lose, delay=delay, repeat=repeat, slow=slow)


def fill(cluster: RoleCluster, records: int) -> None:
    for n in range(records):
        tags = [tag for tag in TAGS[:2] if cluster.random.random() < 0.5]
        tags += ["rare"] if n == records // 3 else []
        cluster.append(b"%d" % n, *tags, engine=n % len(cluster.view.engines))
        if cluster.random.random() < 0.3:
            for _ in range(cluster.random.randint(1, 30)):
                cluster.poke()
                cluster.step()


def check_everything(cluster: RoleCluster, engine: int, bounds: range) -> None:
    oracle = cluster.oracle
    for tag in (None, *TAGS):
        hashed = log_tag(LOG) if tag is None else tag_hash(LOG, tag)
        for bound in (*bounds, MAX_SEQNUM):
            record, position = cluster.read(Direction.NEXT, hashed, bound, engine=engine)
            expected = oracle.next(tag, bound, oracle.tails[position])
            assert (record.seqnum if record else None) == expected, (tag, bound, position)
            record, position = cluster.read(Direction.PREV, hashed, bound, engine=engine)
            expected = oracle.prev(tag, bound, oracle.tails[position])
            assert (record.seqnum if record else None) == expected, (tag, bound, position)
            page, position = cluster.read_page(hashed, bound, 7, engine=engine)
            matching = [s for s in oracle.matching(tag, oracle.tails[position]) if s >= bound]
            assert [r.seqnum for r in page] == matching[:7], (tag, bound, position)
            for found in page:
                assert found.data == oracle.records[found.seqnum][0]


@pytest.mark.parametrize("index_shards", range(1, 7))
@pytest.mark.parametrize("sizes", SIZES)
def test_a19_reads_at_all_bounds_equal_a_scan_of_the_log(sizes: str, index_shards: int) -> None:
    cluster = cluster_with(sizes, index_shards, seed=index_shards)
    fill(cluster, 40)
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(40))
    for engine in (0, 1):
        check_everything(cluster, engine, range(43))


@pytest.mark.parametrize("sizes", SIZES)
def test_a19_every_seqnum_is_found_through_the_empty_tag(sizes: str) -> None:
    cluster = cluster_with(sizes, 3, seed=5)
    fill(cluster, 30)
    cluster.settle()
    for seqnum in range(30):
        record, _ = cluster.read(Direction.NEXT, EMPTY_TAG, seqnum)
        assert record is not None
        assert (record.seqnum, record.data) == (seqnum, cluster.oracle.records[seqnum][0])


@pytest.mark.parametrize("slow", ["engine-1", "index-0-0", "index-2-0", "storage-0"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", ["none", "small", "default"])
def test_a20_reads_amid_appends_reflect_the_session_and_skip_nothing(
    sizes: str, seed: int, slow: str
) -> None:
    """One node hears everything late, so that index shards and engines are at different points."""
    cluster = cluster_with(
        sizes, 3, seed=seed, delay=0.1, repeat=0.1, slow=frozenset({NodeId(slow)})
    )
    session = [0, 0]
    history = []
    for n in range(60):
        engine = cluster.random.randrange(2)
        for _ in range(3):
            waiter = cluster.append(b"%d" % n, cluster.random.choice(TAGS[:2]), engine=engine)
            for _ in range(cluster.random.randint(0, 10)):
                cluster.poke()
                cluster.step()
        if cluster.random.random() < 0.2:
            cluster.run_until(lambda waiter=waiter: waiter.seqnum is not None)
            session[engine] = max(session[engine], cluster.engine(engine).position)
        engine = cluster.random.randrange(2)
        tag = cluster.random.choice(TAGS)
        bound = cluster.random.randint(0, 3 * n + 2)
        direction = cluster.random.choice((Direction.NEXT, Direction.PREV))
        record, position = cluster.read(
            direction, tag_hash(LOG, tag), bound, position=session[engine], engine=engine
        )
        assert position >= session[engine], "the session never goes back"
        session[engine] = position
        history.append((direction, tag, bound, position, record.seqnum if record else None))
    cluster.settle()
    oracle = cluster.oracle
    for direction, tag, bound, position, seqnum in history:
        look = oracle.next if direction is Direction.NEXT else oracle.prev
        assert seqnum == look(tag, bound, oracle.tails[position]), (direction, tag, bound, position)


@pytest.mark.parametrize("seed", range(6))
def test_a17_equal_localids_on_two_shards_are_acknowledged_each_to_its_own_caller(
    seed: int,
) -> None:
    cluster = cluster_with("default", 2, seed=seed, delay=0.3)
    waiters = [cluster.append(b"of engine %d" % engine, "a", engine=engine) for engine in (0, 1)]
    cluster.settle()
    assert {waiter.seqnum for waiter in waiters} == {0, 1}
    for engine in (0, 1):
        for waiter in waiters:
            assert waiter.seqnum is not None
            record, _ = cluster.read(Direction.NEXT, EMPTY_TAG, waiter.seqnum, engine=engine)
            assert record is not None
            assert (record.seqnum, record.data) == (waiter.seqnum, waiter.data)


@pytest.mark.parametrize("seed", range(6))
def test_messages_lost_late_and_twice_only_cost_time(seed: int) -> None:
    cluster = cluster_with("small", 2, seed=seed, lose=0.05, delay=0.2, repeat=0.1)
    fill(cluster, 40)
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(40))
    check_everything(cluster, 0, range(0, 43, 7))


@pytest.mark.parametrize("seed", range(8))
def test_nodes_that_start_again_from_their_disk_lose_nothing(seed: int) -> None:
    cluster = cluster_with("small", 2, seed=seed, delay=0.1)
    for _ in range(6):
        fill(cluster, 12)
        cluster.start(cluster.random.choice([n for n in cluster.view.nodes if "engine" not in n]))
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(72))
    check_everything(cluster, 1, range(0, 75, 9))
