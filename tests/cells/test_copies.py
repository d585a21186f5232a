"""Copies of logs over cells, as in a backup: what they have, and logs that are made from them.

`test_chains` and `test_owned` compare copies of the disks with histories under faults.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

from indilog.base.errors import ConditionFailedError, DataLossError, SealedError, TrimmedError
from indilog.base.ids import NodeId
from indilog.base.log import After, Entry, Log
from indilog.kernel.cell_layout import new_layout
from indilog.runtime.cell_store import CellStore
from indilog.wire.cell_messages import CellsSeal
from indilog_cells.cells import CellsAndNotes, CellsError
from indilog_cells.chain_cells import ChainCells
from indilog_cells.copies import CopiedCell, CopyOvertakenError, LogCopy, write_copy
from indilog_cells.driver import driver_running
from indilog_cells.index import GenerationLimits
from indilog_cells.log import CellLogs
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import DirectoryStore
from indilog_cells.stored_cells import StoredCells
from tests.cells.test_chain_cells import Cluster
from tests.support.repeated import repeated

pytestmark = pytest.mark.asyncio

SMALL = GenerationLimits(cells=5)
NODES = [NodeId(f"storage-{n}") for n in range(3)]
Home: TypeAlias = Literal["objects", "chains"]


class Homes:
    """Where the logs of a test are kept: object stores in a directory, and storage nodes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._clusters: dict[str, Cluster] = {}

    async def cells(self, home: Home, name: str, *, reads: bool = False) -> CellsAndNotes:
        """Return the cells of a log; `reads`: those that a backup reads."""
        if home == "objects":
            store = DirectoryStore(self._directory)
            if reads:
                return await ObjectCells.opened(store, name)
            return await ObjectCells.created(store, name, stripes=3, generation_limits=SMALL)
        cluster = self._cluster(name)
        if reads:
            return StoredCells(cluster, cluster.layout, generation_limits=SMALL)
        part = itertools.count(1).__next__
        return ChainCells(cluster, cluster, part_bytes=100, new_part=part, generation_limits=SMALL)

    def _cluster(self, name: str) -> Cluster:
        if name not in self._clusters:
            layout = new_layout(name, NODES, 2)
            stores = {node: CellStore(":memory:", syncs=False) for node in NODES}
            for node, space in layout.replicas:
                stores[node].serve([CellsSeal(0, space, 1, opens=True)])
            self._clusters[name] = Cluster(layout, stores)
        return self._clusters[name]


@asynccontextmanager
async def opened(cells: CellsAndNotes) -> AsyncIterator[CellLogs]:
    async with driver_running(cells, is_shared=False) as driver:
        yield CellLogs(driver)


async def copy_of(
    cells: CellsAndNotes,
    *,
    is_open: bool = True,
    after_begin: Callable[[], Awaitable[None]] | None = None,
) -> tuple[LogCopy, list[CopiedCell]]:
    """Copy a log; `after_begin` runs when its checkpoint was read."""
    copy = LogCopy(cells, is_open=is_open)
    await copy.begin()
    if after_begin is not None:
        await after_begin()
    return copy, [each async for page in copy.pages() for each in page]


async def fill(log: Log, start: int, end: int) -> None:
    for n in range(start, end):
        await log.append(b"%d" % n * 9, tags=["even"] if n % 2 == 0 else [])


async def content(log: Log) -> list[object]:
    """Return what reads find: floors, and all fields of the records."""
    found: list[object] = [await log.tail(), await log.retention()]
    for tag in (None, "even"):
        floor = 0
        try:
            records = await log.read_range(tag)
        except TrimmedError as error:
            floor = error.first_seqnum
            records = await log.read_range(tag, bound=floor)
        found += [floor, [(r.seqnum, r.data, r.tags, r.time, r.ordered_at) for r in records]]
        found += [await log.find_time(r.ordered_at) for r in records[-1:]]
    return found


@pytest.mark.parametrize("trimmed", [repeated(0), 3, repeated(32), 44])
@pytest.mark.parametrize("target", ["objects", "chains"])
@pytest.mark.parametrize("source", ["objects", "chains"])
async def test_a_log_that_is_made_from_a_copy_is_the_same(
    tmp_path: Path, source: Home, target: Home, trimmed: int
) -> None:
    homes = Homes(tmp_path)
    async with opened(await homes.cells(source, "old")) as logs:
        log = logs.log("orders")
        await log.set_retention(age_s=1e6)
        await fill(log, 0, 40)
        await log.trim(20, tag="even")
        await log.trim(min(trimmed, 40))
        await fill(log, 40, 44)
        await log.trim(trimmed)
        await fill(log, 44, 64)
        expected = await content(log)
    copy, cells = await copy_of(await homes.cells(source, "old", reads=True))
    assert copy.tail == 64
    assert (copy.start > 0) == (trimmed > 10), "trimmed generations are not in it"
    new = await homes.cells(target, "new")
    if copy.start and target == "chains":
        await new.trim(0, copy.start)
    await write_copy(new, cells)
    for _ in range(2):
        async with opened(await homes.cells(target, "new")) as logs:
            log = logs.log("orders")
            assert await content(log) == expected
    async with opened(await homes.cells(target, "new")) as logs:
        log = logs.log("orders")
        with pytest.raises(ConditionFailedError):
            await log.append_batch([Entry(b"x", ["even"])], after=After("even", 60))
        assert await log.append_batch([Entry(b"x", ["even"])], after=After("even", 62)) == [64]
        await fill(log, 65, 80)
        await log.trim(70)
        await fill(log, 80, 90)
        assert [r.seqnum for r in await log.read_range(bound=70)] == list(range(70, 90))


@pytest.mark.parametrize("further", [0, 1, 12])
@pytest.mark.parametrize("home", ["objects", "chains"])
async def test_a_log_that_is_to_go_on_is_copied_without_its_end(
    tmp_path: Path, home: Home, further: int
) -> None:
    """Also if so many cells follow that the newest checkpoint is about an ended log."""
    homes = Homes(tmp_path)
    async with opened(await homes.cells(home, "old")) as logs:
        await fill(logs.log("orders"), 0, 13)
        await logs.end()
        for _ in range(further):
            await logs.log("orders").trim(2)
    copy, cells = await copy_of(await homes.cells(home, "old", reads=True))
    assert copy.tail == 13
    await write_copy(await homes.cells(home, "new"), cells)
    async with opened(await homes.cells(home, "new")) as logs:
        assert await logs.log("orders").append(b"new") == 13
        assert len(await logs.log("orders").read_range(bound=2)) == 12
    copy, cells = await copy_of(await homes.cells(home, "old", reads=True), is_open=False)
    assert copy.tail == 13
    await write_copy(await homes.cells(home, "closed"), cells)
    async with opened(await homes.cells(home, "closed")) as logs:
        assert logs.ended_at == 13
        with pytest.raises(SealedError):
            await logs.log("orders").append(b"new")


@pytest.mark.parametrize("home", ["objects", "chains"])
async def test_a_copy_whose_cells_are_trimmed_meanwhile_begins_again(
    tmp_path: Path, home: Home
) -> None:
    homes = Homes(tmp_path)
    async with opened(await homes.cells(home, "old")) as logs:
        log = logs.log("orders")
        await fill(log, 0, 30)

        async def trim() -> None:
            await log.trim(25)
            await fill(log, 30, 40)
            async with opened(await homes.cells(home, "old")):
                """An open frees what is trimmed."""

        reads = await homes.cells(home, "old", reads=True)
        with pytest.raises(CopyOvertakenError):
            await copy_of(reads, after_begin=trim)
        copy, _ = await copy_of(reads)
        assert (copy.start >= 20, copy.tail) == (True, 40)


@pytest.mark.parametrize("home", ["objects", "chains"])
async def test_a_copy_has_no_cell_above_an_unwritten_one(tmp_path: Path, home: Home) -> None:
    homes = Homes(tmp_path)
    cells = await homes.cells(home, "old")
    async with opened(cells) as logs:
        await fill(logs.log("orders"), 0, 7)
        written = await cells.read(6)
        assert written
        await cells.write(8, written)
    copy, copied = await copy_of(await homes.cells(home, "old", reads=True))
    assert copy.tail == 7
    assert max(each.position for each in copied) == 6


async def test_a_copy_of_a_log_without_an_object_is_refused(tmp_path: Path) -> None:
    homes = Homes(tmp_path)
    async with opened(await homes.cells("objects", "old")) as logs:
        await fill(logs.log("orders"), 0, 12)
    (cell,) = (tmp_path / "old" / "cells").glob("*/*7")
    stored = cell.read_bytes()
    cell.write_bytes(stored[:-1])
    with pytest.raises(DataLossError, match="Cell 7 is damaged"):
        await copy_of(await homes.cells("objects", "old", reads=True))
    cell.unlink()
    with pytest.raises(DataLossError, match="Cell 7 is missing"):
        await copy_of(await homes.cells("objects", "old", reads=True))
    for name in (tmp_path / "old" / "checkpoints").iterdir():
        name.write_bytes(name.read_bytes()[:-1])
    with pytest.raises(DataLossError, match="checkpoint is damaged"):
        await copy_of(await homes.cells("objects", "old", reads=True))


@pytest.mark.parametrize("home", ["objects", "chains"])
async def test_a_crash_while_trimmed_cells_are_freed_does_not_prevent_a_copy(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = Homes(tmp_path)
    cells = await homes.cells(home, "old")

    async def crashed(_start: int) -> None:
        raise CellsError("crashed")

    monkeypatch.setattr(cells, "drop_generation", crashed)
    async with opened(cells) as logs:
        await fill(logs.log("orders"), 0, 17)
        await logs.log("orders").trim(11)
        while await cells.read(4):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
    reads = await homes.cells(home, "old", reads=True)
    assert await reads.generations() == [0, 5, 10], "what is trimmed was not dropped"
    copy, _ = await copy_of(reads)
    assert (copy.start, copy.tail) == (5, 17)


async def test_a_lost_part_of_the_index_does_not_count_as_trimmed(tmp_path: Path) -> None:
    """A trim frees parts of the index that the newest checkpoint names; here there was no trim."""
    homes = Homes(tmp_path)
    async with opened(await homes.cells("objects", "old")) as logs:
        await fill(logs.log("orders"), 0, 12)
    (tmp_path / "old" / "index" / f"{0:020d}").unlink()
    with pytest.raises(CopyOvertakenError):
        await copy_of(await homes.cells("objects", "old", reads=True))


async def test_a_log_that_its_store_does_not_have_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(DataLossError, match="has no old/LOG"):
        await Homes(tmp_path).cells("objects", "old", reads=True)
    assert not names_in(tmp_path)


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]
