"""Streams on every kind of log: writers, fencing, positions, truncation, readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bokistream import Catalog, FencedError, MatchFailedError, Streams, StreamSealedError
from bokistream.catalog import catalog_replica
from indilog.base.log import Log

pytestmark = pytest.mark.asyncio

RECORDS = 40


def process(log: Log) -> Streams:
    """Return the streams as a process of its own sees them."""
    return Streams(log, catalog=Catalog(log, catalog_replica()))


async def datas(streams: Streams, name: str, **at: int) -> list[bytes]:
    return [record.data async for record in streams.read(name, **at)]  # type: ignore[arg-type]


async def test_two_writers_never_both_succeed(session_of: Callable[[], Log]) -> None:
    first, second = process(session_of()), process(session_of())
    await first.create("orders")

    async def write(streams: Streams, mark: bytes) -> list[bytes]:
        """Append until fenced; return the acknowledged records."""
        acknowledged: list[bytes] = []
        async with streams.writer("orders", heartbeat_s=None) as writer:
            try:
                for number in range(RECORDS):
                    record = mark + b"%d" % number
                    await writer.append(record)
                    acknowledged.append(record)
            except FencedError:
                with pytest.raises(FencedError):
                    await writer.append(mark + b" late")
        return acknowledged

    one, other = await asyncio.gather(write(first, b"a"), write(second, b"b"))
    assert max(len(one), len(other)) == RECORDS
    for reading in (first, second, process(session_of())):
        assert await datas(reading, "orders") in ([*one, *other], [*other, *one])


async def test_concurrent_appends_keep_their_order(session_of: Callable[[], Log]) -> None:
    streams = process(session_of())
    await streams.create("orders")
    async with streams.writer("orders") as writer:
        seqnums = await asyncio.gather(*(writer.append(b"%d" % n) for n in range(300)))
    assert list(seqnums) == sorted(seqnums)
    read = [record async for record in process(session_of()).read("orders")]
    assert [record.data for record in read] == [b"%d" % n for n in range(300)]
    assert [record.seqnum for record in read] == list(seqnums)
    assert [record.offset for record in read] == list(range(300))


async def test_positions_truncation_and_the_end(session_of: Callable[[], Log]) -> None:
    streams, other = process(session_of()), process(session_of())
    await streams.create("orders", grace_s=3_600)
    async with streams.writer("orders") as writer:
        for number in range(RECORDS):
            await writer.append(b"%d" % number, txid=10 * (number // 2))
        with pytest.raises(MatchFailedError):
            await other.append("orders", b"x", fencing_token=writer.token, match_seqnum=0)
        last = (await other.last("orders")).seqnum
        await other.append("orders", b"y", fencing_token=writer.token, match_seqnum=last)
        await writer.append(b"z")
    assert await datas(other, "orders", from_txid=181) == [b"38", b"39", b"y", b"z"]
    assert await datas(other, "orders", from_offset=39) == [b"39", b"y", b"z"]
    await other.truncate("orders", before_txid=180)
    kept = [b"36", b"37", b"38", b"39", b"y", b"z"]
    assert await datas(streams, "orders") == kept
    assert len(await datas(streams, "orders", include_truncated=True)) == RECORDS + 2
    await streams.configure("orders", grace_s=0)
    await streams.collect("orders")
    assert await datas(other, "orders") == kept
    await other.seal("orders")
    with pytest.raises(StreamSealedError):
        async with streams.writer("orders"):
            pass
    followed = [record.data async for record in other.read("orders", follow=True)]
    assert followed == kept
    await streams.delete("orders")
    assert await other.list() == []


async def test_a_named_reader_continues_after_its_last_commit(
    session_of: Callable[[], Log],
) -> None:
    streams = process(session_of())
    await streams.create("orders")
    async with streams.writer("orders") as writer:
        await writer.append_many([b"%d" % number for number in range(10)])
    reader = await streams.reader("orders", "billing")
    async for record in reader.records():
        await reader.commit(record.seqnum)
        if record.data == b"6":
            break
    again = await process(session_of()).reader("orders", "billing")
    assert [r.data async for r in again.records(follow=False)] == [b"7", b"8", b"9"]
    (status,) = (await streams.status("orders")).readers
    assert (status.name, status.behind) == ("billing", 3)
