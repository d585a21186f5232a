"""The cost of a lookup after a miss of the local index (decision 0011). It counts sequential trips,
messages and bytes between real roles, with and without the record in the record cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest

from indilog.base.ids import MAX_SEQNUM, NodeId, tag_hash
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.view import view_of
from indilog.roles.role import Event, Received
from indilog.wire.messages import Direction, Message
from indilog_compute.reads.tier_lookups import TierLookups
from tests.support.role_cluster import LOG, RoleCluster

TAG = tag_hash(LOG, "a")
RECORD_BYTES = 1024


class Cost(NamedTuple):
    """Cost of one read: the longest chain of messages, all messages, and their bytes."""

    trips: int
    messages: int
    bytes: int


class CountingCluster(RoleCluster):
    """Counts messages, and records which message caused each of them."""

    def reset(self) -> None:
        self.trips = self.messages = self.bytes = 0
        self._turn_depth = 0
        self._depths: dict[int, int] = {}

    def _turn(self, node: NodeId, events: Sequence[Event]) -> None:
        self._turn_depth = max(
            (self._depths.get(id(e.message), 0) for e in events if isinstance(e, Received)),
            default=0,
        )
        super()._turn(node, events)

    def _deliver(self, to: NodeId, event: Event, message: Message) -> None:
        self._depths[id(message)] = self._turn_depth + 1
        self.trips = max(self.trips, self._turn_depth + 1)
        self.messages += 1
        self.bytes += len(msgspec.msgpack.encode(message))
        super()._deliver(to, event, message)

    _depths: dict[int, int] = {}  # noqa: RUF012 (of the messages while the cluster starts)
    _turn_depth = trips = messages = bytes = 0


def cost_of_a_read(
    direction: Direction, bound: int, *, cached: bool, named: bool, monkeypatch: pytest.MonkeyPatch
) -> Cost:
    """Read without a local index; the record is the engine's own append, or of the other engine."""
    monkeypatch.setattr(TierLookups, "_names_first", lambda _self, _operation: named)
    node = node_config(local_index="none")
    view = view_of(engines=2, index_shards=2)
    cluster = CountingCluster(view, Config(cluster=ClusterConfig(), node=node), seed=1)
    cluster.append(bytes(RECORD_BYTES), "a", engine=0)
    cluster.settle()
    cluster.reset()
    record, _ = cluster.read(direction, TAG, bound, engine=0 if cached else 1)
    assert record is not None
    assert record.seqnum == 0
    while cluster.step():  # an answer to an abandoned request counts as well
        pass
    return Cost(cluster.trips, cluster.messages, cluster.bytes)


def test_a_hit_of_the_local_index_takes_two_trips_or_none_for_a_cached_record() -> None:
    cluster = CountingCluster(view_of(engines=2, index_shards=2), Config(), seed=1)
    assert cluster.read(Direction.PREV, TAG, MAX_SEQNUM, engine=1)[0] is None, "the tag is wanted"
    cluster.append(bytes(RECORD_BYTES), "a", engine=0)
    cluster.settle()
    for engine, trips, messages in ((1, 2, 2), (0, 0, 0)):
        cluster.reset()
        record, _ = cluster.read(Direction.PREV, TAG, MAX_SEQNUM, engine=engine)
        assert record is not None
        assert (cluster.trips, cluster.messages) == (trips, messages)


def test_an_exact_match_takes_three_trips_or_none_for_a_cached_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = cost_of_a_read(Direction.NEXT, 0, cached=False, named=False, monkeypatch=monkeypatch)
    assert (cost.trips, cost.messages) == (3, 6)
    cost = cost_of_a_read(Direction.NEXT, 0, cached=True, named=False, monkeypatch=monkeypatch)
    assert cost == Cost(0, 0, 0)


@pytest.mark.parametrize(
    ("cached", "named", "trips", "messages", "record_travels"),
    [
        (False, False, 4, 6, True),
        (True, False, 4, 6, True),
        (False, True, 5, 7, True),
        (True, True, 3, 5, False),
    ],
)
def test_a_closest_match_costs_a_trip_less_when_named_first_if_the_record_is_cached(
    cached: bool,
    named: bool,
    trips: int,
    messages: int,
    record_travels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = cost_of_a_read(
        Direction.PREV, MAX_SEQNUM, cached=cached, named=named, monkeypatch=monkeypatch
    )
    assert (cost.trips, cost.messages) == (trips, messages)
    assert (cost.bytes > RECORD_BYTES) == record_travels
