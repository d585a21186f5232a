"""The sequencer role: primary or backup, start, assertions."""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import Config
from indilog.kernel.lineage import Extent
from indilog.kernel.view import view_of
from indilog.roles.role import (
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Role,
    Send,
    Started,
    TermBegun,
)
from indilog.wire.messages import TailWanted, TermIs
from indilog.wire.sequencer_messages import MetalogStored, Seal, Sealed
from indilog_ordering.sequencer import Sequencer
from tests.support import metalog_messages

T0 = Instant(1000.0)
BACKUP, ENGINE = NodeId("sequencer-1"), NodeId("engine-0")
SEAL = Seal(Epoch(7), 1)


def sequencer(name: str) -> Sequencer:
    return Sequencer(NodeId(name), [view_of(sequencers=2)], Config())


def test_a_sequencer_leads_the_term_that_it_was_given() -> None:
    role: Role = sequencer("sequencer-1")
    effects = role.handle(metalog_messages.started(1, NodeId("sequencer-1")), T0)
    assert Send(NodeId("sequencer-0"), Seal(Epoch(1), 1)) in effects
    assert role.deadline() is not None


def test_a_sequencer_without_a_term_leads_nothing() -> None:
    role: Role = sequencer("sequencer-0")
    assert role.handle([Started(Epoch(1))], T0) == []
    assert role.deadline() is None


@pytest.mark.parametrize("newer", [TermBegun(Epoch(7), BACKUP), Received(BACKUP, SEAL, Epoch(2))])
def test_a_primary_stops_when_a_newer_term_begins(newer: Event) -> None:
    """It learns this from the metadata store and from the new primary, in any order."""
    node = leading()
    assert node.tail == 0
    node.handle([newer], T0)
    node.handle([Received(BACKUP, SEAL, Epoch(2)), TermBegun(Epoch(7), BACKUP)], T0)
    assert node.status() | {"term": 7} == node.status(), "it is a backup now, without a tail"
    assert "tail" not in node.status()
    asked = Received(ENGINE, TailWanted(1), Epoch(1))
    assert node.handle([asked], T0) == [Send(ENGINE, TermIs(Epoch(7), BACKUP))]
    node.check_invariants()


def test_a_term_older_than_a_promised_one_is_not_led() -> None:
    node = leading()
    node.handle([Received(BACKUP, SEAL, Epoch(2))], T0)
    effects = node.handle([TermBegun(Epoch(6), NodeId("sequencer-0"))], T0)
    assert [type(effect) for effect in effects] == [Ignore]
    assert node.tail is None


def test_a_sequencer_leads_again_in_the_same_incarnation() -> None:
    node = leading()
    node.handle([TermBegun(Epoch(7), BACKUP)], T0)
    effects = node.handle([TermBegun(Epoch(8), NodeId("sequencer-0"))], T0)
    assert Send(BACKUP, Seal(Epoch(8), 1)) in effects
    assert node.tail is None, "it has not adopted a copy yet"
    node.check_invariants()


def leading() -> Sequencer:
    """A primary of term 5 whose term has begun."""
    node = sequencer("sequencer-0")
    (promise, _) = node.handle(metalog_messages.started(5), T0)
    assert isinstance(promise, Persist)
    node.handle([Persisted(promise.token, Location(0, 0, 0))], T0)
    for number in (1, 2):
        sealed = Sealed(Epoch(5), number, Extent(Epoch(0), 0))
        node.handle([Received(BACKUP, sealed, Epoch(1))], T0)
    return node


def test_every_other_sequencer_is_a_backup() -> None:
    role: Role = sequencer("sequencer-1")
    effects = role.handle(metalog_messages.started(1), T0)
    assert effects == [Send(NodeId("sequencer-0"), MetalogStored(Epoch(0), 0))]


def test_a_node_that_is_no_sequencer_is_refused() -> None:
    with pytest.raises(AssertionError):
        sequencer("storage-0")


def test_nothing_happens_before_started() -> None:
    node = sequencer("sequencer-0")
    assert node.handle([], T0) == []
    assert (node.committed, node.tail, node.deadline()) == (0, None, None)
    node.check_invariants()
    with pytest.raises(AssertionError):
        node.handle([Received(NodeId("engine-0"), TailWanted(1), Epoch(1))], T0)


def test_events_that_the_shell_never_sends_trip_an_assertion() -> None:
    node = sequencer("sequencer-0")
    with pytest.raises(AssertionError):
        node.recover(FrameKind.RECORDS, b"", Location(0, 0, 0))
    node.handle(metalog_messages.started(1), T0)
    with pytest.raises(AssertionError):
        node.handle(metalog_messages.started(2), T0)
    with pytest.raises(AssertionError):
        node.handle([FrameRead(0, None)], T0)
