"""The primary, through its sequencer role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from indilog.base.errors import DataDirectoryError, DataLossError
from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import (
    Entry,
    NewRecords,
    NewWriters,
    decode_entry,
    encode_entry,
)  # fmt: skip
from indilog.kernel.view import View, view_of
from indilog.roles.role import (
    Effect,
    FrameKind,
    Ignore,
    Location,
    Lost,
    Persist,
    Persisted,
    Received,
    Send,
    SpaceChanged,
)
from indilog.wire.messages import (
    DiskFull,
    MetalogEntries,
    MetalogWanted,
    ShardProgress,
    ShardStored,
    ShardWanted,
    TailIs,
    TailWanted,
    TermIs,
)
from indilog.wire.sequencer_messages import MetalogAppend, MetalogStored, Seal, Sealed
from indilog_ordering.sequencer import Sequencer
from tests.support import metalog_messages
from tests.support.metalog_messages import entries_message, with_writers

MessageT = TypeVar("MessageT")

PRIMARY, FIRST, SECOND = (NodeId(f"sequencer-{i}") for i in range(3))
STORAGE, ENGINE = NodeId("storage-0"), NodeId("engine-0")
NOWHERE = Location(0, 0, 0)
T0 = Instant(1000.0)
WRITERS = {ShardId(shard): Epoch(1) for shard in range(3)}


def started(
    view: View | None = None,
    *,
    recovered: Sequence[NewRecords] = (),
    in_flight_max: int = 512,
    cluster: ClusterConfig | None = None,
) -> Sequencer:
    node_settings = node_config(resend_s=1.0, metalog_entries_in_flight_max=in_flight_max)
    config = Config(cluster=cluster or ClusterConfig(), node=node_settings)
    node = Sequencer(PRIMARY, [view or view_of()], config)
    node.restore(with_writers(WRITERS), ())
    for entry in recovered:
        node.recover(FrameKind.METALOG, encode_entry(entry), NOWHERE)
    return node


def start(node: Sequencer) -> list[Effect]:
    return node.handle(metalog_messages.started(5), T0)


def progress(
    stored: int, *, shard: int = 0, sender: NodeId = STORAGE, incarnation: int = 1
) -> Received:
    return Received(
        sender, ShardProgress(Epoch(5), {ShardId(shard): (Epoch(1), stored)}), Epoch(incarnation)
    )


def persisted(token: int) -> Persisted:
    return Persisted(token, NOWHERE)


def entry(
    position: int,
    counts: dict[int, int],
    *,
    epoch: int = 5,
    at: Instant = T0,
) -> NewRecords:
    by_shard = {ShardId(shard): count for shard, count in counts.items()}
    return NewRecords(position, ViewNumber(1), Epoch(epoch), by_shard, int(at * 1e6))


def earlier(count: int, *, records: int = 1) -> list[NewRecords]:
    """The entries of the incarnation before that this one recovers."""
    return [entry(position, {0: records}, epoch=4) for position in range(count)]


def append(
    start: int, *entries: NewRecords, committed: int = 0, previous: int = 5, number: int = 2
) -> MetalogAppend:
    before = Epoch(previous if start else 0)
    return MetalogAppend(Epoch(5), start, before, entries, committed, number)


def stored(
    length: int, *, sender: NodeId = FIRST, number: int = 2, incarnation: int = 1
) -> Received:
    """The answer of a backup that has the first `length` entries of this primary."""
    return Received(sender, MetalogStored(Epoch(5), length, number), Epoch(incarnation))


def sealed(
    number: int, last: int = 0, length: int = 0, *, sender: NodeId = FIRST, term: int = 5
) -> Received:
    """The answer of a backup in a round; the last of its entries is of term `last`."""
    extent = Extent(Epoch(last), length)
    return Received(sender, Sealed(Epoch(term), number, extent), Epoch(1))


def sent(effects: Sequence[Effect], kind: type[MessageT]) -> list[tuple[NodeId, MessageT]]:
    return [
        (e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)
    ]


def reasons(effects: Sequence[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignore)]


@pytest.mark.parametrize("first", [FIRST, SECOND])
def test_a_wiped_primary_ends_when_too_many_copies_are_lost(first: NodeId) -> None:
    """In any order of the answers. While only the complete copy is known, its configuration may be
    another one.
    """
    node = Sequencer(PRIMARY, [view_of(sequencers=3)], Config())
    node.lost(Lost(None, b"", NOWHERE))
    node.recovered()
    start(node)
    wiped = Received(FIRST, Sealed(Epoch(5), 1, Extent(Epoch(0), 0), learner=True), Epoch(1))
    answers = {FIRST: wiped, SECOND: sealed(1, 4, 3, sender=SECOND)}
    second = SECOND if first == FIRST else FIRST
    with pytest.raises(DataLossError, match="disk of sequencer-0, and on that of sequencer-1 too"):
        node.handle([answers[first], answers[second]], T0)


# --- senders that restart


def ordered_by(effects: Sequence[Effect]) -> list[dict[ShardId, int]]:
    persisted = [e for e in effects if isinstance(e, Persist)]
    return [dict(decode_entry(persist.payload).counts) for persist in persisted]


REPLICAS = view_of(storage_nodes=2, replicas=2)
A, B = REPLICAS.storage_nodes


def test_a_smaller_prefix_of_a_replica_that_lost_its_disk_is_accepted() -> None:
    """It stored 20 records, was wiped, and reports 10 of the same writer afterwards."""
    node = started(REPLICAS)
    start(node)
    reports = [
        progress(20, sender=A),
        progress(10, sender=B),
        progress(10, sender=A, incarnation=2),
    ]
    assert ordered_by(node.handle(reports, T0)) == [{ShardId(0): 10}]
    assert not ordered_by(node.handle([progress(20, sender=B)], T0)), "one copy is not two"
    effects = node.handle([progress(20, sender=A, incarnation=2)], T0)
    assert ordered_by(effects) == [{ShardId(0): 10}]


def test_a_report_ends_with_its_incarnation_at_any_message_of_the_next_one() -> None:
    """A wiped replica knows no writers, so it reports no shard; it requests the metalog."""
    node = started(REPLICAS)
    start(node)
    node.handle([progress(20, sender=A), Received(A, MetalogWanted(0), Epoch(2))], T0)
    assert not ordered_by(node.handle([progress(20, sender=B)], T0))


def test_a_late_report_of_an_earlier_incarnation_is_refused() -> None:
    node = started(REPLICAS)
    start(node)
    events = [progress(10, sender=A, incarnation=2), progress(20, sender=A), progress(20, sender=B)]
    effects = node.handle(events, T0)
    assert reasons(effects) == ["a message of an earlier incarnation of its sender"]
    assert ordered_by(effects) == [{ShardId(0): 10}]


def test_a_backup_that_restarts_does_not_count_until_it_reports_its_length() -> None:
    node = three()
    node.handle([progress(3)], T0)
    node.handle([persisted(2)], T0)
    restarted = Received(FIRST, MetalogStored(Epoch(5), 0), Epoch(2))
    effects = node.handle([restarted, stored(2)], T0)
    assert node.committed == 1
    assert "a message of an earlier incarnation of its sender" in reasons(effects)


# --- proposing


def test_growth_is_persisted_before_it_is_published() -> None:
    node = started()
    start(node)
    effects = node.handle([progress(3)], T0)
    assert effects == [Persist(FrameKind.METALOG, encode_entry(entry(0, {0: 3})), 0)]
    effects = node.handle([persisted(0)], T0)
    assert sent(effects, MetalogEntries) == [
        (ENGINE, entries_message((entry(0, {0: 3}),))),
        (STORAGE, entries_message((entry(0, {0: 3}),))),
    ]


def test_all_reports_of_one_call_go_into_one_entry() -> None:
    node = started(view_of(engines=3))
    start(node)
    effects = node.handle(
        [progress(3, shard=2), progress(1), progress(4), progress(7, shard=2)], T0
    )
    assert effects == [Persist(FrameKind.METALOG, encode_entry(entry(0, {0: 4, 2: 7})), 0)]


def test_a_report_that_orders_nothing_new_makes_no_entry() -> None:
    node = started()
    start(node)
    node.handle([progress(3)], T0)
    assert node.handle([progress(3)], T0) == []
    assert node.handle([progress(2)], T0) == []
    assert node.deadline() is None


def test_an_entry_has_only_the_growth() -> None:
    node = started()
    start(node)
    node.handle([progress(3)], T0)
    effects = node.handle([progress(8)], T0)
    assert effects == [Persist(FrameKind.METALOG, encode_entry(entry(1, {0: 5})), 1)]


WANTED = Received(ENGINE, ShardWanted(ShardId(0), Epoch(2)), Epoch(2))
NAMED = Persist(
    FrameKind.METALOG,
    encode_entry(NewWriters(1, ViewNumber(1), Epoch(5), {ShardId(0): Epoch(2)})),
    1,
)


def reported(writer: int, stored: int, term: int = 5) -> Received:
    report = ShardProgress(Epoch(term), {ShardId(0): (Epoch(writer), stored)})
    return Received(STORAGE, report, Epoch(1))


def test_ordered_records_stay_ordered_under_a_new_writer() -> None:
    node = started()
    start(node)
    node.handle([progress(5)], T0)
    assert node.handle([WANTED], T0) == [NAMED]
    assert node.handle([WANTED], T0) == [], "it has the shard"
    assert node.handle([progress(7)], T0) == [], "the earlier writer is fenced"
    assert node.handle([reported(2, 5)], T0) == []
    effects = node.handle([reported(2, 6)], T0)
    assert effects == [Persist(FrameKind.METALOG, encode_entry(entry(2, {0: 1})), 2)]


def test_records_of_the_previous_writer_are_ordered_before_the_shard_gets_a_new_one() -> None:
    """Some of these records may be acknowledged, if the entries that ordered them are lost."""
    node = started()
    start(node)
    assert node.handle([WANTED], T0) == [], "its replica has not reported"
    effects = node.handle([progress(4)], T0)
    first = Persist(FrameKind.METALOG, encode_entry(entry(0, {0: 4})), 0)
    assert effects == [first, NAMED]


def test_a_repeated_request_makes_replicas_report_again_whose_report_is_missing() -> None:
    """Seed 879 of the simulation: reports are not resent once all that is stored is ordered."""
    view = view_of(storage_nodes=2, replicas=2)
    node = started(view)
    start(node)
    node.handle([progress(0), WANTED], T0)
    other = NodeId("storage-1")
    assert node.handle([WANTED], T0) == [Send(other, TermIs(Epoch(5), PRIMARY))]
    effects = node.handle([progress(0, sender=other)], T0)
    assert [type(effect) for effect in effects] == [Persist]


def test_a_shard_is_given_to_its_newest_writer_only() -> None:
    node = started()
    start(node)
    node.handle([progress(5), WANTED], T0)
    older = Received(ENGINE, ShardWanted(ShardId(0), Epoch(1)), Epoch(1))
    foreign = Received(STORAGE, ShardWanted(ShardId(0), Epoch(9)), Epoch(1))
    unknown = Received(ENGINE, ShardWanted(ShardId(9), Epoch(9)), Epoch(2))
    for event in (older, foreign, unknown):
        assert [type(effect) for effect in node.handle([event], T0)] == [Ignore]


def test_a_report_that_was_sent_in_an_earlier_term_does_not_count() -> None:
    """Its sender may have lost its disk since, and the primary of a new term does not know that."""
    node = started()
    start(node)
    (ignored,) = node.handle([reported(1, 3, term=4)], T0)
    assert isinstance(ignored, Ignore)
    assert len(node.handle([reported(1, 3)], T0)) == 1


def test_no_more_entries_are_in_flight_than_configured_and_none_is_lost() -> None:
    node = started(in_flight_max=2)
    start(node)
    for stored in (1, 2):
        assert len(node.handle([progress(stored)], T0)) == 1
    assert node.handle([progress(3)], T0) == []
    assert node.handle([progress(4)], T0) == []
    effects = node.handle([persisted(0)], T0)
    assert effects[-1] == Persist(FrameKind.METALOG, encode_entry(entry(2, {0: 2})), 2)


def test_delayed_ordering_catches_up_in_one_entry() -> None:
    """Scalog 4.4.3: "the repair interleaves all delayed records that are already replicated in one
    single cut".
    """
    node = started(in_flight_max=1)
    start(node)
    node.handle([progress(1)], T0)
    for stored in range(2, 50):
        node.handle([progress(stored)], T0)
    effects = node.handle([persisted(0)], T0)
    assert effects[-1] == Persist(FrameKind.METALOG, encode_entry(entry(1, {0: 48})), 1)


# --- committing


def elected(
    view: View | None = None,
    *,
    recovered: Sequence[NewRecords] = (),
    in_flight_max: int = 512,
    backup: tuple[int, int] = (0, 0),
    cluster: ClusterConfig | None = None,
) -> tuple[Sequencer, list[Effect]]:
    """A primary that one backup with a copy of this extent elected, and its effects then."""
    view = view or view_of(sequencers=3)
    node = started(view, recovered=recovered, in_flight_max=in_flight_max, cluster=cluster)
    start(node)
    node.handle([persisted(len(recovered))], T0)
    node.handle([sealed(1, *backup)], T0)
    return node, node.handle([sealed(2, *backup)], T0)


def three() -> Sequencer:
    """A primary whose fence is committed, at all three sequencers."""
    node, _ = elected()
    node.handle([persisted(1), stored(1), stored(0, sender=SECOND), stored(1, sender=SECOND)], T0)
    assert node.committed == 1
    return node


def test_backups_get_an_entry_when_it_is_proposed_before_it_is_durable_here() -> None:
    node = three()
    effects = node.handle([progress(1)], T0)
    message = append(1, entry(1, {0: 1}), committed=1)
    assert sent(effects, MetalogAppend) == [(FIRST, message), (SECOND, message)]
    assert sent(node.handle([persisted(2)], T0), MetalogAppend) == []


def test_an_entry_is_written_here_before_it_is_sent() -> None:
    """One journal holds both copies where a process has two sequencers: in this order."""
    effects = three().handle([progress(1)], T0)
    assert [type(effect) for effect in effects] == [Persist, Send, Send]


def test_an_entry_that_both_backups_have_is_committed_without_the_disk_of_the_primary() -> None:
    """Any majority commits (decision 0042)."""
    node = three()
    node.handle([progress(1)], T0)
    assert sent(node.handle([stored(2)], T0), MetalogEntries) == []
    assert sent(node.handle([stored(2, sender=SECOND)], T0), MetalogEntries) != []
    assert (node.committed, node.metalog.stored) == (2, 1)


def test_an_entry_is_published_when_a_majority_has_it() -> None:
    node = three()
    node.handle([progress(1)], T0)
    assert sent(node.handle([persisted(2)], T0), MetalogEntries) == []
    effects = node.handle([stored(2, sender=SECOND)], T0)
    assert {to for to, _ in sent(effects, MetalogEntries)} == {ENGINE, STORAGE}
    assert sent(node.handle([stored(2)], T0), MetalogEntries) == []
    assert node.committed == 2


def test_two_sequencers_are_a_majority_only_together() -> None:
    node, _ = elected(view_of(sequencers=2))
    node.handle([persisted(1)], T0)
    assert node.committed == 0
    node.handle([stored(1)], T0)
    assert node.committed == 1


def test_entries_are_pipelined_to_backups() -> None:
    node = three()
    node.handle([progress(1)], T0)
    effects = node.handle([progress(2)], T0)
    message = append(2, entry(2, {0: 1}), committed=1)
    assert sent(effects, MetalogAppend) == [(FIRST, message), (SECOND, message)]


def test_several_entries_that_are_committed_at_once_are_published_in_order() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(2), progress(2)], T0)
    node.handle([persisted(3)], T0)
    effects = node.handle([stored(3)], T0)
    entries = (entry(1, {0: 1}), entry(2, {0: 1}))
    assert sent(effects, MetalogEntries)[0] == (ENGINE, entries_message(entries))


def test_all_entries_are_resent_to_a_silent_backup() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(2), stored(1, sender=SECOND)], T0)
    assert node.deadline() == T0 + 1.0
    assert node.handle([], Instant(T0 + 0.9)) == []
    effects = node.handle([], Instant(T0 + 1.0))
    message = append(1, entry(1, {0: 1}), committed=1)
    assert sent(effects, MetalogAppend) == [(FIRST, message)]
    assert node.deadline() == T0 + 2.0, "the second one has answered, without progress"
    effects = node.handle([], Instant(T0 + 2.0))
    assert sent(effects, MetalogAppend) == [(SECOND, message)]


def test_nothing_is_sent_to_a_backup_that_has_all_entries() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(2)], T0)
    node.handle([stored(2), stored(2, sender=SECOND)], T0)
    assert node.deadline() is None


def test_an_answer_that_shows_a_gap_is_followed_by_the_missing_entries() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(2), progress(2)], T0)
    node.handle([persisted(3)], T0)
    gap = MetalogStored(Epoch(5), 1, 2, common=Extent(Epoch(5), 1))
    effects = node.handle([Received(FIRST, gap, Epoch(1))], T0)
    both = entry(1, {0: 1}), entry(2, {0: 1})
    assert sent(effects, MetalogAppend) == [(FIRST, append(1, *both, committed=1))]


def test_a_lagging_backup_is_sent_one_page_per_answer() -> None:
    entries = earlier(5)
    node, effects = elected(recovered=entries, in_flight_max=2)
    assert sent(effects, MetalogAppend)[0] == (FIRST, append(0, *entries[:2]))
    effects = node.handle([stored(2)], T0)
    assert sent(effects, MetalogAppend) == [(FIRST, append(2, *entries[2:4], previous=4))]


# --- restarting


def test_a_restarted_primary_seals_before_all_else() -> None:
    node = started(view_of(sequencers=3), recovered=earlier(2))
    promise, *seals = start(node)
    assert isinstance(promise, Persist)
    assert promise.kind is FrameKind.METALOG_STATE
    seal = Seal(Epoch(5), 1)
    assert seals == [Send(FIRST, seal), Send(SECOND, seal)]
    again = Seal(Epoch(5), 2)
    later = node.handle([], Instant(T0 + 1.0))
    assert later == [Send(FIRST, again), Send(SECOND, again)]


def test_recovered_entries_are_committed_by_the_fence() -> None:
    """Raft 5.4.2: "only log entries from the leader's current term are committed by counting
    replicas".
    """
    entries = earlier(2)
    node, effects = elected(recovered=entries, backup=(4, 2))
    (fence,) = [e for e in effects if isinstance(e, Persist)]
    assert decode_entry(fence.payload) == entry(2, {}, at=T0)
    node.handle([stored(2)], T0)
    assert node.committed == 0, "a majority has them, but no entry of this term"
    effects = node.handle([persisted(3), stored(3)], T0)
    assert node.committed == 3
    assert sent(effects, MetalogEntries)[0][1].committed == 3


def test_an_entry_that_only_this_primary_has_is_adopted_and_committed() -> None:
    entries = earlier(2)
    node, effects = elected(recovered=entries, backup=(4, 1))
    fence = entry(2, {}, at=T0)
    message = append(1, entries[1], fence, previous=4)
    assert sent(effects, MetalogAppend)[0] == (FIRST, message)
    node.handle([persisted(3), stored(3)], T0)
    assert node.committed == 3


def test_an_epoch_that_was_used_before_is_refused() -> None:
    node = started(recovered=[entry(0, {0: 1})])
    with pytest.raises(DataDirectoryError, match="older than the journals"):
        start(node)


def test_a_primary_without_backups_commits_its_recovered_entries_at_once() -> None:
    entries = earlier(3, records=2)
    node = started(recovered=entries, in_flight_max=2)
    effects = start(node)
    assert (node.committed, node.tail) == (3, 6)
    assert sent(effects, MetalogEntries)[0] == (ENGINE, entries_message(tuple(entries[1:])))


def test_a_restarted_primary_continues_where_its_entries_end() -> None:
    node = started(recovered=earlier(1, records=2))
    start(node)
    assert node.handle([progress(2)], T0) == []
    effects = node.handle([progress(3)], T0)
    assert effects == [Persist(FrameKind.METALOG, encode_entry(entry(1, {0: 1})), 1)]


# --- answering


def test_a_reader_that_missed_entries_is_sent_the_committed_ones_page_by_page() -> None:
    entries = earlier(3)
    node = started(recovered=entries, in_flight_max=2)
    start(node)
    wanted = [
        Received(STORAGE, MetalogWanted(position, Epoch(4 if position else 0), 7), Epoch(1))
        for position in (0, 2, 3)
    ]
    assert node.handle(wanted, T0) == [
        Send(STORAGE, entries_message(entries[:2], committed=3, request=7)),
        Send(STORAGE, entries_message(entries[2:], request=7)),
        Send(STORAGE, MetalogEntries(3, Epoch(4), (), 3, 7)),
    ]


@pytest.mark.parametrize(
    ("start", "last", "answered_from"),
    [(2, 4, 2), (9, 4, 3), (3, 3, 2), (9, 3, 2), (1, 2, 0), (9, 2, 0)],
)
def test_a_reader_is_answered_from_where_its_copy_agrees(
    start: int, last: int, answered_from: int
) -> None:
    """Its entries of an incarnation beyond those left in the metalog were lost, and replaced."""
    entries = [*(entry(p, {0: 1}, epoch=3) for p in range(2)), entry(2, {0: 1}, epoch=4)]
    node = started(recovered=entries)
    node.handle(metalog_messages.started(5), T0)
    wanted = Received(STORAGE, MetalogWanted(start, Epoch(last), 7), Epoch(1))
    ((_, answer),) = sent(node.handle([wanted], T0), MetalogEntries)
    assert (answer.start, answer.committed, answer.request) == (answered_from, 3, 7)
    assert answer.entries == tuple(entries[answered_from:])
    assert answer.previous == (entries[answered_from - 1].epoch if answered_from else 0)


def test_a_restarted_primary_answers_nothing_before_it_knows_the_committed_entries() -> None:
    """Readers assume that no entry follows the committed ones, but published entries may."""
    node, _ = elected(recovered=earlier(2), backup=(4, 2))
    effects = node.handle([stored(2), Received(ENGINE, MetalogWanted(0), Epoch(1))], T0)
    assert sent(effects, MetalogEntries) == []
    effects = node.handle([persisted(3), stored(3)], T0)
    answer, published, _ = sent(effects, MetalogEntries)
    assert len(answer[1].entries) == 3
    assert published[1].committed == 3


def test_a_started_primary_announces_its_term_to_all_readers() -> None:
    node = started()
    hello = MetalogEntries(0, Epoch(0), (), 0)
    assert sent(start(node), MetalogEntries) == [(ENGINE, hello), (STORAGE, hello)]
    assert node.handle([], T0) == []


def test_an_entry_that_is_not_committed_is_not_shown() -> None:
    node = three()
    node.handle([progress(1)], T0)
    node.handle([persisted(2)], T0)
    effects = node.handle([Received(ENGINE, MetalogWanted(1, Epoch(5)), Epoch(1))], T0)
    assert effects == [Send(ENGINE, MetalogEntries(1, Epoch(5), (), 1))]


TAIL = Received(ENGINE, TailWanted(7), Epoch(1))


def test_the_tail_is_that_of_committed_entries() -> None:
    node = three()
    node.handle([progress(4)], T0)
    node.handle([persisted(2)], T0)
    time_us = int(T0 * 1e6)
    node.handle([TAIL], T0)
    uncommitted = TailIs(7, 1, 0, {}, Epoch(5), time_us=time_us, writers=WRITERS)
    assert sent(node.handle([stored(1, number=3)], T0), TailIs) == [(ENGINE, uncommitted)]
    node.handle([stored(2)], T0)
    node.handle([TAIL], T0)
    reported = TailIs(7, 2, 4, {ShardId(0): 4}, Epoch(5), time_us=time_us, writers=WRITERS)
    assert sent(node.handle([stored(2, number=4)], T0), TailIs) == [(ENGINE, reported)]


def test_a_tail_waits_for_a_round_that_began_after_the_question() -> None:
    """Raft 8: "a leader must check whether it has been deposed before processing a read-only
    request".
    """
    node = three()
    begun = node.handle([TAIL], T0)
    assert [message.round for _, message in sent(begun, MetalogAppend)] == [3, 3]
    late = Received(ENGINE, TailWanted(8), Epoch(1))
    assert sent(node.handle([late], T0), TailIs) == []
    effects = node.handle([stored(1, number=3)], T0)
    assert [answer.request for _, answer in sent(effects, TailIs)] == [7]
    assert [message.round for _, message in sent(effects, MetalogAppend)] == [4, 4]
    effects = node.handle([stored(1, number=4, sender=SECOND)], T0)
    assert [answer.request for _, answer in sent(effects, TailIs)] == [8]


def test_the_cut_in_an_answer_does_not_change_afterwards() -> None:
    node = started()
    start(node)
    effects = node.handle([Received(ENGINE, TailWanted(7), Epoch(1))], T0)
    node.handle([progress(4)], T0)
    node.handle([persisted(0)], T0)
    assert sent(effects, TailIs)[0][1].cut == {}


def test_a_restarted_primary_answers_no_earlier_tail() -> None:
    node, _ = elected(recovered=earlier(1, records=4), backup=(4, 1))
    assert sent(node.handle([TAIL], T0), TailIs) == []
    effects = node.handle([persisted(2), stored(2)], T0)
    assert sent(effects, TailIs) == []
    assert sent(node.handle([stored(2, number=3)], T0), TailIs)[0][1].tail == 4


# --- impossible messages


@pytest.mark.parametrize(
    "event",
    [
        progress(1, sender=NodeId("storage-9")),
        progress(1, sender=ENGINE),
        progress(1, shard=9),
        progress(-1),
        stored(0, sender=NodeId("sequencer-9")),
        stored(0, sender=PRIMARY),
        stored(2),
        stored(-1),
        stored(1, number=3),
        sealed(3),
        sealed(1, term=4),
        Received(FIRST, MetalogStored(Epoch(6), 1), Epoch(1)),
        Received(FIRST, Seal(Epoch(4), 1), Epoch(1)),
        Received(STORAGE, MetalogWanted(-1), Epoch(1)),
        Received(NodeId("unknown"), TailWanted(1), Epoch(1)),
        Received(FIRST, append(0), Epoch(1)),
        Received(STORAGE, ShardStored(ShardId(0), Epoch(1), 0), Epoch(1)),
    ],
)
def test_an_impossible_message_is_ignored_and_changes_nothing(event: Received) -> None:
    node = three()
    effects = node.handle([event], T0)
    assert [type(effect) for effect in effects] == [Ignore]
    node.check_invariants()
    assert (node.length, node.committed) == (1, 1)


def test_a_report_with_one_foreign_shard_counts_for_the_others() -> None:
    node = started()
    start(node)
    report = ShardProgress(Epoch(5), {ShardId(9): (Epoch(1), 2), ShardId(0): (Epoch(1), 2)})
    effects = node.handle([Received(STORAGE, report, Epoch(1))], T0)
    assert [type(effect) for effect in effects] == [Ignore, Persist]


def test_engines_are_notified_while_the_disk_of_the_primary_is_full() -> None:
    node = started()
    start(node)
    reported = [Send(ENGINE, DiskFull(full=True))]
    assert node.handle([SpaceChanged(100)], T0) == reported
    due = node.deadline()
    assert due is not None
    assert node.handle([], due) == reported
    assert node.handle([SpaceChanged(None)], due) == [Send(ENGINE, DiskFull(full=False))]
    assert node.deadline() is None


def stamp_of(effects: Sequence[Effect]) -> int:
    (persist,) = [e for e in effects if isinstance(e, Persist)]
    stamped = decode_entry(persist.payload)
    assert isinstance(stamped, NewRecords)
    return stamped.time_us


def test_stamps_continue_from_the_last_one_after_a_start_with_an_earlier_clock() -> None:
    node = started(recovered=[entry(0, {0: 1}, epoch=4, at=Instant(2000.0))])
    start(node)  # at 1000.0
    times = [
        stamp_of(node.handle([progress(stored)], Instant(now)))
        for stored, now in ((2, 1000.0), (3, 1000.5), (4, 1999.0), (5, 1001.0))
    ]
    assert times == [2_000_000_000, 2_000_500_000, 2_999_000_000, 2_999_000_000]


def test_stamps_count_the_downtime_by_the_wall_clock_at_the_start() -> None:
    node = started(recovered=[entry(0, {0: 1}, epoch=4, at=Instant(400.0))])
    start(node)
    assert stamp_of(node.handle([progress(2)], Instant(1001.0))) == 1_001_000_000


def test_a_tail_has_the_minimal_time_of_the_next_entry() -> None:
    node = started()
    start(node)
    wanted = Received(ENGINE, TailWanted(7), Epoch(1))
    now = Instant(1003.5)
    assert node.handle([wanted], now) == [
        Send(ENGINE, TailIs(7, 0, 0, {}, time_us=1_003_500_000, writers=WRITERS))
    ]
    assert stamp_of(node.handle([progress(1)], Instant(1003.0))) == 1_003_500_000


def test_with_a_cut_interval_records_of_several_reports_share_a_cut() -> None:
    """Scalog 6.3: the interleaving interval trades latency for the number of shards."""
    node = Sequencer(PRIMARY, [view_of()], Config(cluster=ClusterConfig(cut_interval_s=0.5)))
    node.restore(with_writers(WRITERS), ())
    start(node)
    entries: list[Entry] = []
    for step, stored in enumerate((1, 2, 5)):
        now = Instant(T0 + step / 10)
        before = node.length
        node.handle([progress(stored)], now)
        entries += node.metalog.iterate(before, node.length)
    assert [entry.counts for entry in entries] == [{ShardId(0): 1}], "the first one is not delayed"
    due = node.deadline()
    assert due == Instant(T0 + 0.5)
    before = node.length
    node.handle([], Instant(T0 + 0.5))
    [entry] = node.metalog.iterate(before, node.length)
    assert entry.counts == {ShardId(0): 4}
    assert node.deadline() is None
