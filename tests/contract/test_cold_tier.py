"""Records that moved to cold storage are read, trimmed and found again like all others (decision
0039).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
import uvloop
from pyarrow.fs import FileSystem

from indilog.base.errors import ConfigError, DataLossError, NotReadyError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Entry
from indilog.config import MIB
from indilog.kernel.cold import MARKER
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.cold_place import ColdFolder, OpenObject
from indilog_pipeline.log_image import ColdFile, LogImage
from indilog_pipeline.record_batches import Filter, read_records
from indilog_storage.node import StorageNode
from tests.support.cold_storage import (
    RECORDS,
    TAGS,
    check,
    configured,
    everything,
    figures,
    fill,
    move_records,
    objects,
    wait_for,
)


def test_moved_records_are_read_like_all_others_also_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log)
            assert figures(platform, "cold_objects") > 5
            await check(log, records)
            assert figures(platform, "cold_reads") > 0
        async with embedded(configured(tmp_path)) as platform:
            await check(platform.logs.log("orders"), records)
            await wait_for(lambda: figures(platform, "cold_objects") == len(objects(tmp_path)))

    uvloop.run(story())


@pytest.mark.parametrize("answers", [True, False])
def test_a_stop_waits_for_an_object_that_is_being_written_as_long_as_for_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    put = ColdFolder._put

    def slow_put(system: FileSystem, path: str, content: bytes) -> None:
        if content:
            begun.set()
            may_end.wait()
        put(system, path, content)
        if content:
            ended.set()

    monkeypatch.setattr(ColdFolder, "_put", staticmethod(slow_put))
    config = configured(tmp_path, cold_timeout_s=10.0 if answers else 0.05)

    async def story() -> None:
        async with embedded(config) as platform:
            await fill(platform.logs.log("orders"))
            await wait_for(begun.is_set)
            if answers:
                asyncio.get_running_loop().call_later(0.1, may_end.set)
        assert ended.is_set() == answers

    try:
        uvloop.run(story())
    finally:
        may_end.set()
        ended.wait()


def test_a_page_continues_when_its_next_batch_moves_while_cold_storage_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page waits for more batches than are read at once; the last batch was in the journal at
    first.
    """
    may_read = threading.Event()
    read = OpenObject.read

    def slow_read(opened: OpenObject, offset: int, size: int) -> bytes:
        may_read.wait()
        return read(opened, offset, size)

    monkeypatch.setattr(OpenObject, "read", slow_read)
    config = configured(tmp_path, cold_requests_max=1, cold_timeout_s=60.0, read_timeout_s=60.0)

    async def story() -> None:
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            records = await fill(log)
            await wait_for(lambda: figures(platform, "cold_objects") > 2)
            edge = int(objects(tmp_path)[-1].name.split("-")[2])
            expected = sorted(records)[edge - 6 * RECORDS : edge + RECORDS]
            (storage,) = (r for r in platform.shell.roles.values() if isinstance(r, StorageNode))
            (shard,) = storage._shards.values()
            last = shard.location_of(edge)
            assert last is not None
            page = asyncio.create_task(log.read_range(bound=expected[0], limit=len(expected)))
            await wait_for(lambda: figures(platform, "cold_reads") > 0)
            async with asyncio.timeout(60):
                while platform.shell._journal.read(last) is not None:
                    await fill(log, 1)
            may_read.set()
            assert [record.seqnum for record in await page] == expected
            assert not platform.shell.metrics.ignored.get("a record batch on disk is damaged")

    try:
        uvloop.run(story())
    finally:
        may_read.set()


def test_moved_records_leave_the_local_disk(tmp_path: Path) -> None:
    def on_disk() -> int:
        size = 0
        for file in (tmp_path / "data" / "journal").glob("segment-*.log"):
            with contextlib.suppress(FileNotFoundError):  # a rewrite has just removed it
                size += file.stat().st_size
        return size

    async def story() -> None:
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log)
            total = sum(len(entry.data) for entry in records.values())
            await wait_for(lambda: on_disk() < 3 * MIB)
            assert total > 2 * on_disk() - 2 * MIB
            await check(log, records)
        async with embedded(configured(tmp_path)) as platform:
            await check(platform.logs.log("orders"), records)

    uvloop.run(story())


def test_programs_that_read_the_directory_see_moved_records(tmp_path: Path) -> None:
    async def story() -> dict[SeqNum, Entry]:
        async with embedded(configured(tmp_path)) as platform:
            records = await move_records(platform, platform.logs.log("orders"))
            assert image_of(tmp_path) == {s: entry.data for s, entry in records.items()}
            return records

    records = uvloop.run(story())
    assert image_of(tmp_path) == {seqnum: entry.data for seqnum, entry in records.items()}


def image_of(directory: Path) -> dict[SeqNum, bytes]:
    image = LogImage.read(directory / "data")
    assert any(isinstance(file, ColdFile) for file in image.files)
    wanted = Filter("orders")
    found: dict[SeqNum, bytes] = {}
    for batch in read_records(image, columns=["seqnum", "data"], wanted=wanted):
        found.update(zip(*(batch.column(n).to_pylist() for n in range(2)), strict=True))
    return found


def test_an_object_is_deleted_when_all_its_records_are_trimmed(tmp_path: Path) -> None:
    async def story() -> None:
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log)
            seqnums = sorted(records)
            middle = seqnums[len(seqnums) // 2]
            before = len(objects(tmp_path))
            await log.trim(middle)
            left = {seqnum: entry for seqnum, entry in records.items() if seqnum >= middle}
            await wait_for(lambda: figures(platform, "cold_deleted_objects") > before // 4)
            with pytest.raises(TrimmedError):
                await log.read_next(bound=0)
            assert [s for s, _ in await everything(log, middle)] == sorted(left)
            # One by one, by tags: the records of two tags each.
            for tag in range(TAGS):
                await log.trim(seqnums[-1] + 1, tag=f"tag-{tag}")
            for tag in range(1, RECORDS + 1):
                await log.trim(seqnums[-1] + 1, tag=tag)
            await wait_for(lambda: not objects(tmp_path))
            await wait_for(lambda: figures(platform, "cold_objects") == 0)
        async with embedded(configured(tmp_path)) as platform:
            with pytest.raises(TrimmedError):
                await platform.logs.log("orders").read_next("tag-1", bound=0)

    uvloop.run(story())


def test_objects_that_no_note_names_are_deleted_at_the_start(tmp_path: Path) -> None:
    async def story() -> None:
        async with embedded(configured(tmp_path)) as platform:
            records = await move_records(platform, platform.logs.log("orders"))
        noted = objects(tmp_path)
        stray = noted[0].with_name("0000000999-0-10-01234567.parquet")
        stray.write_bytes(noted[0].read_bytes())
        async with embedded(configured(tmp_path)) as platform:
            await wait_for(lambda: not stray.exists())
            await wait_for(lambda: figures(platform, "cold_objects") == len(objects(tmp_path)))
            await check(platform.logs.log("orders"), records)

    uvloop.run(story())


def test_a_missing_or_damaged_object_is_a_loss_of_its_records_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log)
            by_first = sorted(objects(tmp_path), key=lambda path: int(path.stem.split("-")[1]))
            gone, damaged = by_first[1], by_first[3]
            content = gone.read_bytes()
        gone.unlink()
        flipped = bytearray(damaged.read_bytes())
        flipped[len(flipped) // 3] ^= 1
        damaged.write_bytes(flipped)
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            lost = []
            for seqnum in sorted(records)[::10]:
                try:
                    record = await log.read_next(bound=seqnum)
                except DataLossError:
                    lost.append(seqnum)
                else:
                    assert record is not None
                    assert record.data == records[seqnum].data
            first, end = map(int, gone.stem.split("-")[1:3])
            assert set(lost) >= set(sorted(records)[::10][first // 10 + 1 : end // 10])
            assert len(lost) < len(records) // 10 // 4
        gone.write_bytes(content)
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            for seqnum in sorted(records)[first:end:10]:
                assert await log.read_next(bound=seqnum) is not None

    uvloop.run(story())


def test_an_object_that_one_replica_lost_is_read_from_another_and_repaired(tmp_path: Path) -> None:
    async def story() -> None:
        async with embedded(configured(tmp_path, replicas=2)) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log, 4 * MIB)
        broken = [path for path in objects(tmp_path) if "storage-1-" in str(path)]
        for path in broken[:3]:
            path.write_bytes(path.read_bytes()[:-100])
        async with embedded(configured(tmp_path, replicas=2)) as platform:
            await check(platform.logs.log("orders"), records)
            await check(platform.logs.log("orders"), records)
            await wait_for(lambda: figures(platform, "missing_records") == 0)
            assert figures(platform, "repaired_records") > 0

    uvloop.run(story())


def test_a_store_that_is_away_is_one_clear_retryable_error_and_all_else_continues(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log)
            seqnums = sorted(records)
        away = tmp_path / "away"
        (tmp_path / "cold").rename(away)
        async with embedded(configured(tmp_path)) as platform:
            log = platform.logs.log("orders")
            with pytest.raises(NotReadyError, match="Cold storage"):
                await log.read_next(bound=seqnums[0])
            new = await log.append(b"new", tags=["tag-1"])
            record = await log.read_prev("tag-1")
            assert record is not None
            assert record.seqnum == new
            records.update(await fill(log, 5, 99))
            assert await log.read_next(bound=max(records)) is not None
            assert not (tmp_path / "cold").exists(), "nothing is written where nothing is mounted"
            away.rename(tmp_path / "cold")
            assert (await log.read_next(bound=seqnums[0])) is not None
            assert [s for s, _ in await everything(log)] == sorted({*records, new})

    uvloop.run(story())


def test_another_place_is_refused_while_old_records_are_in_the_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with embedded(configured(tmp_path)) as platform:
            records = await move_records(platform, platform.logs.log("orders"))
        with pytest.raises(ConfigError, match="cold_place is"):
            async with embedded(configured(tmp_path, place=tmp_path / "other")):
                pass
        # Without the setting nothing moves any more, and everything is read.
        unset = configured(tmp_path, cold_place="")
        async with embedded(unset) as platform:
            await check(platform.logs.log("orders"), records)

    uvloop.run(story())


def test_the_records_of_other_processes_are_never_in_the_same_folder(tmp_path: Path) -> None:
    async def story() -> None:
        for name in ("one", "two"):
            config = configured(tmp_path / name, place=tmp_path / "cold")
            async with embedded(config) as platform:
                await move_records(platform, platform.logs.log("orders"))
        assert len(list((tmp_path / "cold").glob(f"{MARKER}-*"))) == 2

    uvloop.run(story())
