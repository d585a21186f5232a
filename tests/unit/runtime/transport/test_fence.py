"""`Fence`: only frames of the newest incarnation of a node are accepted."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.ids import Epoch, NodeId
from indilog.runtime.transport.fence import _SENDERS_MAX, Fence, RefusedFrame
from indilog.wire.envelope import WIRE_VERSION, Envelope, encode_envelope
from indilog.wire.messages import MetalogWanted

ENGINE, PRIMARY, STORAGE = NodeId("engine-0"), NodeId("sequencer-0"), NodeId("storage-0")
SOUND = Envelope(WIRE_VERSION, Epoch(5), ENGINE, PRIMARY, (MetalogWanted(0),))


def frame(**changes: object) -> bytes:
    return encode_envelope(msgspec.structs.replace(SOUND, **changes))


def outcome(fence: Fence, given: bytes) -> str:
    admitted = fence.admit(given)
    return admitted.reason if isinstance(admitted, RefusedFrame) else "taken"


@pytest.fixture
def fence() -> Fence:
    return Fence({PRIMARY})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (frame(), "taken"),
        (b"junk", "malformed frame"),
        (frame(version=WIRE_VERSION + 1), "malformed frame"),
        (frame(receiver=STORAGE), "frame for another node"),
    ],
)
def test_only_frames_for_nodes_of_this_process_are_accepted(
    fence: Fence, given: bytes, expected: str
) -> None:
    assert outcome(fence, given) == expected


def test_a_resumed_process_is_refused_after_a_frame_of_its_successor(
    fence: Fence,
) -> None:
    """A24: the paused process has an older epoch than its successor."""
    outcomes = [outcome(fence, frame(epoch=Epoch(epoch))) for epoch in (5, 5, 8, 5, 7, 8, 9)]
    old = "frame of an old incarnation"
    assert outcomes == ["taken", "taken", "taken", old, old, "taken", "taken"]


def test_each_sender_has_its_own_epoch(fence: Fence) -> None:
    assert outcome(fence, frame(epoch=Epoch(8))) == "taken"
    assert outcome(fence, frame(sender=STORAGE, epoch=Epoch(3))) == "taken"


def test_a_refused_frame_does_not_advance_the_epoch(fence: Fence) -> None:
    assert outcome(fence, frame(receiver=STORAGE, epoch=Epoch(9))) != "taken"
    assert outcome(fence, frame(epoch=Epoch(5))) == "taken"


def test_the_number_of_senders_is_limited(fence: Fence) -> None:
    for number in range(_SENDERS_MAX):
        assert outcome(fence, frame(sender=NodeId(f"engine-{number}"))) == "taken"
    assert outcome(fence, frame(sender=STORAGE)) == "frame of one node too many"
    assert outcome(fence, frame(sender=ENGINE)) == "taken"
