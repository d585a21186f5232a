"""Metalog entries and their replay (`indilog.kernel.metalog`)."""

from __future__ import annotations

import pytest

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, ShardId, ViewNumber
from indilog.kernel.metalog import (
    TRIM_FLOORS_MAX,
    Floor,
    MetalogReplay,
    NewRecords,
    NewWriters,
    Span,
    Trim,
    decode_entry,
    encode_entry,
    size_bound,
)


def entry(position: int, **counts: int) -> NewRecords:
    return NewRecords(
        position=position,
        view=ViewNumber(1),
        epoch=Epoch(1),
        counts={ShardId(int(name[1:])): count for name, count in counts.items()},
    )


def test_an_entry_survives_an_encoding_round_trip() -> None:
    written = entry(7, s0=3, s65535=1)
    assert decode_entry(encode_entry(written)) == written


def test_the_size_bound_of_an_entry_is_safe_and_tight() -> None:
    big, largest = 2**63, 2**64 - 1
    shards = {ShardId(65535 - n): big for n in range(300)}
    writers = {shard: Epoch(big) for shard in shards}
    records = NewRecords(big, ViewNumber(big), Epoch(big), shards, big)
    named = NewWriters(big, ViewNumber(big), Epoch(big), writers)
    floors = tuple(Floor(largest, big, of_log=False, log=largest) for _ in range(TRIM_FLOORS_MAX))
    for written in (records, named, Trim(big, ViewNumber(big), Epoch(big), big, floors), entry(0)):
        size = len(encode_entry(written))
        assert size <= size_bound(written) <= size + 64


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\xc1", encode_entry(entry(1, s0=1))[:-1]])
def test_bytes_that_are_no_entry_are_refused(payload: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        decode_entry(payload)


def test_an_entry_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(MalformedFrameError):
        decode_entry(encode_entry(entry(1, s0=1)).replace(b"\xa1N", b"\xa1T"))


def test_order_inside_an_entry_is_ascending_by_shard() -> None:
    # Scalog 4.1: records of a cut are ordered by shard, then by place in the shard.
    spans = MetalogReplay().apply(entry(0, s2=1, s0=2, s1=3))
    assert spans == [
        Span(ShardId(0), 0, 0, 2), Span(ShardId(1), 0, 2, 3), Span(ShardId(2), 0, 5, 1)
    ]  # fmt: skip


def test_a_shard_continues_at_the_end_of_its_last_cut() -> None:
    replay = MetalogReplay()
    replay.apply(entry(0, s0=2, s1=1))
    (span,) = replay.apply(entry(1, s1=4))
    assert span == Span(ShardId(1), 1, 3, 4)
    assert span.end_seqnum == 7
    assert (replay.position, replay.tail, replay.cut) == (2, 7, {0: 2, 1: 5})


def test_a_replay_may_start_in_the_middle() -> None:
    whole = MetalogReplay()
    whole.apply(entry(0, s0=2, s1=1))
    late = MetalogReplay(whole.position, whole.tail, whole.cut)
    assert late.apply(entry(1, s0=1)) == whole.apply(entry(1, s0=1))
    assert late.cut == whole.cut


def test_replays_do_not_share_their_cut() -> None:
    cut = {ShardId(0): 1}
    replay = MetalogReplay(1, 1, cut)
    replay.apply(entry(1, s0=1))
    assert cut == {0: 1}


def test_an_entry_out_of_order_trips_an_assertion() -> None:
    with pytest.raises(AssertionError):
        MetalogReplay().apply(entry(1, s0=1))
