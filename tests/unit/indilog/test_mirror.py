"""`indilog.mirror`: each record of the source is in the target once, whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from indilog import mirror
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConfigError,
    NotReadyError,
    TrimmedError,
)
from indilog.base.log import After, Entry, Record
from indilog.mirror import MARK_TAG, LogMirror, MirrorProgress
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

RECORDS = 60


class FaultyLog(HookedLog):
    """A target whose appends fail, or lose their answers, at random."""

    def __init__(self, logs: MemoryLogs, chance: random.Random) -> None:
        super().__init__("copy", logs=logs)
        self.chance = chance

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(0)
        draw = self.chance.random()
        if draw < 0.15:
            raise NotReadyError("The target is restarting.")
        if draw < 0.3:
            raise AppendOutcomeUnknownError("No answer came.")

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.chance.random() < 0.3:
            raise AppendOutcomeUnknownError("The answer was lost.")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_BATCH_RECORDS", 7)
    monkeypatch.setattr(mirror, "_UNKNOWN_PAUSE_S", 0.0)
    monkeypatch.setattr(mirror, "_MARKS_PER_TRIM", 3)


async def filled(records: int = RECORDS) -> MemoryLog:
    source = MemoryLog("orders")
    for number in range(records):
        await source.append(b"%d" % number, tags=[f"t{number % 3}", 7 + number % 2])
        await source.logs.log("other").append(b"of another log")
    return source


async def copies(logs: MemoryLogs, name: str = "copy") -> list[Record]:
    return [r for r in await logs.log(name).read_range() if MARK_TAG not in r.tags]


async def copy_in_spite_of_faults(seed: int) -> None:
    """Let two mirrors copy one log to one target, each restarted after errors and crashes."""
    chance = random.Random(seed)
    source, target = await filled(), MemoryLogs()

    async def keep_mirroring() -> None:
        while True:
            running = asyncio.create_task(
                LogMirror(source, FaultyLog(target, chance)).run(follow=False)
            )
            for _ in range(chance.randint(1, 60)):
                await asyncio.sleep(0)
            if running.done() and running.exception() is None:
                return
            running.cancel()  # the process crashes
            await asyncio.wait([running])

    await asyncio.gather(keep_mirroring(), keep_mirroring())
    found = await copies(target)
    assert [(r.data, r.tags) for r in found] == [
        (r.data, r.tags) for r in await source.read_range()
    ], f"seed {seed}"


async def test_each_record_is_copied_once() -> None:
    for seed in range(60):
        await copy_in_spite_of_faults(seed)


async def test_a_mirror_without_its_condition_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FaultyLog.append_batch

    async def unconditional(
        self: FaultyLog, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[int]:
        return await real(self, entries)

    monkeypatch.setattr(FaultyLog, "append_batch", unconditional)

    async def copy_all() -> None:
        for seed in range(60):
            await copy_in_spite_of_faults(seed)

    with pytest.raises(AssertionError, match="seed"):
        await copy_all()


async def test_a_mirror_follows_its_source_and_reports_its_lag() -> None:
    source, target = await filled(3), MemoryLogs()
    told: list[MirrorProgress] = []
    following = LogMirror(source, target.log("copy"), progress=told.append)
    running = asyncio.create_task(following.run())
    async with asyncio.timeout(10):
        while len(await copies(target)) < 3:  # noqa: ASYNC110 - the log has no such event
            await asyncio.sleep(0.001)
        last = await source.append(b"new")
        while len(await copies(target)) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])
    assert told[-1].next_seqnum == last + 1
    assert told[-1].lag_s < 60


async def test_what_was_trimmed_before_it_was_copied_is_an_error() -> None:
    source, target = await filled(), MemoryLogs()
    await source.trim(20)
    await LogMirror(source, target.log("copy")).run(follow=False)
    assert [r.data for r in await copies(target)] == [b"%d" % n for n in range(10, RECORDS)]
    for number in range(10):
        await source.append(b"more %d" % number)
    await source.trim(await source.tail() - 2)
    with pytest.raises(TrimmedError):
        await LogMirror(source, target.log("copy")).run(follow=False)
    await LogMirror(source, target.log("copy"), skip_missing=True).run(follow=False)
    assert [r.data for r in await copies(target)][-2:] == [b"more 8", b"more 9"]


async def test_a_mirror_of_a_mirror_has_only_its_own_marks() -> None:
    source, target = await filled(20), MemoryLogs()
    await LogMirror(source, target.log("copy")).run(follow=False)
    await LogMirror(target.log("copy"), target.log("second")).run(follow=False)
    assert [r.data for r in await copies(target, "second")] == [b"%d" % n for n in range(20)]
    with pytest.raises(ConfigError, match="is the mirror of 'orders', not of 'second'"):
        await LogMirror(target.log("second"), target.log("copy")).run(follow=False)
    await target.log("copy").trim(await target.log("copy").tail())
    with pytest.raises(ConfigError, match="was trimmed with its marks"):
        await LogMirror(source, target.log("copy")).run(follow=False)
