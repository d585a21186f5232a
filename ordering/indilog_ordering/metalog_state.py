"""What a sequencer knows of its own copy of the metalog, as `METALOG_STATE` frames hold it
(docs/FORMATS.md, decision 0020).
"""

from __future__ import annotations

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import Base


class MetalogState(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The tag is the version of the format.

    Attributes:
        promised: no incarnation of the primary older than this is followed.
        extent: how far the copy goes at this place in the order of frames; None: not said.
        whole: whether nothing is missing in it that was here once; not said without `extent`.
        base: what takes the place of the whole copy here; None: nothing does.
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
        MalformedFrameError: it holds none that this version knows.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not the state of a metalog: {error}") from error
