"""A stream cut into any pieces yields exactly the frames that were sent."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from indilog.runtime.transport.stream_incoming import Incoming
from indilog.runtime.transport.transport import TransportCounts

LIMIT = 300


def complete_in(stream: bytes) -> list[bytes]:
    """Return the complete frames of a whole stream: the model, which sees it all at once."""
    found = []
    while len(stream) >= 4:
        size = stream[0] + 256 * stream[1] + 65536 * stream[2] + 16777216 * stream[3]
        if len(stream) < 4 + size:
            break
        found.append(stream[4 : 4 + size])
        stream = stream[4 + size :]
    return found


@given(
    frames=st.lists(st.binary(max_size=LIMIT), max_size=20),
    cuts=st.lists(st.integers(0, 7000), max_size=40),
    lost=st.integers(0, 400),
)
def test_any_pieces_yield_the_complete_frames(
    frames: list[bytes], cuts: list[int], lost: int
) -> None:
    whole = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    stream = whole[: max(0, len(whole) - lost)]
    found: list[bytes] = []
    incoming = Incoming(set(), found.extend, LIMIT, TransportCounts())
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in pairwise(edges):
        incoming.data_received(stream[start:end])
        assert found == complete_in(stream[:end]), "every complete frame, as soon as it is complete"
