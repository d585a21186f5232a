"""Claims about a backup, through the sequencer role that holds it."""

from __future__ import annotations

import pytest

from indilog.config import Config
from indilog.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.messages import MetalogAppend, MetalogStored, MetalogWanted
from indilog.metalog import NewRecords, entry_encoded
from indilog.roles import (
    Effect,
    FrameKind,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from indilog.view import view_of
from ordering.sequencer import Sequencer

PRIMARY, BACKUP = NodeId("sequencer-0"), NodeId("sequencer-1")
NOWHERE = Location(0, 0, 0)
T0 = Instant(1000.0)


def entry(position: int, *, count: int = 1) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(1), {ShardId(0): count})


def frame(position: int) -> Persist:
    return Persist(FrameKind.METALOG, entry_encoded(entry(position)), position)


def backup(*, recovered: int = 0) -> Sequencer:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    for position in range(recovered):
        node.recover(FrameKind.METALOG, entry_encoded(entry(position)), NOWHERE)
    node.handle([Started(Epoch(1))], T0)
    return node


def append(start: int, end: int, *, committed: int = 0) -> Received:
    entries = tuple(entry(position) for position in range(start, end))
    return Received(PRIMARY, MetalogAppend(start, entries, committed))


def answer(length: int) -> list[Effect]:
    return [Send(PRIMARY, MetalogStored(length))]


def test_entries_are_answered_for_when_they_are_durable() -> None:
    node = backup()
    assert node.handle([append(0, 2)], T0) == [frame(0), frame(1)]
    assert node.handle([Persisted(0, NOWHERE), Persisted(1, NOWHERE)], T0) == answer(2)
    assert node.handle([], T0) == []


def test_a_gap_is_not_stored_and_answered_with_what_is_here() -> None:
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
        probe = Received(PRIMARY, MetalogAppend(start, (), 0))
        assert node.handle([probe], T0) == answer(2)


def test_a_restarted_backup_says_what_it_has() -> None:
    node = Sequencer(BACKUP, [view_of(sequencers=3)], Config())
    node.recover(FrameKind.METALOG, entry_encoded(entry(0)), NOWHERE)
    assert node.handle([Started(Epoch(2))], T0) == answer(1)


def test_committed_is_never_more_than_is_here() -> None:
    node = backup(recovered=1)
    node.handle([append(1, 3, committed=9)], T0)
    assert node.committed == 3
    node.handle([append(1, 3, committed=1)], T0)
    assert node.committed == 3
    node.check_invariants()


def test_entries_that_contradict_those_here_get_no_answer() -> None:
    node = backup(recovered=2)
    other = MetalogAppend(1, (entry(1, count=7), entry(2)), 0)
    effects = node.handle([Received(PRIMARY, other)], T0)
    assert [type(effect) for effect in effects] == [Ignore]
    assert node.length == 2


@pytest.mark.parametrize(
    "event",
    [
        Received(NodeId("sequencer-2"), MetalogAppend(0, (entry(0),), 0)),
        Received(PRIMARY, MetalogAppend(0, (entry(1),), 0)),
        Received(PRIMARY, MetalogAppend(0, (entry(0), entry(2)), 0)),
        Received(PRIMARY, MetalogAppend(-1, (), 0)),
        Received(PRIMARY, MetalogWanted(0)),
    ],
)
def test_what_has_no_place_here_is_ignored_and_changes_nothing(event: Received) -> None:
    node = backup()
    effects = node.handle([event], T0)
    assert [type(effect) for effect in effects] == [Ignore]
    assert node.length == 0


def test_a_backup_has_no_deadline_and_no_tail() -> None:
    node = backup(recovered=1)
    assert node.deadline() is None
    assert node.tail is None
