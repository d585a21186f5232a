"""A17, A19 and A20 at the level of roles: reads through all tiers against a brute-force oracle.

A read returns exactly the result of a scan of the log below the position it reflects. This holds
for all cache sizes, numbers of index shards and message orders. That position is the session's or a
later one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest

from indilog.base.ids import EMPTY_TAG, MAX_SEQNUM, NodeId, log_tag, tag_hash
from indilog.config import ClusterConfig, Config, NodeConfig, node_config
from indilog.kernel.view import view_of
from indilog.wire.messages import Direction
from indilog_compute.reads.operation import PENDING, Operation
from indilog_index.tag_index import TagIndex
from tests.support.repeated import first_of, repeated
from tests.support.role_cluster import LOG, RoleCluster, Waiter

TAGS = ("a", "b", "rare", "never")
SIZES: dict[str, dict[str, int | str]] = {
    "none": {"local_index": "none", "record_cache_bytes_max": 0},
    "one": {
        "suffix_cuts_max": 1, "popularity_entries_max": 1, "tag_cache_seqnums_max": 1,
        "tag_cache_seqnums_per_tag_max": 1, "record_cache_bytes_max": 0,
        "answer_cache_entries_max": 1, "refill_seqnums_max": 2,
    },
    "small": {
        "suffix_cuts_max": 4, "popularity_entries_max": 3, "tag_cache_seqnums_max": 12,
        "tag_cache_seqnums_per_tag_max": 5, "record_cache_bytes_max": 2000,
        "answer_cache_entries_max": 4, "refill_seqnums_max": 3,
    },
    "default": {},
    "records only": {"local_index": "none"},
    "extended": {"local_index": "extended"},
    "extended small": {
        "local_index": "extended", "suffix_cuts_max": 4, "popularity_entries_max": 3,
        "tag_cache_seqnums_max": 20, "tag_cache_seqnums_per_tag_max": 5,
        "tag_cache_bytes_max": 2000, "record_cache_bytes_max": 2000,
        "answer_cache_entries_max": 4, "refill_seqnums_max": 3, "new_tags_pending_max": 3,
    },
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
    aggregation: Literal["aggregator", "master-slave", "both"] = "aggregator",
    index_replicas: int = 1,
) -> RoleCluster:
    node = node_config(
        node_config(frame_records_max=3, storage_lost_s=1e9, storage_replaced_s=1e9), **SIZES[sizes]
    )
    view = view_of(
        engines=2,
        storage_nodes=2,
        replicas=2,
        sequencers=3,
        index_shards=index_shards,
        index_replicas=index_replicas,
        aggregators=0 if aggregation == "master-slave" else 2,
    )
    config = Config(cluster=ClusterConfig(aggregation=aggregation), node=node)
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


@pytest.mark.parametrize("index_shards", [3, *map(repeated, (1, 2, 4, 5, 6))])
@pytest.mark.parametrize("sizes", SIZES)
def test_reads_at_all_bounds_equal_a_scan_of_the_log(sizes: str, index_shards: int) -> None:
    cluster = cluster_with(sizes, index_shards, seed=index_shards)
    fill(cluster, 40)
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(40))
    for engine in (0, 1):
        check_everything(cluster, engine, range(43))


@pytest.mark.parametrize("index_replicas", [repeated(1), 2])
@pytest.mark.parametrize("aggregation", ["master-slave", "both"])
@pytest.mark.parametrize("index_shards", [repeated(1), repeated(2), 6])
def test_reads_equal_a_scan_for_every_merging_node_and_replica(
    index_shards: int, aggregation: Literal["master-slave", "both"], index_replicas: int
) -> None:
    cluster = cluster_with(
        "one", index_shards, seed=index_shards, aggregation=aggregation,
        index_replicas=index_replicas,
    )  # fmt: skip
    fill(cluster, 40)
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(40))
    check_everything(cluster, 0, range(43))


@pytest.mark.parametrize("down", ["index-0-0", "index-1-1", "aggregator-0"])
@pytest.mark.parametrize("aggregation", [repeated("aggregator"), "both"])
def test_a_silent_node_of_the_index_tier_delays_but_loses_no_answer(
    aggregation: Literal["aggregator", "both"], down: str
) -> None:
    """Lookups are retried at other nodes, and later ones go to these nodes at once."""
    cluster = cluster_with("none", 2, seed=3, aggregation=aggregation, index_replicas=2)
    fill(cluster, 30)
    cluster.settle()
    cluster.down.add(NodeId(down))
    started = cluster.now
    check_everything(cluster, 0, range(32))
    lookups = 3 * 33 * (1 + len(TAGS))
    timeouts = (cluster.now - started) / cluster.config.node.reads.lookup_timeout_s
    assert 0 < timeouts < lookups / 10


@pytest.mark.parametrize("sizes", SIZES)
def test_every_seqnum_is_found_through_the_empty_tag(sizes: str) -> None:
    cluster = cluster_with(sizes, 3, seed=5)
    fill(cluster, 30)
    cluster.settle()
    for seqnum in range(30):
        record, _ = cluster.read(Direction.NEXT, EMPTY_TAG, seqnum)
        assert record is not None
        assert (record.seqnum, record.data) == (seqnum, cluster.oracle.records[seqnum][0])


@pytest.mark.parametrize("slow", ["engine-1", "index-0-0", "index-2-0", "storage-0"])
@pytest.mark.parametrize("seed", first_of(range(4), 1))
@pytest.mark.parametrize("sizes", first_of(["small", "none", "default", "extended small"], 2))
def test_reads_amid_appends_reflect_the_session_and_skip_no_record(
    sizes: str, seed: int, slow: str
) -> None:
    """A20: one node receives everything late, so that index shards and engines are at different
    positions.
    """
    cluster = cluster_with(
        sizes, 3, seed=seed, delay=0.1, repeat=0.1, slow=frozenset({NodeId(slow)})
    )
    assert not wrong_reads(cluster, 60)


@pytest.mark.heavy
def test_randomly_lagging_index_shards_show_no_session_an_older_state(
    seeds_wanted: int | None,
) -> None:
    """A20: read-your-writes, monotonic reads, and no skipped record, in all layouts of the tier."""
    for seed in range(seeds_wanted or 20):
        cluster = lagging_cluster(seed)
        assert not wrong_reads(cluster, 12), f"seed {seed}"


def test_a_read_skips_when_index_shards_ignore_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above detects the planted fault of the thesis: each shard answers at its own
    progress, and the engine accepts it.
    """
    for name in ("next", "prev"):
        monkeypatch.setattr(TagIndex, name, without_limit(getattr(TagIndex, name)))
    monkeypatch.setattr(Operation, "_may_match", lambda _operation, _seqnum: True)
    assert any(wrong_reads(lagging_cluster(seed), 12) for seed in range(40))


def test_an_engine_refuses_matches_of_index_shards_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second check: a match that is not below the limit of the lookup is no answer."""
    for name in ("next", "prev"):
        monkeypatch.setattr(TagIndex, name, without_limit(getattr(TagIndex, name)))
    assert not any(wrong_reads(lagging_cluster(seed), 12) for seed in range(10))


def without_limit(find: Callable[..., Any]) -> Callable[..., Any]:
    def found(self: TagIndex, tag: int, bound: int, limit: int, count: int) -> object:
        return find(self, tag, bound, MAX_SEQNUM, count)

    return found


def lagging_cluster(seed: int) -> RoleCluster:
    """A cluster whose layout and one slow index node come from the seed."""
    chance = random.Random(seed)
    index_shards = chance.randint(1, 4)
    index_replicas = chance.randint(1, 2)
    slow = f"index-{chance.randrange(index_shards)}-{chance.randrange(index_replicas)}"
    return cluster_with(
        chance.choice(["none", "one", "small"]),
        index_shards,
        seed=seed,
        delay=0.1,
        repeat=0.1,
        slow=frozenset({NodeId(slow)}),
        aggregation=chance.choice(["aggregator", "master-slave", "both"]),
        index_replicas=index_replicas,
    )


def wrong_reads(cluster: RoleCluster, appends: int) -> list[tuple[object, ...]]:
    """Append and read in two sessions, an engine each; return the reads that contradict a scan."""
    session = [0, 0]
    history = []
    for n in range(appends):
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
    look = {Direction.NEXT: oracle.next, Direction.PREV: oracle.prev}
    return [
        (direction, tag, bound, position, seqnum)
        for direction, tag, bound, position, seqnum in history
        if seqnum != look[direction](tag, bound, oracle.tails[position])
    ]


def resends_within(seconds: float, node: NodeConfig) -> int:
    """Return the number of requests of one engine: its pauses double from `resend_s` to
    `resend_s_max`.
    """
    asked, pause = 0, node.messages.resend_s
    while (seconds := seconds - pause) >= 0:
        asked, pause = asked + 1, min(2 * pause, node.messages.resend_s_max)
    return asked


@pytest.mark.parametrize("sizes", ["none", "default"])
def test_a_waiting_read_sends_no_lookups_with_or_without_a_local_index(sizes: str) -> None:
    """Index data reaches every engine; engines ask the primary now and then for a lost entry."""
    cluster = cluster_with(sizes, 3, seed=2)
    fill(cluster, 20)
    cluster.settle()
    waiters = [Waiter() for _ in range(50)]
    for waiter in waiters:
        cluster.engine(1).watches.add(tag_hash(LOG, "awaited"), 0, waiter)
    before = Counter(cluster.sent)
    cluster.pass_seconds(60)
    sent = Counter(cluster.sent) - before
    assert set(sent) <= {"MetalogWanted", "MetalogEntries"}
    assert 0 < sent["MetalogWanted"] <= resends_within(60, NodeConfig())
    assert all(waiter.outcome is PENDING for waiter in waiters)
    cluster.append(b"it", "awaited", engine=0)
    cluster.run_until(lambda: all(waiter.outcome is None for waiter in waiters))


@pytest.mark.parametrize("sizes", ["none", "default"])
def test_a_page_costs_one_index_round_trip_and_one_read_per_shard(sizes: str) -> None:
    cluster = cluster_with(sizes, 3, seed=1)
    for tag in (log_tag(LOG), tag_hash(LOG, "a")):
        assert cluster.read_page(tag, 0, 9, engine=0)[0] == [], "the tag is wanted from here on"
    fill(cluster, 90)
    cluster.settle()
    for tag, text, limit in ((log_tag(LOG), None, 50), (tag_hash(LOG, "a"), "a", 20)):
        bound = cluster.oracle.matching(text, 60)[0] + 1
        before = Counter(cluster.sent)
        page, _ = cluster.read_page(tag, bound, limit, engine=0)
        assert len(page) == limit
        sent = Counter(cluster.sent) - before
        reads = sent.pop("ReadRecords", 0)
        assert reads == sent.pop("RecordsRead", 0) <= 2, "at most one per shard"
        asked = {"IndexLookup": 3, "IndexAnswer": 3, "LookupResult": 1} if sizes == "none" else {}
        assert sent == asked


@pytest.mark.parametrize("slow", ["engine-1", "index-1-0", "storage-0"])
@pytest.mark.parametrize("seed", first_of(range(5), 1))
@pytest.mark.parametrize("sizes", ["none", "default"])
def test_a_fresh_read_sees_every_acknowledged_record(sizes: str, seed: int, slow: str) -> None:
    """A20: the reader's session has seen nothing; its engine may lag far behind the writer's."""
    cluster = cluster_with(
        sizes, 3, seed=seed, delay=0.1, repeat=0.1, slow=frozenset({NodeId(slow)})
    )
    for n in range(25):
        waiter = cluster.append(b"%d" % n, "a", engine=0)
        cluster.run_until(lambda waiter=waiter: waiter.seqnum is not None)
        acknowledged = dict(cluster.oracle.records)
        record, _ = cluster.read(
            Direction.PREV, tag_hash(LOG, "a"), MAX_SEQNUM, engine=1, fresh=True
        )
        assert record is not None
        assert record.seqnum >= max(acknowledged)


@pytest.mark.parametrize("seed", first_of(range(6), 3))
def test_equal_localids_on_two_shards_are_acknowledged_each_to_its_own_caller(
    seed: int,
) -> None:
    """A17: localids are unique in their shard only."""
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


@pytest.mark.parametrize("seed", first_of(range(6), 3))
def test_lost_late_and_repeated_messages_only_cost_time(seed: int) -> None:
    cluster = cluster_with("small", 2, seed=seed, lose=0.05, delay=0.2, repeat=0.1)
    fill(cluster, 40)
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(40))
    check_everything(cluster, 0, range(0, 43, 7))


@pytest.mark.parametrize("seed", first_of(range(8), 3))
def test_nodes_restarted_from_their_disks_lose_no_record(seed: int) -> None:
    cluster = cluster_with("small", 2, seed=seed, delay=0.1)
    for _ in range(6):
        fill(cluster, 12)
        cluster.start(cluster.random.choice([n for n in cluster.view.nodes if "engine" not in n]))
    cluster.settle()
    assert sorted(cluster.oracle.records) == list(range(72))
    check_everything(cluster, 1, range(0, 75, 9))


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_time_is_found_at_the_position_of_the_published_entries(seed: int) -> None:
    cluster = cluster_with("small", 2, seed=seed, delay=0.2, repeat=0.1)
    for n in range(25):
        cluster.now += cluster.random.choice([0.0, 0.001, 3.0])
        cluster.append(b"%d" % n, "a", engine=n % 2)
        for _ in range(cluster.random.randint(0, 40)):
            cluster.poke()
            cluster.step()
    cluster.settle()
    times = sorted(cluster.oracle.times.items())
    assert [time_us for _, time_us in times] == sorted(time_us for _, time_us in times)
    stamps = {time_us for _, time_us in times}
    for time_us in {0, *stamps, *(t + 1 for t in stamps), *(t - 1 for t in stamps)}:
        first = next((p for p, stamp in times if stamp >= time_us), None)
        tails = cluster.oracle.tails
        expected = max(tails.values()) if first is None else tails[first]
        assert cluster.find_time(time_us, engine=seed % 2) == expected


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_record_has_the_stamp_of_its_entry_from_the_cache_and_from_storage(seed: int) -> None:
    cluster = cluster_with("small", 2, seed=seed, delay=0.2, repeat=0.1)
    for n in range(25):
        cluster.now += cluster.random.choice([0.0, 0.001, 3.0])
        cluster.append(b"%d" % n, "a", engine=n % 2)
        for _ in range(cluster.random.randint(0, 40)):
            cluster.poke()
            cluster.step()
    cluster.settle()
    oracle = cluster.oracle
    expected = {
        seqnum: stamp / 1e6
        for position, stamp in oracle.times.items()
        for seqnum in range(oracle.tails[position], oracle.tails[position + 1])
    }
    assert len(expected) == 25
    for engine in (0, 1):  # each wrote half of them, and has the other half from storage
        page, _ = cluster.read_page(EMPTY_TAG, 0, 100, engine=engine)
        assert {record.seqnum: record.ordered_at for record in page} == expected
