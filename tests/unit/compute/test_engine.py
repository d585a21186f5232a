"""`Engine` and `Reads`: joining, appending, the ways of a read, catching up. No I/O: calls and
comparisons.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import pytest

from compute.engine import Engine
from compute.operation import PENDING, Answered
from indilog.config import Config, NodeConfig
from indilog.errors import (
    AppendOutcomeUnknownError,
    DataLossError,
    NotReadyError,
    OverloadedError,
    QuorumUnavailableError,
)
from indilog.ids import EMPTY_TAG, Epoch, Instant, NodeId, ShardId, ViewNumber, tag_columns
from indilog.log import Record
from indilog.messages import (
    AppendBatch,
    Direction,
    IndexBlock,
    IndexData,
    IndexDataWanted,
    IndexLookup,
    LookupResult,
    Message,
    MetalogEntries,
    MetalogWanted,
    ReadRecords,
    RecordsRead,
    ShardClaimed,
    ShardOpened,
    ShardTags,
    StoredRecord,
    TailIs,
    TailWanted,
)
from indilog.metalog import NewRecords
from indilog.records import RecordBatch
from indilog.roles import Answer, Appended, Effect, Ignore, Received, Send, Started
from indilog.view import view_of

ENGINE, PRIMARY = NodeId("engine-0"), NodeId("sequencer-0")
A, B = NodeId("storage-0"), NodeId("storage-1")
SHARD = ShardId(0)
JOIN = 1 << 32
"""The first request number of epoch 1."""
TAG, LOG = 77, 11
NAMES = tag_columns("orders", ("x",))[1]


class Driver:
    """Speaks with one engine; keeps what it said."""

    def __init__(self, *, join_at: tuple[int, int] = (0, 0), **settings: float) -> None:
        node = dataclasses.replace(NodeConfig(), **settings)  # type: ignore[arg-type]
        view = view_of(storage_nodes=2, replicas=2, index_shards=2)
        self.engine = Engine(ENGINE, [view], Config(node=node))
        self.now = 0.0
        self.position, self.tail = join_at
        self.turn(Started(Epoch(1)))

    def join(self) -> None:
        cut = {SHARD: self.tail}
        self.hear(PRIMARY, TailIs(JOIN, self.position, self.tail, cut))
        for replica in (A, B):
            self.hear(replica, ShardClaimed(SHARD, Epoch(1), self.tail))
        for replica in (A, B):
            self.hear(replica, ShardOpened(SHARD, Epoch(1), self.tail))
        assert self.engine.ready

    def turn(self, *events: Started | Received) -> list[Effect]:
        effects = self.engine.handle(events, Instant(self.now))
        self.engine.check_invariants()
        return effects

    def hear(self, sender: NodeId, *messages: Message) -> list[Effect]:
        return self.turn(*(Received(sender, message) for message in messages))

    def order(self, count: int, *, index_data: bool = True) -> list[Effect]:
        """One metalog entry over `count` records of our shard; all carry TAG."""
        position, first = self.position, self.tail
        self.position += 1
        self.tail += count
        entry = NewRecords(position, ViewNumber(1), Epoch(1), {SHARD: count})
        effects = self.hear(PRIMARY, MetalogEntries((entry,)))
        if index_data:
            effects += self.hear(A, IndexData((self.block(position, first, count),)))
        return effects

    @staticmethod
    def block(position: int, first: int, count: int) -> IndexBlock:
        tags = array("Q", [LOG, TAG] * count).tobytes()
        part = ShardTags(SHARD, first, count, b"\x02" * count, tags)
        return IndexBlock(position, first + count, (SHARD,), (part,))

    def read(self, bound: int, *, position: int = 0, tag: int = TAG) -> object:
        return self.engine.read(Direction.NEXT, tag, bound, position, "reader")


def joined(*, join_at: tuple[int, int] = (0, 0), **settings: float) -> Driver:
    driver = Driver(join_at=join_at, **settings)
    driver.join()
    return driver


def sends(effects: Sequence[Effect], kind: type[Message]) -> list[tuple[NodeId, Message]]:
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and type(e.message) is kind]


def answers(effects: Sequence[Effect]) -> list[object]:
    return [e.outcome for e in effects if isinstance(e, Answer)]


def stored(seqnum: int, data: bytes = b"d") -> StoredRecord:
    return StoredRecord(seqnum, 5_000_000, NAMES, data, None)


def test_an_appended_record_is_acknowledged_with_its_seqnum_and_read_from_memory() -> None:
    driver = joined()
    driver.engine.append(b"one", (LOG, TAG), NAMES, "waiter")
    sent = sends(driver.turn(), AppendBatch)
    assert [to for to, _ in sent] == [A, B]
    effects = driver.order(1)
    assert [e for e in effects if isinstance(e, Appended)] == [Appended(["waiter"], 0, 1)]
    record = driver.read(0, position=1)
    assert isinstance(record, Record)
    assert (record.seqnum, record.data) == (0, b"one")


def test_a_node_without_a_shard_refuses_appends() -> None:
    view = view_of(engines=1)
    engine = Engine(NodeId("engine-9"), [view], Config())
    engine.handle([Started(Epoch(1))], Instant(0))
    with pytest.raises(NotReadyError):
        engine.append(b"", (), b"", "waiter")


def test_joining_is_asked_for_again_until_the_primary_answers() -> None:
    driver = Driver()
    driver.now = 1.0
    assert sends(driver.turn(), TailWanted) == [(PRIMARY, TailWanted(JOIN))]


def test_a_read_waits_until_index_data_of_its_session_is_applied() -> None:
    driver = joined()
    driver.engine.append(b"one", (LOG, TAG), NAMES, "waiter")
    driver.turn()
    driver.order(1, index_data=False)
    assert driver.read(0, position=1) is PENDING
    assert answers(driver.turn()) == []
    effects = driver.hear(A, IndexData((driver.block(0, 0, 1),)))
    (answer,) = answers(effects)
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, Record)
    assert answer.value.seqnum == 0


def test_index_data_that_runs_ahead_of_the_metalog_waits_for_it() -> None:
    driver = joined()
    driver.hear(A, IndexData((driver.block(0, 0, 1),)))
    assert driver.engine.tag_position == 0
    driver.order(1, index_data=False)
    assert driver.engine.tag_position == 1


def test_a_found_record_that_is_not_cached_is_read_from_a_replica() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(1)
    assert driver.read(0) is PENDING
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert replica in (A, B)
    assert isinstance(request, ReadRecords)
    assert (request.shard, request.seqnums, request.origin) == (SHARD, (0,), ENGINE)
    effects = driver.hear(replica, RecordsRead(request.request, SHARD, (stored(0),), ()))
    (answer,) = answers(effects)
    assert isinstance(answer, Answered)
    assert answer.position == 1


def test_a_miss_asks_every_index_shard_about_the_same_prefix() -> None:
    driver = joined(join_at=(4, 40))
    driver.read(7)
    lookups = sends(driver.turn(), IndexLookup)
    assert [to for to, _ in lookups] == ["index-0-0", "index-1-0"]
    first, second = (message for _, message in lookups)
    assert first == second
    assert isinstance(first, IndexLookup)
    assert (first.bound, first.limit, first.position, first.count) == (7, 40, 4, 1)


def test_a_lookup_answered_by_storage_teaches_the_popularity_cache() -> None:
    driver = joined(join_at=(4, 40))
    driver.read(7)
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    effects = driver.hear(A, RecordsRead(lookup.request, SHARD, (stored(9),), ()))
    (answer,) = answers(effects)
    assert isinstance(answer, Answered)
    assert answer.position == 4
    again = driver.engine.read(Direction.NEXT, EMPTY_TAG, 9, 0, "reader")
    assert isinstance(again, Record)
    assert again.seqnum == 9


def test_a_lookup_without_a_match_is_a_proven_none() -> None:
    driver = joined(join_at=(4, 40))
    driver.read(7)
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    effects = driver.hear(NodeId("aggregator-0"), LookupResult(lookup.request, (), ()))
    assert answers(effects) == [Answered(None, 4)]


def test_unknown_is_not_absent_the_other_replica_is_asked_then_the_record_is_lost() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(1)
    driver.read(0)
    ((first, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    effects = driver.hear(first, RecordsRead(request.request, SHARD, (), (0,)))
    ((second, again),) = sends(effects, ReadRecords)
    assert {first, second} == {A, B}
    assert isinstance(again, ReadRecords)
    (lost,) = answers(driver.hear(second, RecordsRead(again.request, SHARD, (), (0,))))
    assert isinstance(lost, DataLossError)


def test_a_lookup_without_answer_is_started_again_and_its_late_answer_finds_nothing() -> None:
    driver = joined(join_at=(4, 40), lookup_timeout_s=1, read_timeout_s=3)
    driver.read(7)
    ((_, first), _) = sends(driver.turn(), IndexLookup)
    driver.now = 1.5
    ((_, second), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(first, IndexLookup)
    assert isinstance(second, IndexLookup)
    assert second.request != first.request
    assert answers(driver.hear(A, RecordsRead(first.request, SHARD, (stored(9),), ()))) == []
    driver.now = 4.0
    (failed,) = answers(driver.turn())
    assert isinstance(failed, QuorumUnavailableError)


def test_a_page_is_gathered_from_cache_and_storage_in_order() -> None:
    driver = joined(record_cache_bytes_max=1500)
    for data in (b"old" * 400, b"own"):
        driver.engine.append(data, (LOG, TAG), NAMES, "waiter")
        driver.turn()
        driver.order(1)
    driver.engine.append(b"new" * 100, (LOG, TAG), NAMES, "waiter")
    driver.turn()
    driver.order(1)
    driver.engine.read_page(TAG, 0, 0, 10, "pager")
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    assert request.seqnums == (0,)
    effects = driver.hear(replica, RecordsRead(request.request, SHARD, (stored(0),), ()))
    (answer,) = answers(effects)
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, list)
    assert [(r.seqnum, r.data) for r in answer.value] == [(0, b"d"), (1, b"own"), (2, b"new" * 100)]


def test_a_page_that_storage_cuts_short_ends_at_the_gap() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(3)
    driver.engine.read_page(TAG, 0, 0, 10, "pager")
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    some = RecordsRead(request.request, SHARD, (stored(0), stored(1)), ())
    (answer,) = answers(driver.hear(replica, some))
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, list)
    assert [r.seqnum for r in answer.value] == [0, 1]


def test_a_watch_fires_when_index_data_with_its_tag_arrives_and_only_then() -> None:
    driver = joined()
    driver.engine.watch(TAG, 0, "watcher")
    driver.engine.watch(999, 0, "other")
    driver.engine.watch(TAG, 5, "beyond")
    effects = driver.order(1)
    assert [e.waiter for e in effects if isinstance(e, Answer)] == ["watcher"]


def test_a_gap_in_the_metalog_is_fetched() -> None:
    driver = joined()
    late = NewRecords(1, ViewNumber(1), Epoch(1), {SHARD: 1})
    effects = driver.hear(PRIMARY, MetalogEntries((late,)))
    assert sends(effects, MetalogWanted) == [(PRIMARY, MetalogWanted(0))]


def test_index_data_that_does_not_come_is_asked_for() -> None:
    driver = joined(resend_s=1)
    driver.order(1, index_data=False)
    driver.turn()
    deadline = driver.engine.deadline()
    assert deadline is not None
    driver.now = deadline
    wanted = sends(driver.turn(), IndexDataWanted)
    assert (A, IndexDataWanted(0, 1, 1)) in wanted


def test_the_tail_is_the_primarys_word() -> None:
    driver = joined()
    driver.engine.read_tail("asker")
    ((_, question),) = sends(driver.turn(), TailWanted)
    assert isinstance(question, TailWanted)
    effects = driver.hear(PRIMARY, TailIs(question.request, 9, 99, {}))
    assert answers(effects) == [Answered(99, 9)]


def test_reading_a_whole_log_tries_the_record_at_the_bound_before_the_index_tier() -> None:
    driver = joined(
        record_cache_bytes_max=0, tag_cache_seqnums_max=0, tag_cache_seqnums_per_tag_max=0
    )
    driver.order(1)
    driver.engine.read(Direction.NEXT, LOG, 0, 0, "reader", b"orders")
    effects = driver.turn()
    assert sends(effects, IndexLookup) == []
    ((replica, request),) = sends(effects, ReadRecords)
    assert isinstance(request, ReadRecords)
    (answer,) = answers(driver.hear(replica, RecordsRead(request.request, SHARD, (stored(0),), ())))
    assert isinstance(answer, Answered)
    driver.engine.read(Direction.NEXT, LOG, 0, 0, "reader", b"other")
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    foreign = driver.hear(replica, RecordsRead(request.request, SHARD, (stored(0),), ()))
    assert len(sends(foreign, IndexLookup)) == 2


def test_a_node_that_stops_tells_everyone_who_waits_what_it_knows() -> None:
    driver = joined()
    driver.engine.append(b"sent", (LOG, TAG), NAMES, "sent")
    driver.turn()
    driver.engine.append(b"kept", (LOG, TAG), NAMES, "kept")
    driver.engine.watch(TAG, 0, "watcher")
    driver.read(7, tag=99)
    told = {e.waiter: type(e.outcome) for e in driver.engine.abandon() if isinstance(e, Answer)}
    assert told == {
        "sent": AppendOutcomeUnknownError,
        "kept": NotReadyError,
        "watcher": NotReadyError,
        "reader": NotReadyError,
    }
    assert driver.engine.abandon() == []


def test_answers_to_an_earlier_life_find_nothing() -> None:
    driver = joined(join_at=(4, 40))
    driver.read(7)
    driver.turn()
    for request in range(8):
        late = RecordsRead(request, SHARD, (stored(9),), ())
        assert answers(driver.hear(A, late)) == []


def test_a_read_through_the_suffix_takes_the_session_to_the_metalogs_position() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(1, index_data=False)
    assert driver.read(0, tag=EMPTY_TAG) is PENDING
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    read = RecordsRead(request.request, SHARD, (stored(0),), ())
    (answer,) = answers(driver.hear(replica, read))
    assert isinstance(answer, Answered)
    assert answer.position == 1


def test_a_record_has_one_time_from_memory_and_from_storage() -> None:
    driver = joined()
    driver.now = 1_700_000_000.123_456_789
    driver.engine.append(b"one", (LOG, TAG), NAMES, "waiter")
    ((_, sent), _) = sends(driver.turn(), AppendBatch)
    driver.order(1)
    record = driver.read(0)
    assert isinstance(record, Record)
    assert isinstance(sent, AppendBatch)
    assert record.time == RecordBatch(sent.batch).record(0).time_us / 1e6


def test_a_lost_last_entry_is_asked_for_while_a_watch_waits() -> None:
    driver = joined(resend_s=1)
    driver.engine.watch(TAG, 0, "watcher")
    driver.turn()
    deadline = driver.engine.deadline()
    assert deadline is not None
    driver.now = deadline
    assert sends(driver.turn(), MetalogWanted) == [(PRIMARY, MetalogWanted(0))]


def test_the_metalog_is_asked_for_once_a_gap_and_again_when_a_page_was_not_all() -> None:
    driver = joined()
    entries = [NewRecords(p, ViewNumber(1), Epoch(1), {SHARD: 1}) for p in range(5)]
    first = driver.hear(PRIMARY, MetalogEntries((entries[4],)))
    assert len(sends(first, MetalogWanted)) == 1
    assert sends(driver.hear(PRIMARY, MetalogEntries((entries[4],))), MetalogWanted) == []
    more = driver.hear(PRIMARY, MetalogEntries(tuple(entries[:2])))
    assert sends(more, MetalogWanted) == [(PRIMARY, MetalogWanted(2))]


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (NodeId("storage-9"), ((), (0,), SHARD)),
        (A, ((stored(1),), (), SHARD)),
        (A, ((stored(0), stored(0)), (), SHARD)),
        (A, ((stored(0),), (0,), SHARD)),
        (A, ((), (), SHARD)),
        (A, ((stored(0),), (), ShardId(1))),
    ],
)
def test_records_other_than_those_asked_for_are_ignored_and_the_read_goes_on(
    sender: NodeId, message: tuple[tuple[StoredRecord, ...], tuple[int, ...], ShardId]
) -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(2)
    driver.read(0)
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    records, unknown, shard = message
    effects = driver.hear(sender, RecordsRead(request.request, shard, records, unknown))
    assert [type(e) for e in effects] == [Ignore]
    asked = RecordsRead(request.request, SHARD, (stored(0),), ())
    assert len(answers(driver.hear(replica, asked))) == 1


@pytest.mark.parametrize(("direction", "foreign"), [(0, 6), (0, 40), (1, 8), (1, -1)])
def test_a_match_outside_of_what_was_looked_for_is_ignored(direction: int, foreign: int) -> None:
    driver = joined(join_at=(4, 40))
    driver.engine.read(Direction(direction), TAG, 7, 0, "reader")
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    read = RecordsRead(lookup.request, SHARD, (stored(foreign),), ())
    for message in (read, LookupResult(lookup.request, (foreign,), (SHARD,))):
        assert [type(e) for e in driver.hear(A, message)] == [Ignore]
    right = RecordsRead(lookup.request, SHARD, (stored(7),), ())
    assert len(answers(driver.hear(A, right))) == 1


def test_too_many_callers_that_wait_for_a_node_are_refused() -> None:
    driver = Driver(lookups_pending_max=2)
    driver.engine.when_ready("one")
    driver.engine.when_ready("two")
    with pytest.raises(OverloadedError):
        driver.engine.when_ready("three")


def test_messages_that_make_no_sense_are_ignored() -> None:
    driver = joined(join_at=(4, 40))
    driver.read(7)
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    senseless: list[tuple[NodeId, Message]] = [
        (A, LookupResult(lookup.request, (1, 2), (SHARD,))),
        (A, RecordsRead(lookup.request, SHARD, (), ())),
        (A, MetalogEntries((NewRecords(4, ViewNumber(1), Epoch(1), {SHARD: 1}),))),
        (PRIMARY, MetalogEntries((NewRecords(4, ViewNumber(1), Epoch(1), {ShardId(70_000): 1}),))),
        (PRIMARY, MetalogEntries((NewRecords(4, ViewNumber(1), Epoch(1), {SHARD: -1}),))),
        (A, ShardOpened(SHARD, Epoch(1), 7)),
    ]
    for sender, message in senseless:
        effects = driver.hear(sender, message)
        assert answers(effects) == []
    assert driver.engine.position == 4
