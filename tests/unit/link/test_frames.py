"""Frames of a link: whole again for any cut of the stream, refused when malformed."""

from __future__ import annotations

import tracemalloc

import pytest

from indilog.base.errors import MalformedFrameError
from indilog.link.frames import ClientFrame, FrameReader, write_frame
from indilog.link.link_messages import Done, LogAppend, LogAppendBatch, LogTail, RecordsFound


def test_frames_of_one_chunk_are_decoded_in_order() -> None:
    stream = bytearray()
    write_frame(stream, 1, LogAppend("orders", 3, b"data", ("a", 7)))
    write_frame(stream, 2, LogTail("orders", 4))
    frames = FrameReader(1024).frames(bytes(stream))
    assert [(f.call, f.message) for f in frames] == [
        (1, LogAppend("orders", 3, b"data", ("a", 7))),
        (2, LogTail("orders", 4)),
    ]


def test_a_frame_is_decoded_from_single_bytes() -> None:
    stream = bytearray()
    write_frame(stream, 9, Done(5))
    reader = FrameReader(1024)
    found = [frame for byte in stream for frame in reader.frames(bytes([byte]))]
    assert [(f.call, f.message) for f in found] == [(9, Done(5))]


def test_a_frame_at_the_limit_is_accepted_and_one_byte_more_is_refused() -> None:
    stream = bytearray()
    size = write_frame(stream, 1, LogAppend("l", 0, b"x" * 100, ())) - 4
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


def array(count: int) -> bytes:
    """Return the head of an array in msgpack."""
    return b"\xdd" + count.to_bytes(4, "big")


BATCH = b"\x92\x01\x96\xaeLogAppendBatch\xa1x\x00"
MANY = 4_000_000


@pytest.mark.parametrize(
    "body",
    [
        BATCH + array(MANY) + b"\xc4\x00" * MANY + array(0) + array(0),
        BATCH + array(1) + b"\xc4\x00" + array(MANY) + b"\x01" * MANY + b"\x91\x00",
        BATCH + array(0) + array(0) + array(MANY) + b"\x00" * MANY,
        b"\x92\x01\x95\xa9LogAppend\xa1x\x00\xc4\x00" + array(MANY) + b"\x01" * MANY,
        b"\x92\x01\x94\xa9DeployApp\xc0\xa1x\xdf" + array(MANY)[1:] + b"\xa0\xa0" * MANY,
    ],
    ids=["records", "tags", "counts", "tags of a record", "sources"],
)
def test_a_list_too_long_is_refused_before_it_is_decoded(body: bytes) -> None:
    """Shown by the memory, which would hold the decoded list."""
    stream = len(body).to_bytes(4, "big") + body
    reader = FrameReader(16 * 2**20, ClientFrame)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrameError, match="of length <="):
            reader.frames(stream)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_client_sends_no_answers() -> None:
    stream = bytearray()
    write_frame(stream, 1, RecordsFound(0, ()))
    assert len(FrameReader(1024).frames(bytes(stream))) == 1
    with pytest.raises(MalformedFrameError, match="RecordsFound"):
        FrameReader(1024, ClientFrame).frames(bytes(stream))


def test_a_batch_keeps_its_records_and_their_tags() -> None:
    entries = ((b"a", ("x", 7)), (b"", ()), (b"c", ("y",)))
    stream = bytearray()
    write_frame(stream, 1, LogAppendBatch.of("orders", 3, entries))
    [frame] = FrameReader(1024, ClientFrame).frames(bytes(stream))
    assert isinstance(frame.message, LogAppendBatch)
    assert tuple(frame.message.entries()) == entries


@pytest.mark.parametrize("counts", [(1,), (1, 0), (0, 0), (2, 1), (1, 0, 0)])
def test_a_batch_with_a_wrong_tag_count_is_refused(counts: tuple[int, ...]) -> None:
    batch = LogAppendBatch("orders", 0, (b"a", b"b"), (1, 2), counts)
    with pytest.raises(ValueError, match="differs from the sum"):
        list(batch.entries())
