"""The sequencer role: primary or backup, start, assertions."""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import Config
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, FrameRead, Location, Received, Role, Send, Started
from indilog.wire.messages import TailWanted
from indilog.wire.sequencer_messages import MetalogStored
from indilog_ordering.sequencer import Sequencer

T0 = Instant(1000.0)


def sequencer(name: str) -> Sequencer:
    return Sequencer(NodeId(name), [view_of(sequencers=2)], Config())


def test_the_first_sequencer_of_the_view_is_the_primary() -> None:
    role: Role = sequencer("sequencer-0")
    assert role.handle([Started(Epoch(1))], T0)
    assert role.deadline() is not None


def test_every_other_sequencer_is_a_backup() -> None:
    role: Role = sequencer("sequencer-1")
    effects = role.handle([Started(Epoch(1))], T0)
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
    node.handle([Started(Epoch(1))], T0)
    with pytest.raises(AssertionError):
        node.handle([Started(Epoch(2))], T0)
    with pytest.raises(AssertionError):
        node.handle([FrameRead(0, None)], T0)
