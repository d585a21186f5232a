"""Logs over the objects of a store: what opens, trims, faults and damage do."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DataDirectoryError,
    DataLossError,
    DiskFullError,
    NotReadyError,
    SealedError,
    TrimmedError,
)
from indilog.base.log import After, Entry, Log
from indilog_cells import closed_generations, object_store
from indilog_cells.cells import CellsError
from indilog_cells.core import CORE_LIMITS
from indilog_cells.driver import driver_running
from indilog_cells.index import GenerationLimits
from indilog_cells.log import CellLogs
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import DirectoryStore

pytestmark = pytest.mark.asyncio

SMALL = GenerationLimits(cells=5)


class FaultyStore(DirectoryStore):
    """A directory that fails on request.

    Attributes:
        fails: every operation fails.
        loses_answers: every write takes effect, and fails.
        held: writes wait for it; None: they do not wait.
        waiting: how many writes have waited.
    """

    fails = False
    loses_answers = False
    held: asyncio.Event | None = None
    waiting = 0

    async def create(self, name: str, content: bytes) -> bool:
        self._check()
        if self.held is not None:
            self.waiting += 1
            await self.held.wait()
        took = await super().create(name, content)
        if self.loses_answers and took:
            raise CellsError("the answer was lost")
        return took

    async def get(self, name: str) -> bytes | None:
        self._check()
        return await super().get(name)

    async def names(self, folder: str) -> list[str]:
        self._check()
        return await super().names(folder)

    def _check(self) -> None:
        if self.fails:
            raise CellsError("the store is down")


@asynccontextmanager
async def opened(
    store: DirectoryStore, *, is_shared: bool = False, timeout_s: float = 20.0
) -> AsyncIterator[tuple[CellLogs, ObjectCells]]:
    cells = await ObjectCells.created(store, "log", stripes=3, generation_limits=SMALL)
    async with driver_running(cells, is_shared=is_shared, timeout_s=timeout_s) as driver:
        yield CellLogs(driver), cells


def cell_sizes(directory: Path) -> dict[int, int]:
    return {
        int(path.name): path.stat().st_size for path in (directory / "log/cells").glob("*/[0-9]*")
    }


def kept_in(directory: Path) -> list[str]:
    """Return the names of all objects with a content."""
    return [path.name for path in directory.glob("**/*") if path.is_file() and path.stat().st_size]


async def test_concurrent_appends_share_objects(tmp_path: Path) -> None:
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        log = logs.log("orders")
        await log.append(b"first")
        before = cells.requests.copy()
        await asyncio.gather(*[log.append(b"x", tags=["t"]) for _ in range(2000)])
        assert await log.tail() == 2001
        assert (cells.requests - before)["create"] <= 5


async def test_an_open_reads_only_the_cells_after_the_newest_checkpoint(tmp_path: Path) -> None:
    async with opened(DirectoryStore(tmp_path)) as (logs, _):
        log = logs.log("orders")
        for n in range(64):
            await log.append(b"%d" % n, tags=["even"] if n % 2 == 0 else [])
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        assert cells.requests["get"] <= 3 + 3 * SMALL.cells
        log = logs.log("orders")
        assert [record.data for record in await log.read_range("even")] == [
            b"%d" % n for n in range(0, 64, 2)
        ]
        before = cells.requests["get"]
        assert await log.read_next("never") is None
        assert cells.requests["get"] == before, "the filters show that there is none"


async def test_trimmed_cells_are_emptied_and_their_index_is_deleted(tmp_path: Path) -> None:
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        log = logs.log("orders")
        seqnums = [await log.append(b"x" * 1000, tags=["t"]) for _ in range(30)]
        await log.trim(seqnums[22])
        await log.append_batch([Entry(b"y")] * 3)
        async with asyncio.timeout(60):
            while min(await cells.generations()) < 20:
                await log.append(b"z")
        assert [record.seqnum for record in await log.read_range("t", seqnums[22])] == seqnums[22:]
        with pytest.raises(TrimmedError):
            await log.read(seqnums[3])
    sizes = cell_sizes(tmp_path)
    assert sorted(sizes) == list(range(len(sizes))), "no writer takes a trimmed cell again"
    assert all(not sizes[position] for position in range(20))
    assert all(sizes[position] for position in range(22, len(sizes)))
    assert len(list((tmp_path / "log/checkpoints").iterdir())) == 2
    async with opened(DirectoryStore(tmp_path)) as (logs, _):
        log = logs.log("orders")
        assert [record.seqnum for record in await log.read_range("t", seqnums[22])] == seqnums[22:]


async def test_what_a_crash_left_is_freed_at_the_next_open(tmp_path: Path) -> None:
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        log = logs.log("orders")
        for _ in range(20):
            await log.append(b"x" * 1000)
        left = await cells.read_generation(0)
        assert left is not None
        await log.trim(18)
        while await cells.read_generation(0) is not None:
            await log.append(b"z")
        await cells.write_generation(0, left)
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        async with asyncio.timeout(60):
            while await cells.read_generation(0) is not None:  # noqa: ASYNC110 - it is in a store
                await asyncio.sleep(0)


async def test_a_process_that_fell_behind_the_trims_continues_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path)
    async with opened(store, is_shared=True) as (slow, _), opened(store, is_shared=True) as (
        fast, cells,
    ):  # fmt: skip
        await slow.log("orders").append(b"early")
        log = fast.log("orders")
        for n in range(40):
            await log.append(b"%d" % n)
        await log.trim(await log.tail() - 2)
        while await cells.read_generation(0) is not None:
            await log.append(b"z")
        late = slow.log("orders")
        with pytest.raises(TrimmedError):
            await late.read_next()
        seqnum = await late.append(b"late")
        record = await log.read(seqnum)
        assert record is not None
        assert record.data == b"late"


async def test_a_store_that_is_down_is_an_error_in_time_and_then_works_again(
    tmp_path: Path,
) -> None:
    store = FaultyStore(tmp_path)
    async with opened(store, timeout_s=2.0) as (logs, _):
        log = logs.log("orders")
        await log.append(b"before")
        store.fails = True
        with pytest.raises(AppendOutcomeUnknownError):
            await log.append(b"unknown")
        with pytest.raises(NotReadyError, match="nothing was read"):
            await log.tail()
        store.fails = False
        while True:
            try:
                seqnum = await log.append(b"after")
                break
            except AppendOutcomeUnknownError:
                continue
        data = [record.data for record in await log.read_range()]
        assert data.count(b"unknown") == 1, "the same cell was written again"
        assert seqnum == len(data) - 1


async def test_lost_answers_append_no_record_twice(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    async with opened(store) as (logs, _):
        log = logs.log("orders")
        await log.append(b"0")
        store.loses_answers = True
        assert await asyncio.gather(*[log.append(b"%d" % n) for n in range(1, 4)]) == [1, 2, 3]
        store.loses_answers = False
        assert [record.data for record in await log.read_range()] == [b"0", b"1", b"2", b"3"]


async def test_an_append_that_a_close_interrupts_is_not_called_undone(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    async with opened(store) as (logs, _):
        log = logs.log("orders")
        await log.append(b"first")
        store.held = asyncio.Event()
        appends = []
        for number in range(CORE_LIMITS.cells_in_flight):
            appends.append(asyncio.create_task(log.append(b"in a cell of its own")))
            while store.waiting <= number:  # noqa: ASYNC110 - turns, not time
                await asyncio.sleep(0)
        appends.append(asyncio.create_task(log.append(b"in no cell")))
        await asyncio.sleep(0)
    *sent, waiting = await asyncio.gather(*appends, return_exceptions=True)
    assert all(isinstance(outcome, AppendOutcomeUnknownError) for outcome in sent)
    assert isinstance(waiting, NotReadyError), "no cell has it"
    store.held.set()


async def test_a_damaged_cell_is_detected_and_not_skipped(tmp_path: Path) -> None:
    async with opened(DirectoryStore(tmp_path)) as (logs, _):
        log = logs.log("orders")
        for n in range(7):
            await log.append(b"%d" % n, tags=["t"])
    for position in (2, 6):
        (path,) = (tmp_path / "log/cells").glob(f"*/{position:020d}")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        if position == 2:
            async with opened(DirectoryStore(tmp_path)) as (logs, _):
                log = logs.log("orders")
                with pytest.raises(DataLossError) as raised:
                    await log.read_range("t")
                assert (raised.value.seqnum, raised.value.next_seqnum) == (2, 3)
                assert len(await log.read_range("t", 3)) == 4
    with pytest.raises(DataLossError, match="damaged"):
        async with opened(DirectoryStore(tmp_path)):
            pass


async def test_an_ended_log_refuses_appends_of_every_process(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    async with opened(store, is_shared=True) as (one, _), opened(store, is_shared=True) as (two, _):
        first, second = one.log("events"), two.log("events")
        assert await first.append(b"first") == 0
        appending = [first.append(b"%d" % n) for n in range(50)]
        outcomes = await asyncio.gather(*appending, two.end(), return_exceptions=True)
        end = await one.end()
        assert end == await second.tail(), "it ends where it ended"
        seqnums = [each for each in outcomes[:-1] if isinstance(each, int)]
        assert sorted(seqnums) == list(range(1, end)), "what is acknowledged is below the end"
        for log in (first, second):
            with pytest.raises(SealedError):
                await log.append(b"late")
            with pytest.raises(SealedError):
                await log.append_batch([Entry(b"late", ["t"])], after=After("t"))
        await second.trim(1)
        with pytest.raises(TrimmedError):
            await first.read(0, fresh=True)
    async with opened(store) as (logs, _):
        with pytest.raises(SealedError):
            await logs.log("events").append(b"late")


async def test_nothing_is_freed_of_a_log_that_was_never_trimmed(tmp_path: Path) -> None:
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        log = logs.log("events")
        for number in range(12):
            await log.append(b"%d" % number)
        assert await cells.generations()
        await logs.driver.generations.collect()
        assert [record.seqnum for record in await log.read_range()] == list(range(12))


async def test_a_log_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/LOG").write_text(
        '{"version":2,"stripes":3,"generation_records":1,"generation_cells":1}'
    )
    with pytest.raises(DataDirectoryError, match="format 2; this version reads 1"):
        async with opened(DirectoryStore(tmp_path)):
            pass


async def test_new_folders_are_durable_before_an_object_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(object_store, "_sync_directory", synced.append)
    store = DirectoryStore(tmp_path / "data/objects")
    await store.create("log/LOG", b"first")
    made = [tmp_path, tmp_path / "data", tmp_path / "data/objects", tmp_path / "data/objects/log"]
    assert synced == made
    await store.create("log/cells/0001/7", b"content")
    assert synced[4:] == [made[3], made[3] / "cells", made[3] / "cells/0001"]


async def test_of_many_writers_of_an_object_one_succeeds(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    took = await asyncio.gather(*[store.create("a/b", b"%d" % n) for n in range(20)])
    assert sum(took) == 1
    assert await store.get("a/b") == b"%d" % took.index(True)
    assert await store.names("a") == ["b"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"], "no temporary file is left"


@pytest.mark.parametrize("tag", [None, "t"])
async def test_a_read_that_a_trim_overtakes_skips_no_record(
    tmp_path: Path, tag: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    cells = await ObjectCells.created(store, "log")
    async with driver_running(cells, cache_bytes_max=0) as driver:
        log = CellLogs(driver).log("orders")
        for n in range(4):
            await log.append(b"%d" % n, tags=["t"])
        read, until = cells.read, 0

        async def overtaken(position: int, *, is_applied: bool = False) -> bytes | None:
            nonlocal until
            if is_applied and until:
                until, floor = 0, until
                await log.trim(floor)
            return await read(position, is_applied=is_applied)

        monkeypatch.setattr(cells, "read", overtaken)
        for until, call in ((1, log.read_next), (2, log.read_range)):
            with pytest.raises(TrimmedError) as error:
                await call(tag, until - 1)
            assert not until, "it was trimmed meanwhile"
        until = 4
        with pytest.raises(TrimmedError) as error:
            await log.read_prev(tag)
        assert error.value.first_seqnum == 4


async def test_a_failure_of_the_store_is_known_until_the_store_answers(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    async with opened(store) as (logs, _):
        log = logs.log("orders")
        await log.append(b"first")
        store.fails = True
        append = asyncio.create_task(log.append(b"second"))
        while not logs.failure:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        assert logs.failure == "the store is down"
        store.fails = False
        await append
        assert not logs.failure


async def test_a_trim_frees_closed_generations_without_further_appends(tmp_path: Path) -> None:
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        log = logs.log("orders")
        for n in range(13):
            await log.append(b"%d" % n)
        await log.trim(9)
        async with asyncio.timeout(60):
            while await cells.generations() != [5]:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
        kept = [cell for cell, size in cell_sizes(tmp_path).items() if size]
        assert sorted(kept) == list(range(5, 14))
    async with opened(DirectoryStore(tmp_path)) as (logs, _):
        found = await logs.log("orders").read_range(bound=9)
        assert [record.data for record in found] == [b"9", b"10", b"11", b"12"]


async def test_trimmed_generations_are_freed_after_the_store_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_generations, "_PAUSE_S", 0.001)
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        log = logs.log("orders")
        for n in range(13):
            await log.append(b"%d" % n)
        failures, trim = [0, 0], cells.trim

        async def failing(start: int, end: int) -> None:
            if failures:
                failures.pop()
                raise CellsError("the store is down")
            await trim(start, end)

        monkeypatch.setattr(cells, "trim", failing)
        await log.trim(9)
        async with asyncio.timeout(60):
            while await cells.generations() != [5]:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)


async def test_a_trim_is_effective_although_the_notes_of_a_generation_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are stored, a process that starts needs the cells of the generation."""
    async with opened(DirectoryStore(tmp_path)) as (logs, cells):
        late, write = asyncio.Event(), cells.write_generation

        async def waiting(start: int, content: bytes) -> None:
            if start == 5:
                await late.wait()
            await write(start, content)

        monkeypatch.setattr(cells, "write_generation", waiting)
        log = logs.log("orders")
        for n in range(12):
            await log.append(b"%d" % n)
        await log.trim(12)
        for cell in range(5, 10):
            assert await cells.read(cell), "its generation is not stored"
        late.set()
        async with asyncio.timeout(60):
            while await cells.generations():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)


async def held_appends(
    store: FaultyStore, log: Log
) -> tuple[list[asyncio.Task[int]], asyncio.Task[int]]:
    """Hold all writes of the store. Return as many appends as may have a cell at once, and one that
    waits for a cell.
    """
    store.held, begun = asyncio.Event(), []
    for n in range(CORE_LIMITS.cells_in_flight):
        begun.append(asyncio.create_task(log.append(b"%d" % n)))
        while store.waiting <= n:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
    return begun, asyncio.create_task(log.append(b"waits"))


async def test_records_that_wait_are_refused_if_writes_fail_on_a_full_disk(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    full: list[str] = []
    cells = await ObjectCells.created(store, "log")

    async def full_disks() -> list[str]:
        return full

    async with driver_running(cells, full_disks=full_disks) as driver:
        log = CellLogs(driver).log("orders")
        await log.append(b"first")
        begun, waits = await held_appends(store, log)
        await asyncio.sleep(0)
        full.append("/mnt/logs")
        store.loses_answers = True
        assert store.held is not None
        store.held.set()
        with pytest.raises(DiskFullError):
            await waits
        store.loses_answers = False
        await asyncio.gather(*begun)


async def test_a_directory_on_a_full_disk_takes_trims_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the first store of a process, which finds the disk full."""
    room, write = 0, DirectoryStore._write
    monkeypatch.setattr(object_store, "_LOOK_AGAIN_S", 0.0)

    def written(store: DirectoryStore, path: Path, content: bytes) -> Path:
        used = sum(file.stat().st_size for file in tmp_path.glob("**/*") if file.is_file())
        if used + len(content) > room:
            raise OSError(errno.ENOSPC, "full")
        return write(store, path, content)

    def allocated(descriptor: int, _start: int, size: int) -> None:
        used = sum(file.stat().st_size for file in tmp_path.glob("**/*") if file.is_file())
        if used + size > room:
            raise OSError(errno.ENOSPC, "full")
        os.truncate(descriptor, size)

    monkeypatch.setattr(DirectoryStore, "_write", written)
    monkeypatch.setattr(os, "posix_fallocate", allocated)
    large, needed = bytes(1 << 16), (1 << 20) + object_store._TRIMS_BYTES
    first = DirectoryStore(tmp_path, reserve_bytes=1 << 20)
    room = needed + 1000
    await first.create("log/LOG", b"LOG")
    assert await first.full_disks() == ()
    taken = 16  # so many use up the first reserve
    for cell in range(taken):
        await first.create(f"log/cells/0000/{cell:020d}", large)
    with pytest.raises(CellsError, match="full"):
        await first.create(f"log/cells/0000/{taken:020d}", large)
    assert await first.create(f"log/cells/0000/{taken:020d}", b"trim"), "trims use the second one"
    again = DirectoryStore(tmp_path, reserve_bytes=1 << 20)
    monkeypatch.setattr(object_store, "_rooms", {})
    later = DirectoryStore(tmp_path, reserve_bytes=1 << 20)
    for store in (first, again, later):
        assert await store.full_disks() == [str(tmp_path)]
    room += taken * len(large) + 1000
    for store in (first, again, later):
        assert await store.full_disks() == ()


async def test_on_a_full_disk_records_that_wait_are_refused_and_trims_are_not(
    tmp_path: Path,
) -> None:
    store = FaultyStore(tmp_path)
    full: list[str] = []
    cells = await ObjectCells.created(store, "log")

    async def full_disks() -> list[str]:
        return full

    async with driver_running(cells, full_disks=full_disks) as driver:
        log = CellLogs(driver).log("orders")
        await log.append(b"first")
        begun, waits = await held_appends(store, log)
        trim = asyncio.create_task(log.trim(1))
        await asyncio.sleep(0)
        full.append("/mnt/logs")
        with pytest.raises(DiskFullError, match="no disk space left on /mnt/logs; nothing was"):
            await log.append(b"refused")
        with pytest.raises(DiskFullError):
            await waits
        assert store.held is not None
        store.held.set()
        await asyncio.gather(*begun, trim)
        full.clear()
        assert await log.append(b"again") == 1 + len(begun)
        assert [r.data for r in await log.read_range(bound=1)] == [b"0", b"1", b"again"]


async def test_a_process_that_left_takes_no_cell_of_a_released_log(tmp_path: Path) -> None:
    """It did not read the end of the log. Whatever it does fails, also in a new driver."""
    store = DirectoryStore(tmp_path)
    async with opened(store, is_shared=True, timeout_s=0.3) as (left, _):
        async with opened(store, is_shared=True) as (logs, cells):
            log = logs.log("orders")
            await log.append(b"early")
            assert await left.log("orders").tail() == 1
            for n in range(20):
                await log.append(b"%d" % n)
            await log.trim(await logs.end())
        for _ in range(2):
            await cells.release()
            assert not any(cell_sizes(tmp_path).values())
            assert kept_in(tmp_path) == ["LOG"]
        late = left.log("orders")
        for call in (late.tail, late.read_next, late.read_prev, late.now):
            with pytest.raises((NotReadyError, AppendOutcomeUnknownError)):
                await call()
        with pytest.raises((NotReadyError, AppendOutcomeUnknownError)):
            await late.append(b"lost")
    with pytest.raises(NotReadyError):
        async with opened(store, is_shared=True, timeout_s=0.3):
            pass
    assert not any(cell_sizes(tmp_path).values())
