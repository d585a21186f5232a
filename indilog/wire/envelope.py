"""The envelope: a frame on a socket between nodes (docs/FORMATS.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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


def decode_envelope(frame: bytes | memoryview) -> Envelope:
    """Return the envelope in `frame`.

    Raises:
        MalformedFrameError: the frame is no envelope, or is of another wire version.
    """
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedFrameError(f"not an envelope: {error}") from error
    if envelope.version != WIRE_VERSION:
        raise MalformedFrameError(
            f"envelope of wire version {envelope.version}; this node speaks {WIRE_VERSION}"
        )
    return envelope
