"""What a start does when the notes of cold objects are damaged (decision 0039)."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest
import uvloop

from indilog.base.errors import DataDirectoryError
from indilog.base.ids import SeqNum
from indilog.base.log import Entry
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.journal.checkpoint_files import checkpoint_places
from indilog.runtime.journal.segment import FRAME_HEADER_BYTES
from indilog.runtime.journal.segment_scan import headers_in, synced_end
from indilog_pipeline.log_image import LogImage
from tests.support.cold_storage import (
    check,
    configured,
    figures,
    fill,
    move_records,
    objects,
    wait_for,
)


def copy(data: Path, to: Path) -> None:
    """Copy a data directory; again, if a thread has replaced a segment file meanwhile."""
    for _ in range(20):
        try:
            shutil.copytree(data, to)
        except shutil.Error:
            shutil.rmtree(to)
        else:
            return
    raise AssertionError("files were replaced during each copy")


async def leave_killed(directory: Path) -> tuple[dict[SeqNum, Entry], set[Path]]:
    """Leave a data directory as a kill leaves it, after moves; return records and objects."""
    async with embedded(configured(directory)) as platform:
        log = platform.logs.log("orders")
        records = await move_records(platform, log)
        for seed in itertools.count(40, 2):
            copy(directory / "data", directory / "copy")
            if notes_in(directory / "copy" / "journal"):
                break
            shutil.rmtree(directory / "copy")  # a checkpoint has all notes
            records.update(await fill(log, 1, seed))
            await asyncio.sleep(0.02)
            records.update(await fill(log, 1, seed + 1))  # its frame shows that the note is synced
        kept = set(objects(directory))
    shutil.rmtree(directory / "data")
    (directory / "copy").rename(directory / "data")
    return records, kept


def notes_in(journal: Path) -> list[tuple[Path, int]]:
    """Return the `COLD` frames that a start reads: file, and offset of the payload.

    Only those that were synced according to a later frame: any other is cut as a torn tail if it
    is damaged.
    """
    newest = checkpoint_places(journal)[-1]
    found: list[tuple[Path, int]] = []
    for path in sorted(journal.glob("segment-*.log")):
        first, _, last = path.stem.removeprefix("segment-").partition("-")
        if last:
            continue  # it was rewritten, so both checkpoints have its notes
        synced = synced_end(path, int(first), 0)
        with path.open("rb") as file:
            found += [
                (path, offset + FRAME_HEADER_BYTES)
                for offset, header in headers_in(file.fileno(), int(first), 0)
                if header.kind == FrameKind.COLD
                and newest <= (int(first), offset) < (int(first), synced)
            ]
    return found


def damage(path: Path, offset: int) -> None:
    """Damage a frame beyond what the journal corrects: a single bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        payload = file.read(8)
        file.seek(offset)
        file.write(payload[::-1])


def test_a_start_notes_objects_again_whose_notes_are_damaged(tmp_path: Path) -> None:
    async def story() -> None:
        records, kept = await leave_killed(tmp_path)
        notes = notes_in(tmp_path / "data" / "journal")
        assert notes
        for path, offset in notes:
            damage(path, offset)
        async with embedded(configured(tmp_path)) as platform:
            await wait_for(lambda: figures(platform, "cold_objects") == len(objects(tmp_path)))
            assert set(objects(tmp_path)) >= kept, "an object without a note is not deleted"
            await check(platform.logs.log("orders"), records)
        async with embedded(configured(tmp_path)) as platform:
            await check(platform.logs.log("orders"), records)

    uvloop.run(story())


def test_a_damaged_file_of_the_place_is_refused_in_one_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        records, _ = await leave_killed(tmp_path)
        path = tmp_path / "data" / "journal" / "COLD"
        content = path.read_bytes()
        path.write_bytes(content[:-3] + b"x" + content[-2:])
        said = r"COLD is damaged or of another release\. It names the place of old records: restore"
        with pytest.raises(DataDirectoryError, match=said):
            async with embedded(configured(tmp_path)):
                pass
        with pytest.raises(DataDirectoryError, match=said):
            LogImage.read(tmp_path / "data")
        path.write_bytes(content)
        async with embedded(configured(tmp_path)) as platform:
            await check(platform.logs.log("orders"), records)

    uvloop.run(story())
