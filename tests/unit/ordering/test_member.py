"""A sequencer's copy, its promise and its answers, through its sequencer role."""

from __future__ import annotations

import pytest

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.config import Config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import Base, NewRecords, encode_entries, encode_entry
from indilog.kernel.view import view_of
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
)
from indilog.wire.sequencer_messages import MetalogAppend, MetalogStored, Seal, Sealed
from indilog_ordering.metalog_state import MetalogState, decode_state, encode_state
from indilog_ordering.sequencer import Sequencer
from tests.support import metalog_messages

PRIMARY, BACKUP = NodeId("sequencer-0"), NodeId("sequencer-1")
NOWHERE = Location(0, 0, 0)
T0 = Instant(1000.0)
LIFE = Epoch(9)


def entry(position: int, *, count: int = 1, epoch: int = 1) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(epoch), {ShardId(0): count})


def frame(position: int, token: int | None = None) -> Persist:
    token = position + 1 if token is None else token
    return Persist(FrameKind.METALOG, encode_entry(entry(position)), token)


def restarted(*epochs: int, promised: int | None = None) -> Sequencer:
    """A backup that has recovered entries of these terms, and promised the last of them."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for position, epoch in enumerate(epochs):
        payload = encode_entry(entry(position, epoch=epoch))
        node.recover(FrameKind.METALOG, payload, NOWHERE)
    extent = Extent(Epoch(max(epochs, default=0)), len(epochs))
    state = MetalogState(
        Epoch(max(epochs, default=1) if promised is None else promised), False, extent
    )
    node.recover(FrameKind.METALOG_STATE, encode_state(state), NOWHERE)
    node.recovered()
    node.handle(metalog_messages.started(LIFE), T0)
    return node


def backup(*, recovered: int = 0) -> Sequencer:
    return restarted(*[1] * recovered)


def message(
    start: int,
    *entries: NewRecords,
    term: int = 1,
    previous: int = 1,
    committed: int = 0,
    voter: int = 0,
) -> Received:
    """A message of the primary of `term`."""
    before = Epoch(previous if start > 0 else 0)
    append = MetalogAppend(Epoch(term), start, before, entries, committed, 1, voter=Epoch(voter))
    return Received(PRIMARY, append, Epoch(term))


def append(start: int, end: int, *, committed: int = 0) -> Received:
    return message(start, *map(entry, range(start, end)), committed=committed)


def seal(term: int, number: int = 1, start: int | None = None, previous: int = 0) -> Received:
    return Received(PRIMARY, Seal(Epoch(term), number, start, Epoch(previous)), Epoch(term))


def answer(matched: int, *, term: int = 1, common: tuple[int, int] | None = None) -> list[Effect]:
    extent = None if common is None else Extent(Epoch(common[0]), common[1])
    return [Send(PRIMARY, MetalogStored(Epoch(term), matched, 1, common=extent))]


def done(node: Sequencer, effects: list[Effect]) -> list[Effect]:
    """Make the frames among some effects durable; return what follows."""
    events = [Persisted(e.token, NOWHERE) for e in effects if isinstance(e, Persist)]
    return node.handle(events, T0)


def reports(effects: list[Effect]) -> list[Sealed]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Sealed)]


def ignored(effects: list[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignore)]


# --- entries


def test_entries_are_acknowledged_when_they_are_durable() -> None:
    node = backup()
    effects = node.handle([append(0, 2)], T0)
    assert effects == [frame(0), frame(1), *answer(0)]
    assert done(node, effects) == answer(2)
    assert node.handle([], T0) == []


def test_entries_after_a_gap_are_not_stored_and_answered_with_what_is_here() -> None:
    node = backup(recovered=2)
    assert node.handle([append(3, 5)], T0) == answer(0, common=(1, 2))
    assert node.length == 2


def test_a_repetition_is_not_stored_again_and_answered() -> None:
    node = backup(recovered=2)
    assert node.handle([append(0, 2)], T0) == answer(2)
    assert node.handle([append(0, 2)], T0) == answer(2)
    assert node.handle([append(0, 3)], T0) == [frame(2)]


def test_several_messages_are_answered_once() -> None:
    node = backup(recovered=2)
    assert node.handle([append(0, 1), append(1, 2)], T0) == answer(2)


def test_entries_that_were_not_compared_with_the_primary_are_not_acknowledged() -> None:
    """They may be those of a primary that lost an election."""
    node = backup(recovered=5)
    assert node.handle([message(2)], T0) == answer(2)


def test_committed_is_never_more_than_what_equals_the_primary() -> None:
    node = backup(recovered=4)
    node.handle([append(1, 3, committed=9)], T0)
    assert node.committed == 3
    node.handle([append(1, 3, committed=1)], T0)
    assert node.committed == 3
    node.check_invariants()


def test_entries_that_contradict_those_of_their_term_are_refused() -> None:
    node = backup(recovered=3)
    node.handle([append(0, 2, committed=2)], T0)
    effects = node.handle([message(2, entry(2, count=7))], T0)
    assert len(ignored(effects)) == 1
    assert node.length == 3


def test_an_entry_is_replaced_although_an_earlier_primary_called_it_committed() -> None:
    """That primary had not synced it yet, and may have lost it before it was published."""
    node = backup(recovered=3)
    node.handle([append(0, 2, committed=2)], T0)
    assert node.committed == 2
    other = entry(1, count=7, epoch=2)
    assert not ignored(node.handle([message(1, other, term=2)], T0))
    assert (node.length, node.committed) == (2, 1)


@pytest.mark.parametrize(
    "event",
    [
        Received(NodeId("storage-0"), message(0, entry(0)).message, Epoch(1)),
        message(0, entry(1)),
        message(0, entry(0), entry(2)),
        message(0, entry(0, epoch=2)),
        message(0, entry(0, epoch=2), entry(1), term=2),
        message(-1),
        seal(2, start=-1),
        Received(NodeId("storage-0"), seal(2).message, Epoch(1)),
        Received(PRIMARY, MetalogStored(Epoch(1), 0), Epoch(1)),
    ],
)
def test_an_impossible_message_is_ignored_and_changes_nothing(event: Received) -> None:
    node = backup()
    effects = node.handle([event], T0)
    assert [type(effect) for effect in effects] == [Ignore]
    assert node.length == 0


# --- a newer primary


def test_an_entry_replaces_one_of_another_term_and_all_after_it() -> None:
    node = restarted(1, 1, 1)
    news = entry(1, count=7, epoch=2)
    effects = node.handle([message(1, news, term=2)], T0)
    assert [e.payload for e in effects if isinstance(e, Persist)][1] == encode_entry(news)
    assert node.length == 2
    assert done(node, effects) == answer(2, term=2)


def test_an_entry_of_an_older_term_replaces_one_of_a_newer_term_too() -> None:
    """Raft, Figure 7: the newer one was never committed."""
    node = restarted(1, 2, promised=3)
    effects = node.handle([message(1, entry(1), entry(2, epoch=3), term=3)], T0)
    assert len([e for e in effects if isinstance(e, Persist)]) == 2
    assert node.metalog.extent == Extent(Epoch(3), 3)


def test_a_write_in_flight_does_not_acknowledge_the_entry_that_replaced_it() -> None:
    node = backup()
    node.handle([append(0, 2)], T0)
    newer = node.handle([message(1, entry(1, epoch=2), term=2)], T0)
    assert node.handle([Persisted(1, NOWHERE), Persisted(2, NOWHERE)], T0) == []
    assert done(node, newer) == answer(2, term=2)


def test_entries_are_appended_only_after_an_entry_of_the_same_term() -> None:
    node = restarted(1, 1, promised=2)
    effects = node.handle([message(2, entry(2, epoch=2), term=2, previous=2)], T0)
    assert effects == answer(0, term=2, common=(1, 2))
    assert node.length == 2


def test_an_older_term_is_refused_from_the_first_message_of_a_newer_one_on() -> None:
    node = restarted(1)
    node.handle([message(1, term=2)], T0)
    older = Received(PRIMARY, append(1, 3).message, Epoch(2))
    assert ignored(node.handle([older], T0)) == ["a message of an older term"]
    assert node.length == 1


def test_a_promise_is_durable_before_the_answer_and_outlives_a_restart() -> None:
    node = restarted(1, 1)
    (promise,) = node.handle([seal(5)], T0)
    assert isinstance(promise, Persist)
    assert decode_state(promise.payload).promised == 5
    assert reports(done(node, [promise])) == [Sealed(Epoch(5), 1, Extent(Epoch(1), 2))]
    again = restarted(1, 1, promised=5)
    assert ignored(again.handle([message(2, entry(2), term=4)], T0))
    assert len(reports(again.handle([seal(5, 2)], T0))) == 1, "it was promised already"


def test_a_message_of_a_newer_term_is_a_promise_too() -> None:
    node = restarted(1)
    promise, unstored = node.handle([message(1, entry(1, epoch=2), term=2)], T0)
    assert isinstance(promise, Persist)
    assert promise.kind is FrameKind.METALOG_STATE
    assert isinstance(unstored, Persist)


# --- a primary that lacks entries


@pytest.mark.parametrize(
    ("start", "previous", "positions", "common"),
    [
        (0, 0, [0, 1, 2, 3, 4], None),
        (3, 2, [3, 4], None),
        (3, 1, None, (1, 2)),
        (5, 2, [], None),
        (5, 3, None, (2, 5)),
        (9, 3, None, (2, 5)),
        (9, 1, None, (1, 2)),
    ],
)
def test_a_copy_is_sent_from_where_it_equals_that_of_the_primary(
    start: int, previous: int, positions: list[int] | None, common: tuple[int, int] | None
) -> None:
    node = restarted(1, 1, 2, 2, 2, promised=5)
    (report,) = reports(node.handle([seal(5, 1, start, previous)], T0))
    assert report.extent == Extent(Epoch(2), 5)
    if common is not None:
        assert (report.common, report.entries) == (common, ())
    else:
        assert [entry.position for entry in report.entries] == positions
        assert report.previous == previous


def test_a_base_replaces_a_copy_that_lacks_entries_of_it() -> None:
    node = restarted(1, 1)
    base = Base(4, Epoch(2), 8, {ShardId(0): 8}, 0, 0, {})
    following = MetalogAppend(Epoch(3), 4, Epoch(2), (entry(4, epoch=3),), 4, 1, base=base)
    effects = node.handle([Received(PRIMARY, following, Epoch(3))], T0)
    assert done(node, effects) == answer(5, term=3)
    assert (node.metalog.base, node.length) == (base, 5)
    late = MetalogAppend(Epoch(3), 2, Epoch(1), (), 2, 1, base=Base(2, Epoch(1), 0))
    node.handle([Received(PRIMARY, late, Epoch(3))], T0)
    assert node.metalog.base == base


# --- learners


def damaged(*epochs: int, lost: int, kind: FrameKind | None = FrameKind.METALOG) -> Sequencer:
    """A backup that cannot read one of its frames any more, not started."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for position, epoch in enumerate(epochs):
        payload = encode_entry(entry(position, epoch=epoch))
        if position == lost:
            node.lost(Lost(kind, b"", NOWHERE))
        else:
            node.recover(FrameKind.METALOG, payload, NOWHERE)
    node.recovered()
    return node


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_sequencer_with_a_hole_is_a_learner_from_there_on(lost: int) -> None:
    """A5: its disk says so before all else."""
    node = damaged(1, 1, 1, 1, 1, lost=lost)
    mark, hello = node.handle(metalog_messages.started(LIFE), T0)
    assert isinstance(mark, Persist)
    assert decode_state(mark.payload).learner
    assert hello == Send(PRIMARY, MetalogStored(Epoch(0), 0, learner=True))
    assert (node.length, node.learner) == (lost, True)


def test_a_learner_counts_when_the_primary_announces_it_to_this_incarnation() -> None:
    node = damaged(1, 1, lost=1)
    done(node, node.handle(metalog_messages.started(LIFE), T0))
    done(node, node.handle([append(0, 2)], T0))
    assert node.learner
    done(node, node.handle([message(2, voter=8)], T0))
    assert node.learner, "this was said to an earlier incarnation"
    done(node, node.handle([message(3, voter=9)], T0))
    assert node.learner, "it lacks the entry before"
    effects = node.handle([message(2, voter=9)], T0)
    assert node.learner, "this is not durable yet"
    assert done(node, effects) == answer(2)
    assert not node.learner


def test_a_wiped_sequencer_stays_a_learner_over_a_restart() -> None:
    """Its journal is no longer empty, so its start does not show that it was wiped."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.lost(Lost(None, b"", NOWHERE))
    node.recovered()
    mark, _ = node.handle(metalog_messages.started(LIFE), T0)
    assert isinstance(mark, Persist)
    again = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    again.recover(FrameKind.METALOG_STATE, mark.payload, NOWHERE)
    again.recovered()
    assert again.learner


def test_a_first_start_makes_no_learner() -> None:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.recovered()
    assert node.handle(metalog_messages.started(LIFE), T0) == [
        Send(PRIMARY, MetalogStored(Epoch(0), 0))
    ]
    assert not node.learner


def test_damage_between_two_consecutive_entries_lost_no_entry() -> None:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for position in range(3):
        node.lost(Lost(FrameKind.METALOG, b"", NOWHERE))
        node.lost(Lost(FrameKind.RECORDS, b"", NOWHERE))
        node.recover(FrameKind.METALOG, frame(position).payload, NOWHERE)
    node.recovered()
    assert (node.length, node.learner) == (3, False)


# --- a sole sequencer


def test_a_sole_sequencer_takes_lost_entries_from_an_ordering_journal_of_its_process() -> None:
    """Its entries after them are in their places: they are never replaced."""
    node = Sequencer(PRIMARY, [view_of()], Config())
    lost = (2, 3, 6)
    for position in range(9):
        if position in lost:
            node.lost(Lost(None, b"", NOWHERE))
        else:
            node.recover(FrameKind.METALOG, frame(position).payload, NOWHERE)
        if position == 4:
            node.copied(encode_entries([entry(number) for number in range(3)]))
    node.copied(encode_entries([entry(number) for number in range(3, 6)]))
    node.copied(encode_entries([entry(number) for number in range(6, 8)]))
    node.recovered()
    node.handle(metalog_messages.started(LIFE), T0)
    assert (node.length, node.tail) == (9, 9)
    node.check_invariants()


def test_one_of_several_sequencers_takes_no_entries_from_an_ordering_journal() -> None:
    """They may follow entries that were replaced here."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.lost(Lost(None, b"", NOWHERE))
    node.recover(FrameKind.METALOG, frame(1).payload, NOWHERE)
    node.copied(encode_entries([entry(0), entry(1)]))
    node.recovered()
    assert node.length == 0


def test_a_sole_sequencer_that_lost_entries_reports_it_in_one_sentence() -> None:
    node = Sequencer(PRIMARY, [view_of()], Config())
    node.recover(FrameKind.METALOG, frame(0).payload, NOWHERE)
    node.lost(Lost(None, b"", NOWHERE))
    node.recover(FrameKind.METALOG, frame(1).payload, NOWHERE)
    node.recovered()
    assert node.length == 2, "no entry of the metalog was lost"
    node.lost(Lost(FrameKind.METALOG, b"", NOWHERE))
    node.recover(FrameKind.METALOG, frame(3).payload, NOWHERE)
    with pytest.raises(DataLossError, match=r"is damaged on the disk of sequencer-0"):
        node.recovered()


def test_a_backup_has_no_deadline_and_no_tail() -> None:
    node = backup(recovered=1)
    assert node.deadline() is None
    assert node.tail is None
