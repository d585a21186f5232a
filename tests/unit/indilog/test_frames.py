"""Frames of a link: whole again however the stream is cut, refused when they are none."""

from __future__ import annotations

import pytest

from indilog.calls import Done, LogAppend, LogTail
from indilog.errors import MalformedFrameError
from indilog.frames import FrameReader, frame_written


def test_frames_come_back_in_order_from_one_piece() -> None:
    stream = bytearray()
    frame_written(stream, 1, LogAppend("orders", 3, b"data", ("a", 7)))
    frame_written(stream, 2, LogTail("orders", 4))
    frames = FrameReader(1024).frames(bytes(stream))
    assert [(f.call, f.message) for f in frames] == [
        (1, LogAppend("orders", 3, b"data", ("a", 7))),
        (2, LogTail("orders", 4)),
    ]


def test_a_frame_arrives_byte_by_byte() -> None:
    stream = bytearray()
    frame_written(stream, 9, Done(5))
    reader = FrameReader(1024)
    found = [frame for byte in stream for frame in reader.frames(bytes([byte]))]
    assert [(f.call, f.message) for f in found] == [(9, Done(5))]


def test_a_frame_at_the_limit_passes_and_one_byte_more_is_refused() -> None:
    stream = bytearray()
    size = frame_written(stream, 1, LogAppend("l", 0, b"x" * 100, ())) - 4
    assert len(FrameReader(size).frames(bytes(stream))) == 1
    with pytest.raises(MalformedFrameError, match="the limit is"):
        FrameReader(size - 1).frames(bytes(stream))


def test_a_length_over_the_limit_is_refused_before_its_bytes_arrive() -> None:
    with pytest.raises(MalformedFrameError):
        FrameReader(1024).frames(b"\xff\xff\xff\xff")


def test_a_split_length_over_the_limit_is_refused_too() -> None:
    reader = FrameReader(1024)
    assert reader.frames(b"\xff\xff") == []
    with pytest.raises(MalformedFrameError):
        reader.frames(b"\xff\xff")


@pytest.mark.parametrize("body", [b"\xc1", b"\x93\x01\x02\x03", b"\x92\x01\x91\xa4Nope", b""])
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrameError, match="not a message"):
        FrameReader(1024).frames(len(body).to_bytes(4, "big") + body)
