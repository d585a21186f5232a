"""Backups of a data directory: what they hold, what they refuse, and platforms made from them."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar

import pytest

import indilog
from indilog.base.errors import ConfigError, DataDirectoryError, DataLossError, TrimmedError
from indilog.client import Client
from indilog.config import KIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.cluster_state import layout_in
from indilog.runtime.journal.segment import segment_path
from indilog_pipeline.backup.create import CreatedBackup, create
from indilog_pipeline.backup.files import verify
from indilog_pipeline.backup.restore import HOLE_MAX, restore

T = TypeVar("T")
RECORDS = 120
PART_BYTES = 4 * KIB
SMALL = 1 << 10
"""The hole of these tests: small, so that platforms start soon."""


def config_in(directory: Path, **cluster: int) -> Config:
    sizes = ClusterConfig(record_bytes_max=64 * KIB, batch_bytes_max=128 * KIB)
    node = node_config(data_dir=directory, segment_bytes=256 * KIB, disk_retry_s=0.01)
    return Config(cluster=dataclasses.replace(sizes, **cluster), node=node)  # type: ignore[arg-type]


def on(directory: Path, use: Callable[[Client], Coroutine[object, object, T]], **cluster: int) -> T:
    """Run a platform while it is used."""

    async def used() -> T:
        async with indilog.open(directory, config_in(directory, **cluster)) as client:
            return await use(client)

    return asyncio.run(used())


async def fill(client: Client) -> None:
    for n in range(RECORDS):
        tags = ["even"] if n % 2 == 0 else []
        await client.log("orders" if n % 3 else "sales").append(b"%d." % n * 50, tags=tags)


async def content(
    client: Client,
) -> dict[str, tuple[int, list[tuple[int, bytes, tuple[str | int, ...]]]]]:
    """Return the floor and all that reads find, by log and tag."""
    found = {}
    for name in ("orders", "sales"):
        for tag in (None, "even"):
            log, floor = client.log(name), 0
            try:
                records = await log.read_range(tag, bound=0, limit=1000, fresh=True)
            except TrimmedError as error:
                floor = error.first_seqnum
                records = await log.read_range(tag, bound=floor, limit=1000, fresh=True)
            found[f"{name} {tag}"] = floor, [(r.seqnum, r.data, r.tags) for r in records]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data directory `data` of a platform that ran, and its backup `backup`."""
    folder = tmp_path_factory.mktemp("backup")

    async def use(client: Client) -> None:
        await fill(client)
        await client.log("sales").trim(until=31)
        await client.log("orders").trim(until=41, tag="even")

    on(folder / "data", use)
    create(folder / "data", folder / "backup", part_bytes=PART_BYTES)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the backup, to be damaged."""
    shutil.copytree(made / "backup", tmp_path / "copy")
    return tmp_path / "copy"


LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"sequencers": 3, "storage_nodes": 3, "replicas": 2, "index_shards": 3, "index_replicas": 2},
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restored_platform_has_the_same_records_with_the_same_seqnums(
    made: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    new = tmp_path / "new"
    config = config_in(new, **layout)
    restored = restore(made / "backup", config, "embedded", next_seqnum=RECORDS + SMALL)
    assert restored.tail == RECORDS
    expected = on(made / "data", content)
    assert {name: floor for name, (floor, _) in expected.items()} == {
        "orders None": 0, "orders even": 41, "sales None": 31, "sales even": 31
    }  # fmt: skip
    assert sum(len(records) for _, records in expected.values()) > RECORDS
    assert on(new, content, **layout) == expected


def test_trims_hold_in_a_restored_platform(made: Path, tmp_path: Path) -> None:
    restore(made / "backup", config_in(tmp_path / "new"), "embedded", next_seqnum=RECORDS + SMALL)

    async def use(client: Client) -> list[int]:
        with pytest.raises(TrimmedError, match="31"):
            await client.log("sales").read(0)
        with pytest.raises(TrimmedError):
            await client.log("sales").read_next(bound=0)
        with pytest.raises(TrimmedError):
            await client.log("orders").read_next("even", bound=0)
        await client.log("orders").trim(until=RECORDS - 4)
        return [r.seqnum for r in await client.log("orders").read_range(bound=RECORDS - 4)]

    assert on(tmp_path / "new", use) == [RECORDS - 4, RECORDS - 2, RECORDS - 1]


def test_seqnums_beyond_the_backup_are_not_assigned_again(made: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    restored = restore(made / "backup", config_in(new), "embedded", next_seqnum=RECORDS + SMALL)
    assert restored.next_seqnum == RECORDS + SMALL

    async def append(client: Client) -> list[int]:
        return [await client.log("orders").append(b"new", tags=["even"]) for _ in range(3)]

    async def use(client: Client) -> list[int]:
        seqnums = await append(client)
        records = await client.log("orders").read_range("even", bound=41, limit=1000)
        assert [r.seqnum for r in records][-3:] == seqnums
        before = await client.log("orders").read_prev("even", bound=seqnums[0] - 1)
        assert before is not None
        assert before.seqnum < RECORDS
        with pytest.raises(TrimmedError):
            await client.log("orders").read(RECORDS + 5)
        return seqnums

    first = on(new, use)
    assert first == list(range(RECORDS + SMALL, RECORDS + SMALL + 3))
    again = on(new, append)
    assert again[0] > first[-1]


def test_a_backup_of_a_restored_platform_is_a_backup(made: Path, tmp_path: Path) -> None:
    restore(made / "backup", config_in(tmp_path / "b"), "embedded", next_seqnum=RECORDS + SMALL)
    on(tmp_path / "b", fill)
    create(tmp_path / "b", tmp_path / "second", part_bytes=PART_BYTES)
    restored = restore(tmp_path / "second", config_in(tmp_path / "c"), "embedded")
    assert restored.tail == 2 * RECORDS + SMALL
    assert on(tmp_path / "c", content) == on(tmp_path / "b", content)


def test_an_empty_platform_can_be_backed_up(tmp_path: Path) -> None:
    async def nothing(_: Client) -> None:
        """Only start the platform."""

    on(tmp_path / "data", nothing)
    assert create(tmp_path / "data", tmp_path / "backup").kept == 0
    restore(tmp_path / "backup", config_in(tmp_path / "new"), "embedded")
    on(tmp_path / "new", fill)


def blocks_of_first_segment(data: Path) -> int:
    """Return its blocks on the disk; 0: it was replaced by a smaller file."""
    try:
        return segment_path(data / "journal", 1).stat().st_blocks
    except FileNotFoundError:
        return 0


def test_batches_that_are_discarded_while_they_are_copied_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "data"

    async def use(client: Client) -> CreatedBackup:
        log = client.log("sales")
        for n in range(20):
            await log.append(b"%d." % n * 9000)
        loop = asyncio.get_running_loop()
        blocks = blocks_of_first_segment(data)  # the next segment may not be prepared yet

        def tell(done: int, _: int) -> None:
            """Trim when the first part is written, and wait until the disk has the room back."""
            if done == 1:
                asyncio.run_coroutine_threadsafe(log.trim(until=18), loop).result()
                while blocks_of_first_segment(data) > blocks - 300:
                    time.sleep(0.001)

        return await asyncio.to_thread(
            create, data, tmp_path / "backup", part_bytes=PART_BYTES, progress=tell
        )

    assert 0 < on(data, use).kept < 20
    restore(tmp_path / "backup", config_in(tmp_path / "new"), "embedded")
    assert on(tmp_path / "new", content) == on(data, content)


def test_new_records_are_never_below_a_floor_of_the_backup(tmp_path: Path) -> None:
    """A trim during the backup reaches beyond its tail."""
    data = tmp_path / "data"

    async def use(client: Client) -> CreatedBackup:
        await fill(client)
        loop = asyncio.get_running_loop()

        async def trim_later() -> None:
            last = [await client.log("sales").append(b"late") for _ in range(9)][-1]
            await client.log("sales").trim(until=last)

        def tell(done: int, _: int) -> None:
            if done == 0:
                asyncio.run_coroutine_threadsafe(trim_later(), loop).result()

        return await asyncio.to_thread(create, data, tmp_path / "backup", progress=tell)

    tail = on(data, use).tail
    with pytest.raises(ConfigError, match=f"The next seqnum is {tail + 8} to"):
        restore(tmp_path / "backup", config_in(tmp_path / "new"), "embedded", next_seqnum=tail)
    restore(tmp_path / "backup", config_in(tmp_path / "new"), "embedded", next_seqnum=tail + 8)

    async def append(client: Client) -> list[bytes]:
        await client.log("sales").append(b"new")
        return [r.data for r in await client.log("sales").read_range(bound=tail + 8)]

    assert on(tmp_path / "new", append) == [b"new"]


def test_a_whole_backup_is_never_taken_for_a_new_one(made: Path, copy: Path) -> None:
    before = {file.name: file.stat().st_ino for file in copy.iterdir()}
    with pytest.raises(ConfigError, match="has a whole backup already"):
        create(made / "data", copy)
    assert {file.name: file.stat().st_ino for file in copy.iterdir()} == before


def test_an_interrupted_backup_continues_and_keeps_its_intact_parts(
    made: Path, copy: Path, tmp_path: Path
) -> None:
    plan, _ = verify(copy)
    names = sorted(file.name for file in copy.iterdir() if file.name.startswith("records-"))
    assert len(names) > 4
    (copy / "manifest").unlink()
    (copy / names[2]).unlink()
    flip(copy / names[3], 100)
    kept = {name: (copy / name).stat().st_ino for name in (names[0], names[1], *names[4:])}
    create(made / "data", copy)
    assert verify(copy)[0] == plan
    assert {name: (copy / name).stat().st_ino for name in kept} == kept
    restore(copy, config_in(tmp_path / "new"), "embedded", next_seqnum=RECORDS + SMALL)
    assert on(tmp_path / "new", content) == on(made / "data", content)


def flip(file: Path, at: int) -> None:
    changed = bytearray(file.read_bytes())
    changed[at % len(changed)] ^= 4
    file.write_bytes(changed)


@pytest.mark.parametrize("name", ["plan", "order", "records-00000001", "manifest"])
@pytest.mark.parametrize("at", [0, 77, -1])
def test_one_flipped_bit_of_a_backup_is_refused(
    copy: Path, tmp_path: Path, name: str, at: int
) -> None:
    flip(copy / name, at)
    with pytest.raises(DataDirectoryError, match=f"{name} cannot be used: its digest is wrong"):
        restore(copy, config_in(tmp_path / "new"), "embedded")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda b: (b / "manifest").unlink(), "is not whole; run `indilog backup`"),
        (lambda b: (b / "records-00000002").unlink(), "records-00000002 cannot be used: No such"),
        (lambda b: (b / "order").write_bytes(b"short"), "order cannot be used: its digest"),
        (lambda b: shutil.copy(b / "records-00000001", b / "records-00000002"), "another backup"),
        (lambda b: [f.unlink() for f in b.iterdir()], "holds no backup"),
    ],
)
def test_a_backup_with_missing_or_foreign_files_is_refused(
    copy: Path, tmp_path: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(copy)
    with pytest.raises(DataDirectoryError, match=sentence):
        restore(copy, config_in(tmp_path / "new"), "embedded")
    assert not (tmp_path / "new").exists()


def test_a_directory_that_is_in_use_is_not_restored_into(made: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty; choose a new data directory"):
        restore(made / "backup", config_in(made / "data"), "embedded")


def test_a_layout_with_other_shards_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set engines to at most 1, not 2"):
        restore(made / "backup", config_in(tmp_path / "new", engines=2), "embedded")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("next_seqnum", [RECORDS - 1, RECORDS + HOLE_MAX + 1])
def test_a_next_seqnum_out_of_its_range_is_refused(
    made: Path, tmp_path: Path, next_seqnum: int
) -> None:
    with pytest.raises(ConfigError, match=f"The next seqnum is {RECORDS} to"):
        restore(made / "backup", config_in(tmp_path / "new"), "embedded", next_seqnum=next_seqnum)


def test_a_backup_of_another_platform_is_not_continued(copy: Path, tmp_path: Path) -> None:
    on(tmp_path / "other", fill)
    (copy / "manifest").unlink()
    with pytest.raises(ConfigError, match="of a backup of another platform"):
        create(tmp_path / "other", copy)


def test_a_directory_with_other_files_is_not_written_to(made: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds other files \(such as thesis.tex\)"):
        create(made / "data", tmp_path / "there")


def test_a_damaged_record_without_another_replica_is_no_backup(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "data", tmp_path / "data")
    for path in (tmp_path / "data").rglob("segment-*.log"):
        content = bytearray(path.read_bytes())
        if (at := content.find(b"100.100.")) >= 0:
            content[at] ^= 6
            path.write_bytes(content)
    with pytest.raises(DataLossError, match="from seqnum 100 on are damaged in every replica"):
        create(tmp_path / "data", tmp_path / "backup")


def test_a_backup_of_more_shards_than_compute_nodes_is_restored(tmp_path: Path) -> None:
    """Its cluster has finalized shards, or those of compute nodes that left."""
    on(tmp_path / "data", fill, engines=2)
    create(tmp_path / "data", tmp_path / "backup", part_bytes=PART_BYTES)
    config = config_in(tmp_path / "new")
    restored = restore(tmp_path / "backup", config, "embedded", next_seqnum=RECORDS + SMALL)
    assert restored.tail == RECORDS
    expected = on(tmp_path / "data", content, engines=2)
    assert on(tmp_path / "new", content) == expected
    view = layout_in(tmp_path / "new").view
    assert view.engines == ("engine-0",)
    assert {shard: placed.finalized for shard, placed in view.shards.items()} == {0: False, 1: True}

    async def append(client: Client) -> int:
        return await client.log("orders").append(b"after")

    assert on(tmp_path / "new", append) == RECORDS + SMALL
