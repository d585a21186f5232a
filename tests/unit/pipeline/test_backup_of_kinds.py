"""Backups of logs of other kinds than `shared`: what they hold, and platforms made from them."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

import indilog
from indilog.base.errors import (
    ConditionFailedError,
    ConfigError,
    DataDirectoryError,
    DataLossError,
    NotReadyError,
    TrimmedError,
)
from indilog.base.log import After, Entry, Log
from indilog.base.log_kinds import LogKind
from indilog.client import Client
from indilog.config import KIB, ClusterConfig, Config, node_config
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from indilog_compute.log_kinds.kinds import LogKinds
from indilog_pipeline.backup.create import CreatedBackup, create
from indilog_pipeline.backup.files import verify
from indilog_pipeline.backup.restore import restore

T = TypeVar("T")
OTHER_KINDS: tuple[LogKind, ...] = ("object-store", "order-first", "owned")
SWITCHES: tuple[LogKind, ...] = ("owned", "object-store", "order-first", "shared", "owned")
RECORDS = 9
SMALL = 1 << 10
"""Seqnums of `shared` logs that a restored platform leaves out: few, so that it starts soon."""


def config_in(directory: Path, *, object_place: str = "", **cluster: int) -> Config:
    sizes = ClusterConfig(record_bytes_max=64 * KIB, batch_bytes_max=128 * KIB)
    node = node_config(data_dir=directory, segment_bytes=256 * KIB, object_place=object_place)
    return Config(cluster=dataclasses.replace(sizes, **cluster), node=node)  # type: ignore[arg-type]


def on(config: Config, use: Callable[[Client], Coroutine[object, object, T]]) -> T:
    """Run a platform while it is used."""

    async def used() -> T:
        async with indilog.open(config.node.data_dir, config) as client:
            return await use(client)

    return asyncio.run(used())


def restored(backup: Path, config: Config) -> None:
    tail = verify(backup)[0].tail
    restore(backup, config, "embedded", next_seqnum=tail + SMALL)


async def fill(log: Log, start: int, count: int = RECORDS) -> None:
    for n in range(start, start + count):
        await log.append(b"%s %d" % (log.name.encode(), n), tags=["even"] if n % 2 == 0 else [])


async def content(client: Client) -> dict[str, object]:
    """Return what reads find, by log and tag: the floor, and all fields of the records."""
    found: dict[str, object] = {}
    for info in await client.logs():
        log = client.log(info.log)
        found[info.log] = info.kind, await log.tail(), await log.retention()
        for tag in (None, "even"):
            floor = 0
            try:
                records = await log.read_range(tag, fresh=True)
            except TrimmedError as error:
                floor = error.first_seqnum
                records = await log.read_range(tag, bound=floor, fresh=True)
            rows = [(r.seqnum, r.data, r.tags, r.time, r.ordered_at) for r in records]
            found[f"{info.log} {tag}"] = floor, rows
    return found


def freeing_in(monkeypatch: pytest.MonkeyPatch) -> list[LogKinds]:
    """Return a list that gets the kinds of each compute node that starts."""
    found: list[LogKinds] = []
    start = LogKinds.start

    async def noted(self: LogKinds) -> None:
        found.append(self)
        await start(self)

    monkeypatch.setattr(LogKinds, "start", noted)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the directory `data` of a platform with logs of all kinds, and `backup`."""
    folder = tmp_path_factory.mktemp("kinds")

    async def use(client: Client) -> dict[str, object]:
        for kind in OTHER_KINDS:
            await client.create_log(kind, kind)
            await fill(client.log(kind), 0)
            await client.log(kind).trim(3)
            await client.log(kind).trim(6, tag="even")
            await client.log(kind).set_retention(size_bytes=1 << 30)
        await client.create_log("unused", "owned")
        await client.create_log("nothing", "object-store")
        switched = client.log("switched")
        await fill(switched, 0)
        for number, kind in enumerate(SWITCHES):
            await client.switch_log("switched", kind)
            await fill(switched, (number + 1) * RECORDS)
        await switched.trim((await switched.read_range(limit=RECORDS + 4))[-1].seqnum)
        await nodes[-1]._free_once()
        return await content(client)

    config = config_in(folder / "data", storage_nodes=3, replicas=2)
    with pytest.MonkeyPatch.context() as patch:
        nodes = freeing_in(patch)
        expected = on(config, use)
    assert len(expected) == 3 * (len(OTHER_KINDS) + 3)
    create(folder / "data", folder / "backup")
    assert on(config, content) == expected, "a backup changes nothing"
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the backup, to be damaged."""
    shutil.copytree(made / "backup", tmp_path / "copy")
    return tmp_path / "copy"


LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"storage_nodes": 4, "replicas": 3, "sequencers": 3, "index_shards": 2},
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restored_platform_has_logs_of_all_kinds_with_the_same_records(
    made: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    expected = on(config_in(made / "data", storage_nodes=3, replicas=2), content)
    config = config_in(tmp_path / "new", **layout)  # type: ignore[arg-type]
    restored(made / "backup", config)
    assert on(config, content) == expected
    assert on(config, content) == expected, "after a restart"


def test_a_restored_log_goes_on(made: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "new", storage_nodes=2, replicas=2)
    restored(made / "backup", config)

    async def use(client: Client) -> None:
        for name in (*OTHER_KINDS, "unused", "nothing", "switched"):
            log = client.log(name)
            tail = await log.tail()
            assert await log.append(b"new", tags=["even"]) == tail
            with pytest.raises(ConditionFailedError):
                await log.append_batch([Entry(b"x", ["even"])], after=After("even"))
            await log.append_batch([Entry(b"next", ["even"])], after=After("even", tail))
            assert [r.data for r in await log.read_range("even", bound=tail)] == [b"new", b"next"]
            await log.trim(tail + 1)
            kind = next(each.kind for each in await client.logs() if each.log == name)
            to: LogKind = "shared" if kind != "shared" else "owned"
            assert (await client.switch_log(name, to)).kind == to
            await log.append(b"last", tags=["even"])
            found = await log.read_range("even", bound=tail + 1)
            assert [r.data for r in found] == [b"next", b"last"]

    on(config, use)


def test_a_backup_of_a_restored_platform_is_a_backup(made: Path, tmp_path: Path) -> None:
    first, second = config_in(tmp_path / "a", storage_nodes=2), config_in(tmp_path / "b")
    restored(made / "backup", first)

    async def use(client: Client) -> dict[str, object]:
        for name in (*OTHER_KINDS, "switched"):
            await fill(client.log(name), 100)
        return await content(client)

    expected = on(first, use)
    create(tmp_path / "a", tmp_path / "second")
    restored(tmp_path / "second", second)
    assert on(second, content) == expected


# --- what happens during a backup


def during(
    config: Config,
    backup: Path,
    prepare: Callable[[Client], Coroutine[object, object, T]],
    meanwhile: Callable[[Client], Coroutine[object, object, object]],
) -> tuple[T, CreatedBackup]:
    """Make a backup; `meanwhile` runs when its position is fixed, before any log is copied."""

    async def use(client: Client) -> tuple[T, CreatedBackup]:
        prepared = await prepare(client)
        loop = asyncio.get_running_loop()

        def tell(done: int, _: int) -> None:
            if done == 0:
                asyncio.run_coroutine_threadsafe(meanwhile(client), loop).result()

        data = config.node.data_dir
        return prepared, await asyncio.to_thread(create, data, backup, progress=tell)

    return on(config, use)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_log_that_is_switched_during_the_backup_is_in_it_as_before(
    tmp_path: Path, kind: LogKind
) -> None:
    async def prepare(client: Client) -> None:
        await client.create_log("events", kind)
        await fill(client.log("events"), 0)

    async def meanwhile(client: Client) -> None:
        await client.switch_log("events", "shared")
        await client.log("events").append(b"later")

    during(config_in(tmp_path / "data"), tmp_path / "backup", prepare, meanwhile)
    config = config_in(tmp_path / "new")
    restored(tmp_path / "backup", config)

    async def use(client: Client) -> None:
        log = client.log("events")
        assert [each.kind for each in await client.logs()] == [kind]
        assert await log.append(b"new") == RECORDS
        assert [r.data for r in await log.read_range(bound=RECORDS)] == [b"new"]

    on(config, use)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_the_new_kind_of_a_log_whose_switch_ends_after_the_position_is_empty(
    tmp_path: Path, kind: LogKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog of the backup has the switch under way, and the restored platform ends it."""
    monkeypatch.setattr("indilog_compute.log_kinds.kinds._FINISH_S", 0.2)
    switching: list[asyncio.Task[object]] = []
    bridge = ReplayedCatalog.bridge
    is_sealing, may_end = asyncio.Event(), asyncio.Event()

    async def late(self: ReplayedCatalog, *given: object, **named: object) -> None:
        is_sealing.set()
        await may_end.wait()
        await bridge(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplayedCatalog, "bridge", late)

    async def prepare(client: Client) -> None:
        await fill(client.log("events"), 0)
        switching.append(asyncio.create_task(client.switch_log("events", kind)))
        async with asyncio.timeout(60):
            await is_sealing.wait()

    async def meanwhile(client: Client) -> None:
        may_end.set()
        await switching[0]
        await client.log("events").append(b"later")

    during(config_in(tmp_path / "data"), tmp_path / "backup", prepare, meanwhile)
    config = config_in(tmp_path / "new")
    restored(tmp_path / "backup", config)

    async def use(client: Client) -> None:
        log = client.log("events")
        assert await log.append(b"new") >= RECORDS
        assert [each.kind for each in await client.logs()] == [kind]
        assert [r.data for r in await log.read_range()][RECORDS:] == [b"new"]

    on(config, use)


def records_of(found: dict[str, object]) -> dict[str, object]:
    """Return the floors and records of a `content`, without tails: those of `shared` logs differ
    after a restore.
    """
    return {name: value for name, value in found.items() if " " in name}


@pytest.mark.parametrize("last", ["shared", "owned"])
def test_a_log_with_freed_segments_is_restored_as_it_is(
    tmp_path: Path, last: LogKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = freeing_in(monkeypatch)

    async def use(client: Client) -> dict[str, object]:
        log = client.log("events")
        for number, kind in enumerate(("owned", "object-store", "order-first", last)):
            await client.switch_log("events", kind)
            await fill(log, number * RECORDS)
        await log.trim((await log.read_range())[RECORDS * 2 + 4].seqnum)
        await log.set_retention(size_bytes=1 << 30)
        await nodes[-1]._free_once()
        await fill(log, 4 * RECORDS)
        assert len(nodes[-1]._catalog.logs["events"].segments) == 2
        return await content(client)

    expected = on(config_in(tmp_path / "data", storage_nodes=3, replicas=2), use)
    assert create(tmp_path / "data", tmp_path / "backup").segments == 1 + (last != "shared")
    config = config_in(tmp_path / "new", storage_nodes=2)
    restored(tmp_path / "backup", config)
    assert records_of(on(config, content)) == records_of(expected)

    async def go_on(client: Client) -> None:
        log = client.log("events")
        tail = await log.tail()
        await log.append(b"new")
        await client.switch_log("events", "object-store")
        await log.trim(tail + 1)
        await nodes[-1]._free_once()
        assert await log.append(b"last") == tail + 1
        with pytest.raises(TrimmedError):
            await log.read(tail)

    if last != "shared":  # its seqnums are dense
        on(config, go_on)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_backup_during_which_segments_are_freed_says_so(
    tmp_path: Path, kind: LogKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = freeing_in(monkeypatch)

    async def prepare(client: Client) -> None:
        await client.create_log("events", kind)
        await fill(client.log("events"), 0)
        await client.switch_log("events", "shared")
        await client.log("events").append(b"x")

    async def meanwhile(client: Client) -> None:
        await client.log("events").trim(RECORDS)
        await nodes[-1]._free_once()

    with pytest.raises(NotReadyError, match="Old segments of log events"):
        during(config_in(tmp_path / "data"), tmp_path / "backup", prepare, meanwhile)
    create(tmp_path / "data", tmp_path / "second")
    config = config_in(tmp_path / "new")
    restored(tmp_path / "second", config)
    expected = on(config_in(tmp_path / "data"), content)
    assert records_of(on(config, content)) == records_of(expected)


# --- places


def test_a_log_of_another_place_is_copied_and_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    old = config_in(tmp_path / "data", object_place=place)

    async def prepare(client: Client) -> dict[str, object]:
        await client.create_log("events", "object-store")
        await fill(client.log("events"), 0)
        await client.log("events").trim(3)
        return await content(client)

    expected = on(old, prepare)
    create(tmp_path / "data", tmp_path / "backup")
    new = config_in(tmp_path / "new", object_place=place)
    restored(tmp_path / "backup", new)
    assert len(list((tmp_path / "store").glob("events-*"))) == 2

    async def trim(client: Client) -> None:
        await client.log("events").trim(RECORDS)
        assert await client.log("events").append(b"new") == RECORDS

    on(new, trim)
    assert on(old, content) == expected
    elsewhere = config_in(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "store")
    restored(tmp_path / "backup", elsewhere)
    assert on(elsewhere, content) == expected
    assert (tmp_path / "elsewhere" / "objects").is_dir()


def test_a_store_that_does_not_answer_ends_the_backup_in_a_sentence(tmp_path: Path) -> None:
    config = config_in(tmp_path / "data", object_place=str(tmp_path / "store"))

    async def prepare(client: Client) -> None:
        await client.create_log("events", "object-store")
        await fill(client.log("events"), 0)

    on(config, prepare)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").touch()
    with pytest.raises(NotReadyError, match="Log events cannot be copied now"):
        create(tmp_path / "data", tmp_path / "backup")
    with pytest.raises(DataDirectoryError, match="is not whole"):
        verify(tmp_path / "backup")


# --- damage


def flip(file: Path, at: int) -> None:
    changed = bytearray(file.read_bytes())
    changed[at % len(changed)] ^= 4
    file.write_bytes(changed)


@pytest.mark.parametrize("at", [0, 77, -1])
def test_one_flipped_bit_of_a_copied_log_is_refused(copy: Path, tmp_path: Path, at: int) -> None:
    flip(copy / "log-00000001", at)
    with pytest.raises(DataDirectoryError, match="log-00000001 cannot be used: its digest"):
        restore(copy, config_in(tmp_path / "new"), "embedded")
    (copy / "log-00000001").unlink()
    with pytest.raises(DataDirectoryError, match="log-00000001 cannot be used: No such"):
        restore(copy, config_in(tmp_path / "new"), "embedded")
    assert not (tmp_path / "new").exists()


def test_an_interrupted_backup_keeps_its_intact_logs(made: Path, copy: Path) -> None:
    names = sorted(file.name for file in copy.iterdir() if file.name.startswith("log-"))
    assert len(names) > 3
    (copy / "manifest").unlink()
    (copy / names[0]).unlink()
    flip(copy / names[1], 60)
    kept = {name: (copy / name).stat().st_ino for name in names[2:]}
    assert create(made / "data", copy).segments == len(names)
    assert {name: (copy / name).stat().st_ino for name in kept} == kept
    verify(copy)


def damage_cells(data: Path, *, files: int, log: str) -> None:
    """Change a byte of a cell of a log in some of the files of storage nodes that have it."""
    for path in sorted(data.rglob("*.sqlite3")):
        with closing(sqlite3.connect(path)) as file:
            changed = file.execute(
                "UPDATE cells SET content = CAST(x'00' || substr(content, 2) AS BLOB)"
                " WHERE position = 4 AND section = 0"
                " AND space IN (SELECT id FROM spaces WHERE name LIKE ?)",
                (f"{log}-%",),
            ).rowcount
            file.commit()
        files -= changed
        if not files:
            return
    raise AssertionError("too few files have the cell")


@pytest.mark.parametrize("kind", ["order-first", "owned"])
def test_a_damaged_cell_is_copied_from_another_disk_if_one_has_it(
    made: Path, tmp_path: Path, kind: LogKind
) -> None:
    shutil.copytree(made / "data", tmp_path / "data")
    damage_cells(tmp_path / "data", files=1, log=kind)
    create(tmp_path / "data", tmp_path / "backup")
    config = config_in(tmp_path / "new")
    restored(tmp_path / "backup", config)
    before = config_in(made / "data", storage_nodes=3, replicas=2)
    assert on(config, content) == on(before, content)
    damage_cells(tmp_path / "data", files=2, log=kind)
    with pytest.raises(DataLossError, match=f"Log {kind} cannot be copied: Cell 4 is damaged"):
        create(tmp_path / "data", tmp_path / "second")


def test_a_damaged_object_is_no_backup(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "data", tmp_path / "data")
    (path,) = (tmp_path / "data" / "objects").glob("object-store-*/cells/0004/*4")
    flip(path, -1)
    with pytest.raises(DataLossError, match="Log object-store cannot be copied: Cell 4 is damag"):
        create(tmp_path / "data", tmp_path / "backup")
    flip(path, -1)
    (path,) = (tmp_path / "data" / "objects").glob("switched-*/cells/0008/*8")
    path.unlink()
    with pytest.raises(DataLossError, match="Log switched cannot be copied: Records from 8 on"):
        create(tmp_path / "data", tmp_path / "second")


def test_a_backup_may_leave_out_lost_logs(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "data", tmp_path / "data")
    lost = ["object-store", "owned"]
    (folder,) = (tmp_path / "data" / "objects").glob("object-store-*")
    shutil.rmtree(folder)
    damage_cells(tmp_path / "data", files=2, log="owned")
    with pytest.raises(DataLossError, match=r"other logs \(`--without object-store`\)"):
        create(tmp_path / "data", tmp_path / "backup")
    with pytest.raises(ConfigError, match="has the name events, so it cannot be left out"):
        create(tmp_path / "data", tmp_path / "backup", without=["events"])
    backup = create(tmp_path / "data", tmp_path / "backup", without=lost)
    assert backup.left_out == lost
    restored(tmp_path / "backup", config_in(tmp_path / "new"))

    async def use(client: Client) -> None:
        for name in lost:
            with pytest.raises(DataLossError, match=f"The object store has no {name}-"):
                await client.log(name).tail()
            with pytest.raises(DataLossError):
                await client.log(name).append(b"never")
        assert await client.log("order-first").tail() == RECORDS

    on(config_in(tmp_path / "new"), use)


def test_a_lost_disk_is_no_matter_while_another_one_has_the_log(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "data", tmp_path / "data")
    (tmp_path / "data" / "journal" / "cells" / "storage-1.sqlite3").unlink()
    create(tmp_path / "data", tmp_path / "backup")
    config = config_in(tmp_path / "new")
    restored(tmp_path / "backup", config)
    before = config_in(made / "data", storage_nodes=3, replicas=2)
    assert on(config, content) == on(before, content)
    shutil.rmtree(tmp_path / "data" / "journal" / "cells")
    with pytest.raises(DataLossError, match="Too few disks of storage-"):
        create(tmp_path / "data", tmp_path / "second")
