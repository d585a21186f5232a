"""The record batch: every added record is decoded, and damage is detected.

The model packs and unpacks with `struct` from the layout that FORMATS.md describes, and shares no
code with `indilog.kernel.records`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, ShardId, TagColumns, pack_tags
from indilog.kernel.records import BatchBuilder, RecordBatch


class Plain(NamedTuple):
    """One record, as a caller passes it."""

    data: bytes
    tags: list[int]
    names: bytes


PLAIN = st.builds(
    Plain,
    data=st.binary(max_size=200),
    tags=st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=64),
    names=st.binary(max_size=40),
)
PLACES = st.fixed_dictionaries(
    {
        "shard": st.integers(0, 2**16 - 1),
        "epoch": st.integers(0, 2**32 - 1),
        "first": st.integers(0, 2**63 - 1),
        "time_us": st.integers(0, 2**63 - 1),
        "logspace": st.integers(0, 2**16 - 1),
    }
)


def packed(records: list[Plain], place: dict[str, int]) -> bytes:
    """Pack a batch as FORMATS.md says, naively."""
    body, end = b"", 0
    for record in records:
        body += b"".join(struct.pack("<Q", tag) for tag in record.tags)
    for column in (1, 2):
        end = 0
        for record in records:
            end += len(record.data if column == 1 else record.names)
            body += struct.pack("<I", end)
    body += b"".join(struct.pack("<I", crc32c(record.data)) for record in records)
    body += b"".join(struct.pack("<B", len(record.tags)) for record in records)
    body += b"".join(record.names for record in records)
    data = b"".join(record.data for record in records)
    header = b"ILRB" + struct.pack(
        "<BBHHIQQ", 2, 0, place["logspace"], place["shard"], place["epoch"], place["first"],
        place["time_us"],
    )  # fmt: skip
    header += struct.pack("<II", len(records), sum(len(record.tags) for record in records))
    header += struct.pack("<I", sum(len(record.names) for record in records))
    header += struct.pack("<III", len(data), crc32c(body), crc32c(data))
    return header + struct.pack("<I", crc32c(header)) + body + data


def built(records: list[Plain], place: dict[str, int]) -> bytes:
    builder = BatchBuilder()
    for record in records:
        builder.add(record.data, TagColumns(pack_tags(*record.tags), record.names))
    return builder.build(
        shard=ShardId(place["shard"]),
        epoch=Epoch(place["epoch"]),
        first=place["first"],
        time_us=place["time_us"],
        logspace=place["logspace"],
    )


@given(st.lists(PLAIN, min_size=1, max_size=20), PLACES)
def test_a_batch_has_the_documented_layout(records: list[Plain], place: dict[str, int]) -> None:
    assert built(records, place) == packed(records, place)


@given(st.lists(PLAIN, min_size=1, max_size=20), PLACES)
def test_every_record_is_decoded_unchanged(records: list[Plain], place: dict[str, int]) -> None:
    batch = RecordBatch(packed(records, place))
    assert len(batch) == len(records)
    for index, wanted in enumerate(records):
        assert batch.record(index) == (wanted.data, wanted.names, place["time_us"])
    assert batch.header.first == place["first"]
    counts, tags = batch.tag_columns()
    assert list(counts) == [len(record.tags) for record in records]
    assert list(struct.unpack(f"<{len(tags) // 8}Q", tags)) == [
        tag for record in records for tag in record.tags
    ]


@given(
    st.lists(PLAIN, min_size=1, max_size=5),
    PLACES,
    st.data(),
)
def test_damage_is_always_detected(
    records: list[Plain], place: dict[str, int], data: st.DataObject
) -> None:
    good = built(records, place)
    at = data.draw(st.integers(0, len(good) - 1))
    mask = data.draw(st.integers(1, 255))
    damaged = good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :]
    with pytest.raises(MalformedFrameError):
        RecordBatch(damaged)
    try:
        batch = RecordBatch(damaged, partly=True)
    except MalformedFrameError:
        assert at < len(good) - sum(len(record.data) for record in records)
        return
    assert len(batch.damaged) == 1
    for index in set(range(len(records))) - batch.damaged:
        assert batch.record(index) == (records[index].data, records[index].names, place["time_us"])


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_and_never_break_the_reader(noise: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        RecordBatch(noise)
