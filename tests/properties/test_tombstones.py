"""Notes of discarded records survive the journal with all fields; partial notes are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, ShardId
from indilog.kernel.tombstones import GoneRecords, decode_gone, encode_gone

notes = st.builds(
    lambda shard, epoch, first, count, repaired: GoneRecords(
        ShardId(shard), Epoch(epoch), first, first + count, repaired
    ),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63),
    st.integers(1, 2**32),
    st.booleans(),
)


@given(notes)
def test_a_note_survives_a_round_trip(note: GoneRecords) -> None:
    assert decode_gone(encode_gone(note)) == note


@given(notes, st.integers(0, 30))
def test_a_part_of_a_note_is_refused(note: GoneRecords, length: int) -> None:
    payload = encode_gone(note)
    with pytest.raises(MalformedFrameError):
        decode_gone(payload[: min(length, len(payload) - 1)])


@given(st.binary(max_size=40))
def test_any_bytes_are_a_note_or_refused(payload: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        assert encode_gone(decode_gone(payload)) == payload


@given(notes, st.integers(1, 100), st.booleans())
def test_only_contiguous_notes_are_joined(note: GoneRecords, count: int, repaired: bool) -> None:
    following = note._replace(first=note.end, end=note.end + count, repaired=repaired)
    joined = note.joined(following)
    assert (joined is None) == (note.repaired or repaired)
    assert joined is None or (joined.first, joined.end) == (note.first, following.end)
    apart = following._replace(first=note.end + 1, end=note.end + 1 + count)
    assert note.joined(apart) is None
    assert note.joined(following._replace(epoch=Epoch(note.epoch ^ 1))) is None
