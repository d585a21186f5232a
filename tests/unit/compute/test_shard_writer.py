"""`ShardWriter`: takeover of a shard, batches, resends, timeouts."""

from __future__ import annotations

import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DiskFullError,
    NotReadyError,
    OverloadedError,
    SealedError,
)
from indilog.base.ids import Epoch, Instant, NodeId, ShardId, tag_columns
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.metalog import Span
from indilog.kernel.records import RecordBatch
from indilog.roles.role import Answer, Effect, Send
from indilog.wire.messages import (
    AppendBatch,
    ShardStored,
    ShardStoredWanted,
    ShardWanted,
)
from indilog_compute.shard_writer import ShardWriter, Takeover

A, B, C = NodeId("storage-0"), NodeId("storage-1"), NodeId("storage-2")
SHARD = ShardId(3)
EPOCH = Epoch(7)
ASKED = ShardStoredWanted(SHARD, EPOCH)
WANTED = ShardWanted(SHARD, EPOCH)
COLUMNS = tag_columns("orders", ("new",))


def at(seconds: float) -> Instant:
    return Instant(seconds)


def writer(*replicas: NodeId, **settings: float) -> ShardWriter:
    """Return a writer that has asked for its shard."""
    shard = ShardWriter(SHARD, replicas or (A,), EPOCH, Config(node=node_config(**settings)))
    assert shard.want(at(0)) == WANTED
    return shard


def opened(*replicas: NodeId, cut: int = 0, **settings: float) -> ShardWriter:
    """Return a writer that the metalog names where `cut` records of the shard are ordered."""
    shard = writer(*replicas, **settings)
    assert shard.named(EPOCH, cut) == []
    assert shard.takeover is Takeover.OPEN
    return shard


def append(shard: ShardWriter, *data: bytes) -> None:
    for item in data:
        shard.add(item, COLUMNS, item)


def batches(effects: list[Effect]) -> list[RecordBatch]:
    return [
        RecordBatch(e.message.batch)
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, AppendBatch)
    ]


def contents(batch: RecordBatch) -> list[bytes]:
    return [batch.record(i).data for i in range(len(batch))]


def test_a_writer_begins_where_the_entry_that_names_it_finds_the_shard_ordered() -> None:
    shard = writer(A, B)
    append(shard, b"x", b"y")
    assert shard.flush(at(0)) == [], "no entry names it"
    assert shard.named(Epoch(EPOCH - 1), 3) == []
    assert shard.flush(at(0)) == []
    assert shard.named(EPOCH, 5) == []
    first, second = batches(shard.flush(at(1)))
    header = first.header
    assert (header.first, header.epoch, header.shard) == (5, EPOCH, SHARD)
    assert contents(first) == contents(second) == [b"x", b"y"]


def test_the_shard_is_requested_again_after_a_pause_and_from_a_new_primary_at_once() -> None:
    shard = writer(resend_s=1)
    assert shard.want(at(0.5)) is None
    assert shard.deadline() == at(1)
    assert shard.want(at(1)) == WANTED
    shard.make_due()
    assert shard.want(at(1)) == WANTED
    shard.named(EPOCH, 0)
    assert shard.want(at(100)) is None


def test_a_node_that_joins_late_learns_that_it_has_its_shard() -> None:
    shard = writer()
    assert shard.joined(EPOCH, 4) == []
    append(shard, b"x")
    assert batches(shard.flush(at(0)))[0].header.first == 4


def test_a_replica_that_lost_its_disk_gets_the_unordered_records() -> None:
    """A4: it learns of the writer from the metalog, and reports its stored prefix."""
    shard = opened(cut=4)
    append(shard, b"x")
    (sent,) = shard.flush(at(1))
    assert shard.on_stored(A, ShardStored(SHARD, Epoch(0), 0), at(1)) == [], "not yet"
    assert shard.on_stored(A, ShardStored(SHARD, EPOCH, 4), at(1)) == [sent]


def test_a_writer_whose_entry_was_replaced_asks_again_and_keeps_its_batches() -> None:
    shard = opened(cut=4, frame_records_max=1)
    append(shard, b"ordered meanwhile", b"in flight")
    _, second = shard.flush(at(1))
    (unknown,) = shard.joined(Epoch(EPOCH - 1), 5)
    assert isinstance(unknown, Answer)
    assert isinstance(unknown.outcome, AppendOutcomeUnknownError)
    assert shard.takeover is Takeover.ASKING
    assert shard.want(at(1)) == WANTED
    assert shard.named(EPOCH, 5) == []
    assert shard.on_stored(A, ShardStored(SHARD, EPOCH, 5), at(1)) == [second]
    append(shard, b"next")
    assert batches(shard.flush(at(2)))[0].header.first == 6


def test_a_full_disk_refuses_unsent_and_new_appends() -> None:
    """A35: at once, with one sentence; batches in flight may still find room."""
    shard = opened(frames_in_flight_max=1)
    append(shard, b"sent")
    shard.flush(at(0))
    append(shard, b"waits")
    (refused,) = shard.on_disk_full(A, full=True, now=at(1))
    assert isinstance(refused, Answer)
    assert (refused.waiter, type(refused.outcome)) == (b"waits", DiskFullError)
    with pytest.raises(DiskFullError, match="no disk space left on storage-0"):
        append(shard, b"late")
    full = [shard.is_read_only]
    with pytest.raises(DiskFullError):
        shard.add_batch([(b"late", COLUMNS)], b"late")
    shard.check_invariants()
    assert shard.pending == 1
    shard.on_disk_full(A, full=False, now=at(2))
    full.append(shard.is_read_only)
    assert full == [True, False]
    append(shard, b"again")


def test_appends_continue_while_the_ack_quorum_has_room() -> None:
    config = Config(cluster=ClusterConfig(storage_nodes=3, replicas=3, ack_quorum=2))
    shard = ShardWriter(SHARD, (A, B, C), EPOCH, config)
    shard.named(EPOCH, 0)
    full: list[bool] = []
    for node in (A, B):
        shard.on_disk_full(node, full=True, now=at(1))
        full.append(shard.is_read_only)
    shard.on_disk_full(A, full=False, now=at(1))
    full.append(shard.is_read_only)
    shard.on_disk_full(NodeId("sequencer-0"), full=True, now=at(1))
    assert [*full, shard.is_read_only] == [False, True, False, True]


def test_the_disk_of_a_replica_that_does_not_count_does_not_matter() -> None:
    config = Config(cluster=ClusterConfig(storage_nodes=3, replicas=2))
    shard = ShardWriter(SHARD, (A, B), EPOCH, config, copies=2)
    shard.named(EPOCH, 0)
    assert shard.move((B, C, A)) == [Send(C, ASKED)]
    shard.on_disk_full(A, full=True, now=at(1))
    full = [shard.is_read_only]
    shard.on_disk_full(C, full=True, now=at(1))
    full.append(shard.is_read_only)
    shard.move((B, A))
    assert [*full, shard.is_read_only] == [False, True, True]
    shard.move((B,))
    assert not shard.is_read_only


def test_a_node_without_recent_disk_full_notifications_is_tried_again() -> None:
    shard = opened()
    shard.on_disk_full(A, full=True, now=at(1))
    due = shard.deadline()
    assert due is not None
    shard.on_time(at(due - 0.1))
    with pytest.raises(DiskFullError):
        append(shard, b"early")
    shard.on_time(due)
    append(shard, b"again")


def test_the_appends_of_an_iteration_are_one_batch_up_to_the_frame_limit() -> None:
    shard = opened(frame_records_max=3)
    append(shard, b"a", b"b", b"c", b"d")
    sent = batches(shard.flush(at(0)))
    assert [contents(batch) for batch in sent] == [[b"a", b"b", b"c"], [b"d"]]
    assert sent[1].header.first == 3


def test_records_collect_while_all_frames_are_in_flight() -> None:
    shard = opened(frames_in_flight_max=1)
    append(shard, b"a")
    assert len(batches(shard.flush(at(0)))) == 1
    append(shard, b"b")
    assert shard.flush(at(0)) == []
    append(shard, b"c")
    shard.pop_ordered(Span(SHARD, 0, 100, 1))
    (batch,) = batches(shard.flush(at(0)))
    assert contents(batch) == [b"b", b"c"]


def test_ordered_batches_get_the_seqnums_of_their_span() -> None:
    shard = opened(cut=5)
    append(shard, b"a", b"b")
    shard.flush(at(0))
    (done,) = shard.pop_ordered(Span(SHARD, 5, 50, 2))
    assert (done.first_seqnum, done.waiters) == (50, [b"a", b"b"])
    assert shard.pending == 0


def test_a_replica_that_lacks_batches_gets_them_from_its_prefix_on() -> None:
    shard = opened(frame_records_max=1)
    append(shard, b"a", b"b", b"c")
    shard.flush(at(0))
    again = shard.on_stored(A, ShardStored(SHARD, EPOCH, 1), at(0))
    assert [batch.header.first for batch in batches(again)] == [1, 2]


def asked(effects: list[Effect]) -> list[NodeId]:
    return [e.to for e in effects if isinstance(e, Send) and e.message == ASKED]


def test_without_answers_replicas_are_asked_and_callers_get_an_unknown_outcome_once() -> None:
    shard = opened(append_timeout_s=5, resend_s=1)
    append(shard, b"a")
    shard.flush(at(0))
    assert shard.on_time(at(0.5)) == []
    assert asked(shard.on_time(at(1))) == [A]
    assert shard.deadline() == at(2)
    effects = shard.on_time(at(5))
    (answer,) = [e for e in effects if isinstance(e, Answer)]
    assert isinstance(answer.outcome, AppendOutcomeUnknownError)
    assert asked(effects) == [A], "the batch is kept: localids must be consecutive"
    assert not [e for e in shard.on_time(at(8)) if isinstance(e, Answer)]


def test_only_the_replica_that_lacks_a_batch_gets_it_again() -> None:
    shard = opened(A, B, resend_s=1, frame_records_max=1)
    append(shard, b"a", b"b")
    shard.flush(at(0))
    shard.on_time(at(1))
    assert shard.on_stored(A, ShardStored(SHARD, EPOCH, 2), at(1)) == [], (
        "the replica has all batches"
    )
    again = shard.on_stored(B, ShardStored(SHARD, EPOCH, 1), at(1))
    assert [(e.to, e.message) for e in again if isinstance(e, Send)] == [
        (B, AppendBatch(shard._in_flight[1].encoded))
    ]


def test_nothing_is_resent_to_a_slow_replica() -> None:
    """The replica accepted all batches, and its syncs are slow: resends would make them slower."""
    shard = opened(resend_s=0.25, resend_s_max=2.0, append_timeout_s=100)
    append(shard, b"a")
    shard.flush(at(0))
    sent = questions = 0
    for tenth in range(400):
        now = at(tenth / 10)
        effects = shard.on_time(now)
        questions += len(asked(effects))
        for replica in asked(effects):
            answer = ShardStored(SHARD, EPOCH, 1)
            sent += len(batches(shard.on_stored(replica, answer, now)))
    assert sent == 0
    assert questions <= 2 * (4 + 40 / 2)


def test_an_ordered_batch_restarts_the_pause() -> None:
    shard = opened(resend_s=1, resend_s_max=8)
    append(shard, b"a")
    shard.flush(at(0))
    for moment in (1, 2, 4):
        shard.on_time(at(moment))
    assert shard.deadline() == at(8)
    append(shard, b"b")
    shard.flush(at(5))
    shard.pop_ordered(Span(SHARD, 0, 0, 1))
    assert shard.deadline() == at(6)


def test_a_newer_writer_ends_this_one_and_each_caller_gets_its_outcome() -> None:
    shard = opened(frames_in_flight_max=1)
    append(shard, b"sent")
    shard.flush(at(0))
    append(shard, b"kept")
    effects = shard.on_stored(A, ShardStored(SHARD, Epoch(8), 0), at(0))
    outcomes = {e.waiter: type(e.outcome) for e in effects if isinstance(e, Answer)}
    assert outcomes == {b"sent": AppendOutcomeUnknownError, b"kept": SealedError}
    with pytest.raises(SealedError, match="Another writer"):
        append(shard, b"late")
    assert shard.flush(at(1)) == []
    shard.check_invariants()


def test_the_append_beyond_the_limit_is_refused_whole() -> None:
    shard = opened(append_pending_max=2)
    append(shard, b"a", b"b")
    with pytest.raises(OverloadedError, match="2 appends"):
        append(shard, b"c")
    (batch,) = batches(shard.flush(at(0)))
    assert contents(batch) == [b"a", b"b"]


def test_appends_beyond_the_limit_of_bytes_are_refused_until_some_are_ordered() -> None:
    shard = opened(append_pending_bytes_max=5_000)
    while shard.pending < 5:
        append(shard, b"x" * 1_000)
    with pytest.raises(OverloadedError, match="5 appends"):
        append(shard, b"one more")
    shard.flush(at(0))
    with pytest.raises(OverloadedError, match="5 appends"):
        append(shard, b"in flight")
    shard.pop_ordered(Span(SHARD, 0, 0, 5))
    append(shard, b"room again")
    shard.check_invariants()


def test_an_open_batch_takes_more_records_once_others_are_ordered() -> None:
    shard = opened(append_pending_max=3)
    append(shard, b"a", b"b")
    shard.flush(at(0))
    append(shard, b"c")
    with pytest.raises(OverloadedError):
        append(shard, b"refused")
    shard.pop_ordered(Span(SHARD, 0, 0, 2))
    append(shard, b"d", b"e")
    (batch,) = batches(shard.flush(at(0)))
    assert contents(batch) == [b"c", b"d", b"e"]


def test_only_the_first_record_of_an_open_batch_needs_a_flush() -> None:
    shard = opened(frame_records_max=2)
    assert [shard.add(b"x", COLUMNS, n) for n in range(5)] == [True, False, True, False, True]
    shard.flush(at(0))
    assert shard.add(b"x", COLUMNS, 5)


def test_a_stopped_node_refuses_appends() -> None:
    shard = opened()
    append(shard, b"a")
    assert len(shard.abandon()) == 1
    with pytest.raises(NotReadyError, match="has stopped"):
        append(shard, b"b")
    with pytest.raises(NotReadyError, match="has stopped"):
        shard.add_batch([(b"c", COLUMNS)], "caller")
    assert shard.pending == 0


def test_a_batch_of_a_caller_is_not_split_by_the_frame_limit() -> None:
    shard = opened(frame_records_max=2)
    append(shard, b"before")
    shard.add_batch([(bytes([n]), COLUMNS) for n in range(5)], "caller")
    append(shard, b"after")
    sent = [contents(batch) for batch in batches(shard.flush(at(0)))]
    assert sent == [[b"before"], [bytes([n]) for n in range(5)], [b"after"]]
    _, whole, _ = shard.pop_ordered(Span(SHARD, 0, 0, 7))
    assert whole.waiters == ["caller", None, None, None, None]
    shard.check_invariants()


def test_small_batches_of_callers_share_a_frame() -> None:
    shard = opened(frame_records_max=100)
    shard.add_batch([(b"a", COLUMNS), (b"b", COLUMNS)], "first")
    append(shard, b"c")
    shard.add_batch([(b"d", COLUMNS), (b"e", COLUMNS)], "second")
    (batch,) = batches(shard.flush(at(0)))
    assert contents(batch) == [b"a", b"b", b"c", b"d", b"e"]
    (done,) = shard.pop_ordered(Span(SHARD, 0, 10, 5))
    assert done.waiters == ["first", None, b"c", "second", None]


def test_an_append_that_waits_too_long_for_the_shard_to_open_has_no_effect() -> None:
    shard = writer(A, append_timeout_s=5, resend_s=1)
    append(shard, b"a")
    shard.on_time(at(1))
    answers = [e for e in shard.on_time(at(7)) if isinstance(e, Answer)]
    assert [type(answer.outcome) for answer in answers] == [NotReadyError]
    assert shard.pending == 0


def test_an_entry_that_names_a_newer_writer_fences_this_one() -> None:
    for shard in (opened(), writer()):
        append(shard, b"never ordered")
        sent = bool(shard.flush(at(0)))
        (answer,) = shard.named(Epoch(8), 0)
        assert isinstance(answer, Answer)
        assert isinstance(answer.outcome, AppendOutcomeUnknownError if sent else SealedError)
        assert shard.takeover is Takeover.LOST
        assert shard.named(EPOCH, 0) == []
        assert shard.takeover is Takeover.LOST


def test_a_batch_that_a_replica_always_refuses_is_resent_with_pauses() -> None:
    shard = opened(resend_s=1)
    append(shard, b"a")
    shard.flush(at(0))
    assert len(batches(shard.on_stored(A, ShardStored(SHARD, EPOCH, 0), at(0)))) == 1
    assert shard.on_stored(A, ShardStored(SHARD, EPOCH, 0), at(0.5)) == []
    assert len(batches(shard.on_stored(A, ShardStored(SHARD, EPOCH, 0), at(2)))) == 1


def test_no_frame_exceeds_the_limit_of_storage_for_any_tags() -> None:
    limit = Config().cluster.batch_bytes_max
    shard = opened(frame_bytes=limit, frame_records_max=10_000, frames_in_flight_max=100)
    many = tuple(f"{n:0>250}" for n in range(64))
    columns = tag_columns("orders", many)
    append(shard, b"x" * 350_000)
    shard.add_batch([(b"", columns)] * 240, "caller")
    for _ in range(8):
        shard.add(b"y" * 1_000_000, columns, "big")
    sent: list[RecordBatch] = []
    while shard.pending:
        sent += batches(shard.flush(at(0)))
        shard.pop_ordered(Span(SHARD, 0, 0, sent[-1].header.end))
    assert max(len(batch.buffer) for batch in sent) <= limit


def test_appends_after_a_window_that_does_not_move_fail_as_not_appended() -> None:
    shard = opened(frames_in_flight_max=1, append_timeout_s=5, resend_s=1)
    append(shard, b"sent")
    shard.flush(at(0))
    append(shard, b"kept")
    shard.on_time(at(1))
    answers = {e.waiter: type(e.outcome) for e in shard.on_time(at(7)) if isinstance(e, Answer)}
    assert answers == {b"sent": AppendOutcomeUnknownError, b"kept": NotReadyError}


NEW = ShardId(9)


def test_what_is_not_ordered_is_sent_to_the_new_shard_first_and_in_order() -> None:
    shard = opened(A, frames_in_flight_max=2, frame_records_max=1)
    append(shard, b"a", b"b", b"c")
    assert [contents(batch) for batch in batches(shard.flush(at(1)))] == [[b"a"], [b"b"]]
    (done,) = shard.pop_ordered(Span(SHARD, 0, 40, 1))
    assert done.waiters == [b"a"]
    shard.continue_on(NEW, (B,))
    append(shard, b"d")
    shard.check_invariants()
    assert shard.pending == 3
    assert shard.flush(at(1)) == [], "it is not named yet"
    assert shard.want(at(1)) == ShardWanted(NEW, EPOCH)
    assert shard.named(EPOCH, 0) == []
    sent = shard.flush(at(2))
    assert {effect.to for effect in sent if isinstance(effect, Send)} == {B}
    found = batches(sent)
    assert [(b.header.shard, b.header.first, contents(b)) for b in found] == [
        (NEW, 0, [b"b"]), (NEW, 1, [b"c"]),
    ]  # fmt: skip
    shard.pop_ordered(Span(NEW, 0, 41, 2))
    assert [contents(batch) for batch in batches(shard.flush(at(2)))] == [[b"d"]]
    shard.check_invariants()


def test_records_with_an_unknown_outcome_are_not_sent_to_the_new_shard() -> None:
    shard = opened(A, append_timeout_s=5.0)
    append(shard, b"late")
    shard.flush(at(1))
    assert [type(e.outcome) for e in shard.on_time(at(7)) if isinstance(e, Answer)] == [
        AppendOutcomeUnknownError
    ]
    assert shard.barrier == 1
    shard.continue_on(NEW, (A,))
    shard.check_invariants()
    assert (shard.barrier, shard.pending) == (0, 0)
    shard.named(EPOCH, 0)
    assert shard.flush(at(8)) == []


def test_a_record_that_is_resent_may_still_time_out_with_nothing_appended() -> None:
    """Its first shard has not ordered it, and never will."""
    shard = opened(A, append_timeout_s=5.0)
    append(shard, b"a")
    shard.flush(at(1))
    shard.continue_on(NEW, (A,))
    shard.want(at(1))
    (answer,) = [e for e in shard.on_time(at(20)) if isinstance(e, Answer)]
    assert isinstance(answer.outcome, NotReadyError)
    assert "nothing was appended" in str(answer.outcome)
