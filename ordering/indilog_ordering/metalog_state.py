"""The state of a sequencer's copy of the metalog, as `METALOG_STATE` frames hold it
(docs/FORMATS.md, decision 0042).

`StoredMetalog` writes and reads these frames; a restored backup (`indilog_pipeline.backup`) writes
one.
"""

from __future__ import annotations

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import Base


class MetalogState(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The state of a copy; the tag is the version of the format.

    Attributes:
        promised: primaries of a term below this are not followed.
        learner: whether the copy may lack entries that it once had.
        extent: the extent of the copy at this frame.
        base: the base that replaces the whole copy at this frame; None: the copy stays.
    """

    promised: Epoch
    learner: bool
    extent: Extent
    base: Base | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MetalogState)


def encode_state(state: MetalogState) -> bytes:
    """Return the bytes of a state, as journals hold them."""
    return _encoder.encode(state)


def decode_state(payload: bytes) -> MetalogState:
    """Return the state that `payload` holds.

    Raises:
        MalformedFrameError: this release cannot decode the payload.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not the state of a metalog: {error}") from error
