"""The wire messages and their envelope (`indilog.wire.messages`)."""

from __future__ import annotations

import typing

import msgspec
import pytest

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, NodeId, ShardId, ViewNumber
from indilog.kernel.metalog import NewRecords
from indilog.kernel.view import view_of
from indilog.wire.cell_messages import CellAnswer
from indilog.wire.conditional_messages import HomeIs, HomeWanted
from indilog.wire.envelope import (
    WIRE_VERSION,
    Envelope,
    decode_envelope,
    encode_envelope,
    encode_message,
    pack_envelope,
)
from indilog.wire.growth_messages import GrowthWanted, LogGrew
from indilog.wire.messages import (
    IndexBlock,
    IndexData,
    Message,
    RecordsRead,
    ShardProgress,
    ShardTags,
    StoredRecord,
    TailWanted,
)
from indilog.wire.owner_messages import OwnerAnswer, OwnerAppend
from indilog.wire.sequencer_messages import MetalogAppend
from tests.support.metalog_messages import entries_message

TAGS = ShardTags(ShardId(0), first_seqnum=0, count=1, tag_counts=b"\1", tags=b"12345678")
KINDS = typing.get_args(Message)
MESSAGES: tuple[Message, ...] = (
    ShardProgress(Epoch(1), stored={ShardId(0): (Epoch(2), 7)}),
    entries_message((NewRecords(0, ViewNumber(1), Epoch(1), {ShardId(0): 3}),)),
    IndexData((IndexBlock(0, 3, (ShardId(0),), (TAGS,)),)),
    RecordsRead(1, ShardId(0), (StoredRecord(0, 1, 2, b"orders", b"\xff", None),), (4,)),
)  # fmt: skip


def envelope(*messages: Message, version: int = WIRE_VERSION) -> Envelope:
    return Envelope(version, Epoch(1), NodeId("storage-0"), NodeId("engine-0"), messages)


def test_an_envelope_keeps_kinds_order_and_contents() -> None:
    sent = envelope(*MESSAGES)
    assert decode_envelope(encode_envelope(sent)) == sent
    names = (sent.epoch, sent.sender, sent.receiver)
    packed = pack_envelope(*names, [encode_message(message) for message in sent.messages])
    assert packed == encode_envelope(sent)
    assert decode_envelope(memoryview(encode_envelope(sent))) == sent


def test_every_message_has_its_own_tag_on_the_wire() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags) == len(KINDS)


def test_only_what_is_durable_or_known_elsewhere_promises_nothing() -> None:
    asked = {MetalogAppend, HomeWanted, HomeIs, CellAnswer}
    free = asked | {OwnerAppend, OwnerAnswer, GrowthWanted, LogGrew}
    assert {kind for kind in KINDS if not kind.promises} == free


def test_messages_are_immutable() -> None:
    # Messages within one process are passed by reference.
    assert all(kind.__struct_config__.frozen for kind in KINDS)
    with pytest.raises(AttributeError):
        MESSAGES[0].stored = {}  # type: ignore[misc, union-attr]


def test_every_truncated_envelope_is_refused() -> None:
    frame = encode_envelope(envelope(*MESSAGES))
    for size in range(len(frame)):
        with pytest.raises(MalformedFrameError):
            decode_envelope(frame[:size])


def test_another_wire_version_is_refused_by_number() -> None:
    frame = encode_envelope(envelope(TailWanted(1), version=WIRE_VERSION + 1))
    with pytest.raises(MalformedFrameError, match=f"wire version {WIRE_VERSION + 1}"):
        decode_envelope(frame)


def packed(*messages: object, version: int = WIRE_VERSION) -> bytes:
    return msgspec.msgpack.encode([version, 7, "storage-0", "engine-0", messages])


def test_messages_of_a_later_release_are_left_out() -> None:
    frame = packed(["Greeting", {"any": [b"thing"]}], ["TailWanted", 1], ["Parting"])
    unknown: list[tuple[str, str]] = []
    envelope = decode_envelope(frame, lambda sender, kind: unknown.append((sender, kind)))
    assert envelope.messages == (TailWanted(1),)
    assert unknown == [("storage-0", "Greeting"), ("storage-0", "Parting")]


def test_further_fields_of_a_message_are_ignored() -> None:
    assert decode_envelope(packed([*msgspec.to_builtins(TailWanted(1)), "later"])).messages == (
        TailWanted(1),
    )


def test_another_wire_version_is_named_although_its_messages_are_unknown() -> None:
    with pytest.raises(MalformedFrameError, match=f"wire version {WIRE_VERSION + 1}"):
        decode_envelope(packed(["Greeting"], version=WIRE_VERSION + 1))


def test_a_known_message_with_wrong_fields_is_refused_beside_an_unknown_one() -> None:
    with pytest.raises(MalformedFrameError):
        decode_envelope(packed(["Greeting"], ["TailWanted", "text"]))


def test_metalog_entries_and_views_with_further_fields_are_refused() -> None:
    """Nodes that ignored a part of them would not agree on the order."""
    view = msgspec.to_builtins(view_of())
    entries = [["N", 0, 1, 1, {0: 3}, 17], ["V", 0, 1, 1, view]]
    message = ["MetalogEntries", 0, 0, entries, 2]
    assert len(decode_envelope(packed(message)).messages) == 1
    entries[0].append("later")
    with pytest.raises(MalformedFrameError):
        decode_envelope(packed(message))
    entries[0].pop()
    view["later"] = True
    with pytest.raises(MalformedFrameError):
        decode_envelope(packed(message))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 1, 1, "a", "b", [["NoSuchMessage", 1]]]),
        msgspec.msgpack.encode([1, 1, 1, "a", "b", [["TailWanted", "text"]]]),
        msgspec.msgpack.encode({"version": 1}),
    ],
)
def test_bytes_that_are_no_envelope_are_refused(frame: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        decode_envelope(frame)


def test_text_that_is_not_utf8_is_refused() -> None:
    frame = encode_envelope(envelope(TailWanted(1))).replace(b"storage-0", b"storage-\xff")
    with pytest.raises(MalformedFrameError):
        decode_envelope(frame)
