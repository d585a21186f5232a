"""`Engine` and `Reads` without I/O: joining, appending, the paths of a read, catching up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DataLossError,
    NotReadyError,
    OverloadedError,
    QuorumUnavailableError,
)
from indilog.base.ids import EMPTY_TAG, Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.base.log import Record
from indilog.config import Config
from indilog.kernel.metalog import Floor, NewRecords
from indilog.kernel.records import RecordBatch
from indilog.kernel.view import FIRST_VIEW, view_of
from indilog.roles.role import Answer, AnswerAppends, Effect, Ignore, Started
from indilog.wire.messages import (
    AppendBatch,
    Direction,
    IndexData,
    IndexDataWanted,
    IndexLookup,
    LookupResult,
    Message,
    MetalogWanted,
    ReadRecords,
    RecordsRead,
    ShardStored,
    StoredRecord,
    TailIs,
    TailWanted,
)
from indilog.wire.tag_messages import TrimWanted
from indilog_compute.engine import Engine
from indilog_compute.reads.operation import PENDING, Answered, Tail
from tests.support.metalog_messages import entries_message
from tests.unit.compute.engine_driver import (
    ENGINE,
    JOIN,
    LOG,
    NAMES,
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


def test_an_appended_record_is_acknowledged_with_its_seqnum_and_read_from_memory() -> None:
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "waiter")
    sent = sends(driver.turn(), AppendBatch)
    assert [to for to, _ in sent] == [A, B]
    effects = driver.order(1)
    assert [e for e in effects if isinstance(e, AnswerAppends)] == [AnswerAppends(["waiter"], 0, 1)]
    record = driver.read(0, position=1)
    assert isinstance(record, Record)
    assert (record.seqnum, record.data) == (0, b"one")


def test_a_node_without_a_shard_refuses_appends() -> None:
    view = view_of(engines=1)
    engine = Engine(NodeId("engine-9"), [view], Config())
    engine.handle([Started(Epoch(1))], Instant(0))
    with pytest.raises(NotReadyError):
        engine.append(b"", carrying(), "waiter")


def test_a_join_is_resent_until_the_primary_answers() -> None:
    driver = Driver()
    driver.now = 1.0
    assert sends(driver.turn(), TailWanted) == [(PRIMARY, TailWanted(JOIN, FIRST_VIEW))]


def test_a_node_without_a_shard_resends_its_join_when_its_deadline_says_so() -> None:
    """No other deadline wakes it, because it wants no shard."""
    engine = Engine(NodeId("engine-9"), [view_of(engines=1)], Config())
    asked = sends(engine.handle([Started(Epoch(1))], Instant(0)), TailWanted)
    assert (due := engine.deadline()) is not None
    assert sends(engine.handle([], Instant(due / 2)), TailWanted) == []
    assert sends(engine.handle([], due), TailWanted) == asked


def test_a_read_waits_until_index_data_of_its_session_is_applied() -> None:
    driver = joined()
    driver.engine.append(b"one", carrying(LOG, TAG), "waiter")
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


def test_an_unknown_record_is_requested_from_the_other_replica_then_reported_lost() -> None:
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


def test_a_lookup_without_answer_is_restarted_and_its_late_answer_is_ignored() -> None:
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
        driver.engine.append(data, carrying(LOG, TAG), "waiter")
        driver.turn()
        driver.order(1)
    driver.engine.append(b"new" * 100, carrying(LOG, TAG), "waiter")
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


def test_a_replica_that_lacks_one_record_is_asked_for_the_others_that_it_left_out() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(3)
    driver.engine.read_page(TAG, 0, 0, 10, "pager")
    asked = []
    sent = sends(driver.turn(), ReadRecords)
    for _ in (A, B):
        ((replica, request),) = sent
        assert isinstance(request, ReadRecords)
        asked.append((replica, request.seqnums))
        given = (stored(1),) if 1 in request.seqnums else ()
        unknown = RecordsRead(request.request, SHARD, given, (2,))
        effects = driver.hear(replica, unknown)
        sent = sends(effects, ReadRecords)
    assert sorted(seqnums for _, seqnums in asked) == [(0, 1, 2), (0, 2)]
    assert {replica for replica, _ in asked} == {A, B}
    ((replica, request),) = sent
    assert isinstance(request, ReadRecords)
    assert request.seqnums == (0,)
    page = RecordsRead(request.request, SHARD, (stored(0),), ())
    (answer,) = answers(driver.hear(replica, page))
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, list)
    assert [record.seqnum for record in answer.value] == [0, 1]


def test_records_on_cold_storage_that_does_not_answer_are_not_reported_as_lost() -> None:
    driver = joined(record_cache_bytes_max=0)
    driver.order(4)
    driver.engine.read_page(TAG, 0, 0, 10, "pager")
    sent = sends(driver.turn(), ReadRecords)
    effects: list[Effect] = []
    for _ in (A, B):
        ((replica, request),) = sent
        assert isinstance(request, ReadRecords)
        unknown = RecordsRead(request.request, SHARD, (), request.seqnums, away=(2, 3))
        effects = driver.hear(replica, unknown)
        sent = sends(effects, ReadRecords)
    (lost,) = answers(effects)
    assert isinstance(lost, DataLossError)
    assert (lost.seqnum, lost.next_seqnum) == (0, 2)


def test_a_page_is_bounded_in_bytes_of_tags_too() -> None:
    driver = joined(record_cache_bytes_max=0, page_bytes_max=200)
    driver.order(9)
    driver.engine.read_page(TAG, 0, 0, 10, "pager")
    ((replica, request),) = sends(driver.turn(), ReadRecords)
    assert isinstance(request, ReadRecords)
    names = NAMES + b"\x1fs" + b"y" * 50
    tagged = tuple(StoredRecord(n, 5_000_000, 6_000_000, names, b"d", None) for n in range(9))
    (answer,) = answers(driver.hear(replica, RecordsRead(request.request, SHARD, tagged, ())))
    assert isinstance(answer, Answered)
    assert isinstance(answer.value, list)
    assert [r.seqnum for r in answer.value] == [0, 1]


def test_a_watch_fires_when_index_data_with_its_tag_arrives_and_only_then() -> None:
    driver = joined()
    driver.engine.watches.add(TAG, 0, "watcher")
    driver.engine.watches.add(999, 0, "other")
    driver.engine.watches.add(TAG, 5, "beyond")
    effects = driver.order(1)
    assert [e.waiter for e in effects if isinstance(e, Answer)] == ["watcher"]


def idle_cost(watches: int) -> tuple[int, int]:
    """Return iterations and messages in a minute without an append."""
    driver = joined()
    driver.now += 1
    driver.turn()  # the last check after joining
    for n in range(watches):
        driver.engine.watches.add(1000 + n, 0, f"watcher {n}")
    driver.turn()
    turns = messages = 0
    while (due := driver.engine.deadline()) is not None and due < 60:
        driver.now = max(due, driver.now)
        messages += len(driver.turn())
        turns += 1
    return turns, messages


def test_idle_watches_cost_no_more_than_one_and_no_watch_costs_nothing() -> None:
    assert idle_cost(0) == (0, 0)
    assert idle_cost(1) == idle_cost(1000)
    turns, messages = idle_cost(1)
    assert turns <= 34
    assert messages <= 34, "finally one question in 2 s whether an entry was lost"


def starts_asked(effects: Sequence[Effect]) -> list[int]:
    """Return from where on the primary is asked for entries, each time."""
    return [m.start for _, m in sends(effects, MetalogWanted) if isinstance(m, MetalogWanted)]


def test_a_gap_in_the_metalog_is_fetched() -> None:
    driver = joined()
    late = NewRecords(1, ViewNumber(1), Epoch(1), {SHARD: 1})
    effects = driver.hear(PRIMARY, entries_message((late,)))
    assert starts_asked(effects) == [0]


def test_missing_index_data_is_requested() -> None:
    driver = joined(resend_s=1)
    driver.order(1, index_data=False)
    driver.turn()
    deadline = driver.engine.deadline()
    assert deadline is not None
    driver.now = deadline
    wanted = sends(driver.turn(), IndexDataWanted)
    assert (A, IndexDataWanted(0, 1, 1)) in wanted


def test_the_tail_is_that_of_the_primary() -> None:
    driver = joined()
    driver.engine.read_tail("asker")
    ((_, question),) = sends(driver.turn(), TailWanted)
    assert isinstance(question, TailWanted)
    effects = driver.hear(PRIMARY, TailIs(question.request, 9, 99, {}, time_us=5_000_000))
    assert answers(effects) == [Answered(Tail(99, 5_000_000), 9)]


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


def test_a_trim_that_was_sent_when_the_node_stops_may_still_happen() -> None:
    driver = joined()
    driver.engine.trims.start(Floor(TAG, 1, of_log=False), "sent")
    driver.turn()
    driver.engine.trims.start(Floor(TAG, 2, of_log=False), "kept")
    reported = {e.waiter: type(e.outcome) for e in driver.engine.abandon() if isinstance(e, Answer)}
    assert reported == {"sent": QuorumUnavailableError, "kept": NotReadyError}


def test_a_stopping_node_answers_all_waiting_callers() -> None:
    driver = joined()
    driver.engine.append(b"sent", carrying(LOG, TAG), "sent")
    driver.turn()
    driver.engine.append(b"kept", carrying(LOG, TAG), "kept")
    driver.engine.watches.add(TAG, 0, "watcher")
    driver.read(7, tag=99)
    reported = {e.waiter: type(e.outcome) for e in driver.engine.abandon() if isinstance(e, Answer)}
    assert reported == {
        "sent": AppendOutcomeUnknownError,
        "kept": NotReadyError,
        "watcher": NotReadyError,
        "reader": NotReadyError,
    }
    assert driver.engine.abandon() == []


def test_answers_to_an_earlier_epoch_are_ignored() -> None:
    driver = joined(join_at=(4, 40))
    driver.read(7)
    driver.turn()
    for request in range(8):
        late = RecordsRead(request, SHARD, (stored(9),), ())
        assert answers(driver.hear(A, late)) == []


def test_a_read_through_the_suffix_moves_the_session_to_the_metalogs_position() -> None:
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
    driver.engine.append(b"one", carrying(LOG, TAG), "waiter")
    ((_, sent), _) = sends(driver.turn(), AppendBatch)
    driver.order(1)
    record = driver.read(0)
    assert isinstance(record, Record)
    assert isinstance(sent, AppendBatch)
    assert record.time == RecordBatch(sent.batch).record(0).time_us / 1e6


def test_a_lost_last_entry_is_requested_while_a_watch_waits() -> None:
    driver = joined(resend_s=1)
    driver.engine.watches.add(TAG, 0, "watcher")
    driver.turn()
    deadline = driver.engine.deadline()
    assert deadline is not None
    driver.now = deadline
    assert starts_asked(driver.turn()) == [0]


def test_a_lost_last_entry_is_requested_while_an_append_waits() -> None:
    driver = joined(resend_s=1)
    driver.engine.append(b"d", carrying(TAG), "caller")
    driver.turn()
    deadline = driver.engine.deadline()
    assert deadline is not None
    driver.now = deadline
    assert starts_asked(driver.turn()) == [0]


def test_the_metalog_is_requested_once_per_gap_and_again_after_an_incomplete_page() -> None:
    driver = joined()
    entries = [NewRecords(p, ViewNumber(1), Epoch(1), {SHARD: 1}) for p in range(5)]
    first = driver.hear(PRIMARY, entries_message((entries[4],)))
    ((_, wanted),) = sends(first, MetalogWanted)
    assert isinstance(wanted, MetalogWanted)
    assert sends(driver.hear(PRIMARY, entries_message((entries[4],))), MetalogWanted) == []
    page = entries_message(entries[:2], committed=5, request=wanted.request)
    more = driver.hear(PRIMARY, page)
    assert starts_asked(more) == [2]


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
def test_unrequested_records_are_ignored_and_the_read_continues(
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
def test_a_match_outside_the_requested_range_is_ignored(direction: int, foreign: int) -> None:
    driver = joined(join_at=(4, 40))
    driver.engine.read(Direction(direction), TAG, 7, 0, "reader")
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    read = RecordsRead(lookup.request, SHARD, (stored(foreign),), ())
    for message in (read, LookupResult(lookup.request, (foreign,), (SHARD,))):
        assert [type(e) for e in driver.hear(A, message)] == [Ignore]
    right = RecordsRead(lookup.request, SHARD, (stored(7),), ())
    assert len(answers(driver.hear(A, right))) == 1


def test_callers_over_the_limit_of_waiting_callers_are_refused() -> None:
    driver = Driver(lookups_pending_max=2)
    driver.engine.when_ready("one")
    driver.engine.when_ready("two")
    with pytest.raises(OverloadedError):
        driver.engine.when_ready("three")


def test_impossible_messages_are_ignored() -> None:
    driver = joined(join_at=(4, 40))
    driver.read(7)
    ((_, lookup), _) = sends(driver.turn(), IndexLookup)
    assert isinstance(lookup, IndexLookup)
    senseless: list[tuple[NodeId, Message]] = [
        (A, LookupResult(lookup.request, (1, 2), (SHARD,))),
        (A, RecordsRead(lookup.request, SHARD, (), ())),
        (A, entries_message((NewRecords(4, ViewNumber(1), Epoch(1), {SHARD: 1}),))),
        (PRIMARY, entries_message((NewRecords(4, ViewNumber(1), Epoch(1), {ShardId(70_000): 1}),))),
        (PRIMARY, entries_message((NewRecords(4, ViewNumber(1), Epoch(1), {SHARD: -1}),))),
        (A, ShardStored(ShardId(9), Epoch(1), 7)),
    ]
    for sender, message in senseless:
        effects = driver.hear(sender, message)
        assert answers(effects) == []
    assert driver.engine.position == 4


def resent_at(driver: Driver, kind: type[Message]) -> list[float]:
    """Return when an engine that receives nothing sends messages of `kind`, for 20 s."""
    at: list[float] = []
    for _ in range(400):
        at += [driver.now] * len(sends(driver.turn(), kind))
        due = driver.engine.deadline()
        if due is None or due > 20:
            break
        driver.now = max(due, driver.now + 0.01)
    return at


def test_unanswered_trims_and_joins_are_resent_with_growing_pauses() -> None:
    trimming = joined(resend_s=0.25, resend_s_max=2, read_timeout_s=30)
    trimming.engine.trims.start(Floor(TAG, 1, of_log=False), "trimmer")
    joining = Driver(resend_s=0.25, resend_s_max=2)
    for at in (resent_at(trimming, TrimWanted), resent_at(joining, TailWanted)):
        pauses = [later - earlier for earlier, later in pairwise(at)]
        assert pauses[-1] == pytest.approx(2, abs=0.02)
        assert 10 <= len(at) <= 14, "a fixed pause would give 80"


def test_a_trim_has_another_number_than_any_of_an_earlier_epoch() -> None:
    """The primary answers a number that it knows as a repetition, without a trim."""
    driver = joined()
    driver.engine.trims.start(Floor(TAG, 1, of_log=False), "trimmer")
    ((_, wanted),) = sends(driver.turn(), TrimWanted)
    assert isinstance(wanted, TrimWanted)
    assert wanted.request > JOIN


def test_an_unanswered_trim_fails_after_its_timeout() -> None:
    driver = joined(resend_s=0.25, resend_s_max=2, read_timeout_s=3.1)
    driver.engine.trims.start(Floor(TAG, 1, of_log=False), "trimmer")
    driver.turn()
    while driver.now < 20:
        due = driver.engine.deadline()
        assert due is not None
        driver.now = max(due, driver.now + 0.01)
        if answers(driver.turn()):
            break
    assert driver.now == pytest.approx(3.1, abs=0.05)
