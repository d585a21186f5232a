"""The record batch (`indilog.kernel.records`)."""

from __future__ import annotations

import pytest

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, ShardId, log_tag, tag_columns, tag_hash
from indilog.kernel.records import (
    HEADER_BYTES,
    BatchBuilder,
    RecordBatch,
    batch_header,
    record_bytes,
)


def batch_of(*records: tuple[bytes, tuple[str, ...]], first: int = 5) -> bytes:
    builder = BatchBuilder()
    for data, tags in records:
        builder.add(data, tag_columns("orders", tags))
    return builder.build(shard=ShardId(3), epoch=Epoch(9), first=first, time_us=1_700_000)


TWO = batch_of((b"hello", ("a", "b")), (b"", ()))


def test_a_batch_returns_the_added_records() -> None:
    batch = RecordBatch(TWO)
    assert len(batch) == 2
    assert batch.record(0) == (b"hello", tag_columns("orders", ("a", "b"))[1], 1_700_000)
    assert batch.record(1) == (b"", tag_columns("orders", ())[1], 1_700_000)


def test_the_header_holds_the_shard_and_the_localids() -> None:
    header = batch_header(TWO)
    assert (header.shard, header.epoch, header.logspace) == (3, 9, 0)
    assert (header.first, header.end, header.records, header.tags) == (5, 7, 2, 4)


def test_tag_columns_are_the_bytes_of_the_batch() -> None:
    counts, tags = RecordBatch(TWO).tag_columns()
    assert counts == bytes([3, 1])
    wanted = [
        log_tag("orders"), tag_hash("orders", "a"), tag_hash("orders", "b"), log_tag("orders")
    ]  # fmt: skip
    assert tags == b"".join(tag.to_bytes(8, "little") for tag in wanted)


def test_a_batch_gets_other_data_for_some_records() -> None:
    tombstone = RecordBatch(batch_of((b"x", ()), (b"gone", ("a",)), (b"y", ("b",))))
    batch = RecordBatch(tombstone.with_tombstones([False, True, False]))
    changed = RecordBatch(batch.with_data({2: b"longer"}))
    assert changed.header._replace(data_bytes=0, columns_crc=0, data_crc=0) == (
        batch.header._replace(data_bytes=0, columns_crc=0, data_crc=0)
    )
    assert changed.tag_columns() == batch.tag_columns()
    assert [changed.record(n).data for n in range(3)] == [b"x", b"", b"longer"]
    assert [changed.names(n) for n in range(3)] == [batch.names(n) for n in range(3)]
    assert batch.with_data({}) == batch.buffer


def test_the_batch_layout_never_changes() -> None:
    # Written by version 2; a change of these bytes needs a new version.
    assert TWO[:6] == b"ILRB\x02\x00"
    assert HEADER_BYTES == 58
    assert len(TWO) == HEADER_BYTES + 4 * 8 + 2 * 13 + len(b"orders\x1fsa\x1fsborders") + 5
    assert TWO.endswith(b"orders\x1fsa\x1fsbordershello")


def test_a_record_adds_its_bytes_to_the_batch() -> None:
    builder, size = BatchBuilder(), HEADER_BYTES
    columns = tag_columns("orders", ("t",))
    for data in (b"x" * 100, b""):
        builder.add(data, columns)
        size += record_bytes(data, columns)
    assert size == len(builder.build(shard=ShardId(0), epoch=Epoch(1), first=0, time_us=0))


def test_every_truncated_batch_is_refused() -> None:
    for size in range(len(TWO)):
        with pytest.raises(MalformedFrameError):
            RecordBatch(TWO[:size])


def test_every_flipped_bit_is_detected() -> None:
    for bit in range(8 * len(TWO)):
        damaged = bytearray(TWO)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedFrameError):
            RecordBatch(bytes(damaged))


THREE = batch_of((b"one", ("a",)), (b"two", ("b",)), (b"", ("c",)))
DATA_AT = len(THREE) - len(b"onetwo")


def flipped(batch: bytes, bit: int) -> bytes:
    damaged = bytearray(batch)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_damage_to_data_loses_only_the_data_of_its_record() -> None:
    whole = RecordBatch(THREE)
    for bit in range(8 * DATA_AT, 8 * len(THREE)):
        batch = RecordBatch(flipped(THREE, bit), partly=True)
        [hit] = batch.damaged
        assert hit == (bit // 8 - DATA_AT) // 3
        assert batch.damaged_localids == [5 + hit]
        assert batch.tag_columns() == whole.tag_columns()
        left = [index for index in range(3) if index != hit]
        assert [batch.record(index) for index in left] == [whole.record(i) for i in left]
        with pytest.raises(AssertionError):
            batch.record(hit)


def test_damage_to_tags_names_or_the_header_makes_a_batch_unreadable() -> None:
    for bit in range(8 * DATA_AT):
        with pytest.raises(MalformedFrameError):
            RecordBatch(flipped(THREE, bit), partly=True)


def test_bytes_after_the_batch_are_refused() -> None:
    with pytest.raises(MalformedFrameError, match="came as"):
        batch_header(TWO + b"x")


def test_an_unknown_version_is_refused_by_number() -> None:
    with pytest.raises(MalformedFrameError, match="version 3"):
        batch_header(TWO[:4] + b"\x03" + TWO[5:])


def test_an_empty_batch_trips_an_assertion() -> None:
    with pytest.raises(AssertionError):
        BatchBuilder().build(shard=ShardId(0), epoch=Epoch(1), first=0, time_us=0)
