"""An object on cold storage is read as the batches that it was made of, or refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, ShardId, TagColumns, UserTag, tag_columns
from indilog.kernel.cold import (
    VERSION,
    ColdBatch,
    ColdObject,
    decode_cold_object,
    encode_cold_object,
    object_named,
)
from indilog.kernel.cold_objects import (
    GROUP_RECORDS,
    EncodedObject,
    ObjectReader,
    encode_object,
)
from indilog.kernel.records import BatchBuilder, RecordBatch

Made: TypeAlias = tuple[str, Sequence[UserTag], bytes, bool]
TAG = st.one_of(
    st.integers(1, 2**63 - 1),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=5),
)
RECORD = st.tuples(
    st.sampled_from(["orders", "lög", "日誌"]),
    st.lists(TAG, max_size=3, unique=True),
    st.binary(max_size=40),
    st.booleans(),
)


def batches_of(
    records: Sequence[Sequence[Made]],
) -> list[ColdBatch]:
    """Return batches of records; those with True are tombstones."""
    found, first = [], 7
    for of_batch in records:
        builder = BatchBuilder()
        for log, tags, data, is_dead in of_batch:
            columns = TagColumns(b"", b"") if is_dead else tag_columns(log, tuple(tags))
            builder.add(b"" if is_dead else data, columns)
        payload = builder.build(
            shard=ShardId(3), epoch=Epoch(2), first=first, time_us=1000 + first, logspace=5
        )
        found.append(ColdBatch(payload, 2 * first, 4000 + first, first))
        first += len(of_batch)
    return found


def reader_of(encoded: EncodedObject) -> ObjectReader:
    content, crc = encoded
    return ObjectReader(len(content), crc, lambda offset, size: content[offset : offset + size])


@given(st.lists(st.lists(RECORD, min_size=1, max_size=6), min_size=1, max_size=6))
def test_batches_come_back_byte_for_byte(
    records: list[list[Made]],
) -> None:
    batches = batches_of(records)
    reader = reader_of(encode_object(batches))
    found = {f: b for group in range(reader.groups) for f, b in reader.batches(group).items()}
    assert list(found.values()) == [batch.payload for batch in batches]
    tags = reader.tags()
    parts = [RecordBatch(batch.payload).tag_columns() for batch in batches]
    assert (tags.tag_counts, tags.tags) == tuple(b"".join(c) for c in zip(*parts, strict=True))


def test_any_parquet_reader_gets_the_records() -> None:
    batches = batches_of(
        [
            [("orders", ["a", 7], b"x", False), ("orders", [], b"y", True)],
            [("log", [], b"z", False)],
        ]
    )
    rows = pq.read_table(pa.BufferReader(encode_object(batches).content)).to_pylist()
    assert [row["data"] for row in rows] == [b"x", b"", b"z"]
    assert [row["seqnum"] for row in rows] == [14, 15, 18]
    assert [row["localid"] for row in rows] == [7, 8, 9]
    assert [row["log"] for row in rows] == ["orders", None, "log"]
    assert rows[0]["tag_names"] == ["a", "7"]


def test_a_read_needs_the_end_and_one_row_group() -> None:
    records = [[("orders", ["t"], random.Random(n).randbytes(100), False)] * 64 for n in range(400)]
    batches = batches_of(records)
    content, crc = encode_object(batches)
    asked: list[tuple[int, int]] = []

    def read(offset: int, size: int) -> bytes:
        asked.append((offset, size))
        return content[offset : offset + size]

    reader = ObjectReader(len(content), crc, read)
    assert reader.groups > 64 * 400 // GROUP_RECORDS
    group = reader.group_of(7 + 64 * 200)
    assert group is not None
    assert batches[200].payload in reader.batches(group).values()
    assert len(asked) == 2
    assert asked[1][1] < len(content) // 3
    assert reader.group_of(6) is None
    assert reader.group_of(7 + 64 * 400) is None


def test_no_flipped_bit_changes_what_is_read() -> None:
    batches = batches_of([[("orders", ["t", 3], b"data" * 5, False)] * 3] * 2)
    content, crc = encode_object(batches)
    intact = [batch.payload for batch in batches]
    refused = 0
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        try:
            reader = reader_of(EncodedObject(bytes(flipped), crc))
            found = [b for group in range(reader.groups) for b in reader.batches(group).values()]
        except MalformedFrameError:
            refused += 1
        else:
            assert found == intact
    assert refused > len(content) // 3


@pytest.mark.parametrize("length", [0, 3, 100, -1])
def test_a_torn_object_is_refused(length: int) -> None:
    content, crc = encode_object(batches_of([[("orders", ["t"], b"data", False)]]))
    with pytest.raises(MalformedFrameError):
        reader_of(EncodedObject(content[:length], crc)).batches(0)


def test_an_error_of_the_store_does_not_count_as_damage() -> None:
    content, crc = encode_object(batches_of([[("orders", ["t"], b"data", False)]]))
    fails = False

    def read(offset: int, size: int) -> bytes:
        if fails:
            raise TimeoutError
        return content[offset : offset + size]

    reader = ObjectReader(len(content), crc, read)
    fails = True
    with pytest.raises(TimeoutError):
        reader.batches(0)


def test_a_damaged_batch_does_not_become_an_object() -> None:
    (batch,) = batches_of([[("orders", ["t"], b"data", False)]])
    payload = batch.payload[:-1] + bytes([batch.payload[-1] ^ 1])
    with pytest.raises(MalformedFrameError):
        encode_object([batch._replace(payload=payload)])


def test_notes_and_names_say_which_object_it_is() -> None:
    made = ColdObject(VERSION, 12, ShardId(3), 7, 900, 4567, 99, 31, b"12345678")
    assert decode_cold_object(encode_cold_object(made)) == made
    assert object_named(made.name, 4567) == ColdObject(VERSION, 12, ShardId(3), 7, 900, 4567, 99)
    assert object_named("shard-00003/writing.tmp", 1) is None
    for payload in (
        b"",
        encode_cold_object(made)[:-1],
        encode_cold_object(ColdObject(9, 1, ShardId(0), 0, 1, 1, 1)),
    ):
        with pytest.raises(MalformedFrameError):
            decode_cold_object(payload)
