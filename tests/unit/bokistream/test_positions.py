"""Positions by transaction id and offset, truncation, retention, segments, and damage."""

from __future__ import annotations

import pytest

from bokistream import Segment, Streams, StreamTrimmedError, StreamTruncatedError
from bokistream.records import records_tag
from bokistream.search import find_first
from indilog.base.errors import DataLossError
from indilog.base.log import Record
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.damaged_log import DamagedLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = pytest.mark.asyncio


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class CountedLog(HookedLog):
    """Counts reads, and the records that they return."""

    def __init__(self) -> None:
        super().__init__("work")
        self.reads = 0
        self.records = 0

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        self.reads += 1
        self.records += len(records)
        return records


async def datas(streams: Streams, **at: object) -> list[bytes]:
    return [record.data async for record in streams.read("s", **at)]  # type: ignore[arg-type]


async def test_a_transaction_id_is_found_in_logarithmically_many_reads() -> None:
    log = CountedLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        for number in range(2_000):
            await writer.append(b"%d" % number, txid=3 * number)
            if number % 100 == 0:
                await log.append(b"another record of the log")
    tag = records_tag((await streams.info("s")).created)
    for wanted, first in ((0, 0), (1, 1), (3_000, 1_000), (3_001, 1_001), (5_997, 1_999)):
        log.reads = log.records = 0
        found = await find_first(log, tag, "s", 0, lambda entry: entry.txid, wanted)
        assert found is not None
        assert found.entry.offset == first
        assert log.reads <= 2 * 12 + 6, "two reads per halving of 2,023 seqnums"
        assert log.records <= 2 * log.reads, "no scan"
        assert await datas(streams, from_txid=wanted) == [b"%d" % n for n in range(first, 2_000)]
    assert await datas(streams, from_txid=5_998) == []


async def test_a_reader_of_a_transaction_id_that_is_not_there_yet_waits_for_it() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    await streams.append("s", b"1", txid=1)
    reading = streams.read("s", from_txid=5, follow=True)
    for txid in (2, 5, 6):
        await streams.append("s", b"%d" % txid, txid=txid)
    assert [(await anext(reading)).txid for _ in range(2)] == [5, 6]
    await reading.aclose()


async def test_truncated_records_are_kept_for_the_grace_period() -> None:
    clock = Clock()
    logs = MemoryLogs(clock=clock)
    streams = Streams(logs.log("work"))
    created = (await streams.create("s", grace_s=100)).created
    async with streams.writer("s", heartbeat_s=None) as writer:
        seqnums = [await writer.append(b"%d" % n) for n in range(6)]
    await streams.truncate("s", before_seqnum=seqnums[2])
    clock.now += 60
    await streams.truncate("s", before_seqnum=seqnums[4])
    assert await datas(streams) == [b"4", b"5"]
    assert len(await datas(streams, include_truncated=True)) == 6
    with pytest.raises(StreamTruncatedError) as refused:
        await datas(streams, from_seqnum=seqnums[1])
    assert await datas(streams, from_seqnum=refused.value.first_seqnum) == [b"4", b"5"]
    clock.now += 50  # only the first grace period is over
    await streams.collect("s")
    assert await datas(streams, include_truncated=True) == [b"2", b"3", b"4", b"5"]
    clock.now += 60
    await Streams(logs.log("work")).collect("s")
    assert await datas(streams, include_truncated=True) == [b"4", b"5"]
    assert logs.floor(f"work\x1fs{records_tag(created)}".encode()) == seqnums[4]


async def test_a_batch_is_trimmed_as_a_whole_and_its_rest_is_hidden() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        await writer.append_many([b"0", b"1"])
        seqnums = await writer.append_many([b"2", b"3", b"4"])
        await streams.truncate("s", before_seqnum=seqnums[1])
        assert await datas(streams) == [b"3", b"4"]
        assert await datas(streams, include_truncated=True) == [b"2", b"3", b"4"]
        assert await datas(streams, from_seqnum=seqnums[2]) == [b"4"]
        await writer.append(b"5")
        await streams.truncate("s", before_txid=1)  # all
        assert await datas(streams) == []
        await writer.append(b"6")
    assert [(r.data, r.offset) async for r in streams.read("s")] == [(b"6", 6)]
    assert await datas(Streams(streams.log), from_offset=6) == [b"6"]


async def test_a_reader_that_truncation_overtakes_gets_an_error() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        seqnums = [await writer.append(b"%d" % n) for n in range(10)]
        reader = await streams.reader("s", "slow")
        await reader.commit(seqnums[1])
        await streams.truncate("s", before_seqnum=seqnums[2])
        assert (await anext(reader.records(follow=False))).data == b"2"
        await streams.truncate("s", before_seqnum=seqnums[5])
        with pytest.raises(StreamTruncatedError) as told:
            [r async for r in reader.records(follow=False)]
        await reader.commit(told.value.first_seqnum - 1)
        assert (await anext(reader.records(follow=False))).data == b"5"


async def test_retention_by_size_and_by_age() -> None:
    clock = Clock()
    streams = Streams(MemoryLogs(clock=clock).log("work"))
    await streams.create("s", size_bytes=100)
    async with streams.writer("s", heartbeat_s=None) as writer:
        for number in range(20):
            await writer.append(b"%010d" % number)
            clock.now += 1
    await streams.collect("s")
    assert await datas(streams) == [b"%010d" % n for n in range(10, 20)]
    await streams.configure("s", age_s=5)
    await streams.collect("s")
    assert await datas(streams) == [b"%010d" % n for n in range(15, 20)]
    clock.now += 60
    await streams.collect("s")
    assert await datas(streams) == []
    assert (await streams.last("s")).offset == 20


async def test_segments_are_what_each_writer_appended() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    await streams.append("s", b"12", txid=1)
    tokens = []
    for size in (3, 0, 4):
        async with streams.writer("s", heartbeat_s=None) as writer:
            tokens.append(writer.token)
            await writer.append_many([b"12345"] * size, txid=size)
    found = await streams.segments("s")
    assert [(s.token, s.first_offset, s.end_offset, s.size_bytes, s.last_txid) for s in found] == [
        (tokens[2], 4, 8, 20, 4), (tokens[0], 1, 4, 15, 3), (-1, 0, 1, 2, 1),
    ]  # fmt: skip
    assert len(await streams.segments("s", limit=1)) == 1
    await streams.truncate("s", before_txid=4)
    assert await streams.segments("s") == [Segment(tokens[2], None, None, 8, None, 4)]


async def test_after_a_lost_record_the_next_one_is_read() -> None:
    logs = DamagedLogs()
    streams = Streams(logs.log("work"))
    await streams.create("s")
    seqnums = [await streams.append("s", b"%d" % n) for n in range(4)]
    logs.lost = {seqnums[1]}
    with pytest.raises(DataLossError) as lost:
        await datas(streams)
    assert lost.value.next_seqnum is not None
    assert await datas(streams, from_seqnum=lost.value.next_seqnum) == [b"2", b"3"]


async def test_a_stream_in_a_log_that_was_trimmed_as_a_whole_is_refused() -> None:
    log = MemoryLog("work")
    streams = Streams(log)
    await streams.create("s")
    await streams.append("s", b"0")
    await log.append(b"between")
    await streams.append("s", b"1")
    await log.trim(await log.tail() - 1)
    with pytest.raises(StreamTrimmedError, match="was trimmed as a whole"):
        await streams.last("s")
