"""`bokistream.mirror`: the copy has each record once, with its offset, whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from unittest import mock

import pytest

from bokistream import (
    Catalog,
    FencedError,
    Last,
    StreamMirror,
    StreamMirrorProgress,
    Streams,
    StreamTruncatedError,
    appending,
)
from bokistream import mirror as mirror_module
from bokistream.appending import _Batch
from bokistream.catalog import catalog_replica
from indilog.base.errors import AppendOutcomeUnknownError, IndilogError, NotReadyError
from indilog.base.log import Entry
from indilog.replayed import RetryPolicy
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

RECORDS = 40
SEEDS = 40


class FaultyLog(HookedLog):
    """A target whose appends fail, or lose their answers, at random."""

    def __init__(self, logs: MemoryLogs, chance: random.Random) -> None:
        super().__init__("work", logs=logs)
        self.chance = chance

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(0)
        draw = self.chance.random()
        if draw < 0.1:
            raise NotReadyError("The target is restarting.")
        if draw < 0.2:
            raise AppendOutcomeUnknownError("No answer came.")

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.chance.random() < 0.2:
            raise AppendOutcomeUnknownError("The answer was lost.")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "_BATCH_RECORDS", 5)
    monkeypatch.setattr(appending, "RETRIES", RetryPolicy(tries=3, first_s=0.0))


def streams_of(log: HookedLog) -> Streams:
    return Streams(log, catalog=Catalog(log, catalog_replica()))


async def filled(records: int = RECORDS) -> Streams:
    source = Streams(MemoryLogs().log("work"))
    await source.create("s", age_s=500)
    async with source.writer("s", heartbeat_s=None) as writer:
        for number in range(records):
            await writer.append(b"%d" % number, txid=number // 2)
    return source


async def contents(streams: Streams) -> list[tuple[int, int, bytes]]:
    return [(r.offset, r.txid, r.data) async for r in streams.read("s")]


async def copy_in_spite_of_faults(seed: int, *, mirrors: int = 2) -> None:
    """Let mirrors copy one stream to one target, each restarted after errors and crashes."""
    chance = random.Random(seed)
    source, logs = await filled(), MemoryLogs()

    async def keep_mirroring() -> None:
        for attempt in range(200):
            target = streams_of(FaultyLog(logs, chance))
            running = asyncio.create_task(StreamMirror(source, target, "s").run(follow=False))
            for _ in range(chance.randint(1, 100) if attempt < 20 else 10_000):
                if running.done():
                    break
                await asyncio.sleep(0)
            if running.done() and running.exception() is None:
                return
            running.cancel()  # the process crashes
            await asyncio.wait([running])
            if not running.cancelled():
                assert isinstance(running.exception(), IndilogError), running.exception()
        raise AssertionError("no mirror ended")

    await asyncio.gather(*(keep_mirroring() for _ in range(mirrors)))
    assert await contents(Streams(logs.log("work"))) == await contents(source), f"seed {seed}"


async def test_each_record_is_copied_once() -> None:
    for seed in range(SEEDS):
        await copy_in_spite_of_faults(seed)


async def test_a_mirror_whose_appends_have_no_condition_is_caught() -> None:
    async def has_effect(self: _Batch) -> bool | None:
        return None if self.place is None else True

    async def copy_all() -> None:
        for seed in range(SEEDS):
            await copy_in_spite_of_faults(seed)

    with mock.patch.object(_Batch, "has_effect", has_effect), pytest.raises(AssertionError):
        await copy_all()


async def test_a_copy_is_sealed_with_its_source_and_has_its_settings() -> None:
    source, target = await filled(12), Streams(MemoryLogs().log("work"))
    told: list[StreamMirrorProgress] = []
    following = asyncio.create_task(StreamMirror(source, target, "s", progress=told.append).run())
    async with asyncio.timeout(10):
        while not told or told[-1].next_offset < 12:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        async with source.writer("s", heartbeat_s=None) as writer:
            await writer.append(b"last", txid=100)
            await writer.seal()
        await following
    assert await contents(target) == await contents(source)
    assert (await target.last("s")).is_sealed
    assert (await target.info("s")).age_s == 500
    assert told[-1].lag_s == 0
    await StreamMirror(source, target, "s").run()


async def test_the_copy_of_a_truncated_stream_begins_with_its_first_offset() -> None:
    source, target = await filled(12), Streams(MemoryLogs().log("work"))
    await source.truncate("s", before_txid=3)
    await StreamMirror(source, target, "s").run(follow=False)
    assert await contents(target) == await contents(source)
    assert (await contents(target))[0] == (6, 3, b"6")
    async with source.writer("s", heartbeat_s=None) as writer:
        for txid in (10, 11):
            await writer.append(b"x", txid=txid)
    await source.truncate("s", before_txid=11)
    with pytest.raises(StreamTruncatedError):
        await StreamMirror(source, target, "s").run(follow=False)


async def test_a_mirror_skips_what_another_one_copied_meanwhile() -> None:
    source, target = await filled(12), Streams(MemoryLogs().log("work"))
    await StreamMirror(source, target, "s").run(follow=False)
    with mock.patch.object(target, "last", return_value=Last()):  # read before the others' copies
        await StreamMirror(source, target, "s").run(follow=False)
    assert await contents(target) == await contents(source)


async def test_a_second_mirror_fences_the_first_one() -> None:
    source, target = await filled(3), Streams(MemoryLogs().log("work"))
    first = asyncio.create_task(StreamMirror(source, target, "s").run())
    second = asyncio.create_task(StreamMirror(source, target, "s").run())
    async with asyncio.timeout(10):
        while not await target.list() or (await target.last("s")).offset < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        async with source.writer("s", heartbeat_s=None) as writer:
            await writer.append(b"more", txid=9)
        done, _ = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(done.pop().exception(), FencedError)
        while (await target.last("s")).offset < 4:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
    for task in (first, second):
        task.cancel()
    await asyncio.wait([first, second])
    assert await contents(target) == await contents(source)


async def test_a_copy_is_not_sealed_before_it_has_all_records() -> None:
    """The source gets its last record and its seal after the mirror has read it."""
    source, target = await filled(12), Streams(MemoryLogs().log("work"))

    async def end_source() -> None:
        if not (await source.last("s")).is_sealed:
            async with source.writer("s", heartbeat_s=None) as writer:
                await writer.append(b"last", txid=100)
                await writer.seal()

    ends: list[asyncio.Task[None]] = []

    def end_soon(_: StreamMirrorProgress) -> None:
        ends.append(asyncio.create_task(end_source()))

    await StreamMirror(source, target, "s", progress=end_soon).run(follow=False)
    await asyncio.gather(*ends)
    await StreamMirror(source, target, "s").run(follow=False)
    assert await contents(target) == await contents(source)
    assert (await target.last("s")).is_sealed
