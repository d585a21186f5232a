"""A journal is read beside the process that writes it."""

from __future__ import annotations

from pathlib import Path

from indilog.roles.role import FrameKind, Location
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.journal_reader import FileRead, JournalReader
from indilog.runtime.journal.segment import segment_path
from indilog.runtime.journal.segment_scan import Damage, SegmentScan, synced_end
from tests.unit.runtime.journals import SEGMENT_BYTES, STREAM, spoil, started


def read(directory: Path) -> tuple[list[bytes], list[Damage]]:
    """Return the payloads and the damage that a reader beside a process finds."""
    reader = JournalReader(directory, segment_bytes=SEGMENT_BYTES, running=True)
    assert reader.load_checkpoint() is None
    reader.open_files()
    found = [one for one in reader.frames() if not isinstance(one, FileRead)]
    assert not reader.changed()
    payloads = [one[2] for one in found if not isinstance(one, Damage)]
    return payloads, [one for one in found if isinstance(one, Damage)]


def contents(directory: Path) -> dict[str, bytes]:
    """Return all files, except the next segment, which a thread of the journal prepares."""
    names = ("FORMAT", "LOCK", "NEWEST", segment_path(directory, 1).name)
    return {name: (directory / name).read_bytes() for name in names}


def write(journal: Journal, number: int) -> Location:
    return journal.write(STREAM, FrameKind.METALOG, bytes([number]) * 400)


def test_frames_are_read_up_to_the_first_incomplete_one_and_nothing_changes(tmp_path: Path) -> None:
    journal, _ = started(tmp_path, opened := list[Journal]())
    write(journal, 1)
    journal.sync()
    write(journal, 2)
    torn = write(journal, 3)
    write(journal, 4)
    journal.flush()
    spoil(segment_path(tmp_path, 1), torn.offset, 8)
    before = contents(tmp_path)
    payloads, damage = read(tmp_path)
    assert [payload[0] for payload in payloads] == [1, 2]
    assert damage == []
    assert contents(tmp_path) == before
    opened[-1].close()


def test_a_frame_that_was_incomplete_when_it_was_read_is_no_damage(tmp_path: Path) -> None:
    """The process completes it, syncs it and writes further ones while the reader reads on."""
    journal, _ = started(tmp_path, opened := list[Journal]())
    write(journal, 1)
    journal.sync()
    first = segment_path(tmp_path, 1)
    synced = synced_end(first, 1, 0)
    incomplete = write(journal, 2)
    journal.sync()
    write(journal, 3)
    journal.flush()
    spoil(first, incomplete.offset, 8)
    found = list(SegmentScan(first, 1, newest=True, synced=synced, growing=True))
    assert [one[1][0] for one in found if not isinstance(one, Damage)] == [1]
    spoil(first, incomplete.offset - 32, 32)
    assert len(list(SegmentScan(first, 1, newest=True, synced=synced, growing=True))) == 1
    opened[-1].close()


def test_an_unreadable_frame_that_a_later_one_calls_synced_is_damage(tmp_path: Path) -> None:
    journal, _ = started(tmp_path, opened := list[Journal]())
    spoilt = write(journal, 1)
    journal.sync()
    write(journal, 2)
    journal.flush()
    spoil(segment_path(tmp_path, 1), spoilt.offset, 8)
    payloads, [damage] = read(tmp_path)
    assert [payload[0] for payload in payloads] == [2]
    assert damage.location == spoilt
    opened[-1].close()


def test_a_reader_notices_that_a_file_was_replaced(tmp_path: Path) -> None:
    journal, _ = started(tmp_path, opened := list[Journal]())
    for number in range(12):
        write(journal, number)
    journal.sync()
    reader = JournalReader(tmp_path, segment_bytes=SEGMENT_BYTES, running=True)
    reader.open_files()
    first = segment_path(tmp_path, 1)
    copy = tmp_path / "rewritten.new"
    copy.write_bytes(first.read_bytes())
    assert not reader.changed()
    copy.rename(first)
    assert reader.changed()
    opened[-1].close()
