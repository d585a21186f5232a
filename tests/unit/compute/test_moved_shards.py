"""What a compute node does when a shard gets other replicas (decision 0048)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, NodeId, ShardId, ViewNumber
from indilog.config import Config, node_config
from indilog.kernel.metalog import Base, NewRecords, NewReplicas, Replicas
from indilog.kernel.view import view_of
from indilog.roles.role import Effect, Started
from indilog.wire.base_messages import MetalogBase
from indilog.wire.messages import (
    AppendBatch,
    IndexBlock,
    IndexData,
    MetalogWanted,
    ReadRecords,
    RecordsRead,
    ShardStored,
    ShardStoredWanted,
    ShardTags,
    TailIs,
    TailWanted,
)
from indilog_compute.engine import Engine
from indilog_compute.reads.operation import Answered
from tests.support.metalog_messages import entries_message
from tests.unit.compute.engine_driver import (
    ENGINE,
    JOIN,
    LOG,
    PRIMARY,
    SHARD,
    TAG,
    A,
    B,
    Driver,
    answers,
    carrying,
    joined,
    sends,
    stored,
)

C = NodeId("storage-2")


def move(driver: Driver, *replicas: NodeId) -> list[Effect]:
    """Let the next entry move the shard, which has records without index data from then on."""
    entry = NewReplicas(driver.position, ViewNumber(1), Epoch(1), {SHARD: replicas})
    driver.position += 1
    return driver.hear(PRIMARY, entries_message((entry,)))


def test_batches_are_sent_to_the_new_replica_when_it_reports_its_prefix() -> None:
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "waiter")
    ((_, batch), _) = sends(driver.turn(), AppendBatch)
    early = sends(driver.hear(C, ShardStored(SHARD, Epoch(1), 0)), AppendBatch)
    move(driver, B, C, A)
    effects = driver.hear(C, ShardStored(SHARD, Epoch(1), 0))
    assert (early, sends(effects, AppendBatch)) == ([], [(C, batch)])
    driver.engine.append(b"two", carrying(LOG, TAG), "waiter")
    assert [to for to, _ in sends(driver.turn(), AppendBatch)] == [B, C, A]


def test_a_node_that_joins_again_after_a_move_forgets_what_it_sent_to_the_old_replica() -> None:
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "waiter")
    driver.turn()
    driver.hear(A, ShardStored(SHARD, Epoch(1), 0))
    base = MetalogBase(Base(position=4, last=Epoch(1), replicas={SHARD: Replicas(3, (B, C))}), 0)
    driver.now += 3.0
    ((_, wanted),) = sends(driver.turn(), MetalogWanted)
    assert isinstance(wanted, MetalogWanted)
    effects = driver.hear(PRIMARY, msgspec.structs.replace(base, request=wanted.request))
    ((_, tail),) = sends(effects, TailWanted)
    assert isinstance(tail, TailWanted)
    replicas = {SHARD: Replicas(3, (B, C))}
    known = TailIs(tail.request, 4, 0, {}, Epoch(1), 0, 0, {SHARD: Epoch(1)}, replicas)
    asked = sends(driver.hear(PRIMARY, known), ShardStoredWanted)
    assert [to for to, _ in asked] == [C]


def test_a_node_that_joins_knows_the_replicas() -> None:
    driver = Driver()
    replicas = {SHARD: Replicas(3, (B, C))}
    driver.hear(PRIMARY, TailIs(JOIN, 4, 0, {}, Epoch(1), 0, 0, {SHARD: Epoch(1)}, replicas))
    driver.engine.append(b"one", carrying(LOG, TAG), "waiter")
    assert [to for to, _ in sends(driver.turn(), AppendBatch)] == [B, C]


def test_a_replica_that_lacked_a_record_before_a_move_is_asked_again_after_it() -> None:
    """It may have been a new replica then, and the replica that had the record is dropped."""
    driver = joined(record_cache_bytes_max=0)
    driver.order(1)
    driver.read(0)
    ((first, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    effects = driver.hear(first, RecordsRead(request.request, SHARD, (), (0,)))
    ((second, again),) = sends(effects, ReadRecords)
    assert isinstance(again, ReadRecords)
    move(driver, first)
    effects = driver.hear(second, RecordsRead(again.request, SHARD, (), (0,), since=1))
    assert answers(effects) == []
    driver.now += 3.0
    ((third, _),) = sends(driver.turn(), ReadRecords)
    assert third == first


def test_a_replica_that_does_not_know_of_the_move_does_not_make_a_record_lost() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(1)
    move(driver, B)
    driver.read(0)
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    late = driver.hear(replica, RecordsRead(request.request, SHARD, (), (0,)))
    now = driver.hear(replica, RecordsRead(request.request, SHARD, (), (0,), since=1))
    (lost,) = answers(now)
    assert (replica, answers(late)) == (B, [])
    assert isinstance(lost, DataLossError)


# --- two shards


class TwoShards(Driver):
    """An engine that knows records 0 and 1 of one tag, each in a shard with one replica."""

    def __init__(self) -> None:
        self.engine = Engine(
            ENGINE,
            [view_of(storage_nodes=2, engines=2)],
            Config(node=node_config(record_cache_bytes_max=0)),
        )
        self.now, self.position, self.tail = 0.0, 0, 0
        self.turn(Started(Epoch(1)))
        self.join()
        self.shards = ShardId(0), ShardId(1)
        entry = NewRecords(0, ViewNumber(1), Epoch(1), dict.fromkeys(self.shards, 1))
        self.hear(PRIMARY, entries_message((entry,)))
        tags = TAG.to_bytes(8, "little")
        parts = tuple(ShardTags(shard, int(shard), 1, b"\x01", tags) for shard in self.shards)
        block = IndexBlock(0, 2, self.shards, parts, Epoch(1), Epoch(0))
        self.hear(A, IndexData((block,), copy_of=Epoch(1)))
        self.engine.read_page(TAG, 0, 0, 10, "pager")
        self.asked = {m.shard: (to, m.request) for to, m in self.requests(self.turn())}

    @staticmethod
    def requests(effects: Sequence[Effect]) -> list[tuple[NodeId, ReadRecords]]:
        sent = sends(effects, ReadRecords)
        return [(to, message) for to, message in sent if isinstance(message, ReadRecords)]

    def show(self, shard: int, *, lost: bool) -> list[Effect]:
        to, request = self.asked[ShardId(shard)]
        records, unknown = ((), (shard,)) if lost else ((stored(shard),), ())
        return self.hear(to, RecordsRead(request, ShardId(shard), records, unknown))


def test_a_page_ends_before_a_lost_record_of_another_shard() -> None:
    driver = TwoShards()
    driver.show(1, lost=True)
    (answer,) = answers(driver.show(0, lost=False))
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, list)
    assert [record.seqnum for record in answer.value] == [0]


def test_a_lost_record_is_not_reported_before_an_earlier_one_of_another_shard_came() -> None:
    """Otherwise a reader that continues after it misses the earlier record."""
    driver = TwoShards()
    first = driver.show(1, lost=True)
    driver.now += 3.0
    again = driver.turn()
    assert answers(first) == answers(again) == []
    assert [message.seqnums for _, message in driver.requests(again)] == [(0,)]
