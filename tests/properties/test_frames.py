"""A stream of frames cut into any pieces yields the same frames."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from indilog.link.frames import FrameReader, write_frame
from indilog.link.link_messages import Done, LinkMessage, LogAppend, Returned

MESSAGES = st.one_of(
    st.builds(Done, st.integers(0, 2**40)),
    st.builds(Returned, st.integers(0, 100), st.binary(max_size=200)),
    st.builds(
        LogAppend,
        st.text(max_size=10),
        st.integers(0, 100),
        st.binary(max_size=300),
        st.tuples(st.text(max_size=5), st.integers(1, 2**64 - 1)),
    ),
)


@given(st.lists(MESSAGES, max_size=12), st.lists(st.integers(0, 400), max_size=20))
def test_any_cut_of_the_stream_yields_the_same_frames(
    messages: list[LinkMessage], cuts: list[int]
) -> None:
    stream = bytearray()
    for call, message in enumerate(messages):
        write_frame(stream, call, message)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    reader = FrameReader(4096)
    found = [
        (frame.call, frame.message)
        for start, end in itertools.pairwise(places)
        for frame in reader.frames(bytes(stream[start:end]))
    ]
    assert found == list(enumerate(messages))
