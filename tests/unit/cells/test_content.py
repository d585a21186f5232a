"""The bytes of a cell."""

from __future__ import annotations

import pytest

from indilog.base.errors import MalformedFrameError
from indilog_cells.content import (
    JUNK,
    AskTime,
    Condition,
    Content,
    End,
    Policy,
    Records,
    TrimBelow,
    decode,
    encode,
)

CONTENT = Content(
    epoch=3,
    is_claim=True,
    writer=b"w",
    serial=2**40,
    stamp_us=10**15,
    items=[
        Records(1, [b"t" * 16], [b"log\x1fst"], [b"\x00\xff"], Condition(1, 2**64 - 1, -1, 0)),
        Records(2, [], [], []),
        TrimBelow(5, None, 7),
        TrimBelow(5, 6, 7),
        Policy("log", None, 10),
        AskTime(),
        End(),
    ],
)


def test_a_content_is_read_as_it_was_written() -> None:
    assert decode(encode(CONTENT)) == CONTENT


def test_junk_takes_no_more_than_a_header() -> None:
    assert decode(JUNK) is None
    assert len(JUNK) == 9


def test_each_changed_bit_is_refused() -> None:
    cell = encode(CONTENT)
    for at in range(8 * len(cell)):
        damaged = bytearray(cell)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(MalformedFrameError):
            decode(bytes(damaged))


def test_each_shorter_cell_is_refused() -> None:
    cell = encode(CONTENT)
    for size in range(len(cell)):
        with pytest.raises(MalformedFrameError):
            decode(cell[:size])


def test_another_version_is_named_in_the_refusal() -> None:
    cell = bytearray(encode(CONTENT))
    cell[4] = 9
    with pytest.raises(MalformedFrameError, match="version 9; this reader knows 2"):
        decode(bytes(cell))
    cell[4] = 1
    assert decode(bytes(cell)) == CONTENT, "older versions are read"


def test_an_item_has_an_upper_bound_of_its_bytes() -> None:
    many = Records(1, [b"t" * 16] * 300, [b"log"] * 300, [b"d" * 70_000] * 300)
    for item in (*CONTENT.items, many):
        content = Content(1, False, b"w", 1, 1, [item])
        empty = Content(1, False, b"w", 1, 1, [])
        assert len(encode(content)) - len(encode(empty)) <= item.size_bytes
