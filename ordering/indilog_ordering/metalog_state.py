"""The state of a sequencer's copy of the metalog, as `METALOG_STATE` frames hold it
(docs/FORMATS.md, decision 0020).
"""

from __future__ import annotations

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import Base


class MetalogState(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The state of a copy; the tag is the version of the format.

    Attributes:
        promised: incarnations of the primary older than this are not followed.
        extent: the extent of the copy at this frame; None: not stated.
        whole: whether the copy has all entries that it once had; False without `extent`.
        base: what replaces the whole copy at this frame; None: nothing does.
    """

    promised: Epoch
    extent: Extent | None
    whole: bool
    base: Base | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MetalogState)


def state_encoded(state: MetalogState) -> bytes:
    """Return the bytes of a state, as journals hold them."""
    return _encoder.encode(state)


def state_decoded(payload: bytes) -> MetalogState:
    """Return the state that `payload` holds.

    Raises:
        MalformedFrameError: this release cannot decode the payload.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not the state of a metalog: {error}") from error
