"""Writers: batches, limits, conditions, and what becomes of appends that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokistream import (
    Catalog,
    FencedError,
    MatchFailedError,
    StreamExistsError,
    StreamNotFoundError,
    Streams,
    StreamSealedError,
    StreamSettingsError,
    TransactionOrderError,
    appender,
    appending,
)
from bokistream.catalog import catalog_replica
from bokistream.records import CATALOG_CHECKPOINTS_TAG
from indilog import DiskFullError, OverloadedError, TooLargeError
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.log import Entry
from indilog.config import ClusterConfig
from indilog.replayed import RetryPolicy
from indilog.replayed.replica import CHECKPOINT_EVERY
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class CountedLog(HookedLog):
    """Counts the calls of appends, and fails those that a test wants to fail."""

    def __init__(self) -> None:
        super().__init__("work")
        self.batches: list[int] = []
        self.before: list[Exception] = []
        self.after: list[Exception] = []

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(0)
        if self.before:
            raise self.before.pop(0)
        self.batches.append(len(entries))

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.after:
            raise self.after.pop(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appending, "RETRIES", RetryPolicy(tries=4, first_s=0.001))


async def datas(streams: Streams, name: str = "s") -> list[bytes]:
    return [record.data async for record in streams.read(name)]


async def test_calls_that_come_during_an_append_share_the_next_batch() -> None:
    log = CountedLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        log.batches.clear()
        await asyncio.gather(*(writer.append(b"%d" % n) for n in range(1_500)))
    assert log.batches == [1_000, 500]
    assert await datas(streams) == [b"%d" % n for n in range(1_500)]


@pytest.mark.parametrize(
    ("records", "batches"),
    [
        ([b"1"] * 600, [600, 600]),
        ([bytes(300_000)] * 3, [3, 3]),
        ([b"1"] * 1_200, [1_000] * 2 + [400]),
    ],
)
async def test_a_call_that_fits_into_a_batch_is_appended_atomically(
    records: list[bytes], batches: list[int]
) -> None:
    log = CountedLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        log.batches.clear()
        await asyncio.gather(*(writer.append_many(records) for _ in range(2)))
    assert log.batches == batches


async def test_each_append_returns_after_its_own_batch() -> None:
    """One caller appends the batches of all, and does not wait for those of the others."""
    streams = Streams(CountedLog())
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        counts = [0] * 4

        async def append_for_ever(place: int) -> None:
            while True:
                await writer.append(b"x")
                counts[place] += 1

        calls = [asyncio.create_task(append_for_ever(place)) for place in range(4)]
        for _ in range(1_000):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert min(counts) > 10


async def test_a_batch_ends_when_it_has_a_mebibyte() -> None:
    log = CountedLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        log.batches.clear()
        await asyncio.gather(*(writer.append(bytes(400_000)) for _ in range(6)))
    assert log.batches == [3, 3]


async def test_a_batch_that_is_too_large_is_appended_in_parts() -> None:
    logs = MemoryLogs(ClusterConfig(batch_records_max=100))
    streams = Streams(logs.log("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        await asyncio.gather(*(writer.append(b"%d" % n) for n in range(700)))
    assert await datas(streams) == [b"%d" % n for n in range(700)]


async def test_a_record_that_is_too_large_is_refused_alone() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        results = await asyncio.gather(
            writer.append(b"1"), writer.append(bytes(2 << 20)), writer.append(b"2"),
            return_exceptions=True,
        )  # fmt: skip
    assert isinstance(results[1], TooLargeError)
    assert await datas(streams) == [b"1", b"2"]


async def test_a_writer_refuses_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appender, "WAITING_MAX", 3)
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        await writer.append_many([b"1", b"2", b"3"])
        with pytest.raises(OverloadedError, match="nothing was appended"):
            await writer.append_many([b"4"] * 4)
    assert await datas(streams) == [b"1", b"2", b"3"]


async def test_an_append_whose_answer_is_lost_is_in_the_stream_once() -> None:
    log = CountedLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        log.after = [AppendOutcomeUnknownError("lost")] * 2
        await writer.append(b"1")
        log.before = [AppendOutcomeUnknownError("lost"), NotReadyError("restarting")]
        await writer.append(b"2")
    assert await datas(streams) == [b"1", b"2"]


async def test_a_failed_append_fails_the_later_ones_that_wait() -> None:
    log = CountedLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        first = asyncio.create_task(writer.append(b"1"))
        await asyncio.sleep(0)
        second = asyncio.create_task(writer.append(b"2"))
        log.before = [DiskFullError("no space")]
        with pytest.raises(DiskFullError):
            await first
        with pytest.raises(OverloadedError, match="An earlier append"):
            await second
        await writer.append(b"3")
    assert await datas(streams) == [b"3"]


async def test_an_outcome_that_stays_unknown_is_raised_as_unknown() -> None:
    log = CountedLog()
    streams = Streams(log)
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=None) as writer:
        log.before = [AppendOutcomeUnknownError("lost"), *[NotReadyError("away")] * 3]
        with pytest.raises(AppendOutcomeUnknownError):
            await writer.append(b"1")
        log.before = [NotReadyError("away")] * 4
        with pytest.raises(NotReadyError):
            await writer.append(b"2")
    assert await datas(streams) == []


async def test_a_fenced_writer_learns_it_from_its_heartbeat() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    async with streams.writer("s", heartbeat_s=0.01) as old, streams.writer("s") as new:
        async with asyncio.timeout(10):
            while not old.is_fenced:  # noqa: ASYNC110 - the writer has no event for it
                await asyncio.sleep(0.01)
        assert new.token > old.token
        assert not new.is_fenced


async def test_conditions_and_transaction_ids_are_refused_without_effect() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    await streams.create("other")
    first = await streams.append("s", b"1", txid=5, match_seqnum=-1)
    with pytest.raises(MatchFailedError, match=f"has seqnum {first}, not -1") as failed:
        await streams.append("s", b"x", match_seqnum=-1)
    assert failed.value.last_seqnum == first
    async with streams.writer("other", heartbeat_s=None) as other:
        with pytest.raises(MatchFailedError):
            await other.append_many([b"x", b"y", b"z"], match_seqnum=first)
    assert await datas(streams, "other") == []
    with pytest.raises(TransactionOrderError, match="Transaction id 4 is smaller than 5"):
        await streams.append("s", b"x", txid=4)
    await streams.append("s", b"2", match_seqnum=first)
    async with streams.writer("s", heartbeat_s=None) as writer:
        assert (writer.next_offset, writer.last_txid) == (2, 5)
        with pytest.raises(FencedError):
            await streams.append("s", b"x")
        with pytest.raises(FencedError):
            await streams.append("s", b"x", fencing_token=writer.token - 1)
        await streams.append("s", b"3", fencing_token=writer.token)
        await writer.append(b"4", txid=7)
        await writer.seal()
        with pytest.raises(StreamSealedError):
            await writer.append(b"x")
    assert [(r.data, r.txid) async for r in streams.read("s")] == [
        (b"1", 5), (b"2", 5), (b"3", 5), (b"4", 7),
    ]  # fmt: skip


async def test_a_catalog_without_a_new_checkpoint_has_the_stream_that_was_created() -> None:
    class FullLog(HookedLog):
        async def before_append(self, entries: Sequence[Entry]) -> None:
            if any(CATALOG_CHECKPOINTS_TAG in entry.tags for entry in entries):
                raise NotReadyError("not now")

    streams = Streams(FullLog("work"))
    for number in range(CHECKPOINT_EVERY + 1):
        await streams.create(f"s{number}")
    assert len(await streams.list()) == CHECKPOINT_EVERY + 1


async def test_a_new_stream_of_a_name_has_no_records_of_the_old_one() -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    with pytest.raises(StreamExistsError):
        await streams.create("s")
    await streams.create("s", exist_ok=True)
    other = Streams(streams.log, catalog=Catalog(streams.log, catalog_replica()))
    await other.append("s", b"old")
    async with streams.writer("s", heartbeat_s=None) as writer:
        await writer.append(b"old")
        await streams.delete("s")
        with pytest.raises(StreamNotFoundError):
            await streams.delete("s")
        with pytest.raises(StreamNotFoundError):
            await other.append("s", b"late")
        await streams.create("s")
        with pytest.raises(StreamSealedError):
            await writer.append(b"late")
    assert await datas(streams) == []
    await other.append("s", b"new")
    assert await datas(streams) == [b"new"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.create(""), "A stream's name must be 1 to 128 bytes"),
        (lambda s: s.create("n", age_s=0.5), "age_s must be 1 to"),
        (lambda s: s.create("n", size_bytes=0), "size_bytes must be"),
        (lambda s: s.create("n", grace_s=-1), "grace_s must be 0 to"),
        (lambda s: s.append("s", b"", txid=-1), "txid must be 0 to"),
        (lambda s: s.append("s", b"", match_seqnum=-2), "match_seqnum must be"),
        (lambda s: s.append("s", b"", fencing_token="7"), "fencing_token must be"),
        (lambda s: s.truncate("s"), "Give before_seqnum or before_txid"),
        (lambda s: s.segments("s", limit=0), "limit must be 1 to 1,000"),
        (lambda s: s.reader("s", "x" * 200), "A reader's name must be"),
    ],
)
async def test_a_mistake_gets_one_sentence(call: object, message: str) -> None:
    streams = Streams(MemoryLog("work"))
    await streams.create("s")
    with pytest.raises(StreamSettingsError, match=message):
        await call(streams)  # type: ignore[operator]
    assert (await streams.last("s")).record == -1
