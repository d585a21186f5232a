"""The answer of an owner to another process as bytes (decision 0096)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog_cells.state import (
    Applied,
    BelowFloor,
    CheckedTooEarly,
    Contradicted,
    Ended,
    Outcome,
    Placed,
)

_KINDS: Final = (Placed, Contradicted, BelowFloor, CheckedTooEarly, Ended, Applied)
"""A kind is sent as its number here; new ones come last."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, list[int]]]])


class AppendedContent(NamedTuple):
    """What became of a content.

    Attributes:
        position: how many cells the owner had applied then, among them that of the content.
        outcomes: of its items.
    """

    position: int
    outcomes: Sequence[Outcome]


def encode_appended(appended: AppendedContent) -> bytes:
    """Return the bytes of an answer."""
    position, outcomes = appended
    return _encoder.encode(
        (position, [(_KINDS.index(type(each)), list(each)) for each in outcomes])
    )


def decode_appended(stored: bytes) -> AppendedContent:
    """Return what `encode_appended` was given.

    Raises:
        MalformedFrameError: the bytes are no answer.
    """
    try:
        position, outcomes = _decoder.decode(stored)
        return AppendedContent(position, [_KINDS[kind](*values) for kind, values in outcomes])
    except (msgspec.MsgspecError, IndexError, TypeError) as error:
        raise MalformedFrameError(f"no valid outcomes: {error}") from error
