"""Answers of owners as bytes."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.errors import MalformedFrameError
from indilog_cells.outcomes import AppendedContent, decode_appended, encode_appended
from indilog_cells.state import (
    Applied,
    BelowFloor,
    CheckedTooEarly,
    Contradicted,
    Ended,
    Outcome,
    Placed,
)


def test_each_outcome_is_decoded_as_it_was() -> None:
    outcomes: list[Outcome] = [
        Placed(1), Contradicted(2), BelowFloor(3), CheckedTooEarly(), Ended(), Applied(4),
    ]  # fmt: skip
    assert decode_appended(encode_appended(AppendedContent(7, outcomes))) == AppendedContent(
        7, outcomes
    )


@pytest.mark.parametrize(
    "value", [b"", [0, [[6, []]]], [0, [[0, []]]], [0, [[0, [1, 2]]]], [0, [0]], [0], "x"]
)
def test_other_bytes_are_refused(value: object) -> None:
    stored = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    with pytest.raises(MalformedFrameError):
        decode_appended(stored)
