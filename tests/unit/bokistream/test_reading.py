"""Readers: bounded memory, the idle alarm, the end of the stream, kept positions."""

from __future__ import annotations

import asyncio

import pytest

from bokistream import ReaderIdleError, Streams, StreamSettingsError, catalog, reader
from bokistream.records import cursor_tag, heartbeats_tag
from indilog.base.log import Record
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = pytest.mark.asyncio


class MeteredLog(HookedLog):
    """Notes the bytes of each page."""

    def __init__(self) -> None:
        super().__init__("work")
        self.pages: list[int] = []
        self.hidden_from: int | None = None

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if read.is_page and read.wait is None:
            self.pages.append(sum(len(record.data) for record in records))
        if self.hidden_from is not None and read.wait is not None:
            return [record for record in records if record.seqnum < self.hidden_from]
        return records


async def test_a_slow_reader_holds_two_pages_of_half_its_bytes() -> None:
    log = MeteredLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        await writer.append_many([bytes(1_000)] * 2_000)
    log.pages.clear()
    got = taken = 0
    async for record in streams.read("s", ahead_bytes=40_000):
        got += len(record.data)
        taken += 1
        await asyncio.sleep(0)
        if taken > 100:
            assert sum(log.pages) - got <= 2 * 20_000 + 2_000 * 60, "two pages beyond the reader"
            assert max(log.pages[2:]) <= 21_000
    assert taken == 2_000


async def test_a_reader_that_does_not_follow_gets_what_the_stream_had() -> None:
    """The writer is quicker than the reader, so there is always another page."""
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        await writer.append_many([b"before"] * 40)
        taken = 0
        async for record in streams.read("s"):
            assert record.data == b"before"
            taken += 1
            await writer.append_many([b"during"] * 2)
            await asyncio.sleep(0)
    assert taken == 40


@pytest.mark.leaping
async def test_a_reader_that_follows_ends_at_the_seal() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")

    async def follow() -> list[bytes]:
        return [record.data async for record in streams.read("s", follow=True)]

    following = asyncio.create_task(follow())
    async with streams.writer("s", heartbeat_s=None) as writer:
        await writer.append(b"1")
        await asyncio.sleep(0.01)
        await asyncio.gather(writer.append(b"2"), writer.seal())
    async with asyncio.timeout(10):
        assert await following == [b"1", b"2"]


@pytest.mark.leaping
async def test_an_idle_reader_notices_that_the_writer_has_stopped() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=0.02) as writer:
        await writer.append(b"1")
        reading = streams.read("s", follow=True, idle_s=0.2)
        assert (await anext(reading)).data == b"1"
        with pytest.raises(TimeoutError):  # the writer writes heartbeats, so there is no alarm
            async with asyncio.timeout(0.5):
                await anext(reading)
    await reading.aclose()
    with pytest.raises(ReaderIdleError, match="the last heartbeat of its writer is") as alarm:
        async with asyncio.timeout(10):
            [r async for r in streams.read("s", follow=True, idle_s=0.2)]
    assert alarm.value.seqnum is None


async def test_an_idle_reader_notices_that_it_does_not_get_a_record() -> None:
    log = MeteredLog()
    streams = Streams(log)
    await streams.create("s")
    await streams.append("s", b"1")
    second = await streams.append("s", b"2")
    log.hidden_from = second
    with pytest.raises(ReaderIdleError, match="did not get") as alarm:
        async with asyncio.timeout(60):
            [r async for r in streams.read("s", follow=True, idle_s=0.05)]
    assert alarm.value.seqnum == second


async def test_kept_positions_are_trimmed_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "READERS_MAX", 2)
    monkeypatch.setattr(reader, "_COMMITS_PER_TRIM", 4)
    logs = MemoryLogs()
    streams = Streams(logs.log("work"))
    created = (await streams.create("s")).created
    seqnums = [await streams.append("s", b"%d" % n) for n in range(9)]
    first = await streams.reader("s", "a")
    for seqnum in seqnums:
        await first.commit(seqnum)
    assert len(await logs.log("work").read_range(cursor_tag(created, "a"), 20)) <= 4
    with pytest.raises(StreamSettingsError, match="has committed seqnum"):
        await first.commit(seqnums[0])
    await streams.reader("s", "b")
    with pytest.raises(StreamSettingsError, match="has 2 readers"):
        await streams.reader("s", "c")
    await streams.delete("s")
    for tag in (cursor_tag(created, "a"), heartbeats_tag(created)):
        assert logs.floor(f"work\x1fs{tag}".encode()) > seqnums[-1]


async def test_the_lag_of_a_reader_is_not_computed_from_another_stream() -> None:
    """A reader may commit any seqnum, for example one below the first record that is left."""
    streams = Streams(MemoryLog("work"))
    for name in ("s", "other"):
        await streams.create(name)
    async with streams.writer("other", heartbeat_s=None) as other:
        await other.append_many([b"x"] * 9)
        place = await other.append(b"last")
    async with streams.writer("s", heartbeat_s=None) as writer:
        await writer.append_many([b"1", b"2"])
    await (await streams.reader("s", "r")).commit(place)
    (found,) = (await streams.status("s")).readers
    assert found.behind is None


@pytest.mark.parametrize("wrong", [{"ahead_bytes": 0}, {"idle_s": 0}, {"from_offset": -1}])
async def test_a_mistake_gets_one_sentence(wrong: dict[str, int]) -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    with pytest.raises(StreamSettingsError, match=next(iter(wrong))):
        [r async for r in streams.read("s", **wrong)]  # type: ignore[arg-type]
    with pytest.raises(StreamSettingsError, match="only one of"):
        [r async for r in streams.read("s", from_txid=1, from_offset=1)]
