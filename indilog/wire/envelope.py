"""The envelope: a frame on a socket between nodes (docs/FORMATS.md).

Nodes of two releases work together during a rolling upgrade (decision 0093). So a receiver ignores
messages of kinds that it does not know, and further fields at the end of a message.
`indilog.runtime.transport` packs and unpacks envelopes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, NodeId
from indilog.wire.messages import Message


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A frame on a socket: messages of one sender to one receiver, with the sender's epoch."""

    version: int
    epoch: Epoch
    sender: NodeId
    receiver: NodeId
    messages: tuple[Message, ...]


WIRE_VERSION: Final = 4


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """An envelope whose messages are encoded already."""

    version: int
    epoch: Epoch
    sender: NodeId
    receiver: NodeId
    messages: tuple[msgspec.Raw, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_packed_decoder = msgspec.msgpack.Decoder(_Packed)
_message_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)
_KINDS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(Message))


def encode_envelope(envelope: Envelope) -> bytes:
    """Return an envelope's bytes."""
    return _encoder.encode(envelope)


def encode_message(message: Message) -> msgspec.Raw:
    """Return a message's bytes, for `pack_envelope`."""
    return msgspec.Raw(_encoder.encode(message))


def pack_envelope(
    epoch: Epoch,
    sender: NodeId,
    receiver: NodeId,
    messages: Sequence[msgspec.Raw],
) -> bytes:
    """Return the bytes of an envelope of encoded messages.

    So a message to several receivers is encoded once.
    """
    return _encoder.encode(_Packed(WIRE_VERSION, epoch, sender, receiver, tuple(messages)))


def decode_envelope(
    frame: bytes | memoryview, on_unknown: Callable[[NodeId, str], object] = lambda *_: None
) -> Envelope:
    """Return the envelope in `frame`, without messages of kinds that this release does not know.

    Args:
        frame: bytes of one envelope.
        on_unknown: called with the sender and the kind of each message that is left out. Messages
            can be lost anyway, so the sender copes with that.

    Raises:
        MalformedFrameError: the frame is no envelope, or is of another wire version.
    """
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError):
        envelope = _decode_each(frame, on_unknown)
    _check_version(envelope.version)
    return envelope


def _decode_each(
    frame: bytes | memoryview, on_unknown: Callable[[NodeId, str], object]
) -> Envelope:
    """Return the envelope in `frame`, whose messages are decoded one by one."""
    try:
        packed = _packed_decoder.decode(frame)
        _check_version(packed.version)
        known = []
        for raw in packed.messages:
            kind = _kind_of(raw)
            if kind in _KINDS:
                known.append(_message_decoder.decode(raw))
            else:
                on_unknown(packed.sender, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedFrameError(f"not an envelope: {error}") from error
    return Envelope(packed.version, packed.epoch, packed.sender, packed.receiver, tuple(known))


def _kind_of(message: msgspec.Raw) -> str:
    """Return the name of a message's kind.

    Raises:
        msgspec.DecodeError: it is no array that begins with a name.
    """
    fields = msgspec.msgpack.decode(message, type=list[Any])
    if not fields or not isinstance(fields[0], str):
        raise msgspec.DecodeError("a message is an array that begins with the name of its kind")
    return fields[0]


def _check_version(version: int) -> None:
    if version != WIRE_VERSION:
        raise MalformedFrameError(
            f"envelope of wire version {version}; this node speaks {WIRE_VERSION}"
        )
