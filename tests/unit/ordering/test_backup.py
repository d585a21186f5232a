"""A backup, through its sequencer role."""

from __future__ import annotations

import pytest

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.config import Config, node_config
from indilog.kernel.metalog import NewRecords, entries_encoded, entry_encoded
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
    Started,
)
from indilog.wire.messages import MetalogWanted
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogCopy,
    MetalogCopyWanted,
    MetalogStored,
)
from indilog_ordering.sequencer import Sequencer

PRIMARY, BACKUP = NodeId("sequencer-0"), NodeId("sequencer-1")
NOWHERE = Location(0, 0, 0)
T0 = Instant(1000.0)


def entry(position: int, *, count: int = 1, epoch: int = 1) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(epoch), {ShardId(0): count})


def frame(position: int) -> Persist:
    return Persist(FrameKind.METALOG, entry_encoded(entry(position)), position)


def restarted(*epochs: int) -> Sequencer:
    """A backup that has recovered entries which these incarnations proposed."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for position, epoch in enumerate(epochs):
        payload = entry_encoded(entry(position, epoch=epoch))
        node.recover(FrameKind.METALOG, payload, NOWHERE)
    node.handle([Started(Epoch(9))], T0)
    return node


def backup(*, recovered: int = 0) -> Sequencer:
    return restarted(*[1] * recovered)


def message(
    start: int, *entries: NewRecords, epoch: int = 1, previous: int = 1, committed: int = 0
) -> Received:
    """A message of incarnation `epoch`."""
    before = Epoch(previous if start > 0 else 0)
    return Received(
        PRIMARY, MetalogAppend(Epoch(epoch), start, before, entries, committed), Epoch(1)
    )


def append(start: int, end: int, *, committed: int = 0) -> Received:
    return message(start, *map(entry, range(start, end)), committed=committed)


def answer(length: int, *, epoch: int = 1) -> list[Effect]:
    return [Send(PRIMARY, MetalogStored(Epoch(epoch if length else 0), length))]


def ignored(effects: list[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignore)]


def test_entries_are_acknowledged_when_they_are_durable() -> None:
    node = backup()
    assert node.handle([append(0, 2)], T0) == [frame(0), frame(1)]
    assert node.handle([Persisted(0, NOWHERE), Persisted(1, NOWHERE)], T0) == answer(2)
    assert node.handle([], T0) == []


def test_entries_after_a_gap_are_not_stored_and_answered_with_the_length() -> None:
    node = backup(recovered=2)
    assert node.handle([append(3, 5)], T0) == answer(2)
    assert node.length == 2


def test_a_repetition_is_not_stored_again_and_answered() -> None:
    node = backup(recovered=2)
    assert node.handle([append(0, 2)], T0) == answer(2)
    assert node.handle([append(0, 3)], T0) == [frame(2)]


def test_several_messages_are_answered_once() -> None:
    node = backup(recovered=2)
    assert node.handle([append(0, 1), append(5, 6), append(1, 2)], T0) == answer(2)


def test_a_probe_is_answered() -> None:
    node = backup(recovered=2)
    for start in (0, 2, 7):
        assert node.handle([message(start)], T0) == answer(2)


def test_a_restarted_backup_reports_its_length() -> None:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.recover(FrameKind.METALOG, entry_encoded(entry(0)), NOWHERE)
    assert node.handle([Started(Epoch(2))], T0) == answer(1)


def test_committed_is_never_more_than_the_length() -> None:
    node = backup(recovered=1)
    node.handle([append(1, 3, committed=9)], T0)
    assert node.committed == 3
    node.handle([append(1, 3, committed=1)], T0)
    assert node.committed == 3
    node.check_invariants()


def test_entries_that_contradict_those_here_get_no_answer() -> None:
    node = backup(recovered=2)
    effects = node.handle([message(1, entry(1, count=7), entry(2))], T0)
    assert ignored(effects) == ["the entries contradict those stored here"]
    assert (len(effects), node.length) == (1, 2)


@pytest.mark.parametrize(
    "event",
    [
        Received(NodeId("sequencer-2"), message(0, entry(0)).message, Epoch(1)),
        message(0, entry(1)),
        message(0, entry(0), entry(2)),
        message(0, entry(0, epoch=2)),
        message(0, entry(0, epoch=2), entry(1), epoch=2),
        message(1, entry(1), epoch=2, previous=2),
        message(-1),
        Received(PRIMARY, MetalogWanted(0), Epoch(1)),
    ],
)
def test_an_impossible_message_is_ignored_and_changes_nothing(event: Received) -> None:
    node = backup()
    effects = node.handle([event], T0)
    assert [type(effect) for effect in effects] == [Ignore]
    assert node.length == 0


# --- the primary was restarted


def test_an_entry_that_the_primary_lost_is_replaced_by_that_of_its_next_incarnation() -> None:
    node = restarted(1, 1, 1)
    news = entry(1, count=7, epoch=2)
    effects = node.handle([message(1, news, epoch=2)], T0)
    persist = Persist(FrameKind.METALOG, entry_encoded(news), 3)
    assert effects == [persist, *answer(1)]
    assert node.length == 2
    assert node.handle([Persisted(3, NOWHERE)], T0) == answer(2, epoch=2)


def test_a_write_in_flight_does_not_acknowledge_the_entry_that_replaced_it() -> None:
    node = backup()
    node.handle([append(0, 2)], T0)
    node.handle([message(1, entry(1, epoch=2), epoch=2)], T0)
    assert node.handle([Persisted(0, NOWHERE), Persisted(1, NOWHERE)], T0) == answer(1)
    assert node.handle([Persisted(2, NOWHERE)], T0) == answer(2, epoch=2)


def test_entries_are_not_appended_after_one_that_the_primary_lost() -> None:
    node = restarted(1, 1)
    effects = node.handle([message(2, entry(2, epoch=2), epoch=2, previous=2)], T0)
    assert effects == answer(2)
    assert node.length == 2


def test_an_entry_that_the_primary_kept_stays_when_its_incarnation_is_over() -> None:
    node = restarted(1, 1)
    effects = node.handle([message(1, entry(1), entry(2, epoch=2), epoch=2)], T0)
    assert [type(effect) for effect in effects] == [Persist]
    assert node.length == 3


def test_messages_of_an_older_incarnation_are_ignored_after_one_of_a_newer_incarnation() -> None:
    node = restarted(1)
    node.handle([message(1, epoch=2)], T0)
    effects = node.handle([append(1, 3)], T0)
    assert ignored(effects) == ["metalog entries from an older incarnation of the primary"]
    assert (len(effects), node.length) == (1, 1)


def test_a_restarted_backup_knows_the_incarnation_of_its_last_entry() -> None:
    node = restarted(1, 2)
    assert len(ignored(node.handle([append(1, 3)], T0))) == 1
    assert node.length == 2


def test_entries_of_an_incarnation_are_replaced_even_if_the_one_between_sent_nothing() -> None:
    """Incarnation 2 proposed another entry at position 1, lost nothing, and sends no message."""
    node = restarted(1, 1, 1)
    entries = entry(1, epoch=2), entry(2, epoch=3)
    effects = node.handle([message(1, *entries, epoch=3)], T0)
    assert [type(effect) for effect in effects] == [Persist, Persist, Send]
    assert node.length == 3


def test_entries_that_the_primary_lost_do_not_stay_committed() -> None:
    """The primary may have announced them as committed before its own sync."""
    node = restarted(1)
    node.handle([append(1, 3, committed=3)], T0)
    node.handle([message(1, entry(1, epoch=2), epoch=2, committed=1)], T0)
    assert node.committed == 1
    node.check_invariants()


def test_committed_does_not_cover_entries_that_the_primary_may_have_lost() -> None:
    node = restarted(1, 1, 1)
    node.handle([message(1, epoch=2, committed=3)], T0)
    assert node.committed == 1


def test_a_primary_that_lost_what_earlier_incarnations_kept_is_not_followed() -> None:
    node = restarted(1, 2)
    effects = node.handle([message(0, entry(0, epoch=3), epoch=3)], T0)
    assert ignored(effects) == ["the primary has lost more than one incarnation can lose"]
    assert (len(effects), node.length) == (1, 2)


def test_a_backup_has_no_deadline_and_no_tail() -> None:
    node = backup(recovered=1)
    assert node.deadline() is None
    assert node.tail is None


def damaged(kind: FrameKind | None, *epochs: int, lost: int) -> Sequencer:
    """A backup that cannot read one of its frames any more."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for position, epoch in enumerate(epochs):
        payload = entry_encoded(entry(position, epoch=epoch))
        if position == lost:
            node.lost(Lost(kind, b"", NOWHERE))
        else:
            node.recover(FrameKind.METALOG, payload, NOWHERE)
    node.recovered()
    node.handle([Started(Epoch(9))], T0)
    return node


@pytest.mark.parametrize("kind", [FrameKind.METALOG, None])
@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_backup_with_a_hole_does_not_count_until_it_has_all_entries_again(
    kind: FrameKind | None, lost: int
) -> None:
    """A5: it reports a length of 0, and stores all entries again."""
    node = damaged(kind, 1, 1, 1, 1, 1, lost=lost)
    assert (node.length, node.committed) == (0, 0)
    effects = node.handle([message(0, *[entry(position) for position in range(5)])], T0)
    persisted = [effect for effect in effects if isinstance(effect, Persist)]
    assert len(persisted) == 5
    reported = node.handle([Persisted(effect.token, NOWHERE) for effect in persisted], T0)
    assert reported == [Send(PRIMARY, MetalogStored(Epoch(1), 5, incomplete=Epoch(9)))]


def test_a_backup_that_fetched_a_damaged_metalog_again_finds_it_at_the_next_start() -> None:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.recover(FrameKind.METALOG, frame(0).payload, NOWHERE)
    node.lost(Lost(FrameKind.METALOG, b"", NOWHERE))
    for position in (2, 3, 0, 1, 2):
        node.recover(FrameKind.METALOG, frame(position).payload, NOWHERE)
    node.recovered()
    assert node.length == 3


def test_damage_between_two_consecutive_entries_lost_no_entry() -> None:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for position in range(3):
        node.lost(Lost(None, b"", NOWHERE))
        node.lost(Lost(FrameKind.RECORDS, b"", NOWHERE))
        node.recover(FrameKind.METALOG, frame(position).payload, NOWHERE)
    node.recovered()
    assert node.length == 3


def test_an_entry_of_a_newer_incarnation_after_damage_may_have_replaced_others() -> None:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.recover(FrameKind.METALOG, frame(0).payload, NOWHERE)
    node.lost(Lost(None, b"", NOWHERE))
    node.recover(FrameKind.METALOG, entry_encoded(entry(1, epoch=2)), NOWHERE)
    node.recovered()
    assert node.length == 0


def test_messages_of_an_older_incarnation_are_ignored_after_damage_too() -> None:
    node = damaged(FrameKind.METALOG, 1, 3, 3, lost=1)
    assert isinstance(node.handle([message(0, entry(0), epoch=2)], T0)[0], Ignore)


def test_a_primary_takes_lost_entries_from_an_ordering_journal_of_its_process() -> None:
    """Its entries behind them are in their places: they are never replaced."""
    node = Sequencer(PRIMARY, [view_of()], Config())
    lost = (2, 3, 6)
    for position in range(9):
        if position in lost:
            node.lost(Lost(None, b"", NOWHERE))
        else:
            node.recover(FrameKind.METALOG, frame(position).payload, NOWHERE)
        if position == 4:
            node.copied(entries_encoded([entry(number) for number in range(3)]))
    node.copied(entries_encoded([entry(number) for number in range(3, 6)]))
    node.copied(entries_encoded([entry(number) for number in range(6, 8)]))
    node.recovered()
    node.handle([Started(Epoch(9))], T0)
    assert (node.length, node.tail) == (9, 9)
    node.check_invariants()


def test_a_backup_takes_no_entries_from_an_ordering_journal() -> None:
    """They may follow entries that were replaced here."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.lost(Lost(None, b"", NOWHERE))
    node.recover(FrameKind.METALOG, frame(1).payload, NOWHERE)
    node.copied(entries_encoded([entry(0), entry(1)]))
    node.recovered()
    assert node.length == 0


def test_a_primary_that_lost_entries_reports_it_in_one_sentence() -> None:
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


# --- it lacks entries, and the primary has them


def completing(start: int, *entries: NewRecords, life: int = 9) -> Received:
    before = Epoch(1 if start else 0)
    return Received(
        PRIMARY, MetalogAppend(Epoch(1), start, before, entries, 0, Epoch(life)), Epoch(1)
    )


def test_a_backup_is_whole_when_the_primary_announces_it_to_this_incarnation() -> None:
    node = damaged(None, 1, 1, lost=1)
    effects = node.handle([completing(0, entry(0), life=8)], T0)
    assert [e.kind for e in effects if isinstance(e, Persist)] == [FrameKind.METALOG_FETCHED]
    reported = node.handle([Persisted(1, NOWHERE)], T0)
    assert reported == [Send(PRIMARY, MetalogStored(Epoch(1), 1, incomplete=Epoch(9)))]
    (persist,) = node.handle([completing(1, life=9)], T0)
    assert isinstance(persist, Persist)
    assert persist.kind is FrameKind.METALOG_STATE
    assert node.handle([completing(1, life=9)], T0) == [], (
        "the announcement is answered when it is durable"
    )
    assert node.handle([Persisted(persist.token, NOWHERE)], T0) == answer(1)
    assert node.whole


def test_a_backup_that_lacks_earlier_entries_is_not_completed() -> None:
    node = damaged(None, 1, 1, lost=1)
    assert not [e for e in node.handle([completing(1, entry(1))], T0) if isinstance(e, Persist)]
    assert not node.whole


# --- the primary lacks entries


def wanted(epoch: int, start: int = 0, anchor: int | None = None) -> Received:
    return Received(PRIMARY, MetalogCopyWanted(Epoch(epoch), start, anchor), Epoch(1))


def copies(effects: list[Effect]) -> list[MetalogCopy]:
    return [
        e.message for e in effects if isinstance(e, Send) and isinstance(e.message, MetalogCopy)
    ]


def test_a_copy_is_sent_only_after_a_durable_promise_to_refuse_older_incarnations() -> None:
    node = restarted(1, 1)
    (persist,) = node.handle([wanted(5)], T0)
    assert isinstance(persist, Persist)
    assert node.handle([append(2, 3)], T0)[0] == Ignore(
        append(2, 3), "metalog entries from an older incarnation of the primary"
    )
    assert copies(node.handle([Persisted(persist.token, NOWHERE)], T0)) == [
        MetalogCopy(Epoch(5), True, Epoch(1), 2, 0, Epoch(0), None, Epoch(0), ())
    ]
    again = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for payload in (entry_encoded(entry(0)), entry_encoded(entry(1))):
        again.recover(FrameKind.METALOG, payload, NOWHERE)
    again.recover(FrameKind.METALOG_STATE, persist.payload, NOWHERE)
    again.recovered()
    again.handle([Started(Epoch(10))], T0)
    assert isinstance(again.handle([append(2, 3)], T0)[0], Ignore), "a restart does not forget it"
    assert len(copies(again.handle([wanted(5)], T0))) == 1, "it was promised already"


def test_a_copy_has_the_entries_up_to_the_anchor_a_page_at_most() -> None:
    config = Config(node=node_config(metalog_entries_in_flight_max=2))
    node = Sequencer(BACKUP, [view_of(sequencers=3)], config)
    for position, epoch in enumerate((1, 1, 2, 2, 2)):
        payload = entry_encoded(entry(position, epoch=epoch))
        node.recover(FrameKind.METALOG, payload, NOWHERE)
    (persist,) = [e for e in node.handle([Started(Epoch(9)), wanted(5)], T0) if type(e) is Persist]
    node.handle([Persisted(persist.token, NOWHERE)], T0)
    for start, anchor, positions in (
        (1, 3, [1, 2]), (3, 3, [3]), (4, 3, []), (1, 4, [1, 2]), (0, 9, []), (9, 4, []),
    ):  # fmt: skip
        (copy,) = copies(node.handle([wanted(5, start, anchor)], T0))
        assert [e.position for e in copy.entries] == positions
        assert (copy.last, copy.length, copy.whole) == (2, 5, True)
        assert copy.previous == {0: 0, 1: 1, 3: 2, 4: 2, 9: 0}[start]
        assert copy.anchor_epoch == (2 if anchor < 5 else 0)


@pytest.mark.parametrize(
    "event",
    [wanted(5, -1), wanted(5, 0, -1), Received(NodeId("sequencer-2"), wanted(5).message, Epoch(1))],
)
def test_an_impossible_question_is_ignored(event: Received) -> None:
    assert [type(effect) for effect in restarted(1).handle([event], T0)] == [Ignore]


def test_a_question_of_an_older_incarnation_is_ignored() -> None:
    assert [type(effect) for effect in restarted(1, 3).handle([wanted(2)], T0)] == [Ignore]


def test_a_wiped_backup_that_made_a_promise_still_lacks_entries() -> None:
    """Its journal is no longer empty, so its start does not show that it was wiped."""
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.lost(Lost(None, b"", NOWHERE))
    node.recovered()
    (persist,) = [e for e in node.handle([Started(Epoch(9)), wanted(5)], T0) if type(e) is Persist]
    assert not copies(node.handle([Persisted(persist.token, NOWHERE)], T0))[0].whole
    again = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    again.recover(FrameKind.METALOG_STATE, persist.payload, NOWHERE)
    again.recovered()
    assert not again.whole
