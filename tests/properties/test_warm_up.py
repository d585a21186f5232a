"""A restarted compute node has an empty cache; frequently read tags return to it (thesis 10),
between real roles.
"""

from __future__ import annotations

import pytest

from indilog.base.ids import MAX_SEQNUM, tag_hash
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.view import view_of
from indilog.wire.messages import Direction
from tests.support.role_cluster import LOG, RoleCluster

TAGS = [f"object:{n}" for n in range(12)]


def restarted(**settings: int) -> RoleCluster:
    """A cluster with 120 records of twelve tags whose engine has restarted."""
    bare = node_config(answer_cache_entries_max=0, record_cache_bytes_max=0)
    node = node_config(bare, **settings)
    view = view_of(engines=1, index_shards=3)
    cluster = RoleCluster(view, Config(cluster=ClusterConfig(), node=node), seed=3)
    for n in range(120):
        cluster.append(b"%d" % n, TAGS[n % len(TAGS)])
    cluster.settle()
    cluster.start(view.engines[0])
    cluster.settle()
    return cluster


def lookups_of_a_round(cluster: RoleCluster) -> int:
    """Read every tag at its end, in the middle and at its head; return the number of index tier
    lookups.
    """
    before = asked(cluster)
    for tag in TAGS:
        hashed = tag_hash(LOG, tag)
        of_tag = cluster.oracle.matching(tag, 120)
        for direction, bound, expected in (
            (Direction.PREV, MAX_SEQNUM, of_tag[-1]),
            (Direction.NEXT, of_tag[4] - 1, of_tag[4]),
            (Direction.NEXT, 0, of_tag[0]),
        ):
            record, _ = cluster.read(direction, hashed, bound)
            assert record is not None
            assert record.seqnum == expected
    cluster.settle()
    return asked(cluster) - before


def asked(cluster: RoleCluster) -> int:
    figures = cluster.engine().status()["index_tier"]
    return figures["exact"] + figures["closest"] + figures["none"]


def test_after_two_misses_of_each_tag_lookups_stay_local() -> None:
    cluster = restarted()
    rounds = [lookups_of_a_round(cluster) for _ in range(3)]
    assert rounds[0] <= 3 * len(TAGS)
    assert rounds[1:] == [0, 0]
    assert cluster.engine().status()["tag_questions"]["refills"] == len(TAGS)


@pytest.mark.parametrize("settings", [{"refills_per_s_max": 0}, {"refill_after_misses": 1000}])
def test_without_refills_lookups_keep_going_to_the_index_tier(settings: dict[str, int]) -> None:
    cluster = restarted(**settings)
    rounds = [lookups_of_a_round(cluster) for _ in range(3)]
    assert rounds == [3 * len(TAGS)] * 3


def test_tags_with_more_records_than_one_refill_are_known_at_their_end_only() -> None:
    cluster = restarted(refill_seqnums_max=3)
    for _ in range(3):
        lookups_of_a_round(cluster)
    refills = cluster.engine().status()["tag_questions"]["refills"]
    assert refills == len(TAGS), "a refill that would bring no new record is not repeated"
    assert lookups_of_a_round(cluster) == 2 * len(TAGS)
